"""A source that reads prompts for other machines: one thread, jobs in turns, a few chunks ahead.

A chunk is a safetensors file with its digest. It is kept until a later one is asked for, or the job
has been idle for too long.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvlingo_mlx.backend import mx

from kvlingo_mlx.caches import memory
from kvlingo_mlx.errors import KVLingoError, NotEnoughMemoryError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.geometry import LayerGeometry
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.loading.pairing import matches
from kvlingo_mlx.loading.translators import load_translator, stored_translators
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.remote.chunk import packed
from kvlingo_mlx.remote.order import KEPT, Order, split
from kvlingo_mlx.serving.guard import Refused
from kvlingo_mlx.serving.messages import Failure
from kvlingo_mlx.threads import working
from kvlingo_mlx.translators.base import Translator

AHEAD = 3  # chunks of a job that are kept: the one that is asked for, and those after it
IDLE_S = 120.0  # after which a job that nobody asks for is let go of


@dataclass(frozen=True)
class Sealed:
    """A chunk as it is sent, and its sha256."""

    blob: bytes
    digest: bytes


@dataclass(eq=False)
class PrefillJob:
    """A prompt that is being read."""

    order: Order
    chunks: list[Future[Sealed] | None]  # in the future or there; those that were dropped are None
    steps: Generator[dict[str, mx.array], None, None]  # reads the next chunk
    needs: dict[str, int]  # bytes that it takes in memory
    read: int = 0  # chunks that were read
    asked: int = 0  # the latest chunk that was asked for
    seen: float = field(default_factory=time.monotonic)  # when that was

    @property
    def waits(self) -> bool:
        """Whether its next chunk may be read."""
        return self.read < min(len(self.chunks), self.asked + AHEAD)


class Reader:
    """A loaded source, and the jobs of those who ask for its states.

    ``translators`` are those that it applies; others are looked for in the local store.
    """

    def __init__(
        self, model: LanguageModel, digest: str, translators: Sequence[Translator], most: int
    ) -> None:
        self.model, self._digest, self._most = model, digest, most
        self._translators = {translator.digest: translator for translator in translators}
        self._looked_at: dict[tuple[Path, int], str] = {}
        self._jobs: dict[str, PrefillJob] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._sealing = ThreadPoolExecutor(1, "seal")
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    # ---- what a request does ---------------------------------------------------------------------

    def begin(self, order: Order) -> PrefillJob:
        """The job of an order, which may have begun already.

        Raises:
            Refused: The order is for another model or has what this one lacks, or there is no room.
        """
        with self._changed:
            if (job := self._jobs.get(order.id)) is not None:
                job.seen = time.monotonic()
                return job
        translator, layers = self._checked(order)
        spans, count = order.spans, len(order.tokens)
        each = order.nbytes(layers, order.dtype or "float32") // len(spans)
        needs = {
            memory.caches_of(count): memory.cache_bytes(self.model, count),
            "chunks": each * min(len(spans), AHEAD),
        }
        steps = self._steps(order, translator)
        job = PrefillJob(order, [Future() for _ in spans], steps, needs)
        with self._changed:
            if order.id in self._jobs:
                return self._jobs[order.id]
            self._admit(job)
            self._jobs[order.id] = job
            self._changed.notify_all()
        return job

    def chunk(self, name: str, number: int) -> Future[Sealed]:
        """A chunk of a job, which is read sooner or later; those before it are dropped.

        Raises:
            Refused: There is no such job (404) or chunk, or it was dropped (410).
        """
        with self._changed:
            job = self._jobs.get(name)
            if job is None or not 0 <= number < len(job.chunks):
                raise Refused(Failure("not_found", "there is no such job; ask for it again"))
            job.seen = time.monotonic()
            found = job.chunks[number]
            if found is None:
                told = "this chunk was asked for before; ask for the rest as a new order"
                raise Refused(Failure("not_found", told), status=410)
            job.asked = max(job.asked, number)
            job.chunks[:number] = [None] * number
            self._changed.notify_all()
            return found

    def end(self, name: str) -> None:
        """Let go of a job, if it is there."""
        with self._changed:
            self._drop(name, "the job was ended")
            self._changed.notify_all()

    def stop(self) -> None:
        """End all jobs and the thread."""
        with self._changed:
            self._stopping = True
            for name in list(self._jobs):
                self._drop(name, "the server stops")
            self._changed.notify_all()
        self._thread.join()
        self._sealing.shutdown()

    def _checked(self, order: Order) -> tuple[Translator | None, Sequence[LayerGeometry]]:
        """The translator of an order, and the layers of which it wants states."""
        translator, layers = None, self.model.geometry.layers
        if order.model != self._digest:
            told = f"this machine offers {self.model.name} now, not the model that was asked for"
            raise Refused(Failure("invalid", f"{told} before; connect again"), status=409)
        if order.translator is not None:
            if (translator := self._translator(order.translator)) is None:
                told = "this machine does not have the translator"
                raise Refused(Failure("invalid", told, "translator"), status=409)
            layers = translator.config.target.layers
        points = self.model.family.points if translator is None else [translator.config.capture]
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
        return translator, layers

    def _translator(self, digest: str) -> Translator | None:
        """The translator of a digest; stored ones of this source are looked at once each."""
        if digest in self._translators:
            return self._translators[digest]
        for path in stored_translators():
            try:
                known = (path, (path / translator_folder.WEIGHTS_FILE).stat().st_mtime_ns)
                if known not in self._looked_at:
                    config = translator_folder.read_config(path)
                    mine = matches(config.source, self.model, allow_mismatch=True)
                    found = translator_folder.read(path) if mine else None
                    self._looked_at[known] = translator_folder.digest(*found) if found else ""
                if self._looked_at[known] == digest:
                    self._translators[digest] = load_translator(path)
                    return self._translators[digest]
            except (KVLingoError, OSError):
                continue  # one unreadable folder must not hide all others
        return None

    def _admit(self, job: PrefillJob) -> None:
        """Make room for a job, or refuse it."""
        for name, other in list(self._jobs.items()):
            if time.monotonic() - other.seen > IDLE_S:
                self._drop(name, "the job was idle")
        if self._stopping or len(self._jobs) >= self._most:
            raise Refused(
                Failure("unready", f"{len(self._jobs)} jobs are read already, as many as may; wait")
            )
        needs, held = dict(job.needs), 0
        for other in self._jobs.values():
            for name, size in other.needs.items():
                needs[name] = needs.get(name, 0) + size
                held += size * other.read // len(other.chunks)
        try:
            memory.check(needs, held)
        except NotEnoughMemoryError as error:
            raise Refused(Failure("memory", str(error))) from None

    def _drop(self, name: str, why: str) -> None:
        if (job := self._jobs.pop(name, None)) is not None:
            _fail(job, why)

    # ---- the thread that reads -------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (job := self._next()) is None:
                    self._changed.wait(IDLE_S)
                    self._forget()
                if self._stopping:
                    return
            assert job is not None
            self._read(job)

    def _next(self) -> PrefillJob | None:
        """The job whose turn it is, which then comes last."""
        job = next((job for job in self._jobs.values() if job.waits), None)
        if job is not None:
            self._jobs[job.order.id] = self._jobs.pop(job.order.id)
        return job

    def _forget(self) -> None:
        for name, job in list(self._jobs.items()):
            if time.monotonic() - job.seen > IDLE_S:
                self._drop(name, "the job was idle")

    def _read(self, job: PrefillJob) -> None:
        """Read a job's next chunk; another thread takes its digest meanwhile."""
        number, order = job.read, job.order
        try:
            blob = packed(next(job.steps), order.told(order.spans[number]))
        except Exception as error:  # told to whoever waits; the server lives on
            with self._changed:  # the job stays until it is asked for
                job.read = len(job.chunks)
                _fail(job, f"{type(error).__name__}: {error}")
            return
        with self._changed:
            job.read += 1
            chunk = job.chunks[number]
            if job.read == len(job.chunks):
                job.steps.close()
        if chunk is not None:
            self._sealing.submit(_seal, blob, chunk)

    def _steps(
        self, order: Order, translator: Translator | None
    ) -> Generator[dict[str, mx.array], None, None]:
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
                    if translator is None:
                        arrays = _own(order, span, part)
                    else:
                        every = _translated(order, translator, part)
                        arrays = {name: every[name] for name in order.rows(span)}
                        del every
                    del part, states
                    mx.eval(arrays)
                yield arrays


