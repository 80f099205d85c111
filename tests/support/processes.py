"""Processes of their own, which start in half the time where PyTorch is installed."""

import sys
import time
from collections.abc import Callable
from typing import Any

# transformers loads PyTorch wherever it finds it, and mlx-lm loads transformers.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def command_line(*words: str) -> list[str]:
    """The command kvlingo-mlx with these words."""
    return [
        sys.executable,
        "-c",
        WITHOUT_TORCH + "from kvlingo_mlx.cli import main; main()",
        *words,
    ]


def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What a function returns as soon as it is true."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)
    return found
