"""What is timed on a GPU: a target of random weights at true widths, states to be translated."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvlingo_mlx.cuda.families import family_of
from kvlingo_mlx.cuda.model import TorchModel
from kvlingo_mlx.cuda.shapes import SHAPES, MapForm, forms_of
from kvlingo_mlx.cuda.translation import CacheMemory, PrefixTranslation
from kvlingo_mlx.format.assignment import by_depth
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import maps_of
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.timing.shapes import cache_layers

CHECKED = 200  # tokens that are compared
ERRORS = {"bfloat16": 2e-2, "float16": 1e-2, "float32": 1e-4}
Both = tuple[PrefixTranslation, PrefixTranslation]  # a translator, and the same in float32


class NoTokenizer:
    """Random token ids need none."""

    def get_vocab(self) -> dict[str, int]:
        return {}


def shape_of(name: str, layers: int | None = None) -> dict[str, Any]:
    """A shape's config, of at most ``layers`` layers."""
    depth = min(layers or math.inf, SHAPES[name]["num_hidden_layers"])
    return {**SHAPES[name], "num_hidden_layers": int(depth)}


def config_of(shape: dict[str, Any]) -> Any:
    """transformers' config of a shape."""
    numbers = {**shape}
    return AutoConfig.for_model(numbers.pop("model_type"), **numbers)


def build_target(name: str, device: str, dtype: torch.dtype, layers: int | None) -> TorchModel:
    """A frozen model of random weights at a true model's widths."""
    shape = shape_of(name, layers)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(shape), dtype=dtype, attn_implementation="sdpa"
        )
    facts = family_of(shape["model_type"]).facts(shape)
    return TorchModel(model.eval().requires_grad_(False), NoTokenizer(), dict(facts), name)


def source_spec(name: str, layers: int | None) -> ModelSpec:
    """What a translator knows of its source; the source itself is not needed."""
    shape = shape_of(name, layers)
    unknown = dict.fromkeys(("geometry", "norms", "tokenizer"))
    return ModelSpec(name, None, shape["model_type"], unknown, cache_layers(shape))


def translators(source: ModelSpec, target: TorchModel, nu: int, positions: int) -> dict[str, Both]:
    """By form, a random translator in the target's dtype, and the same in float32."""
    found = {}
    assignment = by_depth(source.layers, target.geometry.layers, nu)
    for name, form in forms_of(source.name, target.name).items():
        config = TranslatorConfig(
            source, target.spec(), assignment, head_mixing=form.head_mixing, capture=form.capture
        )
        tensors = {}
        for m in maps_of(config):
            shape = (*(() if m.heads is None else (m.heads,)), m.outputs, m.inputs)
            drawn = torch.randn(shape, device=target.device) / math.sqrt(m.inputs)
            tensors[f"{m.name}.weight"] = drawn.to(target.dtype)
        found[name] = (
            PrefixTranslation.build(config, tensors, target, positions),
            PrefixTranslation.build(config, tensors, target, positions, torch.float32),
        )
    return found


@dataclasses.dataclass(frozen=True)
class Scene:
    """One pair at one length: what all actions share."""

    source: ModelSpec
    target: TorchModel
    states: tuple[torch.Tensor, torch.Tensor]  # (Ls, n, Hs * Ds) each
    memory: CacheMemory
    ids: torch.Tensor
    num_tokens: int

    @classmethod
    def of(cls, source: ModelSpec, target: TorchModel, num_tokens: int) -> Scene:
        """A scene of random states and tokens."""
        there: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
        widths = (source.layers[0].width(side) for side in SIDES)
        keys, values = (torch.randn(len(source.layers), num_tokens, w, **there) for w in widths)
        memory = CacheMemory.allocate(target, num_tokens, target.dtype)
        vocabulary = target.config["vocab_size"]
        ids = torch.randint(vocabulary, (1, num_tokens + 1), device=target.device)
        return cls(source, target, (keys, values), memory, ids, num_tokens)

    def given(self, form: MapForm) -> list[torch.Tensor]:
        """States as a form finds them: after RoPE, in a cache (the same numbers, read anew)."""
        if form.capture != "post_rope":
            return list(self.states)
        dim = self.source.layers[0].key_dim
        layers, tokens, width = self.states[0].shape
        return [array.view(layers, width // dim, tokens, dim) for array in self.states]

    def read(self, start: int, end: int, chunk: int) -> torch.Tensor:
        """Logits of token ``end - 1``, after the cache's first ``start`` tokens."""
        cache, decoder = self.memory.cache(start), self.target.family.text(self.target.model)
        hidden = None
        for begin in range(start, end, chunk):
            ids = self.ids[:, begin : min(begin + chunk, end)]
            hidden = decoder(ids, past_key_values=cache, use_cache=True).last_hidden_state
        assert hidden is not None
        return self.target.logits(hidden[0, -1:])

    def step(self) -> torch.Tensor:
        """Logits of the token after the prefix."""
        return self.read(self.num_tokens, self.num_tokens + 1, 1)

    @torch.no_grad()
    def error(self, form: MapForm, both: Both, method: str) -> float:
        """Relative error of a translation's last tokens, the worst side of any layer's.

        Raises:
            RuntimeError: The translation left something unwritten.
        """
        count = min(CHECKED, self.num_tokens)
        first, given = self.num_tokens - count, self.given(form)
        for sides in self.memory.arrays:
            for array in sides:
                array.fill_(math.nan)
        both[0](given, self.memory, method=method)
        exact = CacheMemory.allocate(self.target, count, torch.float32, 0)
        both[1]([array[..., first:, :].float() for array in given], exact, first, "torch")
        worst, rooms = 0.0, zip(self.memory.rooms(), exact.rooms(), strict=True)
        for layer, ((like, mine), (_, theirs)) in enumerate(rooms):
            for side, ours, whole in zip(SIDES, mine, theirs, strict=True):
                written = ours[:, :, : like.kept(self.num_tokens)]
                if written.isnan().any():
                    raise RuntimeError(f"{method}: some {side} of layer {layer} were not written")
                off = (written[:, :, -whole.shape[2] :].float() - whole).norm() / whole.norm()
                worst = max(worst, float(off))
        return worst