def _own(order: Order, span: range, states: KVStates) -> dict[str, mx.array]:
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


def _translated(order: Order, translator: Translator, states: KVStates) -> dict[str, mx.array]:
    """Translated states in the target's dtype."""
    layers = min(split(name)[1] for name in order.wanted)
    count = len(translator.config.target.layers)
    first = [
        min(order.wanted.get(f"{side}.{layer}", states.end) for side in SIDES)
        for layer in range(count)
    ]
    found = translator.above(layers)(states, first)
    dtype = getattr(mx, order.dtype or "float32")
    kept = {f"{KEPT}.{layer}": array[0].astype(dtype) for layer, array in found.kept.items()}
    return kept | {
        f"{side}.{layer}": array[0].astype(dtype)
        for side, groups in zip(SIDES, (found.keys, found.values), strict=True)
        for group in groups
        for layer, array in zip(group.layers, group.states, strict=True)
    }


def _fail(job: PrefillJob, why: str) -> None:
    """Tell whoever waits for a chunk that it will not come."""
    for chunk in job.chunks:
        if chunk is not None and not chunk.done():
            with contextlib.suppress(InvalidStateError):  # it was sealed just now
                chunk.set_exception(KVLingoError(why))


def _seal(blob: bytes, chunk: Future[Sealed]) -> None:
    with contextlib.suppress(InvalidStateError):  # the job was dropped meanwhile
        chunk.set_result(Sealed(blob, hashlib.sha256(blob).digest()))


def _check(good: bool, message: str, param: str) -> None:
    if not good:
        raise Refused(Failure("invalid", message, param))
