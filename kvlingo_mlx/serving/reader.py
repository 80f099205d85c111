"""A source that reads prompts for other machines: one thread, jobs in turns, a chunk ahead.

A chunk is a safetensors file with its digest. The latest are kept, so that a connection that was
cut goes on. Jobs are kept in HTTP's thread alone; the other one only reads.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlingo_mlx.backend import mx

from kvlingo_mlx.caches import memory
from kvlingo_mlx.errors import NotEnoughMemoryError
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.remote import frames
from kvlingo_mlx.remote.chunk import packed
from kvlingo_mlx.remote.order import KEPT, Order, split
from kvlingo_mlx.serving.messages import Failure
from kvlingo_mlx.serving.wire import BadRequest, Refused
from kvlingo_mlx.threads import working

KEPT_CHUNKS = 3  # of a job: the one that is sent, those beside it
IDLE_S = 30.0  # after which a job whose connection is gone is let go of
WAIT_S = 1.0  # after which a client is told that it goes on
PIECE = 2**18  # bytes that are handed to the connection at once


class Sealed(NamedTuple):
    """A chunk as it is sent: its frame's head, and its file."""

    head: bytes
    blob: bytes


Arrays = Generator[dict[str, mx.array], None, None]


@dataclass(eq=False)
class PrefillJob:
    """A prompt that is being read."""

    order: Order
    steps: Arrays  # reads the next chunk
    needs: dict[str, int]  # bytes that it takes in memory
    read: int = 0  # chunks that are read, or will be soon
    latest: deque[asyncio.Future[Sealed]] = field(default_factory=lambda: deque(maxlen=KEPT_CHUNKS))
    connection: object = None  # the one that its chunks go to; an older one ends
    idle: asyncio.TimerHandle | None = None  # lets go of it

    def goes_on(self, order: Order) -> bool:
        """Whether an order is what is left of this job's, from a chunk on that is still known."""
        first = len(self.order.spans) - len(order.spans)
        known = self.read - len(self.latest) <= first <= self.read
        return known and self.order.rest(order.start) == order


