"""HTTP from the machine that answers: requests that are sent again when a connection is cut.

A chunk goes on at the byte at which it was cut (``Range``, RFC 9110), and is compared with its
digest (``Repr-Digest``, RFC 9530).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

try:  # huggingface-hub brings one of them along: from its version 2 on httpx2
    import httpx
except ImportError:
    import httpx2 as httpx  # type: ignore[no-redef]

from kvlingo_mlx.errors import RemoteModelError, printable
from kvlingo_mlx.remote.address import Address
from kvlingo_mlx.remote.order import Order
from kvlingo_mlx.version import __version__

T = TypeVar("T")
PATH = "/v1/prefill"
API_KEY = "KVLINGO_API_KEY"
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts
READ_S = 2.0  # after which a silent connection is given up for another one
MOST_TOLD = 2**26  # bytes of an answer that is JSON
DAMAGED = 3  # so many times an answer may be wrong
END_S = 2.0  # how long a server is given to hear that a job is over


class GoneError(Exception):
    """The server no longer has a job, or a chunk of it."""


class RefusedError(RemoteModelError):
    """The server refuses what is asked; ``param`` says what of it, if the server does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _BusyError(OSError):
    """The server has no room now."""


class _DamagedError(Exception):
    """An answer is not the one that was sent."""


CUT = (httpx.TransportError, OSError)


