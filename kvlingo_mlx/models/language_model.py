"""A loaded model with its tokenizer and the facts that translation needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, nn, on_gpu

import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families import family_of
from kvlingo_mlx.families.base import Family, Finish, setting
from kvlingo_mlx.format import fingerprints, misread
from kvlingo_mlx.format.geometry import CacheGeometry, vocabulary_fingerprint
from kvlingo_mlx.format.translator_config import ModelSpec
from kvlingo_mlx.format.translator_folder import probe
from kvlingo_mlx.group import ALONE, Group
from kvlingo_mlx.models.states import KVStates, TranslatedStates
from kvlingo_mlx.threads import unit

FAR = 8  # characters a token, of prompts that may be far beyond a context
PIECE, SEAM = 50_000, 8  # characters of such a prompt's pieces, and tokens that a cut may add
NORMS = ("RMSNorm", "LayerNorm", "LayerNorm1P")  # how the names of norm classes end


@dataclass(frozen=True)
class LanguageModel:
    """An mlx-lm model and its tokenizer, as ``load`` returns it and ``generate`` takes it."""

    model: nn.Module  # mlx-lm's, unchanged
    tokenizer: TokenizerWrapper  # mlx-lm's tokenizer
    config: dict[str, Any]  # model's ``config.json``, as mlx-lm reads it
    name: str  # path or Hub id from which it was loaded
    revision: str | None = None  # commit hash if known
    path: Path | None = None  # folder from which it was loaded, or None
    # What saved conversations say of the weights, kept for an owner who never changes them; None
    # where it is to be found anew each time
    described: dict[str, Any] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        """One line; the weights, the tokenizer and the config are left out."""
        layers = self.geometry.layers
        attention = (layer for layer in layers if layer.recurrence is None)
        shapes = dict.fromkeys(f"{g.kv_heads} x {g.key_dim}" for g in attention)
        return (
            f"<LanguageModel {self.name}: {self.geometry.model_type}, {len(layers)} cache layers, "
            f"KV heads {' or '.join(shapes)}, {self.precision}, context {self.context_length:,}>"
        )

    @property
    def full(self) -> LanguageModel:
        """The whole model, also where several machines hold it together."""
        return self

    @property
    def group(self) -> Group:
        """The processes that hold the model together."""
        return ALONE

    def all_heads(self, states: KVStates) -> KVStates:
        """What the whole model has written of a span, of which this process has ``states``."""
        return states

    def own_heads(self, translated: TranslatedStates) -> TranslatedStates:
        """What this process's caches hold of a translated span."""
        return translated

    @property
    def address(self) -> str | None:
        """The machine on which the model runs, if that is another one."""
        return None

    @cached_property
    def family(self) -> Family:
        """The model's family."""
        return family_of(self.config["model_type"])

    @cached_property
    def attentions(self) -> list[nn.Module]:
        """The attention modules that own a cache, in cache order."""
        return self.family.attentions(self.model)

    @cached_property
    def geometry(self) -> CacheGeometry:
        """The shape of this model's cache."""
        return self.family.geometry(self.model, self.config)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """The text model's config, also inside a wrapper."""
        return self.family.facts(self.model, self.config)

    @cached_property
    def finishes(self) -> list[Finish]:
        """The norms and the rotation of each cache layer, after its projections."""
        return [self.family.finish(a, self.facts) for a in self.attentions]

    @cached_property
    def cache_dtype(self) -> mx.Dtype:
        """The dtype of this model's own keys; it is found without computing anything."""
        cache = make_prompt_cache(self.model)
        self.model(mx.array([[0]]), cache=cache)
        return next(c for c in cache if hasattr(c, "keys")).keys.dtype

    @property
    def bits(self) -> int | None:
        """The bits of quantised weights, taken from the first key projection; None for floats."""
        return getattr(self._projections[0], "bits", None)

    @property
    def precision(self) -> str:
        """How the weights are stored, for example ``bfloat16`` or ``4 bits``."""
        if self.bits is not None:
            return f"{self.bits} bits"
        return str(self._projections[0].weight.dtype).rsplit(".", 1)[-1]

    @cached_property
    @unit
    def projections(self) -> fingerprints.Sketch | None:
        """Numbers that distinguish this model from fine-tuned copies; None if quantised."""
        weights = [module.weight for module in self._projections]
        if self.bits is not None or any(weight.ndim != 2 for weight in weights):
            return None
        # No matmul is used: on some GPUs float32 matmuls are less precise.
        outputs = [(w * mx.array(probe(w.shape[1]), mx.float32)).sum(axis=-1) for w in weights]
        return fingerprints.sketch([np.array(output) for output in outputs])

    @cached_property
    def weights_fingerprint(self) -> str:
        """Sha256 that distinguishes this model from all others; see :mod:`.fingerprints`."""
        return fingerprints.weights_fingerprint(self)

    @cached_property
    def _projections(self) -> list[nn.Module]:
        """The modules whose outputs contain the keys and values, over all cache layers."""
        return [module for a in self.attentions for module in self.family.taps(a)]

    def is_same(self, other: LanguageModel) -> bool:
        """Whether this is the other model: one object, or two loads of one folder, on one machine.

        A copy in another folder, or a model of the same shape, is another one.
        """
        if self is other:
            return True
        if None in (self.path, other.path) or self.address != other.address:
            return False
        here, there = (Path(model.path or "").resolve() for model in (self, other))
        return here == there and self.precision == other.precision

    @property
    def context_length(self) -> int:
        """The most tokens for which the model was made and which mlx-lm runs as in training."""
        trained: int = setting(self.facts, "max_position_embeddings")
        return min(trained, self.ignored_window or trained)

    @cached_property
    def ignored_window(self) -> int | None:
        """The window in tokens that mlx-lm ignores, if shorter than the context; else None."""
        text = self.config.get("text_config", self.config)  # the file's own, not mlx-lm's facts
        window = misread.ignored_window(self.family.text_type(self.facts), text)
        trained = setting(self.facts, "max_position_embeddings")
        return window if window is not None and window < trained else None

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Sha256 of the tokenizer's vocabulary."""
        return vocabulary_fingerprint(self.tokenizer.get_vocab())

    @cached_property
    @unit
    def norms_fingerprint(self) -> str:
        """Sha256 of the stored weights of all norms, which quantisation does not change."""
        norms = {
            name: np.array(module.weight.astype(mx.float32))
            for name, module in self.model.named_modules()
            if type(module).__name__.endswith(NORMS) and "weight" in module
        }
        return fingerprints.norms_fingerprint(norms, self.path)

    def spec(self) -> ModelSpec:
        """The description of this model that a translator's config contains."""
        return ModelSpec.of(self)

    def check_device(self) -> None:
        """Refuse a model that MLX cannot run on its default device; no weight is read.

        Raises:
            UnsupportedModelError: It has experts in 16 bits, and MLX multiplies by those on a GPU
                alone.
        """
        if self._wide_experts is not None and not on_gpu():
            copy = f"a copy that `mlx_lm.convert --hf-path {self.name} --mlx-path COPY -q` makes"
            other = "-c precision=4bit or -c precision=float32" if self.path is None else copy
            raise UnsupportedModelError(
                f"{self.name} has experts in {self._wide_experts}, and on a CPU MLX multiplies by "
                f"experts in float32 or few bits alone; use {other}, or a GPU"
            )

    @cached_property
    def _wide_experts(self) -> str | None:
        """The dtype of experts that are neither float32 nor quantised; None if there are none."""
        if self.address is not None:
            return None
        experts = (m.weight.dtype for m in self.model.modules() if isinstance(m, SwitchLinear))
        found = next((dtype for dtype in experts if dtype != mx.float32), None)
        return None if found is None else str(found).rsplit(".", 1)[-1]

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse token ids that have no embedding row, for which MLX would read out of bounds.

        Raises:
            ValueError: An id is negative or too large, or there are more tokens than the model's
                context holds.
            UnsupportedModelError: As for :meth:`check_device`.
        """
        self.check_device()
        rows = self.geometry.embedding_rows
        if len(tokens) and (min(tokens) < 0 or max(tokens) >= rows):
            bad = next(t for t in tokens if not 0 <= t < rows)
            raise ValueError(f"token id {bad} is outside the {rows} ids of {self.name}")
        if len(tokens) > self.context_length:
            raise self._too_long(str(len(tokens)))

    def check_text(self, text: str) -> None:
        """Refuse a prompt that is far beyond the context before all of it is cut into tokens.

        Raises:
            ValueError: As for :meth:`check_tokens`.
        """
        left, start = self.context_length, 0
        while start < len(text) > FAR * self.context_length:
            piece = text[start : start + PIECE]
            ids = self.tokenizer.encode(piece, add_special_tokens=False)
            left, start = left - max(0, len(ids) - SEAM), start + PIECE
            if left < 0:
                raise self._too_long(f"more than {self.context_length}")

    def _too_long(self, count: str) -> ValueError:
        # Coding agents look for the words of Anthropic's API, and then shorten a conversation.
        window = ", its sliding window, which mlx-lm leaves out" if self.ignored_window else ""
        return ValueError(
            f"the prompt is too long: {count} tokens > {self.context_length} maximum, the context "
            f"of {self.name} is {self.context_length}{window}; shorten the prompt"
        )
