"""``python -m namedshard``."""

import sys

from namedshard._cli import main

if __name__ == "__main__":
    sys.exit(main())