class Client:
    """A server, asked by one thread at a time.

    Args:
        address: Where it listens.
        key: The key that it asks for.
        patience: Seconds without a byte after which it is given up.
    """

    def __init__(self, address: Address, key: str | None = None, patience: float = 10.0) -> None:
        self.address, self.key, self.patience = address, key, patience
        self.received = 0  # bytes of chunks that have come, also those that came in vain
        self.stopped = threading.Event()  # ends what is asked at present with an error
        self._open: httpx.Client | None = None
        self._met = False
        self._heard = 0.0

    def facts(self) -> Any:
        """What the server says of its model."""
        try:
            return self._again(lambda: self._json("GET"))
        except GoneError:
            raise self.odd("has no model to offer") from None

    def begin(self, order: Order) -> str:
        """Ask for a job; the same order leads to the same one. Returns its name."""

        def attempt() -> str:
            found = self._json("POST", order.to_json())
            if not isinstance(found, dict) or found.get("id") != order.id:
                raise _DamagedError("names another job than the one that was asked for")
            return order.id

        try:
            return self._again(attempt)
        except GoneError:
            raise self.odd("takes no orders") from None

    def chunk(self, job: str, number: int, most: int) -> bytes:
        """A chunk of at most so many bytes, whose digest was compared.

        Raises:
            GoneError: The server does not have it, and must be asked anew.
        """
        part = _Part(most)
        return self._again(lambda: self._more(f"{PATH}/{job}/{number}", part))

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

    # ---- one request -----------------------------------------------------------------------------

    def _again(self, attempt: Callable[[], T | None]) -> T:
        """What an attempt returns in the end; None asks for another one at once.

        An attempt sets ``_heard`` when something of use has come.

        Raises:
            RemoteModelError: Nothing came for too long, or what came was wrong too often.
        """
        self._heard = before = time.monotonic()
        pause, damaged = FIRST_PAUSE, 0
        while True:
            try:
                found = attempt()
                if found is not None:
                    return found
                continue
            except _DamagedError as error:
                damaged += 1
                if damaged == DAMAGED:
                    raise self.odd(f"{error}, {DAMAGED} times") from None
            except CUT as error:
                never = isinstance(error, httpx.ConnectError) and not self._met
                silent = time.monotonic() - self._heard
                if self.stopped.is_set() or silent > self.patience or never:
                    self.close()
                    raise RemoteModelError(self._unreached(error)) from None
            self.close()
            pause = FIRST_PAUSE if self._heard > before else min(2 * pause, LONGEST_PAUSE)
            before = self._heard
            self.stopped.wait(pause)

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
            GoneError, RefusedError, OSError: What a status of 400 or more stands for.
        """
        if self._open is None:
            host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
            headers = {"Accept-Encoding": "identity"}
            headers |= {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
            wait = patience or self.patience
            self._open = httpx.Client(
                base_url=f"http{'s' * self.address.secure}://{host}:{self.address.port}",
                headers=headers,
                trust_env=False,
                timeout=httpx.Timeout(wait, read=min(wait, READ_S)),
            )
        with self._open.stream(method, path, **given) as answer:
            self._met = True
            if answer.status_code < 400:
                yield answer
                return
            text, param = _told(_whole(answer))
        if answer.status_code in (404, 410):
            raise GoneError(text)
        if answer.status_code in (429, 503):
            raise _BusyError(text)
        raise RefusedError(printable(f"{self.address} refuses: {text:.400}"), param)

    def _json(self, method: str, body: Any = None) -> Any:
        given = {} if body is None else {"json": body}
        with self._send(method, PATH, **given) as answer:
            text = _whole(answer)
        if hashlib.sha256(text).digest() != _digest(answer):
            raise _DamagedError("sends an answer without its sha256, or another one")
        try:
            return json.loads(text)
        except ValueError:
            raise self.odd("does not answer in JSON") from None

    def _more(self, path: str, part: _Part) -> bytes | None:
        """Go on with a chunk at its byte; None if it is still being read."""
        wait = min(READ_S, self.patience) / 2
        headers = {"Prefer": f"wait={wait:g}"}  # RFC 7240
        if part.blob:
            headers |= {"Range": f"bytes={len(part.blob)}-", "If-Range": part.tag}
        with self._send("GET", path, headers=headers) as answer:
            if answer.status_code == 202:
                _whole(answer)
                self._heard = time.monotonic()
                return None
            if not part.begins(answer):
                part.blob.clear()
                raise _DamagedError("sends a chunk of another size, or another part of it")
            for piece in answer.iter_raw():
                if self.stopped.is_set():
                    raise ConnectionAbortedError("stopped")
                part.blob += piece
                self.received += len(piece)
                self._heard = time.monotonic()
        blob = bytes(part.blob)
        if hashlib.sha256(blob).digest() != part.digest:
            part.blob.clear()
            raise _DamagedError("sends a chunk that is damaged (its sha256 is another one)")
        return blob


class _Part:
    """A chunk that arrives: what has come, and what its first answer's head told of it."""

    def __init__(self, most: int) -> None:
        self.blob = bytearray()
        self.most, self.size, self.tag, self.digest = most, 0, "", b""

    def begins(self, answer: httpx.Response) -> bool:
        """Take what an answer's head says; whether it can be the chunk, or its rest."""
        length = int(answer.headers.get("content-length", -1))
        if answer.status_code == 206:
            rest = f"bytes {len(self.blob)}-{self.size - 1}/{self.size}"
            return bool(self.blob) and answer.headers.get("content-range") == rest
        self.blob.clear()
        self.size, self.tag = length, answer.headers.get("etag", "")
        self.digest = _digest(answer)
        return answer.status_code == 200 and 0 <= length <= self.most


def _whole(answer: httpx.Response) -> bytes:
    """An answer's bytes, as far as they are of a size that an answer can have."""
    text = bytearray()
    for piece in answer.iter_raw():
        text += piece
        if len(text) > MOST_TOLD:
            raise _DamagedError("sends an answer of more than 64 MB")
    return bytes(text)


def _digest(answer: httpx.Response) -> bytes:
    """The sha256 that an answer's head tells; empty if it tells none."""
    told = answer.headers.get("repr-digest", "")
    try:
        return base64.b64decode(told.removeprefix("sha-256=:").removesuffix(":"))
    except ValueError:
        return b""


def _told(body: bytes) -> tuple[str, str | None]:
    """The message and the field of a refusal in the form of OpenAI's API."""
    try:
        error = json.loads(body)["error"]
        param = error.get("param")
        return str(error["message"]), param if isinstance(param, str) else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return "it does not say why", None
