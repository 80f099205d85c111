"""All work of the server's models, by one thread, a unit at a time.

A round gives every answer that is being written its next token, and one of those that are yet to be
written one more piece of its prompt: so a long prompt holds nobody up for longer than one chunk.
"""

import functools
import itertools
import logging
import math
import re
import time
import traceback
from collections.abc import Generator
from typing import Any

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.generate import maybe_set_recommended_wired_limit

from kvlingo_mlx.engine.accounting import check_room
from kvlingo_mlx.engine.answer import AnswerInProgress
from kvlingo_mlx.engine.batches import Batch
from kvlingo_mlx.engine.conversation import Conversation, Request
from kvlingo_mlx.engine.exchange import Exchange
from kvlingo_mlx.engine.responses import GenerationResponse
from kvlingo_mlx.engine.routing import Route, load_route
from kvlingo_mlx.engine.sampling import Choice, sampler_of
from kvlingo_mlx.engine.transcript import Transcript
from kvlingo_mlx.engine.turn import Decoding, Part, Turn
from kvlingo_mlx.errors import KVLingoError, NotEnoughMemoryError
from kvlingo_mlx.group import Group
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.serving import clock
from kvlingo_mlx.serving.active_request import (
    ActiveRequest,
    Steps,
    Tell,
    processors_of,
    tools_of,
    usage_of,
)
from kvlingo_mlx.serving.messages import Failure, GenerationRequest, Status, TokenCount
from kvlingo_mlx.serving.model_pool import ModelPool
from kvlingo_mlx.serving.policy import Policy
from kvlingo_mlx.serving.session_store import SessionStore, conversing, too_large
from kvlingo_mlx.serving.sessions import Found, Key, Keys, Session, find, keys_of_text
from kvlingo_mlx.serving.settings import AUTO, Settings
from kvlingo_mlx.tokenization.probes import announces_tools

log = logging.getLogger("kvlingo_mlx.serving")

# What a request can be answered with an error for; anything else is a fault of the program.
ALONE = (MemoryError, RuntimeError, OSError)  # what may fail on one machine of several
REFUSED = (ValueError, KVLingoError, MemoryError, RuntimeError, OSError)


