"""What the figures say: their ticks, their scales, which models they are of."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlingo_mlx.reporting import pictures
from kvlingo_mlx.timing import bench
from tests.support.command_line import run
from tests.support.fixtures import Patch

matplotlib_image = pytest.importorskip("matplotlib.image")


def ticks(axis: Any) -> list[str]:
    """What stands at an axis, as it is drawn."""
    low, high = sorted(axis.get_view_interval())
    found = []
    for which in ("major", "minor"):
        places = getattr(axis, f"get_{which}ticklocs")()
        texts = getattr(axis, f"get_{which}_formatter")().format_ticks(places)
        found += [t for place, t in zip(places, texts, strict=True) if t and low <= place <= high]
    return found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([12, 4000], ["20", "50", "100", "200", "500", "1,000", "2,000"]),
        ([0.0004, 0.02], ["0.0005", "0.001", "0.002", "0.005", "0.01"]),
        ([56, 81], None),  # within a decade, where matplotlib writes 6x10^1
        ([3, 3], None),
    ],
)
def test_ticks_are_plain_numbers(values: list[float], expected: list[str] | None) -> None:
    figure = pictures.figure()
    axes = figure.add_subplot()
    axes.plot([1, 2], values)
    pictures.log_scale(axes, "y", values)
    found = ticks(axes.yaxis)
    numbers = [float(text.replace(",", "")) for text in found]
    assert "10^" not in "".join(found) and numbers == sorted(set(numbers))
    assert axes.get_yscale() == "log"
    if expected is None:
        assert len(found) >= 2
    else:
        assert set(expected) <= set(found)


def test_benchs_times() -> None:
    lengths = (64, 256, 2048)
    timed = [bench.PhaseTimes(n, {"native": [n / 3e4], "translate": [n / 3.4e4]}) for n in lengths]
    axes = bench.figure(timed, str.upper).axes[0]
    assert ticks(axes.xaxis) == ["64", "256", "2,048"]
    assert all(text.replace(",", "").replace(".", "").isdecimal() for text in ticks(axes.yaxis))
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["NATIVE"] == [[n, pytest.approx(n / 30)] for n in lengths]


def edge(picture: Path) -> np.ndarray:
    """The outermost pixels of a picture."""
    image = matplotlib_image.imread(picture)
    return np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])


def test_no_text_is_cut(tmp_path: Path) -> None:
    """Nothing is drawn at a picture's edge, however long a label is; without our saving it is."""
    long = pictures.figure(2.0, 2.0)
    long.add_subplot().set(ylabel="a label that is longer than its axes are high " * 2)
    long.savefig(tmp_path / "cut.png")
    pictures.save(long, tmp_path / "whole.png")
    assert (edge(tmp_path / "cut.png") != 1).any()
    assert (edge(tmp_path / "whole.png") == 1).all()


def test_pictures_say_of_which_models_they_are(tmp_path: Path, monkeypatch: Patch) -> None:
    drawn: dict[str, str] = {}
    save = pictures.save

    def seen(figure: Any, picture: str, title: str = "") -> None:
        save(figure, picture, title)
        drawn[Path(picture).name] = figure.get_suptitle()

    monkeypatch.setattr(pictures, "save", seen)
    pair = ["--source", "tiny-qwen3-s", "--target", "tiny-qwen3-l"]
    assert run(["bench", *pair, "-p", "16", "-n", "1", "--plot", str(tmp_path / "bench.png")]) == 0
    assert drawn == {"bench.png": "tiny-qwen3-s to tiny-qwen3-l"}
    assert pictures.pair("/models/a", "Qwen/Qwen3-4B") == "a to Qwen/Qwen3-4B"


def test_trainings_curve(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from kvlingo_mlx.training import command_line

    log = tmp_path / "log.jsonl"
    lines = [{"step": step, "learning_rates": [1e-4, 1e-3], "held_out": [0.3 / (step + 1), None]}
             for step in range(4)]  # fmt: skip
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = command_line.figure(log)
    assert figure.axes[0].lines[0].get_ydata().tolist() == [line["held_out"][0] for line in lines]
    assert "10^" not in "".join(ticks(figure.axes[0].yaxis))
