"""HTTP from the machine that answers: requests that are sent again when a connection is cut.

Only Python's own ``http.client`` is used. A chunk goes on at the byte at which it was cut
(``Range``, RFC 9110), and is compared with its digest (``Repr-Digest``, RFC 9530).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvlingo_mlx.errors import RemoteModelError, printable
from kvlingo_mlx.remote.address import Address
from kvlingo_mlx.remote.order import Order
from kvlingo_mlx.version import __version__

T = TypeVar("T")
PATH = "/v1/prefill"
API_KEY = "KVLINGO_API_KEY"
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts
PIECE = 2**18  # bytes
MOST_TOLD = 2**26  # bytes of an answer that is JSON
DAMAGED = 3  # so many times an answer may be wrong
END_S = 2.0  # how long a server is given to hear that a job is over
CUT = (OSError, http.client.HTTPException)


class GoneError(Exception):
    """The server no longer has a job, or a chunk of it."""


class RefusedError(RemoteModelError):
    """The server refuses what is asked.

    Attributes:
        param: What of it, if the server says so.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _BusyError(OSError):
    """The server has no room now."""


class _DamagedError(Exception):
    """An answer is not the one that was sent."""


@dataclass
class Client:
    """A server, asked by one thread at a time.

    Attributes:
        address: Where it listens.
        key: The key that it asks for.
        patience: Seconds without a byte after which it is given up.
        received: Bytes of chunks that have come, also those that came in vain.
    """

    address: Address
    key: str | None = field(default=None, repr=False)
    patience: float = 10.0
    received: int = 0
    _open: http.client.HTTPConnection | None = field(default=None, repr=False)
    _met: bool = False
    _heard: float = 0.0
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _over: bool = False

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

    def chunk(self, job: str, number: int, sizes: Collection[int]) -> bytearray:
        """A chunk of one of some sizes in bytes, whose digest was compared.

        Raises:
            GoneError: The server does not have it, and must be asked anew.
        """
        part = _Part(sizes)
        return self._again(lambda: self._more(f"{PATH}/{job}/{number}", part))

    def end(self, job: str) -> None:
        """Tell the server that a job is not needed any more, if it can be told."""
        with self._lock:
            self._over = True
        self.close()
        with contextlib.suppress(*CUT, GoneError, RemoteModelError):
            self._send("DELETE", f"{PATH}/{job}", timeout=END_S).read()
        self.close()

    def stop(self) -> None:
        """End what another thread asks at present; it raises an error there."""
        self._stopped.set()
        with self._lock:
            sock = None if self._over or self._open is None else self._open.sock
            if sock is not None:
                with contextlib.suppress(OSError):  # it is closed already
                    sock.shutdown(socket.SHUT_RDWR)

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
                never = (
                    isinstance(error, ConnectionRefusedError | socket.gaierror) and not self._met
                )
                silent = time.monotonic() - self._heard
                if self._stopped.is_set() or silent > self.patience or never:
                    self.close()
                    raise RemoteModelError(self._unreached(error)) from None
            self.close()
            pause = FIRST_PAUSE if self._heard > before else min(2 * pause, LONGEST_PAUSE)
            before = self._heard
            self._stopped.wait(pause)

    def _unreached(self, error: Exception) -> str:
        text = printable(str(error) or type(error).__name__)
        if isinstance(error, _BusyError):
            return f"{self.address} has no room for this: {text:.300}"
        return (
            f"{self.address} cannot be reached ({text:.100}); start `kvlingo-mlx serve-prefill` "
            "there, and check the address, the port and the firewall"
        )

    def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> http.client.HTTPResponse:
        """Send a request, on the open connection or a new one, and read the answer's head."""
        if self._open is None:
            secure = self.address.secure
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            wait = self.patience if timeout is None else timeout
            self._open = kind(self.address.host, self.address.port, timeout=wait)
        given = dict(headers or {})
        if self.key is not None:
            given["Authorization"] = f"Bearer {self.key}"
        text = None if body is None else json.dumps(body).encode()
        self._open.request(method, path, text, given)
        answer = self._open.getresponse()
        self._met = True
        if answer.status >= 400:
            self._refuse(answer)
        return answer

    def _refuse(self, answer: http.client.HTTPResponse) -> None:
        """Raise the error that a status stands for."""
        text, param = _told(answer.read(PIECE))
        if answer.status in (404, 410):
            raise GoneError(text)
        if answer.status in (429, 503):
            raise _BusyError(text)
        raise RefusedError(printable(f"{self.address} refuses: {text:.400}"), param)

    def _json(self, method: str, body: Any = None) -> Any:
        answer = self._send(method, PATH, body)
        text = answer.read(MOST_TOLD)
        if answer.length != 0:  # what was announced and has not come, or was not announced
            raise http.client.IncompleteRead(text, answer.length)
        if hashlib.sha256(text).digest() != _digest(answer):
            raise _DamagedError("sends an answer without its sha256, or another one")
        try:
            return json.loads(text)
        except ValueError:
            raise self.odd("does not answer in JSON") from None

    # ---- a chunk ---------------------------------------------------------------------------------

    def _more(self, path: str, part: _Part) -> bytearray | None:
        """Go on with a chunk at its byte; None if it is still being read.

        Raises:
            OSError: The connection was cut; what has come is kept.
        """
        headers = {"Prefer": f"wait={max(1, int(self.patience / 2))}"}  # RFC 7240
        if part.done:
            headers |= {"Range": f"bytes={part.done}-", "If-Range": part.tag}
        answer = self._send("GET", path, headers=headers)
        if answer.status == 202:
            answer.read()
            self._heard = time.monotonic()
            return None
        if answer.length is None or "repr-digest" not in answer.headers:
            raise ConnectionResetError("the connection was closed in the head of a chunk")
        if not part.begins(answer):
            part.done = 0
            raise _DamagedError("sends a chunk of another size, or another part of it")
        view = memoryview(part.blob)
        while part.done < len(view):
            if self._stopped.is_set():
                raise ConnectionAbortedError("stopped")
            count = answer.readinto(view[part.done : part.done + PIECE])
            if not count:
                raise ConnectionResetError("the connection was closed in the middle of a chunk")
            part.hash.update(view[part.done : part.done + count])
            part.done += count
            self.received += count
            self._heard = time.monotonic()
        if part.hash.digest() != part.digest:
            part.done = 0
            raise _DamagedError("sends a chunk that is damaged (its sha256 is another one)")
        return part.blob


