"""The compared conditions: each way to fill a cache, with its name, identity and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlingo_mlx import folding
from kvlingo_mlx.engine.hybrid import AUTO, Native, native_part
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.conditions import CacheMaker, Prefix, Reuse, target_ids
from kvlingo_mlx.evaluation.harness.decoding import POINTS, PROMPT, TRACE
from kvlingo_mlx.loading.pairing import check_tokenizers
from kvlingo_mlx.loading.translators import resolve_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing.ceilings import Costs, translation_work
from kvlingo_mlx.timing.switching import translation
from kvlingo_mlx.translators.base import Translator

Action = Callable[[], list]
CONTROLS = ("hidden", "shuffled")
Share = Callable[[Sequence[float], int], float]
RECOMPUTED = "droidspeak"  # with a number of layers
BASELINES = ("hidden", "shuffled", "canonical", "reuse", RECOMPUTED, "text", "folded")


@dataclass(frozen=True)
class Condition:
    """One way to fill the target's cache with a prefix.

    Attributes:
        name: The name in tables.
        makers: One cache maker per seed; an item's scores are averaged over them.
        identity: All that its results depend on beside the target. It distinguishes the condition
            from others, whatever their names; JSON-able.
        point: Where the cache changes hands: after the ``prompt``; before its question
            (``context``), which the target reads itself; after a reasoning ``trace`` that the
            source has written.
        at_switch: Maps a prefix to the work that remains once the source has read it; None for
            controls, whose time means nothing.
        share: Maps the target's work by layer (:meth:`.Costs.by_layer`) and the tokens of a prefix
            to the share of the target's prefill that remains at a switch; None where it means
            nothing or is not known.
    """

    name: str
    makers: tuple[CacheMaker, ...]
    identity: dict[str, Any] = field(default_factory=dict)
    at_switch: Callable[[Prefix], Action] | None = None
    share: Share | None = None
    point: str = PROMPT

    def moved(self, point: str, source: LanguageModel) -> Condition:
        """The same way to read, with the cache changing hands elsewhere."""
        if point == PROMPT:
            return self
        identity = self.identity | {"switch_at": point}
        if point == TRACE:
            identity["source"] = identity_of(source)
        name = f"{self.name}, {point}"
        return replace(self, name=name, identity=identity, at_switch=None, share=None, point=point)


def load(
    named: Mapping[str, Sequence[str | None]],
    source: LanguageModel,
    target: LanguageModel,
    forms: Sequence[int | None] = (None,),
    *,
    allow_mismatch: bool = False,
) -> dict[str, list[Translator]]:
    """Load translators by name, each in every form; several under one name are one method's seeds.

    Args:
        named: Folders or Hub ids; None stands for the local store.
        source: The model whose cache they translate.
        target: The model that decodes.
        forms: The bits of their weights; None leaves the weights as they are.
        allow_mismatch: Whether they may be made for other checkpoints.
    """
    return {
        name if bits is None else f"{name}, {bits} bits": [
            resolve_translator(place, source, target, allow_mismatch=allow_mismatch, quantize=bits)
            for place in places
        ]
        for name, places in named.items()
        for bits in forms
    }


def line_up(
    source: LanguageModel,
    target: LanguageModel,
    named: Mapping[str, Sequence[Translator]],
    baselines: Sequence[str],
    native_layers: int | str | None = 0,
    *,
    points: Sequence[str] = (PROMPT,),
    allow_mismatch: bool = False,
    ways: Any = conditions,
) -> list[Condition]:
    """The conditions to compare: native, the translators, then each :func:`baseline`.

    ``points`` are where the cache changes hands (:class:`Condition`), for the translators and the
    controls ``hidden`` and ``shuffled``. Beside a trace, the target also reads it itself. ``ways``
    has the functions that fill caches, by their names in :mod:`.conditions`: another module where
    the models are of another library, which has native, hidden and translated.

    Raises:
        ValueError: A point is unknown, or given for two tokenizers.
    """
    check_points(points, source, target)
    every = [translator for found in named.values() for translator in found]
    reuse = Reuse(source, target) if any(_reuses(spec) for spec in baselines) else None
    more: dict[str, Any] = {"allow_mismatch": allow_mismatch, "ways": ways}
    own = native(target, ways)
    line = [own] + ([own.moved(TRACE, source)] if TRACE in points else [])
    for name, found in named.items():
        whole = translated(name, source, target, found, native_layers, **more)
        line += [whole.moved(point, source) for point in points]
    for spec in baselines:
        whole = baseline(spec, source, target, every, native_layers, reuse=reuse, **more)
        line += [whole.moved(p, source) for p in (points if spec in CONTROLS else (PROMPT,))]
    # The profiler may choose a number of layers that is asked for beside it.
    return list({condition.name: condition for condition in line}.values())


def _reuses(spec: str) -> bool:
    return spec.partition(":")[0] in ("reuse", RECOMPUTED)


def check_points(points: Sequence[str], source: LanguageModel, target: LanguageModel) -> None:
    """Refuse points of a prompt at which a cache cannot change hands.

    Raises:
        ValueError: One is unknown, or given for two tokenizers.
    """
    if not points or set(points) - set(POINTS):
        raise ValueError(
            f"--switch-at is {','.join(points)!r}; give one or more of {', '.join(POINTS)}"
        )
    if set(points) != {PROMPT}:
        check_tokenizers(source, target, "their caches change hands after the whole prompt alone")


def native(target: LanguageModel, ways: Any = conditions) -> Condition:
    """The condition in which the target reads the prefix itself, as in a full re-prefill."""
    make = ways.native(target)
    return Condition(
        "native",
        (make,),
        at_switch=lambda tokens: lambda: make(tokens),
        share=lambda layers, n: 1.0,
    )


def translated(
    name: str,
    source: LanguageModel,
    target: LanguageModel,
    translators: Sequence[Translator],
    native_layers: int | str | None = 0,
    *,
    allow_mismatch: bool = False,
    ways: Any = conditions,
) -> Condition:
    """A cache translated from the source's; several translators are seeds of one method.

    The target reads its first ``native_layers`` itself, as in :func:`hand_over`. None and ``auto``
    stand for the number to which each translator was tuned, perhaps by the length of a prefix.

    Raises:
        ValueError: A translator was tuned by length, and ``ways`` are PyTorch's.
    """
    digests = [t.digest for t in translators]
    layers = [native_part(t.config, native_layers).layers for t in translators]
    identity: dict[str, Any] = {"source": identity_of(source), "translators": digests}
    if any(t.bits is not None for t in translators):
        identity["bits"] = [t.bits for t in translators]
    if any(layers):
        identity["native_layers"] = layers
    asked: list[Any] = list(layers)
    if native_layers in (None, AUTO) and any(t.config.native_by_length for t in translators):
        if ways is not conditions:
            raise ValueError(
                f"{translators[0].config.title} was tuned by length (native_by_length), which only "
                "MLX follows; give a number (--native-layers)"
            )
        identity["native_by_length"] = [t.config.native_by_length for t in translators]
        asked = [None] * len(layers)
    first = translators[0]

    def part(tokens: int) -> Native:
        return native_part(first.config, asked[0], tokens=tokens)

    return Condition(
        name,
        tuple(
            ways.translated(source, target, t, j, allow_mismatch=allow_mismatch)
            for t, j in zip(translators, asked, strict=True)
        ),
        identity,
        lambda prefix: translation(
            conditions.plan_of(source, target, first, prefix, part(len(target_ids(prefix)) - 1))
        ),
        _share_of(source, target, first, lambda tokens: part(tokens).layers),
    )


def _share_of(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    native_layers: Callable[[int], int],
) -> Share | None:
    """What a translation and the native layers below it take; not known between tokenizers."""
    if translator.config.alignment is not None:
        return None

    def share(layers: Sequence[float], count: int) -> float:
        native = native_layers(count)
        maps = translation_work(translator.above(native), source, target, count).flops
        return (sum(layers[:native]) + maps) / sum(layers)

    return share


def _folded(
    source: LanguageModel, target: LanguageModel, translator: Translator, **match: Any
) -> Condition:
    """Folded decoding: nothing is translated, and the target reads the source's own cache."""

    def at_switch(prefix: Prefix) -> Action:
        theirs = folding.prefill(source, [target_ids(prefix)[:-1]], 2048)
        return lambda: folding.fold_caches(theirs, source, target, translator, **match)

    return Condition(
        "folded",
        (conditions.folded(source, target, translator, **match),),
        {"source": identity_of(source), "translators": [translator.digest], "folded": True},
        at_switch,
    )


