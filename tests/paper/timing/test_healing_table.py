"""The table of healing: what is run until a cache is native, its work, and the verb."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from benchmarks.paper.timing import healing, paths, runs, tables
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing import ceilings, geometries
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny
from tests.support.command_line import run
from tests.support.healings import Chunk, in_a_row, noted

PROMPT = tiny.random_tokens(81)
COUNT = len(PROMPT) - 1
LAYERS = ("heal_idle", "heal_interleaved", "heal_layers 1", "heal_layers 2", "heal_layers 3")


@pytest.fixture(autouse=True)
def rates_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = ceilings.Rates(1e9, 1e9, "float32")
    monkeypatch.setattr(runs, "measured_rates", lambda: rates)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Chunk]:
    return noted(monkeypatch)


def fitted(models: dict[str, LanguageModel], source: str, target: str) -> Translator:
    return kv.fit(models[source], models[target], [{"text": "one two three four five " * 9}])


@pytest.fixture(scope="module")
def made(models: dict[str, LanguageModel]) -> paths.Paths:
    translator = fitted(models, "dense", "moe")
    return paths.Paths(models["dense"], models["moe"], {"stored": translator}, PROMPT, 32)


# ---- what is timed --------------------------------------------------------------------------


@pytest.mark.parametrize("phase", LAYERS)
def test_a_phase_ends_with_the_targets_own_cache(
    made: paths.Paths, read: list[Chunk], phase: str
) -> None:
    made.phase(phase)()
    assert in_a_row(read) == COUNT
    own = make_prompt_cache(made.target.model)
    made.target.model(mx.array(PROMPT[:-1])[None], cache=own)
    for cache, wanted in zip(read[-1].cache, own, strict=True):
        for side in ("keys", "values"):
            a, b = (np.array(getattr(c, side)[0, :, :COUNT]) for c in (cache, wanted))
            assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()
        if phase == "heal_idle":
            assert cache.offset == COUNT
    if phase != "heal_idle":
        found = made.meanwhile[phase][-1]
        assert found.left == 0 <= found.tokens and found.seconds > 0
        # The last token is run for the first answer's token, and each of these for the next.
        assert read[-1].cache[0].offset >= COUNT + 1 + found.tokens


def test_an_answer_that_fills_the_context_ends_and_the_rest_is_read(
    made: paths.Paths, read: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy:
        """Decoding that never leaves time for a chunk."""

        def __init__(self, reader: Any) -> None:
            self.reader = reader

        def began(self) -> None: ...

        def __call__(self) -> None: ...

    monkeypatch.setattr(healing, "Interleaved", Busy)
    monkeypatch.setattr(healing, "room_for", lambda model, tokens, most: 5)
    made.heal_interleaved()
    found = made.meanwhile["heal_interleaved"][-1]
    assert (found.tokens, found.left) == (4, COUNT) and in_a_row(read) == COUNT


# ---- work -----------------------------------------------------------------------------------


def test_work_by_hand(tmp_path: Path) -> None:
    """Two layers of width 64, 4 heads of 16, 2 of them cached, MLPs of 128; three tokens."""
    options: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 16}
    model = kv.load(tiny.write_tiny_model(tmp_path / "m", "qwen3", seed=1, **options))
    forms: dict[str, Any] = {"float32": ("float32", None)}
    maps = geometries.random_translators(model, model, 1, forms)["float32"]
    kept, queries, mlp = 3 * 2 * 2 * 64 * 32, 3 * 2 * 2 * 64 * 64, 3 * 2 * 3 * 64 * 128
    attention = 4 * 2 * 2 * 16 * (1 + 2 + 3)
    map_of_a_layer = 3 * 2 * 2 * 32 * 32
    whole = kept + queries + mlp + attention
    assert healing.work(model, model, maps, [1, 2], 3) == {
        "switch": {"first_token": 2 * map_of_a_layer},
        "native": {"first_token": whole + kept, "until_native": whole + kept},
        "heal_idle": {
            "first_token": 2 * map_of_a_layer,
            "until_native": 2 * map_of_a_layer + whole + kept,
        },
        "heal_interleaved": {
            "first_token": 2 * map_of_a_layer,
            "until_native": 2 * map_of_a_layer + whole + kept,
        },
        # The keys and values of one layer; then all of it, and those of the next.
        "heal_layers 1": {
            "first_token": map_of_a_layer + kept,
            "until_native": map_of_a_layer + 2 * kept + whole,
        },
        "heal_layers 2": {"first_token": whole + kept, "until_native": whole + kept},
    }


# ---- the verb -------------------------------------------------------------------------------


def bench(tmp_path: Path, *more: str) -> tuple[int, Sequence[dict[str, Any]]]:
    """Run the verb; return its status and its records."""
    out = tmp_path / "out.jsonl"
    status = run(["paper bench", "--table", "healing", "-n", "2", "--json", str(out), *more])
    lines = out.read_text().splitlines() if out.exists() else []
    return status, [json.loads(line) for line in lines]


def test_the_verb_and_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, (record,) = bench(tmp_path, "-p", "2,40", "--decode-tokens", "8")
    assert status == 0
    text = " ".join(capsys.readouterr().out.split())
    for told in (
        "From a switch to the target's own cache", "switch, 2 layers native",
        "until native, healed idle", "until native, healed between tokens",
        "until native, 2 layers at once", "target, healed meanwhile (tokens/s)",
        "Work before the first token / until the cache is native (GFLOP)",
        "decoding steps are left out",
    ):  # fmt: skip
        assert told in text, told
    found = record["results"]["healing"]
    assert [t["prompt_tokens"] for t in found["timings"]] == [2, 40]
    for timing, work, speeds in zip(
        found["timings"], found["work"], found["while_healed"], strict=True
    ):
        phases = {"heal_interleaved", "heal_layers 2"}
        assert set(timing["meanwhile"]) == phases >= set(speeds)
        assert all(len(rounds) == 2 for rounds in timing["meanwhile"].values())
        assert set(work) == phases | {"switch", "native", "heal_idle"}
    # One token is read after the first of the answer, so none is decoded meanwhile.
    assert found["while_healed"][0] == {}
    assert all(r["tokens"] == 0 for r in found["timings"][0]["meanwhile"]["heal_interleaved"])


def test_the_verb_with_numbers_of_layers_a_reference_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["-p", "12", "--decode-tokens", "8"]
    assert bench(tmp_path, *more)[0] == 0
    capsys.readouterr()
    more += ["--native-layers", "1,6", "--reference", str(tmp_path / "out.jsonl")]
    picture = tmp_path / "x.png"
    if importlib.util.find_spec("matplotlib"):
        more += ["--plot", str(picture)]
    status, records = bench(tmp_path, *more)
    text = capsys.readouterr().out
    assert status == 0 and "measured otherwise" not in text and "does not say" not in text
    assert "in brackets how many times as long" in text and "6 layers at once" in text
    rows = [row["phase"] for row in records[-1]["results"]["healing"]["reference"]["rows"]]
    assert rows == [
        "switch", "native", "heal_idle", "heal_interleaved", "decode_native", "decode_translated"
    ]  # fmt: skip
    assert "--plot" not in more or picture.stat().st_size > 1000


def test_random_models_of_fewer_layers(
    small_geometries: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their times are shown as they are; the target's experts are those of a mixture."""
    more = ["--geometry", "qwen3-4b:qwen3-30b-a3b", "--layers", "3", "-p", "12"]
    status, (record,) = bench(tmp_path, *more, "--decode-tokens", "8")
    text = capsys.readouterr().out
    assert status == 0 and "none of these times is extrapolated to full depth" in text
    assert "until native, 1 layer at once" in text and "experts touched, prompt" in text
    assert record["results"]["healing"]["extrapolated"] == [{}]
    assert record["config"]["forms"] == ["float32"]  # no other form would be timed


def test_windows_are_refused_before_anything_is_timed(
    small_geometries: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tables, "run_table", None)
    monkeypatch.setattr(runs, "measured_rates", None)
    more = ["--geometry", "gemma-3-4b:gemma-3-4b", "-p", "12"]
    status, records = bench(tmp_path, *more)
    error = capsys.readouterr().err
    assert status != 0 and not records and error.count("\n") == 1
    assert "error: --table healing has nothing to time: random gemma-3-4b cannot be heal" in error
    assert error.rstrip().endswith("give another --table")
