"""Ways to fill a target's cache with a prefix: native, translated, alternatives and controls.

Each is a function from the prefix to a cache of all its tokens but the last, which the target runs
itself. A prefix is its token ids; between two tokenizers it is an ``AlignedPrefix``. The controls
show whether a measurement means anything: if hiding the prefix, or shuffling the translator's
layers, costs little, then the data do not need the prefix.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import kvlingo_mlx.backend  # noqa: F401  (before mlx_lm, always)

from mlx_lm.models.cache import make_prompt_cache

from kvlingo_mlx.caches.memory import check_caches
from kvlingo_mlx.engine import hybrid
from kvlingo_mlx.engine.fill import bring
from kvlingo_mlx.engine.hybrid import Native, native_part
from kvlingo_mlx.engine.plan import Plan, check_tokens
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator

Prefix = Sequence[int] | AlignedPrefix
CacheMaker = Callable[[Prefix], list]


def target_ids(prefix: Prefix) -> Sequence[int]:
    """The prefix in the target's tokens."""
    return prefix.target_ids if isinstance(prefix, AlignedPrefix) else prefix


def plan_of(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    prefix: Prefix,
    part: Native | None = None,
) -> Plan:
    """The plan of a prefix's hand-over; ``part`` names the layers that the target reads itself."""
    aligned = prefix if isinstance(prefix, AlignedPrefix) else None
    ids = list(target_ids(prefix))
    return Plan(source, target, ids, translator, part or Native(), aligned)


def empty(target: LanguageModel) -> list:
    """The target's caches of nothing."""
    return make_prompt_cache(target.model)


def prefill_layers(
    model: LanguageModel, tokens: Sequence[int], step_size: int, layers: int
) -> list:
    """A model's cache of ``tokens``, with its first ``layers`` layers filled."""
    cache = empty(model)
    hybrid.read_layers(model, tokens, cache, step_size, layers)
    return cache


def native(target: LanguageModel, step_size: int = 2048) -> CacheMaker:
    """Make caches that the target prefills itself, which is also a full re-prefill."""
    layers = len(target.attentions)
    return lambda prefix: prefill_layers(target, target_ids(prefix)[:-1], step_size, layers)


def translated(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    native_layers: int | str | None = 0,
) -> CacheMaker:
    """Make caches that are translated from the source's, above the target's native layers.

    By default there are no native layers. With None the number to which the translator was tuned is
    used; it changes when the translator is tuned again. That it fits the models was found out when
    it was resolved. What measures has no need of :func:`hand_over`'s warnings about its grade and
    length, so they are left out.
    """

    def make(prefix: Prefix) -> list:
        if isinstance(prefix, AlignedPrefix):
            return bring(plan_of(source, target, translator, prefix)).cache
        check_tokens((source, target), prefix)
        check_caches((source, target), len(prefix))
        part = native_part(translator.config, native_layers)
        return bring(plan_of(source, target, translator, prefix, part)).cache

    return make


def text(source: LanguageModel, target: LanguageModel) -> CacheMaker:
    """Make caches in which the target reads the text of the source's tokens (a text hand-over)."""

    def make(prefix: Prefix) -> list:
        ids = prefix.source_ids if isinstance(prefix, AlignedPrefix) else prefix
        spelled = source.tokenizer.decode(list(ids[:-1]))
        own = target.tokenizer.encode(spelled, add_special_tokens=False)
        return prefill_layers(target, own, 2048, len(target.attentions))

    return make


def hidden(target: LanguageModel) -> CacheMaker:
    """Control: make empty caches, so that the prefix is hidden."""
    return lambda prefix: empty(target)


def shuffled(translator: Translator, seed: int = 0) -> Translator:
    """Control: a translator whose maps are moved to wrong target layers of equal shape.

    Maps that fit no other layer stay where they are, with the opposite sign.
    """
    config, weights = translator.config, translator.to_weights()
    alike: dict[tuple, list[int]] = defaultdict(list)
    for layer, geometry in enumerate(config.target.layers):
        outputs = (geometry.kv_heads, geometry.key_dim, geometry.value_dim)
        inputs = (m.inputs for m in maps_of(config) if m.layer == layer)
        alike[(*outputs, *inputs)].append(layer)
    rng = random.Random(seed)
    moved: dict[int, int] = {}
    for layers in alike.values():
        order = list(layers)
        while len(layers) > 1 and any(i == j for i, j in zip(layers, order, strict=True)):
            rng.shuffle(order)
        moved.update(zip(layers, order, strict=True))
    arrays = {}
    for name, array in weights.arrays.items():
        side, place, last = name.split(".")
        to = moved[int(place)]
        if to == int(place) and last != "right":  # of a state's two factors one is enough
            opposite = {name: -weights.as_float32(name)}
            array = Weights.from_float32(opposite, weights.dtype).arrays[name]
        arrays[f"{side}.{to}.{last}"] = array
    return build(config, Weights(weights.dtype, arrays))
