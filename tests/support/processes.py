"""Processes of their own, which start in half the time where PyTorch is installed; their ports."""

import contextlib
import random
import socket
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


OWN = range(20_000, 32_768)  # Linux gives those above to connections, at any time
drawn = random.SystemRandom()  # processes that run tests side by side may be seeded alike


def free_ports(count: int = 1) -> int:
    """The first of so many ports in a row that are free, for programs that cannot choose one.

    It is drawn, since tests beside this one want ports of their own.
    """
    while True:
        first = drawn.randrange(OWN.start, OWN.stop - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
