"""The source's cache unchanged: verbatim, and as DroidSpeak uses it above recomputed layers."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.paper.timing.costs import translation_work
from benchmarks.paper.timing.layers import LayerCosts
from kvlingo_mlx import caches
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.evaluation.conditions import CacheMaker, Prefix, native, prefill_layers, target_ids
from kvlingo_mlx.evaluation.lineup import Action, Condition, identity_of
from kvlingo_mlx.format.geometry import layer_differences
from kvlingo_mlx.loading.pairing import check_tokenizers
from kvlingo_mlx.models.language_model import LanguageModel

RECOMPUTED = "droidspeak"  # with a number of layers
WHOLE = ("native", "text")  # conditions in which the target reads all of the prefix


def is_reuse(spec: str) -> bool:
    """Whether a baseline is one of these, by name."""
    return spec.partition(":")[0] in ("reuse", RECOMPUTED)


def baseline(
    spec: str, source: LanguageModel, target: LanguageModel, reuse: Reuse | None = None
) -> Condition:
    """``reuse`` (the source's cache, unchanged) or ``droidspeak:J`` (J layers recomputed).

    Conditions that share a ``reuse`` read a prefix once for all of them.

    Raises:
        ValueError: The number of layers is missing, or not one of the target's.
        IncompatibleTranslatorError: The caches to reuse differ in shape.
    """
    name, _, argument = spec.partition(":")
    if not (argument.isdecimal() if name == RECOMPUTED else not argument):
        raise ValueError(f"--baselines names {spec!r}; give reuse, or {RECOMPUTED}:J, J a number")
    return condition(name, reuse or Reuse(source, target), int(argument or 0))


class Reuse:
    """DroidSpeak's caches as the paper adapts it (appendix "Comparison with DroidSpeak").

    The target computes its first layers over the prefix; the layers above are the source's cache,
    unchanged. Makers of several numbers of layers share what was read of the latest prefix: the
    source reads it once, and the target once, up to the most layers that any of them takes.

    Raises:
        IncompatibleTranslatorError: The two caches differ in shape.
    """

    def __init__(self, source: LanguageModel, target: LanguageModel, step_size: int = 2048) -> None:
        self.source, self.target, self._step_size = source, target, step_size
        self.layers = len(target.attentions)
        self._asked: set[int] = set()
        self._latest: tuple[tuple[int, ...], list, list] | None = None
        check_tokenizers(source, target, "a cache of other tokens cannot be reused")
        differ = layer_differences(target.geometry.layers, source.geometry.layers)
        for layer in range(0 if differ else self.layers):
            ours, theirs = (caches.stored_shape(model, layer) for model in (target, source))
            if ours != theirs:
                differ = [f"layer {layer} stores (heads, width) {theirs}, expected {ours}"]
                break
        if differ:
            raise IncompatibleTranslatorError(
                f"the cache of {source.name} cannot be reused by {target.name}: {differ[0]}"
            )

    def maker(self, recomputed: int) -> CacheMaker:
        """Make caches of which the target computes the first ``recomputed`` layers.

        With 0 this is verbatim reuse, with all layers a re-prefill.

        Raises:
            ValueError: ``recomputed`` is not a possible number of layers.
        """
        if not 0 <= recomputed <= self.layers:
            raise ValueError(
                f"recomputed is {recomputed}; {self.target.name} has {self.layers} layers"
            )
        self._asked.add(recomputed)

        def make(prefix: Prefix) -> list:
            own, theirs = self._read(tuple(target_ids(prefix)[:-1]))
            return [caches.shared(c) for c in (*own[:recomputed], *theirs[recomputed:])]

        return make

    def _read(self, tokens: tuple[int, ...]) -> tuple[list, list]:
        """The target's cache and the source's, as far as the makers need them.

        They are kept for the next maker, if there are several.
        """
        if self._latest is not None and self._latest[0] == tokens:
            return self._latest[1:]
        self._latest = None  # before two more are made
        below = self.layers if min(self._asked) < self.layers else 0
        own = prefill_layers(self.target, tokens, self._step_size, max(self._asked))
        theirs = prefill_layers(self.source, tokens, self._step_size, below)
        if len(self._asked) > 1:
            self._latest = (tokens, own, theirs)
        return own, theirs


def reused(
    source: LanguageModel, target: LanguageModel, recomputed: int = 0, step_size: int = 2048
) -> CacheMaker:
    """Make caches with one number of recomputed layers (see :class:`Reuse`)."""
    return Reuse(source, target, step_size).maker(recomputed)


def condition(name: str, reuse: Reuse, recomputed: int) -> Condition:
    """The source's cache above the first ``recomputed`` layers, which the target computes."""
    target = reuse.target
    label = f"DroidSpeak, {recomputed} of {reuse.layers} recomputed"

    def at_switch(prefix: Prefix) -> Action:
        tokens = target_ids(prefix)
        theirs = native(reuse.source)(tokens)

        def recompute() -> list:
            own = prefill_layers(target, tokens[:-1], 2048, recomputed)
            return own[:recomputed] + theirs[recomputed:]

        return recompute

    return Condition(
        name if name == "reuse" else label,
        (reuse.maker(recomputed),),
        {"source": identity_of(reuse.source), "recomputed": recomputed},
        at_switch,
    )


def shares(
    source: LanguageModel, target: LanguageModel, line: Sequence[Condition], tokens: int
) -> dict[str, float]:
    """What remains to be computed at a switch, as shares of the target's own prefill.

    Floating-point operations are counted, of weights and of causal attention, for a prefix of so
    many tokens, as the paper's table "DroidSpeak against KV-Lingo" does; embeddings and the output
    head are left out. Recomputed and native layers count whole. Conditions whose work is not known
    are left out.
    """
    layers = LayerCosts(target).by_layer(tokens)
    found = {c.name: _share(c, source, target, layers, tokens) for c in line}
    return {name: share for name, share in found.items() if share is not None}


def _share(
    one: Condition,
    source: LanguageModel,
    target: LanguageModel,
    layers: Sequence[float],
    tokens: int,
) -> float | None:
    if one.name in WHOLE and "switch_at" not in one.identity:
        return 1.0
    if "recomputed" in one.identity:
        return sum(layers[: one.identity["recomputed"]]) / sum(layers)
    maps = one.translator
    if maps is None or maps.config.alignment is not None or one.native_layers is None:
        return None
    native = one.native_layers
    work = translation_work(maps.above(native), source, target, tokens).flops
    return (sum(layers[:native]) + work) / sum(layers)