class Reader:
    """A loaded source, and the jobs of those who ask for its states, at most so many."""

    def __init__(self, model: LanguageModel, digest: str, most: int) -> None:
        self.model, self._digest, self._most = model, digest, most
        self.jobs: dict[str, PrefillJob] = {}
        self._thread = ThreadPoolExecutor(1, "reader")

    def begin(self, order: Order, connection: object) -> PrefillJob:
        """The job of an order, which is begun unless it goes on; its chunks go to a connection.

        Raises:
            Refused: The order is for another model or has what this one lacks, or there is no room.
        """
        job = self.jobs.get(order.session)
        if job is None or not job.goes_on(order):
            self._check_order(order)
            self._end(order.session)
            self._admit(order)
            job = self.jobs[order.session]
        if job.idle is not None:
            job.idle.cancel()
        job.connection = connection
        return job

    async def frames(
        self, job: PrefillJob, order: Order, connection: object
    ) -> AsyncIterator[bytes]:
        """The chunks of an order, each as soon as it is read."""
        count, key = len(job.order.spans), order.key
        for number in range(count - len(order.spans), count):
            chunk = self._chunk(job, number)
            if number + 1 < count:
                self._chunk(job, number + 1)  # is read while this one is sent
            while not (await asyncio.wait({chunk}, timeout=WAIT_S))[0]:
                yield frames.head(key, frames.WAIT)
            if job.connection is not connection or chunk.cancelled():
                return
            if (error := chunk.exception()) is not None:
                self._end(order.session)
                text = f"{self.model.name} did not read the prompt: {type(error).__name__}: {error}"
                failed = text[:400].encode()
                yield frames.head(key, frames.FAILED, failed) + failed
                return
            head, blob = chunk.result()
            yield head
            view = memoryview(blob)
            for at in range(0, len(blob), PIECE):
                yield bytes(view[at : at + PIECE])
        if job.connection is connection:  # else the client has come back by another one
            self._end(order.session)

    def leave(self, job: PrefillJob, connection: object) -> None:
        """A connection is over; a job that has no other one may be gone on with for a while."""
        if job.connection is connection:
            job.connection = None
            loop = asyncio.get_running_loop()
            job.idle = loop.call_later(IDLE_S, self._end, job.order.session)

    def stop(self) -> None:
        for name in list(self.jobs):
            self._end(name)
        self._most = 0
        self._thread.shutdown(wait=False)

    def _chunk(self, job: PrefillJob, number: int) -> asyncio.Future[Sealed]:
        """A chunk of a job, which is read sooner or later; the thread takes all jobs in turns."""
        if job.read <= number:
            span, loop = job.order.spans[number], asyncio.get_running_loop()
            job.latest.append(loop.run_in_executor(self._thread, _next_chunk, job, span))
            job.latest[-1].add_done_callback(lambda found: found.cancelled() or found.exception())
            job.read += 1
        return job.latest[number - job.read]

    def _end(self, name: str) -> None:
        """Let go of a job, if it is there."""
        if (job := self.jobs.pop(name, None)) is not None:
            job.connection = None
            for chunk in job.latest:
                chunk.cancel()
            if job.idle is not None:
                job.idle.cancel()
            self._thread.submit(job.steps.close)

    def _check_order(self, order: Order) -> None:
        """Refuse an order of what there is not."""
        layers = self.model.geometry.layers
        if order.model != self._digest:
            told = f"this machine offers {self.model.name} now, not the model that was asked for"
            raise BadRequest(f"{told} before; connect again", status=409)
        points = self.model.family.points
        _check(order.capture in points, f"there are no {order.capture} states to send", "capture")
        try:
            self.model.check_tokens(order.tokens)
        except ValueError as error:
            raise Refused(Failure("too_long", str(error), "tokens")) from None
        for side, layer in map(split, order.wanted):
            _check(layer < len(layers), "there are fewer layers", "wanted")
            rule = layers[layer].recurrence
            keeps = side != KEPT or (rule is not None and len(rule.parts) > 1)
            _check(keeps, f"layer {layer} keeps no state", "wanted")

    def _admit(self, order: Order) -> None:
        """Make a job of an order, if there is room for it; jobs without a connection make room."""
        if len(self.jobs) >= self._most:
            for name in [name for name, job in self.jobs.items() if job.connection is None]:
                self._end(name)
        if len(self.jobs) >= self._most:
            told = f"{len(self.jobs)} jobs are read already, as many as may; wait"
            raise Refused(Failure("unready", told))
        spans, count = order.spans, len(order.tokens)
        each = order.nbytes(self.model.geometry.layers, "float32") // len(spans)
        caches = memory.cache_bytes(self.model, count)
        needs = {memory.caches_of(count): caches, "chunks": each * min(len(spans), KEPT_CHUNKS)}
        together, held = dict(needs), 0
        for other in self.jobs.values():
            for name, size in other.needs.items():
                together[name] = together.get(name, 0) + size
                held += size * other.read // len(other.order.spans)
        try:
            memory.check(together, held)
        except NotEnoughMemoryError as error:
            raise Refused(Failure("memory", str(error))) from None
        self.jobs[order.session] = PrefillJob(order, self._steps(order), needs)

    def _steps(self, order: Order) -> Arrays:
        """The tensors of each chunk, evaluated.

        What comes before the first position that is sent is read, too.
        """
        kept = any(split(name)[0] == KEPT for name in order.wanted)
        reading = capture.prefill(self.model, order.tokens, order.step_size, kept=kept)
        spans = iter(order.spans)
        with contextlib.closing(reading):
            for states in reading:
                if states.end <= order.start:
                    continue
                span = next(spans)
                with working():
                    part = states.part(span.start, span.stop)
                    part = capture.move(part, self.model, order.capture)
                    arrays = _sent(order, span, part)
                    del part, states
                    mx.eval(arrays)
                yield arrays


def _next_chunk(job: PrefillJob, span: range) -> Sealed:
    blob = packed(next(job.steps), job.order.told(span))
    if span.stop == len(job.order.tokens):
        job.steps.close()  # its caches are not needed any more
    return Sealed(frames.head(job.order.key, frames.CHUNK, blob), blob)


def _sent(order: Order, span: range, states: KVStates) -> dict[str, mx.array]:
    """A source's states as they are sent: all of one dtype."""
    arrays = {
        name: states.kept[layer][0]
        if side == KEPT and states.kept is not None
        else states.side(side)[layer][0, -rows:]
        for name, rows in order.rows(span).items()
        for side, layer in [split(name)]
    }
    kinds = {array.dtype for array in arrays.values()}
    if len(kinds) > 1 or not kinds <= {mx.float32, mx.float16, mx.bfloat16}:
        arrays = {name: array.astype(mx.float32) for name, array in arrays.items()}
    return arrays


def _check(good: bool, message: str, param: str) -> None:
    if not good:
        raise BadRequest(message, param)
