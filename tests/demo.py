"""The example of `make demo` as a module, and what it is to compute."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parent.parent / "examples" / "embed_sentences.py"
BEGINNING = [0.126535, -0.032851, -0.029060, 0.044407]


def load() -> ModuleType:
    """Import the script anew."""
    spec = importlib.util.spec_from_file_location("embed_sentences", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
