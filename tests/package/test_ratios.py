"""benchmarks/ratios.py: a promise that is missed is told, and ends with status 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ratios

    return ratios


def test_a_missed_ratio_fails_loudly(
    ratios: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    made = {
        "good": ratios.Ratio("a / b", 1.05, lambda n: {"ratios": [0.9, 1.0, 7.0]}),
        "bad": ratios.Ratio("c / d", 1.05, lambda n: {"ratios": [1.0, 1.1, 1.2]}),
        "slow": ratios.Ratio("e / f", 5.0, lambda n: {"ratios": [4.0] * n}, at_least=True),
    }
    monkeypatch.setattr(ratios, "RATIOS", made)
    record = tmp_path / "record.jsonl"
    monkeypatch.setattr(sys, "argv", ["ratios.py", "--trials", "2", "--json", str(record)])
    assert ratios.main() == 1
    done = capsys.readouterr()
    assert done.err == "missed: bad, slow\n"
    good, bad, slow = done.out.splitlines()[:3]
    assert good.startswith("ok") and "<= 1.05:  1.000 (0.900 to 7.000)" in good
    assert bad.startswith("MISSED") and "1.100 (1.000 to 1.200)" in bad
    assert slow.startswith("MISSED") and ">= 5.00" in slow
    assert json.loads(record.read_text())["results"]["slow"]["ratios"] == [4.0, 4.0]
    monkeypatch.setattr(sys, "argv", ["ratios.py", "--only", "good"])
    assert ratios.main() == 0


def test_sides_alternate_and_the_first_is_divided_by_the_others(ratios: ModuleType) -> None:
    ran: list[str] = []
    actions = {name: (lambda name=name: ran.append(name)) for name in ("a", "b", "c")}
    found = ratios.translation_cost.alternated(actions, 2)
    assert ran == ["a", "b", "c"] * 3
    times = found["samples_s"]
    for index, ratio in enumerate(found["ratios"]):
        under = times["b"][index] + times["c"][index]
        assert ratio == pytest.approx(times["a"][index] / under)


def test_memory_and_maps_can_be_measured_small(ratios: ModuleType) -> None:
    assert ratios.memory(1, tokens=96, step=32)["ratios"][0] > 0
    assert len(ratios.head_wise(2, tokens=8, layers=2)["ratios"]) == 2
