"""Ports of this machine for programs that cannot choose one themselves."""

import contextlib
import random
import socket

OWN = range(20_000, 32_768)  # Linux gives those above to connections, at any time


drawn = random.SystemRandom()  # processes that run tests side by side may be seeded alike


def free_ports(count: int = 1) -> int:
    """The first of so many ports in a row that are free.

    It is drawn, since tests beside this one want ports of their own.
    """
    while True:
        first = drawn.randrange(OWN.start, OWN.stop - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
