"""Phi-3 and Phi-4: one fused projection writes queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlingo_mlx.backend import mx, nn

from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.families.plain import Plain

KINDS = ("longrope", "su", "linear")  # mlx-lm ignores all others; linear also needs long_factor


class Phi3(Plain):
    """Splits the fused projection's output into its three parts."""

    def check_rotation(self, text: Mapping[str, Any]) -> None:
        """Refuse scaled rotations that mlx-lm does not run: all but LongRoPE under older names."""
        super().check_rotation(text)
        found = text.get("rope_scaling") or self.settings(text).get("rope_scaling")
        if not found:
            return
        kind = found.get("type")
        if kind not in KINDS or "long_factor" not in found:
            raise UnsupportedModelError(
                f"this {self.model_type} has rope_scaling of type {kind!r} with "
                f"{', '.join(sorted(found))}; mlx-lm runs no scaling here, or longrope with "
                "type and long_factor: correct its config.json, or use another checkpoint"
            )

    def taps(self, attention: nn.Module) -> tuple[nn.Module, ...]:
        return (attention.qkv_proj,)

    def states(
        self, attention: nn.Module, outputs: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array]:
        """The keys and values, which are the last two parts."""
        _, keys, values = self._parts(attention, outputs[0])
        return keys, values

    def query_projection(self, attention: nn.Module) -> nn.Module:
        return attention.qkv_proj

    def queries(self, attention: nn.Module, projected: mx.array, offset: int) -> mx.array:
        """The queries, which are the first part, rotated."""
        return super().queries(attention, self._parts(attention, projected)[0], offset)

    def key_dim(self, attention: nn.Module) -> int:
        return attention.head_dim

    def value_dim(self, attention: nn.Module) -> int:
        return attention.head_dim

    def _parts(self, attention: nn.Module, fused: mx.array) -> list[mx.array]:
        queries = attention.n_heads * attention.head_dim
        edges = [queries, queries + attention.n_kv_heads * attention.head_dim]
        return list(mx.split(fused, edges, axis=-1))


FAMILY = Phi3("phi3")
