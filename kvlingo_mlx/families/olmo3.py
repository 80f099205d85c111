"""OLMo 3: only the rotation of global layers is scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlingo_mlx.families.plain import Plain
from kvlingo_mlx.format.geometry import spelled_out


class Olmo3(Plain):
    """Reads newer configs, which give a rotation per kind of layer; mlx-lm reads only one."""

    def settings(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The global layers' rotation, if local layers have the same base and no scaling."""
        kinds = text.get("rope_parameters") or {}
        full, local = (spelled_out(kinds.get(f"{k}_attention")) for k in ("full", "sliding"))
        if full and local == {"rope_theta": full["rope_theta"]}:
            return full
        return super().settings(text)


FAMILY = Olmo3("olmo3")
