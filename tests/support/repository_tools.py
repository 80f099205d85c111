"""The scripts in ``tools/``, as modules."""

import importlib
import sys
from types import ModuleType

from tests.support import ROOT

TOOLS = str(ROOT / "tools")


def tool(name: str) -> ModuleType:
    """``tools/NAME.py``, or a part of a package there (``pretraining.packed``).

    Its folder stays importable, as it is for a script: tools import one another.
    """
    if TOOLS not in sys.path:
        sys.path.append(TOOLS)
    return importlib.import_module(name)