class Scheduler:
    """The server's models, conversations and requests.

    Raises:
        KVLingoError, ValueError: A model, a translator or a route cannot be opened.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.pool = ModelPool(settings.models, settings.sharded or ())
        models = self.pool.models
        self.policy = Policy(models, settings)
        self._blank = Conversation(
            models, verbatim=settings.verbatim, **conversing(len(models), settings)
        )
        self._heals, self._healed = settings.heal is not None, 0
        if self._heals:
            self._blank.check_healing()
        self._blank.exchange.use(self.policy.directions)
        self._route: Route | None = None
        if settings.routes is not None:
            self._route = load_route(settings.routes, list(models))
        self.store = SessionStore(settings, self.pool, self._blank, self.policy.nbytes)
        self._keys = Keys(settings.volatile, settings.verbatim)
        self._batches: dict[int, Batch] = {}
        self._jobs: dict[int, ActiveRequest] = {}
        self._turn = 0
        maybe_set_recommended_wired_limit()  # once, since somebody always answers

    # ---- requests ---------------------------------------------------------------------------

    def ask(self, number: int, ask: GenerationRequest, tell: Tell) -> None:
        try:
            name = self._chosen(ask)
            if ask.count:
                tell(TokenCount(_length(ask, self.pool[name].model)))
                return
            job = ActiveRequest(ask, tell, name)
        except REFUSED as error:
            tell(self._failed(error))
            return
        job.steps = self._answer(job)
        self._jobs[number] = job

    def cancel(self, number: int) -> None:
        """End a request; what was read and written of it stays in its conversation."""
        if (job := self._jobs.pop(number, None)) is not None:
            job.steps.close()

    def _failed(self, error: BaseException) -> Failure:
        """An error as it is told to the client, in one line, models by the names it knows."""
        if not isinstance(error, REFUSED):
            told = f"the server failed ({type(error).__name__}); its log says where"
            return Failure("internal", told)
        line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        for name, resident in self.pool.all.items():
            known = resident.model.name
            if re.search(r"\W", known):  # a plain word could be any word of the line
                whole = rf"(?<![\w/.-]){re.escape(known)}(?![\w/-])"
                line = re.sub(whole, name.replace("\\", r"\\"), line)
        kind = "internal"
        if isinstance(error, NotEnoughMemoryError | MemoryError):
            kind = "memory"
        elif isinstance(error, ValueError) and not isinstance(error, KVLingoError):
            kind = "too_long" if "context" in line else "invalid"
        return Failure(kind, line)

    def _chosen(self, ask: GenerationRequest) -> str:
        """The name of the model that is to answer."""
        names = list(self.pool.all)
        if ask.model == AUTO and self._route is not None:
            route, messages = self._route, [dict(m) for m in ask.messages or ()]
            return self.group.firsts(lambda: route(messages, names))
        if ask.model not in names:
            raise ValueError(f"there is no model {ask.model!r}; there are {', '.join(names)}")
        return ask.model

    # ---- a round of work --------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The processes that serve together, each with its part of a model."""
        return self._blank.exchange.group

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def work(self) -> None:
        """One round: a token for each answer that is being written, a piece of one prompt."""
        for batch in [batch for batch in self._batches.values() if len(batch)]:
            batch.step()
        for number, job in list(self._jobs.items()):
            if job.row is not None:
                self._advance(number, job)
        waiting = [number for number, job in self._jobs.items() if job.row is None]
        if waiting:
            later = [number for number in waiting if number > self._turn]
            self._turn = min(later or waiting)
            self._advance(self._turn, self._jobs[self._turn])

    def use_idle_time(self) -> bool:
        """Read behind translations, else write to disk; whether there is more to read."""
        if self._heal():
            return True
        self.store.tidy()
        return False

    def _heal(self) -> bool:
        """Let a model read a chunk of what it holds translated; False where nothing is left of it.

        The session used last comes first, and in it the model that answered last. Lines that
        were put away stay away.
        """
        if not self._heals:
            return False
        for session in sorted(self.store.sessions, key=lambda session: -session.used):
            if session.busy or session.exchange is None:
                continue
            lines, active = session.exchange.lines, session.exchange.active
            for name in sorted(lines, key=lambda name: name != active):
                if lines[name].away or not self.pool[name].loaded:
                    continue
                if not (before := lines[name].left(answers=False)):
                    continue
                try:
                    self._healed += before - session.exchange.heal(name, answers=False)
                except (KVLingoError, MemoryError, RuntimeError) as error:
                    self._heals = False
                    log.error("healing has ended, answers go on without it: %s", error)
                return self._heals
        return False

    def _advance(self, number: int, job: ActiveRequest) -> None:
        """Take a request's next step, and those that must not wait for the next round."""
        try:
            for at_once in job.steps:
                if not at_once:
                    return
        except Exception as error:  # a fault of ours ends this request, not those beside it
            if self.group.several and isinstance(error, ALONE):
                raise  # the others have gone on
            if not isinstance(error, REFUSED):
                # The error's text may hold a prompt, which is never logged.
                where = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{type(error).__name__}, {where.filename}:{where.lineno}"
                log.error("%s: a request could not be answered", place)
            job.tell(self._failed(error))
        job.steps.close()
        self._jobs.pop(number, None)

    # ---- one answer -------------------------------------------------------------------------

    def _answer(self, job: ActiveRequest) -> Steps:
        """The work of one request; each step says whether the next one must follow at once."""
        resident = self.pool[job.name]
        keys, session = self._keys_of(job), None
        while session is None:
            while not self._admits(job, keys):
                job.waits(0)
                yield False
            if (session := self._session(keys, job)) is None:
                yield False
        session.expected = self.store.expected(job.ask)
        resident.running += 1
        session.busy, job.queued = True, time.perf_counter() - job.arrived
        try:
            yield from self._written(job, session, keys)
        finally:
            session.busy, session.ending, session.expected = False, False, 0
            session.used = resident.used = clock.now()
            resident.running -= 1
            if not session.keys:  # its only request was refused
                self.store.sessions.remove(session)
        self.store.make_room()

    def _admits(self, job: ActiveRequest, keys: list[Key]) -> bool:
        before = itertools.takewhile(lambda other: other is not job, self._jobs.values())
        return self.store.admits(job, self._found(keys, job), before)

    def _found(self, keys: list[Key], job: ActiveRequest) -> Found | None:
        """The session with which a request has something in common."""
        sources = self.policy.sources_of(job.name, job.ask.strategy)
        return find(self.store.sessions, keys, job.name, sources)

    def _session(self, keys: list[Key], job: ActiveRequest) -> Session | None:
        """The session to go on with, perhaps a new one; None where one is about to be free."""
        found = self._found(keys, job)
        job.messages = list(map(dict, job.ask.messages or ()))
        if found is None:
            return self.store.new(self._begun(job))
        if found.session.ending:
            return None
        session = found.session
        if session.conversation is None and not self.store.back(session):
            return self.store.new(self._blank.branch())
        assert session.conversation is not None
        job.messages = self._keys.taken_over(session.messages, job.messages)
        return self.store.new(session.conversation.snapshot()) if found.apart else session

    def _keys_of(self, job: ActiveRequest) -> list[Key]:
        """The keys by which its session is found; a plain text's tokens are noted."""
        model, prompt = self.pool[job.name].model, job.ask.prompt
        if job.ask.messages is not None:
            return self._keys.of(job.ask)
        if isinstance(prompt, str):
            model.check_text(prompt)
        job.tokens = encode(model, prompt) if isinstance(prompt, str) else list(prompt or ())
        model.check_tokens(job.tokens)
        return keys_of_text(model.tokenizer_fingerprint, job.tokens)

    def _begun(self, job: ActiveRequest) -> Conversation:
        """An empty conversation; for a plain text one of the models that share its tokenizer."""
        if job.ask.messages is not None:
            return self._blank.branch()
        tokenizer = self.pool[job.name].model.tokenizer_fingerprint
        alike = {n: m for n, m in self.pool.models.items() if m.tokenizer_fingerprint == tokenizer}
        conversation = Conversation(alike, **conversing(len(alike), self._settings))
        conversation.exchange.use(self.policy.directions)
        return conversation

    def _completed(
        self, job: ActiveRequest, exchange: Exchange, request: Request
    ) -> Generator[GenerationResponse | None, None, Any]:
        """Go on with a plain text."""
        choice = exchange.chosen_together(request.choice)
        progress = AnswerInProgress.to_text(exchange, job.name, job.tokens)
        turn = Turn(
            exchange, progress, request.max_tokens,
            Decoding(choice, batch=request.batch, seat=request.seat, divides=False),
        )  # fmt: skip
        check_room({job.name: len(job.tokens)}, exchange.lines, exchange.group)
        if job.ask.echo:
            given, tokenizer = job.ask.prompt, self.pool[job.name].model.tokenizer
            job.before = given if isinstance(given, str) else tokenizer.decode(job.tokens)
        return turn.answer_by([Part(job.name)], None, lambda _: progress.follow(eager=True))

    def _prepare(self, exchange: Exchange, job: ActiveRequest) -> None:
        """Say between which models is translated, and whose lines follow the answer."""
        lengths = [len(line.tokens) for line in exchange.lines.values()]
        job.ways = self.policy.ways_of(job.ask.strategy, max(lengths))
        exchange.barred = frozenset(p for p, way in job.ways.items() if way.strategy == "reread")
        if job.ask.strategy == "reread":  # what was translated before is read now
            line = exchange.lines[job.name] = exchange.lines[job.name].copy()
            line.trim(next((s.start for s in line.spans if s.passes), len(line)))
        exchange.waits = True
        exchange.asleep = frozenset(name for name, each in self.pool.all.items() if not each.loaded)

    def _tell(
        self, job: ActiveRequest, response: GenerationResponse | None, exchange: Exchange, done: int
    ) -> bool:
        """Tell the client what a step brought; whether the next step must follow at once.

        ``done`` is the length of the model's line now.
        """
        if response is None:
            if not job.told and job.row is None:
                job.waits(done, lambda: _length(job.ask, self.pool[job.name].model))
            return False
        resident = self.pool[job.name]
        if not job.told:
            job.usage = usage_of(job, exchange, resident, response)
            if (switch := exchange.last) is not None:
                resident.took(switch.read, switch.read_s)
        job.take(response, resident.model.tokenizer)
        return job.ended or (job.row is not None and bool(job.row.ready))

    def _written(self, job: ActiveRequest, session: Session, keys: list[Key]) -> Steps:
        """Let the conversation answer, and keep what it says; who is refused changes nothing."""
        conversation, kept = session.conversation, (session.keys, session.messages)
        assert conversation is not None
        exchange, line = conversation.exchange, session.line(job.name)
        chat = job.ask.messages is not None
        try:
            self._prepare(exchange, job)
            request = self._request(job)
            if chat:
                steps = conversation.reply_in_steps(job.name, request)
            else:
                steps = self._completed(job, exchange, request)
            for number, response in enumerate(steps):
                if not number:  # nothing refuses it now; others find it, the disk's is outdated
                    session.keys, session.messages, session.saved = keys, job.messages, None
                    session.pinned |= job.ask.pin
                    line = exchange.lines[job.name]
                at_once = self._tell(job, response, exchange, len(line))
                session.ending = job.ended
                yield at_once
                if job.ended and not job.complete:
                    steps.close()  # the answer as it is joins the conversation
        except Exception:
            session.keys, session.messages = kept
            exchange.lines[job.name] = line
            raise
        session.messages = conversation.messages
        if chat:
            session.keys = [*keys, self._keys.message(session.messages[-1])]

    def _request(self, job: ActiveRequest) -> Request:
        ask, model = job.ask, self.pool[job.name].model
        batch = self._batches.get(id(model))
        if batch is None:
            records = len(self.pool.all) > 1
            most = self._settings.max_concurrent
            inputs = self._blank.exchange.line(job.name).inputs
            batch = Batch(model, records=records, inputs=inputs, size=most, group=self.group)
            self._batches[id(model)] = batch
        processors = processors_of(ask, model) or None
        return Request(
            messages=job.messages,
            begun=ask.begun,
            max_tokens=ask.max_tokens or self._settings.max_tokens,
            choice=Choice(sampler_of(vars(ask.sampling)), processors, ask.sampling.seed, ask.stop),
            tools=(tools_of(ask, model) or None) if announces_tools(model.tokenizer) else None,
            template=_switches(ask, model),  # also for lines of models that tell of tools
            batch=batch,
            seat=functools.partial(setattr, job, "row"),
        )

    # ---- what others ask --------------------------------------------------------------------

    def load(self, name: str) -> None:
        """Read a model's weights now.

        Raises:
            NotEnoughMemoryError: There is no room for them beside what is running.
        """
        if not self.store.room_for_model(name):
            raise too_large(self.pool[name])
        self.pool.read(name)

    def unload(self, name: str) -> None:
        """Let go of a model's weights.

        Raises:
            ValueError: An answer needs them.
        """
        if not self.pool.unload(name) and self.pool[name].loaded:
            raise ValueError(f"{name} is answering a request; try again when it is done")

    def status(self) -> Status:
        store, begun = self.store, sum(job.row is not None for job in self._jobs.values())
        here = [session for session in store.sessions if session.exchange is not None]
        return Status(
            models=tuple(resident.info(name) for name, resident in self.pool.all.items()),
            routes=self._route is not None,
            conversations=(len(here), len(store.sessions) - len(here)),
            lines_bytes=sum(session.nbytes for session in here),
            translators_bytes=self.policy.nbytes,
            budget_bytes=0 if math.isinf(store.budget) else int(store.budget),
            running=begun,
            queued=len(self._jobs) - begun,
            healed=self._healed,
            pairs=tuple((*pair, way.strategy, way.why) for pair, way in self.policy.ways.items()),
        )

    def close(self) -> None:
        """End all answers and keep the conversations on disk, if they are to be kept."""
        for number in list(self._jobs):
            self.cancel(number)
        self.store.close()


def _length(ask: GenerationRequest, model: LanguageModel) -> int:
    """The number of a prompt's tokens."""
    if ask.messages is None:
        return len(ask.prompt if isinstance(ask.prompt, tuple) else encode(model, ask.prompt or ""))
    messages = list(map(dict, ask.messages))
    return len(Transcript(messages, switches=_switches(ask, model), begun=ask.begun).prompt(model))


def _switches(ask: GenerationRequest, model: LanguageModel) -> dict[str, Any]:
    """The chat templates' switches for a request; one that cannot tell of tools leaves them out."""
    return {**ask.template, **({"tools": tools_of(ask, model)} if ask.tools else {})}