class _Part:
    """A chunk that arrives.

    Attributes:
        sizes: The bytes that it may have.
        blob: Its bytes.
        done: How many of them have come.
        tag: Its entity tag.
        digest: The digest that was told.
        hash: The digest of what has come.
    """

    def __init__(self, sizes: Collection[int]) -> None:
        self.sizes, self.blob, self.done, self.tag, self.digest = sizes, bytearray(), 0, "", b""
        self.hash = hashlib.sha256()

    def begins(self, answer: http.client.HTTPResponse) -> bool:
        """Take what an answer's head says; whether it can be the chunk, or its rest."""
        if answer.status == 206:
            rest = f"bytes {self.done}-{len(self.blob) - 1}/{len(self.blob)}"
            return bool(self.done) and answer.headers.get("content-range") == rest
        length = answer.length
        if answer.status != 200 or length is None or length not in self.sizes:
            return False
        self.digest, self.tag = _digest(answer), answer.headers.get("etag", "")
        self.blob, self.done, self.hash = bytearray(length), 0, hashlib.sha256()
        return True


def _digest(answer: http.client.HTTPResponse) -> bytes:
    """The sha256 that an answer's head tells; empty if it tells none."""
    told = answer.headers.get("repr-digest", "")
    try:
        return base64.b64decode(told.removeprefix("sha-256=:").removesuffix(":"))
    except ValueError:
        return b""


def _told(body: bytes) -> tuple[str, str | None]:
    """The message and the field of a refusal in the form of OpenAI's API."""
    try:
        error: Mapping[str, Any] = json.loads(body)["error"]
        param = error.get("param")
        return str(error["message"]), param if isinstance(param, str) else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return "it does not say why", None
