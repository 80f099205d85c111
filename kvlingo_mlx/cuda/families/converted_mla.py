"""Models that ``tools/convert_mla.py`` made; ``cuda/converted_mla.py`` is the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvlingo_mlx.cuda import converted_mla  # registered with transformers
from kvlingo_mlx.cuda.families.base import Positions, places
from kvlingo_mlx.cuda.families.latent import Latent
from kvlingo_mlx.format.geometry import RopeSpec


class ConvertedMLA(Latent):
    """Latents without a norm of their own; ``keys`` are the chosen pairs, before rotation."""

    def states(
        self, attention: Any, outputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary keys (T, dr), with their heads' norms, and the latents (T, r)."""
        latent, rotary = attention.split(outputs[0])
        return rotary, latent

    def rotate(
        self, model: Any, attention: Any, heads: torch.Tensor, start: Positions
    ) -> torch.Tensor:
        """Rotate (T, H, dr) keys to (1, H, T, dr), each pair by its slot's frequency."""
        states = heads.transpose(0, 1)[None]
        return attention.turned(
            states, self.cosines(model, attention, states, places(start, heads))
        )

    def query_projection(self, attention: Any) -> Any:
        """The projection of queries."""
        return attention.q_proj

    def queries(
        self, model: Any, attention: Any, projected: torch.Tensor, start: int
    ) -> torch.Tensor:
        """The queries (Hq, M, D + dr), normed per head and their last part rotated."""
        angles = self.cosines(model, attention, projected, places(start, projected))
        return attention.queries(projected[None], angles)[0]

    def attended(self, attention: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The expanded keys of every KV head."""
        return attention.expanded(values[None], keys[None])[0][0]

    def rope(self, config: Mapping[str, Any], attention: Any) -> RopeSpec:
        """The rotation of the chosen pairs, by their frequencies."""
        half = attention.head_dim // 2
        listed = tuple(config["rotary_frequencies"][slot % half] for slot in attention.slots)
        base, dims = float(config["rope_theta"]), attention.qk_rope_head_dim
        return RopeSpec("listed", base, dims, scaling=(("frequencies", listed),))

    def rope_here(self, model: Any, attention: Any) -> RopeSpec:
        """The same: both runtimes rotate by the config's list."""
        config = attention.config
        base = config.rope_parameters["rope_theta"]
        facts = {"rotary_frequencies": config.rotary_frequencies, "rope_theta": base}
        return self.rope(facts, attention)


FAMILY = ConvertedMLA(converted_mla.MODEL_TYPE)
