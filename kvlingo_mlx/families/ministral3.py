"""Ministral-3: queries are scaled by their absolute position, keys are not."""

from __future__ import annotations

from kvlingo_mlx.backend import mx, nn

from mlx_lm.models.ministral3 import _get_llama_4_attn_scale

from kvlingo_mlx.families.plain import Plain


class Ministral3(Plain):
    """Scales queries by their absolute position, which a hand-over keeps."""

    def queries(self, attention: nn.Module, projected: mx.array, offset: int) -> mx.array:
        heads = super().queries(attention, projected, offset)
        return heads * _get_llama_4_attn_scale(
            heads.shape[2],
            offset,
            attention.scaling_beta,
            attention.original_max_position_embeddings,
        ).astype(heads.dtype)


FAMILY = Ministral3("ministral3", relative_positions=False)
