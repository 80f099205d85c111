"""The guide's commands, on tiny models and a CPU, to pages beside the paper's numbers."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("lm_eval")

from benchmarks.paper.commands import run
from benchmarks.paper.reproducing.entries import BY_LABEL

GUIDE = Path(__file__).parents[3] / "benchmarks" / "paper" / "README.md"
TYPED = re.findall(r"^python -m benchmarks\.paper ((?:tab|fig):.*)$", GUIDE.read_text(), re.M)
SMALL = "--tiny --device cpu --items 1 --seeds 1 --steps 1".split()


@pytest.mark.parametrize("typed", TYPED)
def test_a_command_ends_in_its_page(typed: str, tmp_path: Path) -> None:
    """As it is typed, or small, and without its judge, whose benchmarks have no number then."""
    label, *options = shlex.split(typed)
    assert {*options[::2]} <= {"--judge", "--device", "--tiny"}
    small = options if "--tiny" in options else SMALL
    assert run(["reproduce", label, *small, "--room", str(tmp_path)]) == 0
    (page,) = (tmp_path / "tiny" / "results").glob("*.md")
    told = page.read_text()
    assert page.stem == label.replace(":", "-") and BY_LABEL[label].title in told
    assert re.search(r"\d\.\d+ .*\(paper \d", told)
    assert ("| translator |" in told) == (label == "tab:qwen3sl")
    assert "tiny models, made to test the way" in told


def test_the_guide_has_commands_of_labels() -> None:
    assert any(typed.startswith("tab:qwen3sl --judge") for typed in TYPED) and len(TYPED) > 1
