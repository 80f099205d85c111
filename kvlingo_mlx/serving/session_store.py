"""What is in memory: models, and conversations, which go to 8 bits, to disk, and away.

A request waits until there is room for its model and its lines. What is used least recently goes
first, and what is pinned never goes. On disk a conversation is a folder, as it was in memory, and a
file of the same name with the keys by which it is found: so it is found again after a restart. The
file is written last and removed first, so a folder without one is rubbish.
"""

import contextlib
import json
import logging
import math
import shutil
import uuid
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.caches import memory
from kvlingo_mlx.engine.conversation import Conversation
from kvlingo_mlx.engine.folder import Draft, replace_text
from kvlingo_mlx.engine.storage import worker as files
from kvlingo_mlx.errors import KVLingoError, NotEnoughMemoryError
from kvlingo_mlx.format.atomic import alone
from kvlingo_mlx.loading.translators import home
from kvlingo_mlx.serving import clock
from kvlingo_mlx.serving.active_request import ActiveRequest
from kvlingo_mlx.serving.messages import GenerationRequest
from kvlingo_mlx.serving.model_pool import ModelPool, PooledModel
from kvlingo_mlx.serving.sessions import SAVED, Found, Session
from kvlingo_mlx.serving.settings import Settings

log = logging.getLogger("kvlingo_mlx.serving")

MOST_HERE, MOST_KEPT = 200, 1000  # conversations in memory, and in all; the oldest go first
IDLE_S = 30.0  # an idle conversation is written to disk after so long, in case the process crashes
PATIENCE_S = 5.0  # a request that has lacked room for so long goes before those that do not
STEP = 256  # tokens by which mlx-lm's caches grow
KEYS_OF = 3  # what keys are made of; others are not found again
LOST = (KVLingoError, OSError, ValueError, RuntimeError)


def conversing(models: int, settings: Settings) -> dict[str, Any]:
    """A conversation's options; one model alone takes none that concern several."""
    several: dict[str, Any] = {}
    if models > 1:
        several = {"on_missing": "reprefill", "guard": settings.guard}
        several |= {"on_doubt": settings.on_doubt} if settings.guard else {}
    return {"prefill_step_size": settings.prefill_step_size, **several}


