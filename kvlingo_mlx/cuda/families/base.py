"""What training needs to know about a model family in transformers.

The defaults describe the common attention block: ``k_proj`` and ``v_proj``, an optional per-head
``k_norm``, then rotation by halves. A family states the facts as mlx-lm uses them; ``agreement.py``
compares them with what transformers reads from the same files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from kvlingo_mlx.format.geometry import CacheGeometry, LayerGeometry, RopeSpec, configured_rope

POINTS = ("pre_norm", "post_norm", "post_rope")

# The position of a span's first token, or of each token (T,). mypy without torch needs the word.
Positions: TypeAlias = int | torch.Tensor


def places(start: Positions, heads: torch.Tensor) -> torch.Tensor:
    """The positions (1, T) of (T, H, D) keys or queries."""
    if isinstance(start, int):
        start = torch.arange(start, start + len(heads), device=heads.device)
    return start[None]


@dataclass(frozen=True)
class TorchFamily:
    """One model family, by the ``model_type`` of its text model's config.

    ``scaled_rope`` is False where mlx-lm builds a plain RoPE and ignores the config's scaling.
    """

    model_type: str
    scaled_rope: bool = True

    # The capture points of keys; projections output keys at the first one.
    points: ClassVar[tuple[str, ...]] = POINTS
    # Whether transformers has a rotation for each kind of layer.
    turned_by_kind: ClassVar[bool] = False
    # How a user turns windows off in config.json, for messages.
    no_windows: ClassVar[str] = "use_sliding_window to false"

    def facts(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The text model's config as mlx-lm reads it; ``config`` is the raw one."""
        return config

    def text(self, model: Any) -> Any:
        """The decoder of the text model, without its language-model head and its other towers."""
        return getattr(model.model, "language_model", model.model)

    def align(self, model: Any) -> None:
        """Make a loaded model round as mlx-lm does, where the two differ only in rounding."""

    def attentions(self, model: Any) -> list[Any]:
        """The attention modules that own a cache, in cache order."""
        return [layer.self_attn for layer in self.text(model).layers]

    def readers(self, model: Any) -> list[tuple[Any, ...]]:
        """For each cache, the attention modules that read it; its owner comes first."""
        return [(attention,) for attention in self.attentions(model)]

    def logits(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The next-token logits of final hidden states."""
        return model.lm_head(hidden)

    # ---- keys and values ------------------------------------------------------------------

    def taps(self, attention: Any) -> tuple[Any, ...]:
        """The modules whose outputs hold a layer's keys and values."""
        return attention.k_proj, attention.v_proj

    def states(
        self, attention: Any, outputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (T, H * D), at the first of ``points``, from the outputs of ``taps``."""
        keys, values = outputs
        return keys, values

    def normalise_values(self, attention: Any, heads: torch.Tensor) -> torch.Tensor:
        """The (T, H, D) values after their norm, where the family has one."""
        return heads

    def stored(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Finished keys and values as transformers' cache stores them, (1, H, T, D) each."""
        return keys, values

    # ---- attention, for the attention norms -------------------------------------------------

    def query_projection(self, attention: Any) -> Any:
        """The module whose output :meth:`queries` takes."""
        return attention.q_proj

    def queries(
        self, model: Any, attention: Any, projected: torch.Tensor, start: int
    ) -> torch.Tensor:
        """Queries as attention uses them: projected (M, Hq * D), at ``start``, to (Hq, M, D)."""
        heads = projected.view(len(projected), -1, attention.head_dim)
        return self.rotate(model, attention, self.normalise(attention, heads, "q"), start)[0]

    def attended(self, attention: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The keys (H, T, D) that ``queries`` attend to, of finished keys and values (H, T, D)."""
        return keys

    # ---- facts ----------------------------------------------------------------------------

    def geometry(self, model: Any, config: Mapping[str, Any]) -> CacheGeometry:
        """All facts that shape this model's cache; ``config`` is the result of ``facts``."""
        attentions = self.attentions(model)
        windows = self.windows(config, len(attentions))
        return CacheGeometry(
            model_type=self.model_type,
            layers=tuple(self.layer_geometry(i, a, windows[i]) for i, a in enumerate(attentions)),
            rope=tuple(self.rope(config, a) for a in attentions),
            norm_eps=config["rms_norm_eps"],
            embedding_rows=config["vocab_size"],
        )

    def windows(self, config: Mapping[str, Any], num_layers: int) -> list[int | None]:
        """Each layer's window in tokens in mlx-lm; None where a layer attends to all tokens."""
        return [None] * num_layers

    def windows_here(self, model: Any) -> list[int | None]:
        """Each layer's window in transformers."""
        return [getattr(a, "sliding_window", None) for a in self.attentions(model)]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        """How mlx-lm rotates a layer's keys."""
        return configured_rope(config, self.key_dim(attention), scaled=self.scaled_rope)

    def rope_here(self, model: Any, attention: Any) -> RopeSpec:
        """How transformers rotates a layer's keys."""
        parameters = self.text(model).config.rope_parameters
        own = parameters[attention.layer_type] if self.turned_by_kind else parameters
        return configured_rope({"rope_parameters": own}, self.key_dim(attention))

    def key_dim(self, attention: Any) -> int:
        """The width of one head's keys."""
        return attention.head_dim

    def layer_geometry(self, index: int, attention: Any, window: int | None) -> LayerGeometry:
        """The shape of one cache layer."""
        taps, dim = self.taps(attention), self.key_dim(attention)
        heads = taps[0].out_features // dim
        return LayerGeometry(
            layer=index,
            kv_heads=heads,
            key_dim=dim,
            value_dim=taps[-1].out_features // heads,
            attention="full" if window is None else "sliding",
            window=window,
        )

    def normalise(self, attention: Any, heads: torch.Tensor, which: str = "k") -> torch.Tensor:
        """(T, H, D) keys (``which="q"``: queries) after a per-head RMSNorm, where there is one."""
        norm = getattr(attention, f"{which}_norm", None)
        return heads if norm is None else norm(heads)

    def key_norm(self, attention: Any) -> tuple[torch.Tensor, float]:
        """What a key is multiplied by after it was divided by its root mean square, and epsilon."""
        return attention.k_norm.weight, attention.k_norm.variance_epsilon

    def rotate(
        self, model: Any, attention: Any, heads: torch.Tensor, start: Positions
    ) -> torch.Tensor:
        """Rotate (T, H, D) keys or queries to (1, H, T, D).

        ``start`` is the position of the first one, or the position of each one.
        """
        states = heads.transpose(0, 1)[None]
        angles = self.cosines(model, attention, states, places(start, heads))
        return self.turned(sys.modules[type(attention).__module__], states, angles)

    def turned(self, module: Any, states: torch.Tensor, angles: Any) -> torch.Tensor:
        """States (1, H, T, D) rotated by ``angles``, by the functions of the family's module."""
        return module.apply_rotary_pos_emb(states, states, *angles)[0]

    def cosines(
        self, model: Any, attention: Any, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (1, T, D) of a layer's rotation, in the dtype of ``states``."""
        kind = (attention.layer_type,) if self.turned_by_kind else ()
        return self.text(model).rotary_emb(states, positions, *kind)
