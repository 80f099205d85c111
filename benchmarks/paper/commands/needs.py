"""Options of the paper's commands that need others to have an effect, as in the package's table."""

from __future__ import annotations

from kvlingo_mlx.arguments import Need, is_set, off
from kvlingo_mlx.cli import needs

VERBS: dict[str, tuple[Need, ...]] = {
    "analyze": (
        Need("hidden epochs", "mlp", is_set, True),
    ),
    "reproduce": (
        Need("labels tiny models translators data text task_data judge steps items seeds device",
             "listing", off, why="which makes nothing"),
    ),
}  # fmt: skip


class Checked(needs.Checked):
    """A command that refuses options without effect before it begins."""

    needs = VERBS
