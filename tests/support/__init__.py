"""What tests share: tiny models, references, helpers. No test module imports another one."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
TOOLS = str(ROOT / "tools")


def tool(name: str) -> ModuleType:
    """``tools/NAME.py``, or a part of a package there (``pretraining.packed``).

    Its folder stays importable, as it is for a script: tools import one another.
    """
    if TOOLS not in sys.path:
        sys.path.append(TOOLS)
    return importlib.import_module(name)
