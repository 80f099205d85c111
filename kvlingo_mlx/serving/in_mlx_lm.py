"""mlx-lm's own server, unchanged, with a prompt cache that translates.

That server keeps the caches of finished prompts in a store, by model and tokens, and asks it before
it reads a prompt. This store can offer more: where another model has read on, its rows are
translated out of its cache, without its weights. The server reads the rest, at least the last
token.

Each entry says who wrote its rows, in the spans of :class:`~kvlingo_mlx.engine.line.Line`. Only
rows that their own model wrote are translated; so none goes through two translators. What is
translated, and what was read after that, is read anew by its model while no request is running.
All of this happens in the one thread in which mlx-lm's server generates.
"""

import functools
import logging
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache

from kvlingo_mlx import caches
from kvlingo_mlx.caches.validation import validate_cache
from kvlingo_mlx.engine.healing import IDLE_S, Pace
from kvlingo_mlx.engine.hybrid import native_part
from kvlingo_mlx.engine.line import Given, Line
from kvlingo_mlx.engine.spans import Span, cut, exact, grown
from kvlingo_mlx.errors import KVLingoError, MissingTranslatorError, UnsupportedModelError
from kvlingo_mlx.families.base import POINTS
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.models import at_hand
from kvlingo_mlx.loading.notes import command, tell
from kvlingo_mlx.loading.opening import let_go
from kvlingo_mlx.loading.translators import find_translator, resolve_translator
from kvlingo_mlx.threads import finished, working
from kvlingo_mlx.translators.base import Translator

Key = tuple[str, str | None, str | None]  # a model, its adapter and its draft, by mlx-lm's names
LEAST = 32  # tokens: fewer are soon read, and may be no more than what all chats begin with
STEP = 2048  # tokens that are translated at once
REFUSED = (KVLingoError, ValueError, OSError)  # told; then a model reads as in mlx-lm alone


class SignedCache(list[Any]):
    """A model's caches, which say who wrote which of their rows."""

    def __init__(self, cache: Iterable[Any], spans: list[Span]) -> None:
        super().__init__(cache)
        self.spans = spans

    @property
    def end(self) -> int:
        """The number of tokens."""
        return self.spans[-1].stop if self.spans else 0


