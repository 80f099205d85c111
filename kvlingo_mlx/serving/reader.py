"""A source that reads prompts for other machines: one thread, jobs in turns, a few chunks ahead.

A chunk is a safetensors file with its digest. It is kept until a later one is asked for, or the job
has been idle for too long. Jobs are kept in HTTP's thread alone; the other one only reads.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from kvlingo_mlx.backend import mx

from kvlingo_mlx.caches import memory
from kvlingo_mlx.errors import KVLingoError, NotEnoughMemoryError
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.remote.chunk import packed
from kvlingo_mlx.remote.order import KEPT, Order, split
from kvlingo_mlx.serving.messages import Failure
from kvlingo_mlx.serving.wire import BadRequest, Refused
from kvlingo_mlx.threads import working

AHEAD = 3  # chunks of a job that are kept: the one that is asked for, and those after it
IDLE_S = 120.0  # after which a job that nobody asks for is let go of


class Sealed(NamedTuple):
    """A chunk as it is sent, and its sha256."""

    blob: bytes
    digest: bytes


Arrays = Generator[dict[str, mx.array], None, None]


@dataclass(eq=False)
class PrefillJob:
    """A prompt that is being read."""

    order: Order
    steps: Arrays  # reads the next chunk
    needs: dict[str, int]  # bytes that it takes in memory
    chunks: list[asyncio.Future[Sealed] | None]  # those that were dropped are None
    read: int = 0  # chunks that were read
    asked: int = 0  # the latest chunk that was asked for
    reading: asyncio.Task[None] | None = None
    idle: asyncio.TimerHandle | None = None  # lets go of it

    def fail(self, why: str) -> None:
        """Tell whoever waits for a chunk that it will not come."""
        self.read = len(self.chunks)
        for chunk in self.chunks:
            if chunk is not None and not chunk.done():
                chunk.set_exception(KVLingoError(why))
                chunk.exception()  # perhaps nobody waits


class Reader:
    """A loaded source, and the jobs of those who ask for its states, at most so many."""

    def __init__(self, model: LanguageModel, digest: str, most: int) -> None:
        self.model, self._digest, self._most = model, digest, most
        self._jobs: dict[str, PrefillJob] = {}
        self._thread = ThreadPoolExecutor(1, "reader")

    async def begin(self, order: Order) -> None:
        """Begin the job of an order, unless it has begun already.

        Raises:
            Refused: The order is for another model or has what this one lacks, or there is no room.
        """
        if order.id not in self._jobs:
            self._check_order(order)
            self._admit(order)
        self._go_on(self._jobs[order.id])

    def chunk(self, name: str, number: int) -> asyncio.Future[Sealed]:
        """A chunk of a job, which is read sooner or later; those before it are dropped.

        Raises:
            Refused: There is no such job (404) or chunk, or it was dropped (410).
        """
        job = self._jobs.get(name)
        if job is None or not 0 <= number < len(job.chunks):
            raise Refused(Failure("not_found", "there is no such job; ask for it again"))
        if (found := job.chunks[number]) is None:
            told = "this chunk was asked for before; ask for the rest as a new order"
            raise Refused(Failure("not_found", told), status=410)
        job.asked = max(job.asked, number)
        job.chunks[:number] = [None] * number
        self._go_on(job)
        return found

    def end(self, name: str, why: str = "the job was ended") -> None:
        """Let go of a job, if it is there."""
        if (job := self._jobs.pop(name, None)) is not None:
            job.fail(why)
            if job.idle is not None:
                job.idle.cancel()
            self._thread.submit(job.steps.close)

    def stop(self) -> None:
        for name in list(self._jobs):
            self.end(name, "the server stops")
        self._most = 0
        self._thread.shutdown(wait=False)

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
        """Make a job of an order, if there is room for it."""
        if len(self._jobs) >= self._most:
            told = f"{len(self._jobs)} jobs are read already, as many as may; wait"
            raise Refused(Failure("unready", told))
        spans, count = order.spans, len(order.tokens)
        each = order.nbytes(self.model.geometry.layers, "float32") // len(spans)
        caches = memory.cache_bytes(self.model, count)
        needs = {memory.caches_of(count): caches, "chunks": each * min(len(spans), AHEAD)}
        together, held = dict(needs), 0
        for other in self._jobs.values():
            for name, size in other.needs.items():
                together[name] = together.get(name, 0) + size
                held += size * other.read // len(other.chunks)
        try:
            memory.check(together, held)
        except NotEnoughMemoryError as error:
            raise Refused(Failure("memory", str(error))) from None
        steps, loop = self._steps(order), asyncio.get_running_loop()
        chunks = [loop.create_future() for _ in spans]
        self._jobs[order.id] = PrefillJob(order, steps, needs, [*chunks])

    def _go_on(self, job: PrefillJob) -> None:
        """Somebody asks for a job: it is no longer idle, and may be read further."""
        if job.idle is not None:
            job.idle.cancel()
        loop = asyncio.get_running_loop()
        job.idle = loop.call_later(IDLE_S, self.end, job.order.id, "the job was idle")
        if job.reading is None or job.reading.done():
            job.reading = asyncio.create_task(self._read(job))

    async def _read(self, job: PrefillJob) -> None:
        """Read a job's next chunks; the thread takes the chunks of all jobs in turns."""
        loop = asyncio.get_running_loop()
        while job.read < min(len(job.chunks), job.asked + AHEAD):
            span = job.order.spans[job.read]
            try:
                sealed = await loop.run_in_executor(self._thread, _next_chunk, job, span)
            except Exception as error:  # told to whoever waits; the job stays until it is asked for
                job.fail(f"{type(error).__name__}: {error}")
                return
            if job.read < len(job.chunks):  # else it has failed meanwhile
                chunk = job.chunks[job.read]
                job.read += 1
                if chunk is not None:
                    chunk.set_result(sealed)

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
    return Sealed(blob, hashlib.sha256(blob).digest())


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
