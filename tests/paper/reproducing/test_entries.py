"""The list of tables and figures against the paper's labels, and what each cell is a score of."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from benchmarks.paper.evaluation.suites import BASE, PAPER, SCRATCH
from benchmarks.paper.reproducing import decoding, labels, running, sizes
from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.entries import (
    BY_LABEL,
    ENTRIES,
    FAR,
    GEMMA3,
    LARGE,
    LATENTS,
    MISTRAL,
    MIXTURE,
    SMALL,
)
from benchmarks.paper.reproducing.entries import SCRATCH as MADE
from benchmarks.paper.reproducing.forms import OWN, form, is_translator
from benchmarks.paper.reproducing.listing import listed, named, overview, pairs_of, trainings_of
from benchmarks.paper.reproducing.models import PAGE, Models
from benchmarks.paper.reproducing.results import Result
from benchmarks.paper.reproducing.running import MAKERS
from benchmarks.paper.reproducing.tables import tables
from benchmarks.paper.reproducing.trained import Wanted, settings
from benchmarks.paper.reproducing.work import TINY, Heard, Work
from benchmarks.paper.training.paper_pairs import filled
from kvlingo_mlx.errors import KVLingoError, MissingModelError, NotEnoughMemoryError
from kvlingo_mlx.training.plan import TrainingPlan
from tests.support.fixtures import Patch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# Written by a script that read every figure and table of the paper's source.
LABELS = [
    [told["kind"], told["label"]]
    for told in map(json.loads, (HERE / "captions.jsonl").read_text().splitlines())
]
L2S, S2L = "large to small", "small to large"
SCORES = [entry for entry in ENTRIES if entry.maker == "scores"]


def test_every_label_of_the_paper_has_an_entry() -> None:
    assert len(LABELS) == 75
    assert {(e.kind, e.label) for e in ENTRIES} == {(kind, label) for kind, label in LABELS}
    assert len(ENTRIES) == len(LABELS)
    assert set(tables()) == {label for kind, label in LABELS if kind == "table"}


def test_every_entry_is_made_or_has_a_reason() -> None:
    """All is every label that is made."""
    for entry in ENTRIES:
        if entry.maker not in MAKERS:
            assert entry.maker == "protocol"
            assert (ROOT / entry.why).exists(), f"{entry.label} names {entry.why}"
    made = [entry for entry in ENTRIES if entry.maker in MAKERS]
    assert named(["all"]) == made and len(made) > 60
    with pytest.raises(ValueError, match="no table or figure 'all'"):
        named(["all", "tab:cost"])


@pytest.mark.parametrize("entry", SCORES, ids=lambda entry: entry.label)
def test_every_number_of_a_table_has_a_cell(entry: Any) -> None:
    grid = entry.grid()
    known = {row.name for row in (*PAPER, *BASE, *SCRATCH)} | {"mean", "compute"}
    assert {cell.benchmark for cell in grid.cells()} <= known
    for row in grid.rows:
        for at, (cell, value) in enumerate(zip(row.cells, row.paper or row.cells, strict=True)):
            if entry.label == "app:tab:cachedist" and at in (0, 3):
                assert cell is None  # R2, which no benchmark scores
            elif not isinstance(value, str):
                assert cell is not None or value is None, (row.names, at)
    for cell in grid.cells():
        if is_translator(cell.who):
            form(cell.who)


def of(label: str, *words: str) -> dict[int, tuple[Cell | None, Any]]:
    """The cells and values of the row that these words name."""
    row, *_ = (r for r in BY_LABEL[label].grid().rows if r.names == words)
    return dict(enumerate(zip(row.cells, row.paper, strict=True)))


def test_numbers_stand_where_the_paper_has_them() -> None:
    """Read off the paper's pages."""
    row = of("tab:qwen3ls", "Qwen3-4B/8B", "RULER")
    assert row[2] == (Cell(LARGE, L2S, "ruler", "closed"), [0.96, 0.004])
    row = of("tab:qwen3sl", "Qwen3-0.6B/1.7B", "MMLU-Pro")
    assert row[3] == (Cell(SMALL, S2L, "mmlu_pro", "mixing", seeds=(42, 43, 44)), [0.246, 0.009])
    assert row[1] == (Cell(SMALL, S2L, "mmlu_pro", "large"), [0.379, 0.013])
    row = of("app:tab:moe", "LongMemEval 16k")
    cell = Cell(MIXTURE, S2L, "longmemeval 16k", "mixing+nu3", seeds=(42,))
    assert row[2] == (cell, 0.576)
    row = of("tab:cothandoff", "GSM8K")
    assert row[4][0] == Cell(SMALL, L2S, "gsm8k", "closed", True, "trace")
    row = of("tab:droidspeak", "DroidSpeak, profiler")
    assert row[0] == (Cell(SMALL, S2L, "arc_challenge", "droidspeak"), [0.77, 0.012])
    row = of("tab:mla", "S → L", "RepLiQA")
    assert row[2] == (Cell(LATENTS, S2L, "repliqa", "closed"), [0.163, 0.02])
    row = of("tab:scratch", "L → S", "HellaSwag")
    assert row[0] == (Cell(MADE, S2L, "hellaswag", "small"), [0.457, 0.011])
    mlp = Cell(MADE, L2S, "hellaswag", "head_wise_mlp+hidden512", seeds=(42,))
    assert row[3] == (mlp, [0.439, 0.011])
    row = of("tab:droidspeak_sweep", "20")
    assert row[2] == (Cell(SMALL, L2S, "arc_challenge", "droidspeak:20"), [0.5, 0.025])