def baseline(
    spec: str,
    source: LanguageModel,
    target: LanguageModel,
    translators: Sequence[Translator],
    native_layers: int | str | None = 0,
    *,
    allow_mismatch: bool = False,
    ways: Any = conditions,
    reuse: Reuse | None = None,
) -> Condition:
    """A control or an alternative, by name.

    Args:
        spec: ``hidden``; ``shuffled`` (the first translator's maps at wrong layers); ``canonical``
            (between two tokenizers: the first translator's keys at their entries' own places, not
            at assigned positions); ``reuse`` (the source's cache, unchanged); ``droidspeak:J`` (the
            target recomputes its first J layers); ``text`` (the target reads the text of the
            source's tokens); ``folded`` (folded decoding).
        source: The model whose cache is available.
        target: The model that decodes.
        translators: The translators that ``shuffled`` and ``canonical`` change and ``folded``
            folds.
        native_layers: The native layers of ``shuffled``, as in :func:`translated`, so that the
            control equals what it controls; ``folded`` refuses any.
        allow_mismatch: Whether the translators may be made for another checkpoint.
        ways: As for :func:`line_up`, for ``hidden`` and ``shuffled``.
        reuse: What ``reuse`` and all of ``droidspeak`` share; by default each reads for itself.

    Raises:
        ValueError: There is no such baseline, or ``canonical`` is asked for with one tokenizer.
        IncompatibleTranslatorError: The caches to reuse differ in shape, or the translators cannot
            be folded.
        UnsupportedModelError: Folded decoding does not support one of the models.
    """
    name, _, argument = spec.partition(":")
    theirs = {"source": identity_of(source)}
    match: dict[str, Any] = {"allow_mismatch": allow_mismatch}
    if name not in BASELINES or not (argument.isdecimal() if name == RECOMPUTED else not argument):
        known = [other if other != RECOMPUTED else f"{RECOMPUTED}:J" for other in BASELINES]
        raise ValueError(
            f"--baselines names {spec!r}; known are {', '.join(known)}, with J layers recomputed"
        )
    if name == "hidden":
        return Condition("prefix hidden", (ways.hidden(target),), {"hidden": True})
    if name == "text":
        make = conditions.text(source, target)
        return Condition(
            "text", (make,), theirs, lambda tokens: lambda: make(tokens), lambda layers, n: 1.0
        )
    if name == "folded":
        folding.check_whole(translators[0].config, native_layers)
        return _folded(source, target, translators[0], **match)
    if name == "shuffled":
        control = conditions.shuffled(translators[0])
        found = translated(name, source, target, [control], native_layers, ways=ways, **match)
        return replace(found, at_switch=None, share=None)
    if name == "canonical":
        if translators[0].config.alignment is None:
            raise ValueError("--baselines names 'canonical', which needs a pair of two tokenizers")
        found = translated(name, source, target, translators[:1], **match)
        make = conditions.canonical(found.makers[0])
        return Condition(name, (make,), found.identity | {"canonical": True})
    return _reused(name, reuse or Reuse(source, target), int(argument or 0))


