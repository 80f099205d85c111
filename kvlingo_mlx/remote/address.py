"""Addresses of other machines: ``host:port``, or a URL of it."""

import os
import re
from dataclasses import dataclass

PATTERN = re.compile(r"(?:(https?)://)?(\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[A-Za-z0-9._-]+):(\d{1,5})/?")


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    secure: bool = False

    def __str__(self) -> str:
        """``host:port``, as it was typed."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def address_of(text: object) -> Address | None:
    """The address that a text is; None for a folder, a Hub id, and what is no text."""
    found = PATTERN.fullmatch(text) if isinstance(text, str) else None
    if found is None or os.path.exists(found.string):
        return None
    scheme, host, port = found.groups()
    return Address(host.strip("[]"), int(port), scheme == "https") if int(port) < 2**16 else None