def agreement(shift: int) -> float:
    """How often two tables that have the same cell have nearly the same value in it.

    ``shift`` moves the columns of every second table.
    """
    values: dict[Cell, list[float]] = defaultdict(list)
    for number, entry in enumerate(e for e in SCORES if e.columns):
        for row in entry.grid().rows:
            paper = row.paper[shift * (number % 2) :] + row.paper[: shift * (number % 2)]
            for cell, value in zip(row.cells, paper, strict=True):
                if isinstance(value, list) and cell is not None and cell.who in OWN:
                    values[cell].append(value[0])
    shared = [found for found in values.values() if len(found) > 1]
    assert len(shared) > 30
    return sum(max(found) - min(found) < 0.05 for found in shared) / len(shared)


def test_tables_agree_on_the_cells_that_they_share() -> None:
    """A model's own score is in several tables; it is the same one there, unless misread."""
    assert agreement(0) > 0.95
    assert agreement(1) < 0.7


def test_forms_are_the_papers() -> None:
    work = Work(Path("room"))
    plan, recipe, stage1 = settings(work, Wanted("Qwen3-4B", "Qwen3-30B-A3B", "mixing+nu3", 42))
    assert recipe == {"learning_rates": ()} and stage1 is None
    assert filled(plan, "Qwen3-4B", "Qwen3-30B-A3B")["norm"] == "attention_mass"
    plan, recipe, stage1 = settings(work, Wanted(*SMALL, "head_wise_mlp", 42))
    assert (plan["kind"], plan["head_mixing"]) == ("mlp", False)
    assert stage1 == {"steps": 5000, "rates": ()} and recipe["sweep"]
    assert settings(work, Wanted(*SMALL, "closed", 42))[1]["steps"] == 0
    assert form("wide_mlp").plan == {"kind": "mlp", "hidden": 4096, "gated": False}
    plan, recipe, stage1 = settings(work, Wanted(*LARGE, "wide_mlp", 42))
    assert recipe == {"learning_rates": (3e-6, 1e-5, 3e-5)} and stage1["rates"] == (1e-3,)
    assert form("mixing+post_rope+cap8k").stream == {"max_prefix": 8192}
    assert form("mixing+r2+nu4").plan == {"assignment": "r2", "nu": 4}
    for wrong in ("mixin", "mixing+nu", "mixing+r3"):
        with pytest.raises(ValueError, match="there is no translator|changes nothing"):
            form(wrong)


