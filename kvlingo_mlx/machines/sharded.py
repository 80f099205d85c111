"""A model that several ranks hold together: each has some heads of every layer.

mlx-lm shards it. To the rest of the package a rank's part is a model whose layers have fewer KV
heads; its logits are whole. A translator reads and writes all heads, so a part gathers them when it
is a source, and takes its own when it is a target. That is all that lines know of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.base import LATENT
from kvlingo_mlx.group import ALONE, Group
from kvlingo_mlx.machines.ranks import digest_of, here
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates, LayerGroup, TranslatedStates
from kvlingo_mlx.threads import working
from kvlingo_mlx.version import __version__


@dataclass(frozen=True, repr=False)
class ShardedModel(LanguageModel):
    """A rank's part of a model: some heads of each layer, or all of a layer that keeps latents."""

    whole: LanguageModel = field(default=None, compare=False)  # type: ignore[assignment]  # unread
    group: Group = field(default=ALONE, compare=False)  # the ranks

    @property
    def full(self) -> LanguageModel:
        """The whole model, with its weights unread."""
        return self.whole

    @property
    def _splits(self) -> list[bool]:
        """Of each cache layer, whether each rank has some of its heads."""
        both = zip(self.geometry.layers, self.whole.geometry.layers, strict=True)
        return [own.kv_heads < of.kv_heads for own, of in both]

    def all_heads(self, states: KVStates) -> KVStates:
        """What all ranks have written of a span, evaluated: one message for all layers."""
        arrays, splits = states.arrays, self._splits * 2
        parts = [array.reshape(-1) for array, split in zip(arrays, splits, strict=True) if split]
        if not parts:
            return states
        with working():
            flat = mx.concatenate(parts)
            mx.eval(flat)  # what is sent is computed before it is sent
            every, start = mx.distributed.all_gather(flat[None]), 0
            for place, (array, split) in enumerate(zip(arrays, splits, strict=True)):
                if split:
                    own = every[:, start : start + array.size].reshape(-1, *array.shape)
                    start += array.size
                    arrays[place] = mx.moveaxis(own, 0, 2).reshape(*array.shape[:2], -1)
            mx.eval(arrays)
        half = len(arrays) // 2
        return replace(states, keys=tuple(arrays[:half]), values=tuple(arrays[half:]))

    def own_heads(self, translated: TranslatedStates) -> TranslatedStates:
        """The heads of a translated span that this rank's caches hold."""
        splits, layers = self._splits, self.geometry.layers

        def own(group: LayerGroup) -> LayerGroup:
            first = group.layers[0]  # all layers of a group are alike
            if not splits[first]:
                return group
            count = layers[first].kv_heads
            chosen = slice(self.group.rank * count, (self.group.rank + 1) * count)
            return replace(group, states=group.states[:, :, chosen])

        keys, values = (tuple(map(own, side)) for side in (translated.keys, translated.values))
        return replace(translated, keys=keys, values=values)


def shard(model: LanguageModel, whole: LanguageModel) -> ShardedModel:
    """This rank's part of a model whose weights are unread.

    Args:
        model: The model, whose module is changed in place.
        whole: The same model, opened once more; it stays whole, and unread.

    Raises:
        ValueError: There are no ranks, or they cannot share the model's heads evenly.
        UnsupportedModelError: mlx-lm cannot shard this family, or it is a hybrid.
    """
    group = here()
    if not group.several:
        raise ValueError(
            "only ranks can share a model (shard, sharded), and this program runs "
            "alone; start it on several ranks: mlx.launch -n 2 kvlingo-mlx generate ..."
        )
    if whole.geometry.recurrent:
        raise UnsupportedModelError(
            f"{whole.name} keeps recurrent states, which ranks cannot hold together: run it on one "
            "machine"
        )
    if not hasattr(model.model, "shard") or model.model.shard is None:
        raise UnsupportedModelError(
            f"mlx-lm cannot shard {model.name} ({model.config['model_type']}); run it on one "
            "machine"
        )
    _check_heads(whole, group.size)
    shard_module(model.model)
    own = {each.name: getattr(model, each.name) for each in fields(LanguageModel)}
    return ShardedModel(**own, whole=whole, group=group)


def shard_module(module: Any) -> None:
    """Leave this rank's part of a module's weights, which are unread."""
    module.shard(mx.distributed.init())


def _check_heads(whole: LanguageModel, size: int) -> None:
    """Refuse (ValueError) a number of ranks by which heads cannot be divided."""
    counts = {g.kv_heads for g in whole.geometry.layers if g.attention != LATENT}
    counts.add(int(whole.facts["num_attention_heads"]))
    if odd := sorted(count for count in counts if count % size):
        can = [n for n in range(2, min(counts) + 1) if not any(count % n for count in counts)]
        start = f"start {' or '.join(map(str, can))}" if can else "run it on one machine"
        raise ValueError(
            f"{whole.name} has {odd[0]} heads, which {size} ranks cannot share evenly: {start} "
            "(mlx.launch -n)"
        )


def group_of(models: Iterable[Any]) -> Group:
    """The ranks that hold one of some models together; a group of one if each is whole."""
    groups = (getattr(model, "group", ALONE) for model in models)
    return next((group for group in groups if group.several), ALONE)


def facts_of(models: Mapping[str, LanguageModel]) -> dict[str, str]:
    """Versions, and models by their roles."""
    others = (f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    facts = {"version": ", ".join([f"kvlingo-mlx {__version__}", *others])}
    for role, model in models.items():
        facts[f"model for {role}"] = model.full.weights_fingerprint
        facts[f"way to share {role}"] = "heads" if model.group.several else "none"
    return facts


def facts_of_work(models: Sequence[LanguageModel], asked: Mapping[str, Any]) -> dict[str, str]:
    """:func:`facts_of` a source and a target, and of what is asked."""
    roles = dict(zip(("source", "target"), models, strict=True))
    return facts_of(roles) | {name: digest_of(value) for name, value in asked.items()}
