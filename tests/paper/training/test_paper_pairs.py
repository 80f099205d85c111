"""The learning rates of the paper's pairs, against the paper's own table (label "tab:lrs")."""

from typing import Any

import pytest

from benchmarks.paper.reproducing.tables import tables
from benchmarks.paper.training import jobs
from benchmarks.paper.training.paper_pairs import PAIRS, filled, rate_of
from kvlingo_mlx.training.command_line import Options

# The table's columns as options.
COLUMNS: dict[str, dict[str, Any]] = {
    "head-mixing / nu = 1, depth": {"nu": 1},
    "head-mixing / nu = 1, selected": {"nu": 1, "assignment": "r2"},
    "head-mixing / nu = 2": {"nu": 2, "assignment": "r2"},
    "head-mixing / nu = 4": {"nu": 4, "assignment": "r2"},
    **{f"head-wise / nu = {nu}": {"nu": nu, "head_mixing": False} for nu in (1, 2, 4, 8)},
}


def number(text: str) -> float:
    """``3×10^-5`` or ``10^-4``."""
    factor, _, power = text.rpartition("10^")
    return float(f"{factor.rstrip('×') or 1}e{power}")


def released(family: str, size: str) -> str:
    """A released model's name."""
    if family.startswith("Qwen"):
        return f"{family}-{size}"
    return f"{family.lower()}-{size.lower() if family == 'Gemma-3' else size}-it"


def rows() -> list[tuple[str, str, dict[str, Any], float]]:
    """Source, target, options and rate of every number in the table."""
    found, made = tables()["tab:lrs"], []
    for _, pair, direction, *cells in found.rows:
        family, sizes = pair.rsplit("-", 1)
        small, large = (released(family, size) for size in sizes.split("/"))
        ways = {"L → S": [(large, small)], "S → L": [(small, large)]}
        for way in ways.get(direction, [(small, large), (large, small)]):
            for name, cell in zip(found.columns[2:], cells, strict=True):
                if cell is not None:
                    made.append((*way, COLUMNS[name], number(cell)))
    return made


def test_every_rate_of_the_table() -> None:
    found = rows()
    assert len(found) == 4 * 2 + 4 * 8 + 2 * 2 * 2
    for source, target, plan, rate in found:
        assert rate_of(f"Qwen/{source}", f"/models/{target}", plan) == rate, (source, target, plan)
    listed = {(source, target) for source, target, _, _ in found}
    beyond = {pair for pair in PAIRS if pair not in listed}
    assert all("30B-A3B" in "".join(pair) or "Mistral" in "".join(pair) for pair in beyond)


@pytest.mark.parametrize(
    ("plan", "rate"),
    [
        ({"nu": 3}, 3e-6),  # nearer to 4 than to 2, by ratio
        ({"nu": 8}, 3e-6),
        ({"nu": 16, "head_mixing": False}, 1e-5),
        ({"nu": 3, "head_mixing": False}, 1e-4),
        ({"kind": "mlp"}, 1e-4),
        ({"nu": None}, 3e-5),
        ({"nu": 0}, 3e-5),  # refused elsewhere
    ],
)
def test_forms_that_the_table_lacks(plan: dict[str, Any], rate: float) -> None:
    assert rate_of("Qwen3-0.6B", "Qwen3-8B", plan) == rate
    assert rate_of("somebody/else", "Qwen3-8B", plan) == 1e-4


def test_pairs_with_a_recipe_of_their_own() -> None:
    """The mixture of experts, and two tokenizers; what is given is left as it is."""
    dense, sparse = "Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B"
    nothing = {"nu": None, "norm": None, "kind": "linear"}
    assert filled(nothing, dense, sparse) == {**nothing, "nu": 3, "norm": "attention_mass"}
    assert filled({**nothing, "nu": 1}, sparse, dense)["nu"] == 1
    assert filled({**nothing, "norm": "sink_8"}, sparse, dense)["norm"] == "sink_8"
    mistral = filled(nothing, "Qwen/Qwen3-8B", "mistralai/Mistral-7B-Instruct-v0.3")
    assert (mistral["nu"], mistral["norm"]) == (3, "frobenius")
    other = filled(nothing, dense, "Qwen/Qwen3-8B")
    assert (other["nu"], other["norm"]) == (1, "frobenius")
    mlp = filled({**nothing, "kind": "mlp"}, dense, sparse)
    assert (mlp["nu"], mlp["norm"]) == (1, "frobenius")
    assert rate_of(dense, sparse, {"nu": 3}) == 3e-6 and rate_of(sparse, dense, {"nu": 3}) == 1e-4
    assert rate_of(sparse, dense, {"nu": 3, "kind": "linear_mlp"}) == 3e-5


def test_a_plan_takes_them() -> None:
    """By the laboratory's own function, for models in folders of these names."""
    options = Options(source="/m/Qwen3-4B", target="/m/Qwen3-30B-A3B", data=("d",), device="mlx")
    plan = {"nu": None, "norm": None, "kind": "linear"}
    asked = jobs.plan_of(options, plan, {"learning_rates": ()})
    assert (asked.nu, asked.norm) == (3, "attention_mass")
    assert asked.recipe.learning_rates == (3e-6,)
