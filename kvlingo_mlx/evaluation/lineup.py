"""What is compared: each way to fill a cache, with its name, what tells it apart, and its work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlingo_mlx.engine.hybrid import Native, native_part
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.conditions import CacheMaker, Prefix
from kvlingo_mlx.loading.translators import resolve_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing.switching import translation
from kvlingo_mlx.translators.base import Translator

Action = Callable[[], list]
BASELINES = ("hidden", "shuffled", "text")


@dataclass(frozen=True)
class Condition:
    """One way to fill the target's cache with a prefix."""

    name: str  # the name in tables
    # One cache maker per seed; an item's scores are averaged over them.
    makers: tuple[CacheMaker, ...]
    # All that its results depend on beside the target. It distinguishes the condition from others,
    # whatever their names; JSON-able.
    identity: dict[str, Any] = field(default_factory=dict)
    # Maps a prefix to the work that remains once the source has read it; None for controls, whose
    # time means nothing.
    at_switch: Callable[[Prefix], Action] | None = None
    # Makes lm-eval's view of a decoder, if not as :func:`.harness.running.run` does.
    lm: Callable[..., Any] | None = None
    translator: Translator | None = None  # the first seed's translator
    native_layers: int | None = None  # its first layers, which the target reads itself


def load(
    named: Mapping[str, Sequence[str | None]],
    source: LanguageModel,
    target: LanguageModel,
    forms: Sequence[int | None] = (None,),
    *,
    allow_mismatch: bool = False,
) -> dict[str, list[Translator]]:
    """Load translators by name (folders or Hub ids; None is the store's), each in every form.

    Several under one name are one method's seeds. Forms are bits of weights; None leaves them as
    they are.
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
    ways: Any = conditions,
) -> list[Condition]:
    """The conditions to compare: native, the translators, then each :func:`baseline`.

    ``ways`` has the functions that fill caches, by their names in :mod:`.conditions`: another
    module where the models are of another library, which has native, hidden and translated.
    """
    every = [translator for found in named.values() for translator in found]
    return [
        native(target, ways),
        *(translated(n, source, target, t, native_layers, ways) for n, t in named.items()),
        *(baseline(spec, source, target, every, native_layers, ways) for spec in baselines),
    ]


def native(target: LanguageModel, ways: Any = conditions) -> Condition:
    """The condition in which the target reads the prefix itself, as in a full re-prefill."""
    return _reading("native", ways.native(target), {})


def _reading(name: str, make: CacheMaker, identity: dict[str, Any]) -> Condition:
    """A condition in which the target reads the prefix, so that this is the work of a switch."""
    return Condition(name, (make,), identity, lambda prefix: lambda: make(prefix))


def translated(
    name: str,
    source: LanguageModel,
    target: LanguageModel,
    translators: Sequence[Translator],
    native_layers: int | str | None = 0,
    ways: Any = conditions,
) -> Condition:
    """A cache translated from the source's; several translators are seeds of one method.

    The target reads its first ``native_layers`` itself, as in :func:`hand_over`. None and ``auto``
    stand for the number to which each translator was tuned.
    """
    layers = [native_part(t.config, native_layers).layers for t in translators]
    identity: dict[str, Any] = {
        "source": identity_of(source), "translators": [t.digest for t in translators]
    }  # fmt: skip
    if any(t.bits is not None for t in translators):
        identity["bits"] = [t.bits for t in translators]
    if any(layers):
        identity["native_layers"] = layers
    first = translators[0]
    return Condition(
        name,
        tuple(
            ways.translated(source, target, t, j) for t, j in zip(translators, layers, strict=True)
        ),
        identity,
        lambda prefix: translation(
            conditions.plan_of(source, target, first, prefix, Native(layers[0]))
        ),
        translator=first,
        native_layers=layers[0],
    )


def baseline(
    spec: str,
    source: LanguageModel,
    target: LanguageModel,
    translators: Sequence[Translator],
    native_layers: int | str | None = 0,
    ways: Any = conditions,
) -> Condition:
    """A control or an alternative, by name.

    ``hidden``; ``shuffled`` (the first translator's maps at wrong layers, with the native layers of
    what it controls); ``text`` (the target reads the text of the source's tokens).

    Raises:
        ValueError: There is no such baseline.
    """
    if spec not in BASELINES:
        raise ValueError(
            f"--baselines names {spec!r}; known are {', '.join(BASELINES)}; canonical, folded, "
            "reuse and droidspeak:J are `python -m benchmarks.paper eval --baselines` in a checkout"
        )
    if spec == "hidden":
        return Condition("prefix hidden", (ways.hidden(target),), {"hidden": True})
    if spec == "text":
        return _reading(spec, conditions.text(source, target), {"source": identity_of(source)})
    control = [conditions.shuffled(translators[0])]
    found = translated(spec, source, target, control, native_layers, ways)
    return replace(found, at_switch=None, translator=None)


def identity_of(model: LanguageModel) -> dict[str, Any]:
    """The facts that distinguish loaded models, wherever they lie: also a hash of all weights."""
    return {
        **model.spec().fingerprint,
        "weights": model.weights_fingerprint,
        "dtype": str(model.cache_dtype),
        "quantization": model.config.get("quantization"),
    }