class SessionStore:
    """All conversations, and the memory that they may take beside the models.

    Args:
        blank: An empty conversation, of which those that come back from disk are branches.
        translators: The bytes of the translators in memory.

    Raises:
        ValueError: Another server keeps its conversations in the same folder.
    """

    def __init__(
        self, settings: Settings, pool: ModelPool, blank: Conversation, translators: int
    ) -> None:
        free = memory.free() if settings.memory_limit is None else settings.memory_limit
        self.budget = math.inf if free is None else free
        self.sessions: list[Session] = []
        self._pool, self._blank, self._translators = pool, blank, translators
        # Conversations on disk are found again by servers that are told the same of these.
        paths = {name: each.path for name, each in pool.all.items()}
        self._mine = {"models": paths, "verbatim": settings.verbatim, "keys of": KEYS_OF}
        self._latest: Future[None] | None = None  # that was to be written
        self._lock = contextlib.ExitStack()  # on the folder
        self._folder: Path | None = None
        if settings.keep_conversations and blank.exchange.group.several:
            log.info("several machines serve, so conversations are kept in memory alone")
        elif settings.keep_conversations:
            given = settings.conversations
            self._folder = home() / "conversations" if given is None else Path(given).expanduser()
            self._open(self._folder, settings.stop_timeout)

    # ---- requests ---------------------------------------------------------------------------

    def admits(
        self, job: ActiveRequest, found: Found | None, before: Iterable[ActiveRequest]
    ) -> bool:
        """Whether a request can begin now: its model is loaded, and its lines have room.

        One that has lacked room for a while lets none begin that came later, so that what runs
        comes to an end. Where nothing runs, lines may take more than there is room for.

        Args:
            job: The request.
            found: The conversation that it goes on with, which stays as it is.
            before: The requests that came before it.

        Raises:
            NotEnoughMemoryError: There will never be room for its model.
        """
        now, resident = clock.now(), self._pool[job.name]
        if any(o.lacking is not None and now - o.lacking > PATIENCE_S for o in before):
            return False
        idle = not any(r.running for r in self._pool.all.values())
        if not resident.loaded:
            if self.room_for_model(job.name):
                self._pool.read(job.name)
            elif idle:
                raise too_large(resident)
        needed, spared = self.expected(job.ask), None
        if found is not None and not found.apart:
            needed, spared = max(0, needed - found.session.nbytes), found.session
        if resident.loaded and (self.make_room(needed, spared=spared) or idle):
            job.lacking = None
            return True
        job.lacking = job.lacking or now
        return False

    def expected(self, ask: GenerationRequest) -> int:
        """About the bytes that a prompt's lines will take; its tokens are a guess by its length."""
        texts = [str(message.get("content")) for message in ask.messages or ()]
        texts += [ask.prompt] if isinstance(ask.prompt, str) else []
        given = len(ask.prompt) if isinstance(ask.prompt, tuple) else 0
        tokens = given + sum(map(len, texts)) // 3
        loaded = (each.model for each in self._pool.all.values() if each.loaded)
        return sum(memory.cache_bytes(model, tokens + STEP) for model in loaded)

    def new(self, conversation: Conversation) -> Session:
        """A new session, which goes on from a conversation; it is found once it has keys.

        The oldest are let go of where there are too many.
        """
        session = Session(conversation=conversation)
        self.sessions.append(session)
        idle = sorted((t for t in self.sessions if self._may_go(t)), key=lambda t: t.used)
        here = sum(t.exchange is not None for t in self.sessions)
        for old in idle[: max(0, here - MOST_HERE)]:
            self._away(old)
        gone = sorted((t for t in self.sessions if t.exchange is None), key=lambda t: t.used)
        for old in gone[: max(0, len(self.sessions) - MOST_KEPT)]:
            self._drop(old)
        return session

    def _may_go(self, session: Session) -> bool:
        return not (session.busy or session.pinned or session.exchange is None) and bool(
            session.keys
        )

    # ---- memory -----------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """The bytes of all weights, translators and lines in memory."""
        lines = sum(session.nbytes for session in self.sessions)
        return self._pool.weights + self._translators + lines

    def make_room(self, needed: int = 0, spared: Session | None = None) -> bool:
        """Put idle conversations away until so many bytes are free; return whether they are."""
        idle = [each for each in self.sessions if self._may_go(each) and each is not spared]
        for step in (self._to_8bit, self._away):
            for session in sorted(idle, key=lambda session: session.used):
                if self._fits(needed):
                    return True
                step(session)
        return self._fits(needed)

    def _fits(self, needed: int) -> bool:
        """Whether so many bytes are free beside what is used, on all machines."""
        return all(self._blank.exchange.group.gathered(self.used + needed <= self.budget))

    def room_for_model(self, name: str) -> bool:
        """Let go of idle models, then put conversations away, until a model's weights fit."""
        needed = self._pool[name].weights
        for idle in self._pool.idle(name):
            if self._fits(needed):
                break
            log.info("unloading %s to make room for %s", idle, name)
            self._pool.unload(idle)
        return self.make_room(needed)

    def _to_8bit(self, session: Session) -> None:
        assert session.exchange is not None
        for name, line in session.exchange.lines.items():
            if line.where == "resident":
                session.exchange.put_away(name, "8bit")
        mx.clear_cache()

    def _away(self, session: Session) -> None:
        """Put a session on disk, if conversations are kept; else forget it."""
        if self._folder is None or not self.save(session):
            self._drop(session)
            return
        assert session.conversation is not None
        session.conversation.close()
        session.conversation, session.messages = None, []  # they are in the folder
        mx.clear_cache()

    def _drop(self, session: Session) -> None:
        if self._folder is not None:  # in its turn: after what is being written of it
            files().submit(_remove_saved, session).result()
        self.sessions.remove(session)
        if session.exchange is not None:
            for line in session.exchange.lines.values():
                line.clear()
        mx.clear_cache()

    # ---- disk -------------------------------------------------------------------------------

    def _open(self, folder: Path, patience: float) -> None:
        """Take a folder for this server alone, and find what a former one left there."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:  # a server whose parent was killed may still be saving into it
            self._lock.enter_context(alone(folder / "conversations", patience))
        except OSError as error:
            if error.errno is not None:
                raise
            raise ValueError(
                f"another server keeps its conversations in {folder}; give --conversations "
                "another folder, or --no-keep-conversations"
            ) from None
        for path in folder.iterdir():
            if path.suffix == ".tmp":
                path.unlink()
            elif path.is_dir() and not path.with_suffix(".json").exists():
                shutil.rmtree(path, ignore_errors=True)
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in files[:-MOST_KEPT]:  # of other models, too
            _remove(old.with_suffix(""))
        for file in files[-MOST_KEPT:]:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                facts: dict[str, Any] = json.loads(file.read_text("utf-8"))
                if all(facts[name] == mine for name, mine in self._mine.items()):
                    keys = [tuple(map(str, key)) for key in facts["keys"]]
                    kept, used = file.with_suffix(""), float(facts["used"])
                    self.sessions.append(Session(keys, folder=kept, used=used, saved=SAVED))

    def save(self, session: Session) -> bool:
        """Write an idle session to disk, unless it is there as it is; whether it is there."""
        if self._folder is None or not session.storable:
            return session.folder is not None
        written = session.saved
        if written is None or written.exception() is not None:
            written = self._begin(self._folder, session)
        return written.exception() is None

    def _begin(self, folder: Path, session: Session) -> Future[None]:
        """Let another thread write an idle session to disk; it may go on meanwhile."""
        assert session.conversation is not None
        facts = json.dumps({"keys": session.keys, "used": session.used, **self._mine})
        written = Future[None]()
        try:
            with self._pool.asleep():
                draft = session.conversation.draft()
            written = files().submit(_write, session, draft, folder / uuid.uuid4().hex, facts)
        except LOST as error:
            _tell_unsaved(error)
            written.set_exception(error)
        session.saved = self._latest = written
        return written

    def back(self, session: Session) -> bool:
        """Bring a session back from disk; False, and it is forgotten, if it is lost or outdated."""
        assert session.folder is not None
        conversation = self._blank.branch()
        try:
            with self._pool.asleep():
                conversation.restore(session.folder)
        except LOST as error:
            log.warning("a conversation on disk is lost (%s); it will be read anew", error)
            self._drop(session)
            return False
        session.conversation, session.messages = conversation, conversation.messages
        return True

    def tidy(self) -> None:
        """Begin to write a session that has been idle for a while, in case the process crashes."""
        if self._folder is None or (self._latest is not None and not self._latest.done()):
            return
        late = clock.now() - IDLE_S
        for session in self.sessions:
            idle = not session.busy and session.storable and session.used < late
            if idle and session.saved is None:
                self._begin(self._folder, session)
                return

    def close(self) -> None:
        """Write what is to be kept, and let another server have the folder."""
        for session in list(self.sessions):
            self.save(session)
        self._lock.close()


def too_large(resident: PooledModel) -> NotEnoughMemoryError:
    return NotEnoughMemoryError(
        f"the weights of {resident.model.name} ({resident.weights / 1e9:.1f} GB) do not fit into "
        "the server's memory; raise --memory-limit, or offer a smaller model"
    )


def _write(session: Session, draft: Draft, path: Path, facts: str) -> None:
    """Write a conversation, then its keys, and remove what was written before.

    Nothing of it is left where that fails.
    """
    try:
        draft.write(path)
        replace_text(path.with_suffix(".json"), facts)
    except BaseException as error:
        _tell_unsaved(error)
        shutil.rmtree(path, ignore_errors=True)
        raise
    _remove_saved(session)
    session.folder = path


def _tell_unsaved(error: BaseException) -> None:
    log.warning("a conversation cannot be kept on disk (%s)", error)


def _remove_saved(session: Session) -> None:
    if session.folder is not None:
        _remove(session.folder)


def _remove(path: Path) -> None:
    """Remove a saved conversation: its keys first, so that a rest is rubbish."""
    path.with_suffix(".json").unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