class TranslatingPromptCache(LRUPromptCache):
    """mlx-lm's store of caches, which also offers what other models have read, translated.

    ``provider`` is mlx-lm's, which holds the one model that is loaded. ``healing`` is the line that
    is being healed and its entry's type; it is let go of before another model is loaded.
    """

    def __init__(self, max_size: int, *, provider: Any, heals: bool = True) -> None:
        super().__init__(max_size)
        self._provider, self._heals, self._pace = provider, heals, Pace()
        self._keys: dict[Key, None] = {}  # of all entries that ever were
        self._open = functools.cache(at_hand)  # models with their weights unread
        self._translator = functools.cache(self._find)
        # What running requests were given that is not all the model's own, by model, length and
        # hash of its tokens: mlx-lm puts it into batches, and gives other objects back.
        self._lent: dict[tuple[Key, int, int], list[Span]] = {}
        self._unhealed: deque[tuple[Key, list[int], dict[str, str]]] = deque(maxlen=max_size)
        self.healing: tuple[Line, dict[str, str]] | None = None

    def fetch_nearest_cache(self, model: Key, tokens: list[int]) -> tuple[Any, list[int]]:
        """A copy of the caches of the longest known beginning of ``tokens``, and the other tokens.

        What other models have read further is translated; at least one token is left then.
        """
        found = self._translated(model, tokens)
        if not exact(found.spans):
            self._lent[model, found.end, hash((*tokens[: found.end],))] = found.spans
        return list(found) or None, tokens[found.end :]

    def insert_cache(self, model: Key, tokens: list[int], prompt_cache: Any, **kind: Any) -> None:
        """Keep the caches of ``tokens``, with what is known of their rows."""
        self._keys[model] = None
        lent = {
            length: spans
            for (key, length, digest), spans in self._lent.items()
            if key == model and hash((*tokens[:length],)) == digest
        }
        spans = grown(lent[max(lent)] if lent else [], len(tokens), model[0])
        if not exact(spans):
            self._unhealed.append((model, tokens, kind))
        super().insert_cache(model, tokens, SignedCache(prompt_cache, spans), **kind)

    def _nearest(self, model: Key, tokens: list[int]) -> SignedCache:
        """What mlx-lm's store has of a model, as a copy."""
        found, rest = super().fetch_nearest_cache(model, tokens)
        return SignedCache(found or (), cut(found.spans, len(tokens) - len(rest)) if found else [])

    def _translated(
        self, model: Key, tokens: list[int], without: tuple[Key, ...] = ()
    ) -> SignedCache:
        """A model's own caches, and what others have read after that, each what it ran itself."""
        own, skipped = self._nearest(model, tokens), (model, *without)
        others = {k: self._nearest(k, tokens[:-1]) for k in self._keys if k not in skipped}
        others = {key: held for key, held in others.items() if held.end - own.end >= LEAST}
        if not others or min(tokens) < 0:  # as pictures have it
            return own
        key = next(iter(others))
        try:
            line = self._line(model, tokens[: own.end], own)
            while stops := {_reach(held, len(line)): key for key, held in others.items()}:
                key = stops[stop := max(stops)]
                if stop <= len(line):
                    break
                made = self._translator(key, model)
                given = self._given(key[0], others[key], len(line), stop, made.config)
                layers = native_part(made.config).layers
                finished(line.take_over(tokens[:stop], given, made, STEP, native_layers=layers))
            with working():
                mx.eval(caches.arrays(line.cache))
                validate_cache(line.cache, line.model, len(line))
        except REFUSED as error:
            told = f"{model[0]} does not take over what {key[0]} has read: {error}"
            tell(told, told)
            return self._translated(model, tokens, (*without, key))
        numbers = f"{own.end} tokens kept, {len(line) - own.end} translated"
        logging.info(f"{model[0]}: {numbers}, {len(tokens) - len(line)} to read")
        return SignedCache(line.cache, line.spans)

    def _find(self, source: Key, target: Key) -> Translator:
        """The stored translator between two models, if caches are what it reads."""
        if any((*source[1:], *target[1:])):
            raise UnsupportedModelError("one has an adapter or a draft model")
        ends = self._open(source[0]), self._open(target[0])
        if ends[0].tokenizer_fingerprint != ends[1].tokenizer_fingerprint:
            raise UnsupportedModelError("their tokenizers differ; use `kvlingo-mlx serve`")
        try:
            path = find_translator(*ends, suits=lambda config: config.capture != POINTS[0])
        except MissingTranslatorError:
            made = command("pair", source[0], target[0], "--capture", POINTS[1])
            raise MissingTranslatorError(f"no translator is stored; {made} makes one") from None
        found = resolve_translator(path, *ends)
        for model in ends:  # what was compared of their weights
            let_go(model)
        return found

    def _given(
        self, name: str, cache: SignedCache, start: int, stop: int, config: TranslatorConfig
    ) -> Given:
        """Rows of a cache as a translator reads them, in parts."""
        source, maps = self._open(name), config.state_maps
        held = caches.read(cache, source, config.capture, kept=maps, first=start)
        starts = range(held.start, held.end, STEP)
        parts = (held.part(start, min(start + STEP, held.end)) for start in starts)
        given = Given(source, parts, stop)
        given.spans = cache.spans
        return given

    def _line(self, model: Key, tokens: list[int], cache: SignedCache) -> Line:
        """A line of the loaded model that holds these tokens."""
        loaded = replace(self._open(model[0]), model=self._provider.model)
        line = Line(model[0], loaded, records=False)
        if cache:
            line.adopt(tokens, list(cache), ())
            line.spans = cache.spans
        return line

    def heal(self) -> None:
        """Let the loaded model read a chunk in the place of what was translated for it.

        No request may be running.
        """
        self._lent.clear()
        self.healing = self.healing or self._next()
        if self.healing is None:
            return
        line, kind = self.healing
        read = functools.partial(line.heal, answers=True)
        self._pace.read(read, IDLE_S)
        held = SignedCache(line.cache, line.spans)
        super().insert_cache(self._provider.model_key, line.tokens, held, **kind)
        if exact(line.spans):
            logging.info(f"{line.name}: all {len(line)} tokens are its own now")
            self.healing = None

    def _next(self) -> tuple[Line, dict[str, str]] | None:
        """The latest entry of the loaded model that is still there and has translated rows."""
        for entry in list(self._unhealed)[::-1] if self._heals else ():
            model, tokens, kind = entry
            if model == self._provider.model_key:
                held = self._nearest(model, tokens)
                if held.end == len(tokens) and not exact(held.spans):
                    return self._line(model, tokens, held), kind
                self._unhealed.remove(entry)
        return None


def _reach(held: SignedCache, at: int) -> int:
    """Up to where a model read the tokens from ``at`` on itself, and its caches can be cut."""
    stop = next((max(at, s.start) for s in held.spans if s.passes and s.stop > at), held.end)
    return stop if stop == held.end or not any(map(caches.forgets, held)) else at


class Attentive(server.ResponseGenerator):
    """mlx-lm's loop, which lets its store heal while it waits for requests."""

    prompt_cache: TranslatingPromptCache

    def _next_request(self, timeout: float | None = None) -> Any:
        request = super()._next_request(timeout)
        if request is not None:
            self.prompt_cache.healing = None
        elif timeout is not None:  # no answer is being written
            self.prompt_cache.heal()
        return request


def run(arguments: Sequence[str], heals: bool = True) -> None:
    """Run mlx-lm's server with its own command line's ``arguments`` until it is stopped."""
    stock = server.run

    def with_ours(host: str, port: int, model_provider: Any, **more: Any) -> None:
        ours = functools.partial(TranslatingPromptCache, provider=model_provider, heals=heals)
        vars(server)["LRUPromptCache"] = ours
        stock(host, port, model_provider, **more)

    vars(server).update(run=with_ours, ResponseGenerator=Attentive)
    sys.argv = ["mlx_lm.server", *arguments]
    server.main()