def test_the_list_tells_what_is_needed(tmp_path: Path) -> None:
    rows = {row.label: row for row in listed(tmp_path)}
    suite = rows["tab:qwen3sl"]
    # Two pairs, one way: four trained translators of three seeds each.
    assert suite.trainings == 2 * 4 * 3 and suite.judge
    swept = trainings_of(BY_LABEL["tab:qwen3sl"], sweeps=True)
    assert swept == 2 * (3 * 3 + 5 + 2)  # the MLP's first seed tries five rates
    assert suite.models == ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")
    assert suite.command.endswith("tab:qwen3sl --judge MODEL") and suite.state == "not done"
    assert suite.hours is None and rows["tab:gemma3"].gated == ("gemma-3-4b-it", "gemma-3-12b-it")
    lines = overview(list(rows.values()))
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert all(any(label in line for line in lines) for _, label in LABELS)
    assert rows["tab:cost"].machine == "an NVIDIA GPU"
    latents = rows["tab:mla"]
    assert latents.made == latents.models == LATENTS and latents.gigabytes == 8.1 + 16.4
    assert latents.command.endswith("tab:mla --models FOLDER --judge MODEL")
    assert rows["app:tab:mla"].trainings == 8 and len(rows["app:tab:mla"].made) == 8
    assert "--text" in rows["tab:scratch"].command and rows["app:fig:scratch"].trainings == 4
    assert rows["tab:base"].models[0] == "Qwen3-0.6B-Base"
    assert pairs_of(BY_LABEL["tab:linearity"]) == [LARGE, SMALL]


def test_the_page_of_labels_is_todays() -> None:
    """Else: python -m benchmarks.paper.reproducing.labels."""
    assert labels.PAGE.read_text(encoding="utf-8") == labels.page()
    verdicts = [labels.AUDIT.get(label) for _, label in LABELS]
    assert (verdicts.count(labels.OTHER), verdicts.count(labels.MISSING)) == (19, 6)
    assert set(labels.AUDIT) <= {label for _, label in LABELS}


def test_made_models_are_asked_as_the_paper_has_them() -> None:
    """The figure leaves IFEval out; MLPs have 59.0M and 235.9M numbers, which fixes their width."""
    table = {cell.benchmark for cell in BY_LABEL["tab:mla"].grid().cells()} - {"mean"}
    assert set(BY_LABEL["fig:mla_pair"].what) == table - {"ifeval"} and len(table) == 6
    for name, told in (("head_wise_mlp+hidden512", 59.0), ("head_wise_mlp", 235.9)):
        hidden = form(name).plan.get("hidden", TrainingPlan.hidden)
        maps = 28 * 2 * 8  # of layers, sides and heads
        assert round(maps * ((128 + 1) * hidden + (hidden + 1) * 128) / 1e6, 1) == told
    assert Wanted(*MADE, "mixing", 42).plain and not Wanted(*LATENTS, "mixing", 42).plain


@pytest.mark.parametrize("there", [(), LATENTS[:1], LATENTS])
def test_a_missing_made_model_is_refused_before_anything_is_read(
    there: tuple[str, ...], tmp_path: Path, monkeypatch: Patch
) -> None:
    """With both of them there, the entry is made."""
    monkeypatch.setitem(MAKERS, "scores", lambda entry, work: Result((), (), ()))
    monkeypatch.setattr(running.sizes, "check_memory", lambda *given: None)
    for name in there:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    work, entry = Work(tmp_path / "room", Models(tmp_path)), BY_LABEL["tab:mla"]
    if there == LATENTS:
        assert running.reproduce(entry, work)[1].exists()
        return
    told = rf"found: {'|'.join(there) or 'none'} .*missing: {', '.join(LATENTS[len(there) :])};"
    with pytest.raises(MissingModelError, match=f"{told} {PAGE}#latents"):
        running.reproduce(entry, work)
    assert not work.room.exists()


