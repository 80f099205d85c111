"""What the options of ``kvlingo-mlx bench`` stand for; refused before any model is made or read."""

from __future__ import annotations

BUDGET = "memory-budget"  # a table of its own: no translation is timed, so "all" leaves it out


def numbers(option: str, text: str, example: str, least: int = 1) -> list[int]:
    """The numbers of a list such as ``64,256``, each once, in their order.

    Raises:
        ValueError: One is no number, or below ``least``.
    """
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give numbers: {example}") from None
    if min(found) < least:
        raise ValueError(f"{option} holds {min(found)}; give at least {least}")
    return found


def check_numbers(time_limit: float, **counts: int) -> None:
    """Refuse (ValueError) counts below 1 by their parameters' names, and no time at all."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {count}; give at least 1")
    if not time_limit > 0:
        raise ValueError(f"--time-limit is {time_limit:g}; give seconds above 0")


def geometry_names(
    geometry: str, layers: int | None, precision: str | None, nu: int
) -> tuple[str, str]:
    """Source and target of ``--geometry``.

    Raises:
        ValueError: Not two known names, or not with these layers, precision or ``nu``.
    """
    from kvlingo_mlx.timing.geometries import GEOMETRIES, check

    known = ", ".join(GEOMETRIES)
    names = geometry.split(":")
    if len(names) != 2:
        raise ValueError(f"--geometry is {geometry!r}; give SOURCE:TARGET of {known}")
    for name in names:
        check(name, layers, precision)
    depth = layers or GEOMETRIES[names[0]]["num_hidden_layers"]
    if nu > depth:
        raise ValueError(f"--nu is {nu}; {names[0]} has {depth} layers here to read: give fewer")
    return names[0], names[1]
