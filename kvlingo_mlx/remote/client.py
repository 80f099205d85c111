"""HTTP from the machine that answers: an order, and the stream of its chunks.

When a connection is cut or a frame is damaged, what has not come is ordered anew.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict
from typing import Any

try:  # huggingface-hub brings one of them along: from its version 2 on httpx2
    import httpx
except ImportError:
    import httpx2 as httpx  # type: ignore[no-redef]

from kvlingo_mlx.errors import RemoteModelError, printable
from kvlingo_mlx.remote import frames
from kvlingo_mlx.remote.address import Address
from kvlingo_mlx.remote.order import Order
from kvlingo_mlx.version import __version__

PATH = "/v1/prefill"
API_KEY = "KVLINGO_API_KEY"
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts
SILENT_S = 5.0  # after which a silent connection is given up for another one
MOST_FACTS = 2**26  # bytes
MOST_REFUSED = 2**16  # bytes that are read of a refusal
DAMAGED, CUTS = 3, 30  # so many times in a row an answer may be wrong, or cut within a chunk


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
        self._heard = 0.0  # when something has come
        self._met = False

    def facts(self) -> Any:
        """What the server says of its model."""
        (found,) = self.stream(None, MOST_FACTS)
        try:
            return json.loads(found)
        except ValueError:
            raise self.odd("does not answer in JSON") from None

    def stream(self, order: Order | None, most: int) -> Generator[bytes, None, None]:
        """The chunks of an order, or without one the server's facts, each of at most so many bytes.

        Raises:
            RemoteModelError: Nothing came for too long, what came was wrong too often, or the
                server refuses.
        """
        left = 1 if order is None else len(order.spans)
        pause, damaged, cuts, self._heard = FIRST_PAUSE, 0, 0, time.monotonic()
        while left:
            before, came = left, self.received
            try:
                with contextlib.closing(self._payloads(order, most)) as payloads:
                    for payload in payloads:
                        left, damaged, cuts = left - 1, 0, 0
                        yield payload
                        self._heard = time.monotonic()
                        if not left:
                            return
            except _DamagedError as error:
                damaged += 1
                if damaged == DAMAGED:
                    raise self.odd(f"{error}, {DAMAGED} times") from None
            except CUT as error:
                never = isinstance(error, httpx.ConnectError) and not self._met
                silent = time.monotonic() - self._heard > self.patience
                cuts += self.received > came
                if self.stopped.is_set() or silent or never or cuts == CUTS:
                    raise RemoteModelError(self._unreached(error)) from None
            if order is not None:
                order = order.rest(order.spans[-left].start)
            pause = FIRST_PAUSE if left < before else min(2 * pause, LONGEST_PAUSE)
            self.stopped.wait(pause)

    def odd(self, what: str) -> RemoteModelError:
        """The error of a server that does what ours would not."""
        return RemoteModelError(
            f"{self.address} {what}; is it a `kvlingo-mlx serve-prefill` of version {__version__}?"
        )

    def _payloads(self, order: Order | None, most: int) -> Generator[bytes, None, None]:
        """What one connection brings.

        Raises:
            RemoteModelError: The server refuses.
            _DamagedError, OSError: A frame is wrong; the connection is cut.
        """
        key = "" if order is None else order.key
        with self._answer(order) as answer:
            pieces, came = answer.iter_raw(), bytearray()

            def take(count: int) -> bytes:
                while len(came) < count:
                    if (piece := next(pieces, None)) is None:
                        raise _DamagedError("ends an answer too soon")
                    if self.stopped.is_set():
                        raise ConnectionAbortedError("stopped")
                    self.received += len(piece)
                    self._heard = time.monotonic()
                    came.extend(piece)
                found = bytes(came[:count])
                del came[:count]
                return found

            while True:
                kind, size, digest = frames.HEAD.unpack(take(frames.HEAD.size))
                if size > most:
                    raise _DamagedError("sends an answer of another size")
                payload = take(size)
                if frames.digest(key, kind, payload) != digest:
                    told = "sends an answer that is damaged (its sha256 is another one)"
                    raise _DamagedError(told)
                if kind == frames.FAILED:
                    told = payload.decode(errors="replace")
                    raise RemoteModelError(printable(f"{self.address}: {told}"))
                if kind == frames.CHUNK:
                    yield payload

    @contextlib.contextmanager
    def _answer(self, order: Order | None) -> Iterator[httpx.Response]:
        """Send a question on a connection of its own; the answer's head has come.

        Raises:
            RemoteModelError, OSError: What a status of 400 or more stands for.
        """
        headers = {"Accept-Encoding": "identity"}
        headers |= {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        url = f"http{'s' * self.address.secure}://{self.address}{PATH}"
        asked: dict[str, Any] = {} if order is None else {"json": asdict(order)}
        timeout = httpx.Timeout(self.patience, read=min(self.patience, SILENT_S))
        options: dict[str, Any] = {"verify": self.address.secure, "timeout": timeout}
        with (
            httpx.Client(headers=headers, trust_env=False, **options) as opened,
            opened.stream("GET" if order is None else "POST", url, **asked) as answer,
        ):
            self._met = True
            if answer.status_code < 400:
                yield answer
                return
            text = _refusal(next(answer.iter_bytes(MOST_REFUSED), b""))
        if answer.status_code == 404:
            raise self.odd("has no model to offer")
        if answer.status_code in (429, 503):
            raise _BusyError(text)
        raise RemoteModelError(printable(f"{self.address} refuses: {text:.400}"))

    def _unreached(self, error: Exception) -> str:
        text = printable(str(error) or type(error).__name__)
        if isinstance(error, _BusyError):
            return f"{self.address} has no room for this: {text:.300}"
        return (
            f"{self.address} cannot be reached ({text:.100}); start `kvlingo-mlx serve-prefill` "
            "there, and check the address, the port and the firewall"
        )


def _refusal(body: bytes) -> str:
    """The message of a refusal in the form of OpenAI's API."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return "it does not say why"
