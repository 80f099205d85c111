"""Who may begin: a request waits until there is room for its model and its lines."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from kvlingo_mlx.caches import memory
from kvlingo_mlx.errors import NotEnoughMemoryError
from kvlingo_mlx.serving import clock
from kvlingo_mlx.serving.active_request import ActiveRequest
from kvlingo_mlx.serving.messages import GenerationRequest
from kvlingo_mlx.serving.model_pool import ModelPool, PooledModel
from kvlingo_mlx.serving.session_store import SessionStore
from kvlingo_mlx.serving.sessions import Found

PATIENCE_S = 5.0  # a request that has lacked room for so long goes before those that do not
STEP = 256  # tokens by which mlx-lm's caches grow


class Admission:
    """Lets requests begin.

    Args:
        store: Makes room among the idle conversations.
        pool: The models.
        jobs: All requests, in the order in which they came.
    """

    def __init__(self, store: SessionStore, pool: ModelPool, jobs: Iterable[ActiveRequest]) -> None:
        self._store, self._pool, self._jobs = store, pool, jobs

    def admits(self, job: ActiveRequest, found: Found | None) -> bool:
        """Whether a request can begin now: its model is loaded, and its lines have room.

        One that has lacked room for a while lets none begin that came later, so that what runs
        comes to an end. Where nothing runs, lines may take more than there is room for.

        Args:
            job: The request.
            found: The conversation that it goes on with, which stays as it is.

        Raises:
            NotEnoughMemoryError: There will never be room for its model.
        """
        now, resident = clock.now(), self._pool[job.name]
        before = itertools.takewhile(lambda other: other is not job, self._jobs)
        if any(o.lacking is not None and now - o.lacking > PATIENCE_S for o in before):
            return False
        idle = not any(r.running for r in self._pool.all.values())
        if not resident.loaded:
            if self._store.room_for_model(job.name):
                self._pool.read(job.name)
            elif idle:
                raise too_large(resident)
        if resident.loaded and (self._room(job.ask, found) or idle):
            job.lacking = None
            return True
        job.lacking = job.lacking or now
        return False

    def _room(self, ask: GenerationRequest, found: Found | None) -> bool:
        if found is None or found.apart:
            return self._store.make_room(self.expected(ask))
        needed = self.expected(ask) - found.session.nbytes
        return self._store.make_room(max(0, needed), spared=found.session)

    def expected(self, ask: GenerationRequest) -> int:
        """About the bytes that a prompt's lines will take; its tokens are a guess by its length."""
        texts = [str(message.get("content")) for message in ask.messages or ()]
        texts += [ask.prompt] if isinstance(ask.prompt, str) else []
        given = len(ask.prompt) if isinstance(ask.prompt, tuple) else 0
        tokens = given + sum(map(len, texts)) // 3
        loaded = (each.model for each in self._pool.all.values() if each.loaded)
        return sum(memory.cache_bytes(model, tokens + STEP) for model in loaded)


def too_large(resident: PooledModel) -> NotEnoughMemoryError:
    """The error of a model for which there is no room."""
    return NotEnoughMemoryError(
        f"the weights of {resident.name} ({resident.weights / 1e9:.1f} GB) do not fit into the "
        "server's memory; raise --memory-limit, or offer a smaller model"
    )