def _reused(name: str, reuse: Reuse, recomputed: int) -> Condition:
    """The source's cache above the first ``recomputed`` layers, which the target computes."""
    target = reuse.target
    label = f"DroidSpeak, {recomputed} of {reuse.layers} recomputed"

    def at_switch(prefix: Prefix) -> Action:
        tokens = target_ids(prefix)
        theirs = conditions.native(reuse.source)(tokens)

        def recompute() -> list:
            own = conditions.prefill_layers(target, tokens[:-1], 2048, recomputed)
            return own[:recomputed] + theirs[recomputed:]

        return recompute

    return Condition(
        name if name == "reuse" else label,
        (reuse.maker(recomputed),),
        {"source": identity_of(reuse.source), "recomputed": recomputed},
        at_switch,
        lambda layers, count: sum(layers[:recomputed]) / sum(layers),
    )


def shares(target: LanguageModel, conditions: Sequence[Condition], tokens: int) -> dict[str, float]:
    """What remains to be computed at a switch, as shares of the target's own prefill.

    Floating-point operations are counted, of weights and of causal attention, for a prefix of so
    many tokens, as the paper's table "DroidSpeak against KV-Lingo" does; embeddings and the output
    head are left out. Recomputed and native layers count whole. Conditions without a share are left
    out.
    """
    layers = Costs(target).by_layer(tokens)
    return {c.name: c.share(layers, tokens) for c in conditions if c.share is not None}


def identity_of(model: LanguageModel) -> dict[str, Any]:
    """The facts that distinguish loaded models in a record, including a hash of all weights."""
    return {
        "model": model.name,
        "revision": model.revision,
        **model.spec().fingerprint,
        "weights": model.weights_fingerprint,
        "dtype": str(model.cache_dtype),
        "quantization": model.config.get("quantization"),
    }
