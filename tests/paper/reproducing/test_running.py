"""Tiny runs of entries through the verb: trained, measured, laid out, kept, and gone on with."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from benchmarks.paper import converted_mla
from benchmarks.paper.commands import run
from benchmarks.paper.reproducing import running, scores
from benchmarks.paper.reproducing.cells import Cell
from benchmarks.paper.reproducing.drawing import draw, panels
from benchmarks.paper.reproducing.entries import BY_LABEL, LATENTS, SMALL
from benchmarks.paper.reproducing.models import Models
from benchmarks.paper.reproducing.results import Line, Result, cells, keep, kept, markdown
from benchmarks.paper.reproducing.stand_ins import deeper
from benchmarks.paper.reproducing.work import TINY, Heard, Work
from kvlingo_mlx.embedded import TRANSLATORS, zoo
from kvlingo_mlx.embedded.dialogues import held_out
from kvlingo_mlx.evaluation.compare import Outcome, Scored
from kvlingo_mlx.evaluation.error_bars import Mean
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.tokenization.samples import encode_plain
from kvlingo_mlx.training.on_mlx.pair import MLXPair

S2L = "small to large"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproduced")


@pytest.fixture
def work(room: Path) -> Work:
    return Work(room / "tiny", Models(None, True, room / "tiny" / "models"), TINY)


def record(room: Path, label: str) -> dict[str, Any]:
    path = room / "tiny" / "results" / f"{label.replace(':', '-')}.json"
    return json.loads(path.read_text())


def test_a_label_alone_finds_pytorch(tmp_path: Path) -> None:
    """The package's command line hides it from verbs that do without."""
    pytest.importorskip("torch")
    words = ["benchmarks.paper", "tab:cost", "--tiny", "--room", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert done.returncode == 0 and "re-prefill" in done.stdout, done.stderr


def test_a_label_that_fails_keeps_no_other_from_being_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = running.reproduce

    def broken(entry: Any, work: Work) -> Any:
        return {}[entry.label] if entry.label == "tab:erank" else made(entry, work)

    monkeypatch.setattr(running, "reproduce", broken)
    labels = "fig:main", "tab:erank", "tab:cost"
    assert run(["reproduce", *labels, "--tiny", "--room", str(tmp_path)]) == 2
    assert record(tmp_path, "tab:cost")["rows"]
    told = capsys.readouterr().err
    assert "fig:main is not made: fig:main has no numbers" in told
    assert "tab:erank is not made: KeyError; `tab:erank --debug` shows where" in told
    assert "2 of 3 labels are not made, as warned above: fig:main, tab:erank;" in told


def test_an_entry_of_each_maker_by_the_verb(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MLXPair, "receipt", lambda *rest: None)  # which takes longer than the rest
    labels = ["fig:prefixhist", "app:fig:norms", "fig:head_alignment"]
    assert run(["reproduce", *labels, "--tiny", "--room", str(room)]) == 0
    for label in labels:
        assert record(room, label)["tiny"], label
    made = {row["translator"]: row for row in record(room, "app:fig:norms")["translators"]}
    (one,) = (row for form, row in made.items() if "attention_mass" in form)
    assert len(made) == 2 and (one["rate"], one["seed"], len(one["sha256"])) == ("0.0001", "42", 12)
    lengths = record(room, "fig:prefixhist")["rows"]
    assert sum(sum(row["values"]) for row in lengths) == 240  # the paper's probe
    heads = record(room, "fig:head_alignment")["rows"]
    # The zoo's models were trained apart, so a head's share in its own place is one in four.
    assert all(abs(value - 0.25) < 0.05 for row in heads for value in row["values"])


def test_scores_are_those_of_the_suite_and_controls_collapse(work: Work) -> None:
    """The package's own trained translators, given: the target's answers, and none of a control."""
    given = work.room.parent / "given"
    names = "tiny-qwen3-s--tiny-qwen3-l"
    for form, wrong in (("mixing", False), ("mixed_loss", True)):
        copy(TRANSLATORS / names, given / f"{names}--{form}--42", shuffled=wrong)
    entry = replace(BY_LABEL["tab:qwen3sl"], seeds=(42,))
    cells = [
        Cell(SMALL, S2L, "coqa", who, seeds=() if who in ("large", "text") else (42,))
        for who in ("large", "mixing", "mixed_loss", "text")
    ]
    ours = replace(work, given=given, size=replace(TINY, items=8))
    found, notes = scores.measured(cells, ours, entry)
    values = [found[cell].value for cell in cells]
    assert notes == ["answers were decoded on mlx"]
    assert all(found[cell].count == 8 for cell in cells)
    native, translated, wrong, text = values
    assert native == text > 0.9
    assert translated > native - 0.1 and wrong < 0.6  # "The hotel of Emma is" is most of F1


def copy(folder: Path, into: Path, *, shuffled: bool) -> None:
    """A translator, or the control that has its maps at wrong layers."""
    from kvlingo_mlx.evaluation.conditions import shuffled as at_wrong_layers
    from kvlingo_mlx.format import translator_folder
    from kvlingo_mlx.loading.translators import load_translator

    into.parent.mkdir(parents=True, exist_ok=True)
    translator = load_translator(folder)
    if shuffled:
        translator = at_wrong_layers(translator)
    translator_folder.write(into, translator.config, translator.to_weights())


def test_a_deeper_stand_in_says_the_same(tmp_path: Path) -> None:
    folder = deeper("tiny-qwen3-l-deeper", tmp_path)
    assert deeper("tiny-qwen3-l-deeper", tmp_path) == folder
    plain, deep = load(str(zoo("tiny-qwen3-l"))), load(str(folder))
    assert (len(plain.attentions), len(deep.attentions)) == (4, 6)
    tokens = mx.array([[7, 300, 21, 5, 900]])
    both = [np.array(model.model(tokens)) for model in (plain, deep)]
    np.testing.assert_allclose(both[1], both[0], atol=1e-4)


def test_latents_that_stand_in_say_the_same(tmp_path: Path) -> None:
    """Of a zoo model, converted by the tool of the paper's: nearly whole, as its rank is."""
    models = Models(None, True, tmp_path)
    name, _ = models.names(LATENTS)
    assert (name, models.stands_in(LATENTS)) == ("tiny-qwen3-s-latents", "")
    converted_mla.register()
    both = [load(folder) for folder in (models.place(name), zoo("tiny-qwen3-s"))]
    assert [model.model.args.model_type for model in both] == ["converted_mla", "qwen3"]
    talk = next(held_out(1, seed=3))
    tokens = mx.array([encode_plain(both[1].tokenizer, talk.messages[0]["content"])])
    chosen = [np.array(model.model(tokens).argmax(-1)) for model in both]
    assert (chosen[0] == chosen[1]).mean() > 0.9
    there = Models(tmp_path / "none", True, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.paper.reproducing.models.can_be_made", lambda name: False)
        assert there.names(LATENTS) == ("tiny-qwen3-s", "tiny-qwen3-l")
        assert "stand for Qwen3-4B-latents and Qwen3-8B-latents" in there.stands_in(LATENTS)


def test_scores_less_the_targets_own_are_of_paired_items() -> None:
    """Two categories of two items, equal in weight; by hand, and unlike unpaired errors."""
    own, ours = (1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 0.0, 1.0)
    items = {
        name: [Scored(str(n), "ab"[n // 2], str(n), {"acc": v}) for n, v in enumerate(values)]
        for name, values in (("native", own), ("mixing", ours))
    }
    outcome = Outcome("mmlu_pro", ("acc",), 4, 9, {}, items)
    found = scores.less_native(outcome, "mixing", "groups")
    sd = 0.5**0.5  # of 0 and 1 in the one, of -1 and 0 in the other
    assert (found.value, found.error) == pytest.approx((0.0, (2 * (sd / 2**0.5) ** 2) ** 0.5 / 2))
    assert scores.less_native(outcome, "native", "groups").error == 0


def test_numbers_are_laid_beside_the_papers(work: Work, tmp_path: Path) -> None:
    entry = BY_LABEL["tab:affine"]
    line = Line(("Qwen3 8B/4B", "K"), (Mean(0.5, 0.01, 9), None), ([0.815, 0.02], 0.25))
    assert cells(line) == ["0.500 +- 0.010 (paper 0.815 +- 0.02)", "- (paper 0.25)"]
    assert cells(Line(("x",), (1234.5678, "62-65"))) == ["1235", "62-65"]
    result = Result(("pair", "side"), ("a", "b"), (line, Line(("K",), (1.0, 2.0))), ("odd",))
    page = markdown(entry, result, ["told"])
    assert "| Qwen3 8B/4B | K | 0.500 +- 0.010 (paper 0.815 +- 0.02) | - (paper 0.25) |" in page
    assert "|  | K | 1 | 2 |" in page and page.endswith("- told\n")
    there = replace(work, room=tmp_path, heard=Heard())
    path = keep(there, entry, result)
    found = kept(tmp_path, entry)
    assert path.suffix == ".md" and found is not None
    assert found["rows"][0]["values"] == [{"value": 0.5, "error": 0.01, "count": 9}, None]
    assert "tiny models" in found["notes"][0] and "steps 6" in found["notes"][1]
    (tmp_path / "results" / "tab-affine.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged; remove it"):
        kept(tmp_path, entry)


def test_a_figure_is_drawn_from_its_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    means = (Mean(0.5, 0.1, 4), None, Mean(0.2, 0.1, 4))
    lines = [Line(("pair", way, what), means) for way in ("a", "b") for what in ("coqa", "arc")]
    result = Result(("pair", "way", "what"), ("small", "mixing", "closed"), tuple(lines))
    assert panels(result)["pair, b"] == {
        "small": {"coqa": means[0], "arc": means[0]},
        "closed": {"coqa": means[2], "arc": means[2]},
    }
    grid = Result(("pair", "layer"), ("0", "1"), (Line(("x", "0"), (0.5, 0.1)),
                                                  Line(("y", "0"), (0.5, None))))  # fmt: skip
    for label, shown in (("fig:suite_off", result), ("app:fig:norms", result), ("fig:cka", grid)):
        path = tmp_path / f"{label.replace(':', '-')}.png"
        draw(BY_LABEL[label], shown, path)
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("task", "value", "error"), [("mt_bench_101", 0.5, 0.1), ("coqa", 5.5, 0.9)]
)
def test_ratings_are_from_0_to_1_in_tables_over_benchmarks(
    task: str, value: float, error: float, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"mean": {"rating": Mean(5.5, 0.9, 4)}}
    outcome = Outcome(task, ("rating",), 4, 10, {}, {}, (), {"mixing": [table, table]})
    cell = Cell(SMALL, S2L, task, "mixing")
    single = replace(outcome, tables={"mixing": table}, seeds={})
    for found, count in ((outcome, 2), (single, 1)):  # as --seeds 1 has it
        asked = scores.Asked(found, {cell: "mixing"}, {})
        monkeypatch.setattr(scores, "_measured", lambda *given, asked=asked: [asked])
        means = scores.by_seed([cell], work, BY_LABEL["tab:seedsd"], [])[cell]
        assert len(means) == count
        for mean in means:
            assert (mean.value, mean.error, mean.count) == pytest.approx((value, error, 4))


def test_a_span_of_rungs_is_pooled_from_its_items(work: Work) -> None:
    """As the paper's RULER over 4k to 16k: each length counts once, and 32k not at all."""
    tokens = {"4k": 512, "8k": 768, "16k": 1024, "32k": 1280}  # of a tiny run
    scored = {"4k": (1.0, 0.0), "8k": (1.0,), "16k": (0.0, 0.0, 1.0), "32k": (0.0,) * 9}
    items = [
        Scored(f"{rung}/{n}", str(tokens[rung]), f"{rung}/{n}", {"recall": value})
        for rung, several in scored.items()
        for n, value in enumerate(several)
    ]
    table = {str(length): {"recall": Mean(0.1, 0.0, 1)} for length in tokens.values()}
    outcome = Outcome("ruler", ("recall",), 15, 10, {"x": table}, {"x": items})
    cell = Cell(SMALL, S2L, "ruler 4k-16k", "x")
    found = scores.score(outcome, "x", cell, work)
    assert (found.value, found.count) == (pytest.approx((0.5 + 1 + 1 / 3) / 3), 6)
    assert scores.score(outcome, "x", replace(cell, what="ruler 8k"), work).value == 0.1
