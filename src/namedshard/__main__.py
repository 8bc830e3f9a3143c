"""``python -m namedshard``."""

import sys

from namedshard._cli import main

sys.exit(main())
