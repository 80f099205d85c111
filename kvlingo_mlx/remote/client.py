"""HTTP from the machine that answers: requests that are sent again when a connection is cut.

An answer goes on at the byte at which it was cut (``Range``, RFC 9110), and is compared with its
digest (``Repr-Digest``, RFC 9530).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

try:  # huggingface-hub brings one of them along: from its version 2 on httpx2
    import httpx
except ImportError:
    import httpx2 as httpx  # type: ignore[no-redef]

from kvlingo_mlx.errors import RemoteModelError, printable
from kvlingo_mlx.remote.address import Address
from kvlingo_mlx.remote.order import Order
from kvlingo_mlx.version import __version__

PATH = "/v1/prefill"
API_KEY = "KVLINGO_API_KEY"
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts
READ_S = 2.0  # after which a silent connection is given up for another one
MOST_JSON = 2**26  # bytes of an answer that is JSON
MOST_REFUSED = 2**16  # bytes that are read of a refusal
DAMAGED = 3  # so many times an answer may be wrong
END_S = 2.0  # how long a server is given to hear that a job is over


class GoneError(Exception):
    """The server no longer has a job, or a chunk of it."""


class _BusyError(OSError):
    """The server has no room now."""


class _DamagedError(Exception):
    """An answer is not the one that was sent."""


CUT = (httpx.TransportError, OSError)


class Client:
    """A server, asked by one thread at a time, with the ``key`` that it asks for.

    It is given up after ``patience`` seconds without a byte.
    """

    def __init__(self, address: Address, key: str | None = None, patience: float = 10.0) -> None:
        self.address, self.key, self.patience = address, key, patience
        self.received = 0  # bytes of answers that have come, also those that came in vain
        self.stopped = threading.Event()  # ends what is asked at present with an error
        self._open: httpx.Client | None = None
        self._met = False

    def facts(self) -> Any:
        """What the server says of its model."""
        return self._json("GET", "has no model to offer")

    def begin(self, order: Order) -> str:
        """Ask for a job; the same order leads to the same one. Returns its name."""
        found = self._json("POST", "takes no orders", asdict(order))
        if not isinstance(found, dict) or found.get("id") != order.id:
            raise self.odd("names another job than the one that was asked for")
        return order.id

    def chunk(self, job: str, number: int, most: int) -> bytes:
        """A chunk of at most so many bytes, whose digest was compared.

        Raises:
            GoneError: The server does not have it, and must be asked anew.
        """
        return self._fetch("GET", f"{PATH}/{job}/{number}", most)

    def end(self, job: str) -> None:
        """Tell the server that a job is not needed any more, if it can be told."""
        self.close()
        gone = contextlib.suppress(*CUT, GoneError, RemoteModelError)
        with gone, self._send("DELETE", f"{PATH}/{job}", patience=END_S):
            pass
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def odd(self, what: str) -> RemoteModelError:
        """The error of a server that does what ours would not."""
        return RemoteModelError(
            f"{self.address} {what}; is it a `kvlingo-mlx serve-prefill` of version {__version__}?"
        )

    def _json(self, method: str, gone: str, body: Any = None) -> Any:
        given = {} if body is None else {"json": body}
        try:
            return json.loads(self._fetch(method, PATH, MOST_JSON, **given))
        except GoneError:
            raise self.odd(gone) from None
        except ValueError:
            raise self.odd("does not answer in JSON") from None

    def _fetch(self, method: str, path: str, most: int, **given: Any) -> bytes:
        """An answer of at most so many bytes, on as many connections as it takes.

        Raises:
            RemoteModelError: Nothing came for too long, or what came was wrong too often.
        """
        part = _Download(most, time.monotonic())
        pause, damaged = FIRST_PAUSE, 0
        while True:
            before = part.heard
            try:
                while not part.whole:
                    self._go_on(method, path, part, **given)
                return part.checked()
            except _DamagedError as error:
                part.blob.clear()
                damaged += 1
                if damaged == DAMAGED:
                    raise self.odd(f"{error}, {DAMAGED} times") from None
            except CUT as error:
                never = isinstance(error, httpx.ConnectError) and not self._met
                silent = time.monotonic() - part.heard
                if self.stopped.is_set() or silent > self.patience or never:
                    self.close()
                    raise RemoteModelError(self._unreached(error)) from None
            self.close()
            pause = FIRST_PAUSE if part.heard > before else min(2 * pause, LONGEST_PAUSE)
            self.stopped.wait(pause)

    def _go_on(self, method: str, path: str, part: _Download, **given: Any) -> None:
        """Ask for what an answer lacks; nothing comes of it if it is still being read."""
        wait = min(READ_S, self.patience) / 2
        headers = {"Prefer": f"wait={wait:g}"}  # RFC 7240
        if part.blob:
            headers |= {"Range": f"bytes={len(part.blob)}-", "If-Range": part.tag}
        with self._send(method, path, headers=headers, **given) as answer:
            if answer.status_code == 202:
                part.heard = time.monotonic()
                return
            part.begin(answer)
            for piece in answer.iter_raw():
                if self.stopped.is_set():
                    raise ConnectionAbortedError("stopped")
                part.blob += piece
                part.heard = time.monotonic()
                self.received += len(piece)

    def _unreached(self, error: Exception) -> str:
        text = printable(str(error) or type(error).__name__)
        if isinstance(error, _BusyError):
            return f"{self.address} has no room for this: {text:.300}"
        return (
            f"{self.address} cannot be reached ({text:.100}); start `kvlingo-mlx serve-prefill` "
            "there, and check the address, the port and the firewall"
        )

    @contextlib.contextmanager
    def _send(
        self, method: str, path: str, patience: float | None = None, **given: Any
    ) -> Iterator[httpx.Response]:
        """Send a request, on the open connection or a new one; the answer's head has come.

        Raises:
            GoneError, RemoteModelError, OSError: What a status of 400 or more stands for.
        """
        if self._open is None:
            headers = {"Accept-Encoding": "identity"}
            headers |= {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
            wait = patience or self.patience
            self._open = httpx.Client(
                base_url=f"http{'s' * self.address.secure}://{self.address}",
                headers=headers,
                trust_env=False,
                timeout=httpx.Timeout(wait, read=min(wait, READ_S)),
            )
        with self._open.stream(method, path, **given) as answer:
            self._met = True
            if answer.status_code < 400:
                yield answer
                return
            text = _refusal(next(answer.iter_bytes(MOST_REFUSED), b""))
        if answer.status_code in (404, 410):
            raise GoneError(text)
        if answer.status_code in (429, 503):
            raise _BusyError(text)
        raise RemoteModelError(printable(f"{self.address} refuses: {text:.400}"))


class _Download:
    """An answer that arrives: what has come, and what its first head said of it."""

    def __init__(self, most: int, heard: float) -> None:
        self.blob = bytearray()
        self.most, self.size, self.tag, self.digest = most, -1, "", b""
        self.heard = heard  # when something of use has come

    @property
    def whole(self) -> bool:
        """Whether all of it has come."""
        return len(self.blob) == self.size

    def begin(self, answer: httpx.Response) -> None:
        """Take what an answer's head says, which must be of the whole or of the rest."""
        length = int(answer.headers.get("content-length", -1))
        if answer.status_code == 206:
            rest = f"bytes {len(self.blob)}-{self.size - 1}/{self.size}"
            good = bool(self.blob) and answer.headers.get("content-range") == rest
        else:
            self.blob.clear()
            self.size, self.tag = length, answer.headers.get("etag", "")
            self.digest = _digest(answer.headers.get("repr-digest", ""))
            good = answer.status_code == 200 and 0 <= length <= self.most
        if not good:
            self.size = -1
            raise _DamagedError("sends an answer of another size, or another part of it")

    def checked(self) -> bytes:
        """All of it, if it is what was sent."""
        blob = bytes(self.blob)
        if hashlib.sha256(blob).digest() != self.digest:
            self.size = -1
            raise _DamagedError("sends an answer that is damaged (its sha256 is another one)")
        return blob


def _digest(text: str) -> bytes:
    """The sha256 that a head says; empty if it says none."""
    try:
        return base64.b64decode(text.removeprefix("sha-256=:").removesuffix(":"))
    except ValueError:
        return b""


def _refusal(body: bytes) -> str:
    """The message of a refusal in the form of OpenAI's API."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return "it does not say why"
