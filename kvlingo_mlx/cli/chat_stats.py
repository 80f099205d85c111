"""The output of /stats: what a chat's models hold, and the time of the last switch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlingo_mlx.cli.output import facts, ms, table, tell_of_machine

if TYPE_CHECKING:
    from kvlingo_mlx.engine.conversation import Stats, Switch

COLUMNS = ["model", "tokens", "own", "translated", "cache (MB)", "for others (MB)", "where"]


def print_lines(stats: Stats) -> None:
    """Print a row per model, and the memory of all."""
    rows = [
        [
            line.name,
            str(line.tokens),
            str(line.native),
            str(line.translated),
            _mb(line.cache_bytes),
            _mb(line.recording_bytes),
            line.where,
        ]
        for line in stats.lines
    ]
    table("Tokens in each model's cache, written by itself or translated", COLUMNS, rows)
    facts(
        {
            "models (MB)": _mb(stats.models),
            "translators (MB)": _mb(stats.translators),
            "total (MB)": _mb(stats.total),
            "MLX's active memory (MB)": _mb(stats.mlx_active),
            **{f"translator, {ends}": name for ends, name in stats.used.items()},
        }
    )


def switch_line(switch: Switch) -> str:
    """What a switch took, in a line."""
    ahead = f" ({switch.ahead} of them before you asked)" if switch.ahead else ""
    return (
        f"[{switch.name} took over in {ms(switch.seconds)} ms; tokens: {switch.kept} kept, "
        f"{switch.translated} translated{ahead}, {switch.read + 1} read; /stats compares it with "
        "reading all]"
    )


def print_switch(switch: Switch, anew: float | None) -> None:
    """Print the last switch, beside the seconds of reading the same prompt anew."""
    facts(
        {
            "last switch": f"to {switch.name}",
            "tokens kept": switch.kept,
            "tokens translated": switch.translated,
            "of them before you asked": switch.ahead,
            "tokens read": switch.read + 1,
            **({"native layers": switch.native_layers} if switch.native_layers else {}),
            **({"guard": str(switch.guarded)} if switch.guarded else {}),
            "took (ms)": ms(switch.seconds),
            "reading all anew (ms)": "not measured" if anew is None else ms(anew),
        }
    )
    tell_of_machine()


def _mb(count: int) -> str:
    return f"{count / 1e6:,.2f}"
