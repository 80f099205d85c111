"""Cohere 2: local layers rotate keys, global layers do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlingo_mlx.families.base import period_setting
from kvlingo_mlx.families.plain import Plain


class Cohere2(Plain):
    """Adds the period of global layers: newer configs list the layers, mlx-lm reads the period."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        return super().settings(text) | period_setting(text)


FAMILY = Cohere2("cohere2", rotated_if="use_sliding_window")