@pytest.mark.parametrize(
    ("wanted", "swept", "first"),
    [
        (Wanted(*SMALL, "mixing", 43), False, None),
        (Wanted(*SMALL, "mixing+post_norm", 43), False, None),
        (Wanted(*FAR, "mixing+r2+nu4", 56), False, None),
        (Wanted(*FAR, "mixing+r2+nu8", 56), True, None),  # table "lrs" ends at 4
        (Wanted(*FAR, "mixing+greedy+nu2", 56), True, None),  # its columns are by R2
        (Wanted(*FAR, "head_wise+greedy+nu8", 42), False, None),
        (Wanted(*GEMMA3, "mixing+nu2", 42), True, None),
        (Wanted(*MISTRAL, "mixing+nu3", 42), True, None),
        (Wanted(*MIXTURE, "mixing+nu3", 42), False, None),
        (Wanted(*SMALL, "head_wise_mlp", 42), True, None),
        (Wanted(*SMALL, "head_wise_mlp", 44), True, Wanted(*SMALL, "head_wise_mlp", 42)),
        (Wanted(*FAR, "mixing_mlp", 42), True, Wanted(*FAR, "head_wise_mlp", 42)),
        (Wanted(f"{SMALL[0]}-Base", f"{SMALL[1]}-Base", "mixing", 42), True, None),
        (Wanted(f"{SMALL[0]}-Base", f"{SMALL[1]}-Base", "closed", 42), False, None),
        (Wanted(*LARGE, "wide_mlp", 42), False, None),
        (Wanted(*LATENTS, "mixing", 42), True, None),
    ],
)
def test_rates_are_stated_or_swept(wanted: Wanted, swept: bool, first: Wanted | None) -> None:
    """As appendix "Training protocol" has them; other seeds train at the first one's rate."""
    assert (wanted.swept, wanted.first) == (swept, first)
    assert settings(Work(Path("room")), wanted)[1].get("sweep", False) == swept
    assert not settings(Work(Path("room"), size=TINY), wanted)[1].get("sweep", False)


def test_what_cannot_run_is_refused_before_it_begins(tmp_path: Path, monkeypatch: Patch) -> None:
    said: list[str] = []
    work = Work(tmp_path, heard=Heard(warn=said.append))
    monkeypatch.setattr(Work, "trains", "cpu")
    assert decoding.with_mlx(work, ["RULER"]).place == "mlx"
    assert decoding.with_mlx(work, []).place == "cpu"
    assert said == ["RULER: by MLX alone, which answers this entry; cpu trains"]
    monkeypatch.setattr(Work, "trains", "cuda:0")
    monkeypatch.setattr(decoding, "on_gpu", lambda: False)
    with pytest.raises(KVLingoError, match=r"RULER, .*mlx\[cuda13\]'.* \(nothing was trained"):
        decoding.with_mlx(work, ["RULER", "the judge"])
    monkeypatch.setattr(sizes, "_free", lambda place: int(70e9))
    sizes.check_memory(work, LARGE)
    monkeypatch.setattr(sizes, "_free", lambda place: int(69e9))
    with pytest.raises(NotEnoughMemoryError, match="30B-A3B take 69 GB, and cuda:0 has 69 GB free"):
        sizes.check_memory(work, MIXTURE)
    with pytest.raises(NotEnoughMemoryError, match="8B and Qwen/Some-27B take 78 GB, and cuda:0"):
        sizes.check_memory(work, LARGE, "Qwen/Some-27B")  # 8 and 16 GB, and 27 billion weights


def test_hours_are_by_a_measured_step(tmp_path: Path) -> None:
    """A step of 0.6B and 1.7B in 2 s: 5,000 of 8B and 4B, twice, in proportion to their weights."""
    folder = tmp_path / "translators"
    folder.mkdir()
    ends = {"source": SMALL[0], "target": SMALL[1]}
    (folder / "a.json").write_text(json.dumps({"options": ends}))
    (folder / "a.log.jsonl").write_text('{"step": 0}\n{"step": 10, "seconds": 20.0}\n')
    second = sizes.seconds_per_work(tmp_path)
    expected = 2 * 5000 * 2.0 * (4.0 + 8.2) / (0.6 + 1.7) / 3600
    assert sizes.hours([LARGE], 2, second) == pytest.approx(expected)
    assert sizes.hours([LARGE], 2, sizes.seconds_per_work(tmp_path / "other")) is None
    (row,) = (row for row in listed(tmp_path) if row.label == "fig:xquad")
    assert row.short == f"fig:xquad ~{3 * expected:.3g}h"
    assert dict(row.whole)["trainings"] == f"6; about {3 * expected:.3g} hours"
