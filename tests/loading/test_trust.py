"""Translators that nobody should trust are named, and none is replaced or used unseen."""

import dataclasses
import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import TRANSLATORS
from kvlingo_mlx.embedded.bundled import NAME
from kvlingo_mlx.embedded.dialogues import for_fitting
from kvlingo_mlx.fitting.data import chosen
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.loading import grading, notes
from kvlingo_mlx.serving.policy import Policy
from kvlingo_mlx.serving.settings import Settings
from kvlingo_mlx.tokenization.samples import HeldOut
from tests.support import tiny
from tests.support.command_line import fails
from tests.support.fixtures import Folders, Models, Patch, Printed
from tests.support.random_samples import samples
from tests.support.translator_folders import MIXING, arrays_of, config_json, to_config
from tests.support.warned import told

Make = Callable[[str, Any], Path]
PAIR = ("tiny-qwen3-s", "tiny-qwen3-l")
PROMPT = list(range(5, 45))


@pytest.mark.parametrize(
    ("source", "options", "unknowns"),
    [("narrow", {}, 16), ("dense", {"nu": 2}, 128), ("dense", {"nu": 2, "head_mixing": False}, 64)],
)
def test_few_tokens_are_told_with_the_number_that_would_do(
    models: Models, source: str, options: dict[str, Any], unknowns: int
) -> None:
    """One for each unknown is not refused, 32 are enough: the widths are counted by hand."""

    def fit(tokens: int) -> list[str]:
        whole, rest = divmod(tokens, 128)
        data = samples(whole, 128) + (samples(1, rest, seed=9) if rest else [])
        return told(lambda: kv.fit(models[source], models["moe"], data, **options))

    with pytest.raises(ValueError, match=f"{unknowns - 1:,} tokens .* {unknowns:,} inputs"):
        fit(unknowns - 1)
    (few,) = fit(unknowns)
    assert few.startswith(f"only {unknowns:,} tokens for {unknowns:,} inputs")
    assert few.endswith(f": give at least {32 * unknowns:,}")
    assert len(fit(32 * unknowns - 1)) == 1 and fit(32 * unknowns) == []


OWN = {"data": "mine.jsonl", "conversations": 8, "hidden_kl": 1.0}
GRADED: list[tuple[float, tuple[float, float, float], float | None, str]] = [
    (0.1, (1.0, 1.0, 0.0), None, "works"),
    (0.11, (1.0, 1.0, 0.0), None, "better than nothing"),
    (float("nan"), (1.0, 1.0, 0.0), None, "useless"),
    (0.01, (0.0, 1.0, 0.0), None, "useless"),
    (0.4, (1.0, 1.0, 0.0), None, "better than nothing"),
    (0.6, (1.0, 1.0, 0.0), None, "useless"),
    (0.01, (0.875, 1.0, 0.0), None, "works"),
    (0.01, (0.75, 1.0, 0.0), None, "better than nothing"),
    (0.01, (0.125, 1.0, 0.125), None, "useless"),
    (0.01, (0.5, 0.5, 0.0), None, "works"),
    (0.01, (0.0, 0.25, 0.0), None, "works"),
    (0.01, (1.0, 1.0, 0.0), 0.3, "better than nothing"),
    (0.01, (1.0, 1.0, 0.0), 0.7, "useless"),
    (0.01, (float("nan"), 1.0, 0.0), None, "useless"),
]


def planted(kl: float, recall: tuple[float, float, float], own: float | None) -> dict[str, Any]:
    names = ("translated", "native", "hidden")
    told = {"recall": {**dict(zip(names, recall, strict=True)), "facts": 8}}
    more = {} if own is None else {"own": {**OWN, "kl": own}}
    return {"prompts": NAME, "kl": kl, "top1": 0.9, "hidden_kl": 1.0, **told, **more}


@pytest.mark.parametrize(("kl", "recall", "own", "word"), GRADED)
def test_a_grade_is_the_worst_of_all_that_was_measured(
    kl: float, recall: tuple[float, float, float], own: float | None, word: str
) -> None:
    left = planted(kl, recall, own)
    config = dataclasses.replace(to_config(config_json()), provenance={"receipt": left})
    found = grading.receipt_of(config)
    assert found is not None and found.grade == grading.grade_of(config) == word
    assert found.to_json() == {**left, "native_layers": 0} or "nan" in repr(left)
    kept = "nan" if recall[0] != recall[0] else round(8 * recall[0])
    assert f"{word}: keeps {kept} of 8 facts (the target itself {round(8 * recall[1])}, " in str(
        found
    )
    assert (": too few to judge by)" in str(found)) == (recall[1] < 0.5)
    assert ("on 8 held-out conversations of mine.jsonl (1.0000 " in str(found)) == (own is not None)


@pytest.mark.parametrize(
    ("kl", "recall", "own", "way"),
    [(0.01, 0.0, None, "reread"), (0.4, 1.0, None, "translate"), (0.6, 1.0, None, "reread"),
     (0.01, 1.0, 0.7, "reread"), (0.01, 1.0, 0.3, "translate")],
)  # fmt: skip
def test_a_server_rereads_by_the_one_grade(
    make: Make, models: Models, kl: float, recall: float, own: float | None, way: str
) -> None:
    make("mine", planted(kl, (recall, 1.0, 0.0), own))
    both = {"dense": models["dense"], "moe": models["moe"]}
    settings = Settings(models={name: model.name for name, model in both.items()})
    found = Policy(both, settings).ways["dense", "moe"]
    assert found.strategy == way and f"keeps {round(8 * recall)} of 8 facts" in found.why


def test_what_a_fit_is_measured_on_is_not_fitted_on(models: Models, monkeypatch: Patch) -> None:
    """Of many records a few that are of use are kept, with all that are like them."""
    source, target = models["dense"], models["moe"]
    ends = (source, target), to_config(config_json()), "frobenius", 10**9
    many = samples(130, 20)
    records = [*many, *reversed(many)]
    read = chosen(records, *ends)
    assert read.own is not None and read.records == len(records)
    kept = set(read.own.samples)
    assert len(read.own.samples) == len(kept) == 8 and kept < set(many)
    assert list(read.samples) == [sample for sample in records if sample not in kept]
    silent = [dataclasses.replace(s, continuation=()) for s in samples(130, 20, seed=4)]
    read = chosen([*silent, *many], *ends)
    assert read.own is not None and set(read.own.samples) < set(many)
    assert set(silent) < set(read.samples)
    # The maps are those of the other records alone.
    seen: list[HeldOut | None] = []
    fits = importlib.import_module("kvlingo_mlx.fitting")
    monkeypatch.setattr(fits, "receipt", lambda *a, own, **others: seen.append(own))
    made = kv.fit(source, target, many)
    own = seen.pop()
    assert own is not None and made.config.provenance["samples"] == 122
    rest = kv.fit(source, target, [sample for sample in many if sample not in own.samples])
    assert seen == [None] and made.digest == rest.digest
    every = kv.fit(source, target, many[:127])
    assert made.digest != every.digest


def test_a_fit_leaves_a_receipt_that_verify_agrees_with(tmp_path: Path, capsys: Printed) -> None:
    """A closed form of few texts keeps hardly a fact, and whoever uses it is told so, once."""
    data = tmp_path / "d.jsonl"
    lines = [json.dumps({"messages": talk.conversation()}) for talk in for_fitting(25)]
    data.write_text("\n".join(lines))
    ends = ["--source", PAIR[0], "--target", PAIR[1]]
    folder = str(tmp_path / "t")
    assert run(["fit", *ends, "--data", str(data), "--out", folder, "--json", "-"]) == 0
    captured = capsys.readouterr()
    left = json.loads(captured.out)["results"]["receipt"]
    assert left["recall"]["native"] == 1.0 > left["recall"]["translated"] and "own" not in left
    kept = f"keeps {round(8 * left['recall']['translated'])} of 8 facts (the target itself 8, "
    grade = "better than nothing" if left["recall"]["translated"] else "useless"
    assert f"grade: {grade}: {kept}" in captured.err
    assert run(["verify", folder, *ends, "--json", "-"]) == (grade == "useless")
    measured = json.loads(capsys.readouterr().out)["results"]["measured"]
    assert {name: left[name] for name in ("kl", "hidden_kl", "top1", "recall")} == {
        name: pytest.approx(measured[name]) for name in ("kl", "hidden_kl", "top1", "recall")
    }
    assert measured["grade"] == grade
    assert measured["recovered"] == pytest.approx(1 - left["kl"] / left["hidden_kl"])
    notes._told.clear()
    words = ["generate", "--prefill-model", PAIR[0], "--decode-model", PAIR[1], "-m", "1"]
    assert run([*words, "-p", "Hello there", "--translator", folder]) == 0
    captured = capsys.readouterr()
    assert captured.err.count(kept) == 1 and f"the translator {folder} (from " in captured.err
    assert f"Translator: {folder} (sha256 " in captured.out


def receipt(kl: float, **others: Any) -> dict[str, Any]:
    return {"prompts": NAME, "kl": kl, "top1": 0.9, "hidden_kl": 20 * kl, **others}


@pytest.fixture
def make(folders: Folders, store: Path, tmp_path: Path) -> Make:
    """Put a random translator from "dense" to "moe" under a receipt into the store, newest last."""
    made: list[Path] = []

    def put(name: str, left: Any) -> Path:
        at = tmp_path / f"made-{len(made)}"
        tiny.write_random_translator(at, folders["dense"], folders["moe"], seed=len(made))
        config, weights = translator_folder.read(at)
        provenance = {} if left is None else {"receipt": left}
        config = dataclasses.replace(config, provenance=provenance)
        folder = translator_folder.write(store / name, config, weights)
        made.append(folder)
        when = 1_700_000_000 + len(made)
        os.utime(folder / "translator_config.json", (when, when))
        return folder

    return put


def used(models: Models) -> tuple[str | None, list[str]]:
    """Which stored translator ``generate`` uses, and what it tells."""
    found: list[str | None] = []

    def generate() -> None:
        for response in kv.stream_generate(models["dense"], models["moe"], PROMPT, max_tokens=1):
            found.append(response.translator)

    said = told(generate)
    return found[0], said


OTHER = {"prompts": "dialogues-0", "kl": 1e-6, "top1": 1.0, "hidden_kl": 1.0}  # of other talks


@pytest.mark.parametrize(
    ("receipts", "best", "unmeasured"),
    [
        ([receipt(0.01), receipt(0.02)], 0, False),
        ([receipt(0.01), None], 0, False),
        ([receipt(0.01), OTHER], 0, False),
        ([receipt(0.01), receipt(0.01)], 1, False),
        ([None, None], 1, True),
    ],
)
def test_the_best_receipt_wins_not_the_newest(
    make: Make, models: Models, receipts: list[Any], best: int, unmeasured: bool
) -> None:
    """Of ties and of those that cannot be compared it is told, once, which one is used."""
    made = [make(name, left) for name, left in zip("ba", receipts, strict=True)]
    path, said = used(models)
    assert path == str(made[best]) and used(models) == (path, [])
    if receipts[1] == receipt(0.02):
        assert said == []
        return
    assert f"no receipt shows that it is better than {made[1 - best]}" in said[0]
    assert "of 2 stored translators from " in said[0] and path in said[0]
    assert len(said) == 1 + unmeasured and ("nobody has measured" in said[-1]) == unmeasured


def test_digests_tell_all_that_is_computed_apart() -> None:
    """Facts or numbers, one changed at a time; where it came from changes nothing."""
    config, weights = to_config(config_json()), Weights("float32", arrays_of(MIXING))
    digest = translator_folder.digest(config, weights)
    elsewhere = dataclasses.replace(
        config, provenance={"made": "x"}, source=dataclasses.replace(config.source, name="x")
    )
    assert translator_folder.digest(elsewhere, weights) == digest
    keys, values = config.assignment.keys, config.assignment.values
    other = dataclasses.replace(config.assignment, keys=keys[::-1], values=values)
    assert keys != keys[::-1]
    first = next(iter(weights.arrays))
    nudged = {n: a.copy() for n, a in weights.arrays.items()}
    nudged[first].flat[0] = np.nextafter(nudged[first].flat[0], np.float32(9))
    more = {**weights.arrays, "keys.0.bias": np.zeros(4, np.float32)}  # a tensor that is optional
    changed = {
        translator_folder.digest(dataclasses.replace(config, **{name: value}), weights)
        for name, value in (("kind", "mlp"), ("head_mixing", False), ("joint", True),
                            ("capture", "post_rope"), ("alignment", "minimal_groups"),
                            ("head_map", (0,)), ("assignment", other))
    } | {
        translator_folder.digest(config, Weights("float32", nudged)),
        translator_folder.digest(config, Weights("float32", more)),
        translator_folder.digest(config, weights, 8),
        translator_folder.digest(config, weights.cast("bfloat16")),
    }  # fmt: skip
    assert len(changed) == 11 and digest not in changed


def test_responses_and_records_name_the_translator(
    make: Make, models: Models, folders: Folders, tmp_path: Path, capsys: Printed
) -> None:
    folder = make("t", receipt(0.01))
    digest = translator_folder.digest(*translator_folder.read(folder))
    pair = models["dense"], models["moe"]
    loaded = kv.load_translator(folder)
    assert (loaded.path, loaded.digest) == (folder, digest)
    for given in (None, str(folder), loaded):
        *_, last = kv.stream_generate(*pair, PROMPT, translator=given, max_tokens=2)
        assert (last.translator, last.translator_digest) == (str(folder), digest)
    *_, last = kv.stream_generate(*pair, PROMPT, strategy="native", max_tokens=2)
    assert last.translator is last.translator_digest is None
    fitted = kv.fit(*pair, samples(3, 60))
    *_, last = kv.stream_generate(*pair, PROMPT, translator=fitted, max_tokens=2)
    assert (last.translator, last.translator_digest) == ("made in this process", fitted.digest)
    words = ["--prefill-model", str(folders["dense"]), "--decode-model", str(folders["moe"])]
    capsys.readouterr()
    assert run(["generate", *words, "-p", "some words of a prompt", "-m", "1", "--json", "-"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert (results["translator"], results["translator_digest"]) == (str(folder), digest)
    talk = kv.Conversation({"a": pair[0], "b": pair[1]})
    talk.reply("a", "words", max_tokens=2)
    (*_, last) = talk.stream_reply("b", "more words", max_tokens=2)
    assert (last.translator, last.translator_digest) == (str(folder), digest)
    assert talk.stats().used == {"a to b": f"{folder} (sha256 {digest[:12]})"}


def test_save_never_replaces_another(models: Models, tmp_path: Path) -> None:
    one = kv.fit(models["narrow"], models["wide"], samples(4, 40))
    other = kv.fit(models["narrow"], models["wide"], samples(4, 40, seed=1))
    folder = one.save(tmp_path / "t")
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    one.save(folder)  # the very same
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    with pytest.raises(ValueError, match=r"holds another translator; .*overwrite=True"):
        other.save(folder)
    assert kv.load_translator(folder).digest == one.digest
    other.save(folder, overwrite=True)
    assert kv.load_translator(folder).digest == other.digest != one.digest


def test_fit_refuses_before_it_reads_anything(
    models: Models, folders: Folders, tmp_path: Path, capsys: Printed
) -> None:
    folder = kv.fit(models["narrow"], models["wide"], samples(4, 40)).save(tmp_path / "t")
    old = kv.load_translator(folder).digest
    ends = ["--source", str(folders["narrow"]), "--target", str(folders["wide"])]
    assert run(["fit", *ends, "--data", "absent.jsonl", "--out", str(folder)]) == 2
    assert "holds another translator; " in (error := capsys.readouterr().err)
    assert "--force" in error and error.count("\n") == 1
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"text": "the you and use is of an other " * 20}))
    arguments = ["fit", *ends, "--data", str(data), "--out", str(folder)]
    assert run([*arguments, "--force"]) == 0
    assert kv.load_translator(folder).digest != old


def test_list(make: Make, store: Path, capsys: Printed, folders: Folders) -> None:
    folder = make("mine", receipt(0.01))
    (store / "broken").mkdir()
    (store / "broken" / "translator_config.json").write_text("{")
    assert run(["list", "--json", "-"]) == 0
    captured = capsys.readouterr()
    rows = {Path(row["path"]).name: row for row in json.loads(captured.out)["results"]}
    mine = rows["mine"]
    assert mine["grade"] == "works" and mine["recovered"] == pytest.approx(0.95)
    assert mine["nbytes"] == sum(p.stat().st_size for p in folder.iterdir())
    assert Path(mine["source"]).name == Path(folders["dense"]).name and not mine["embedded"]
    assert rows["broken"]["problem"] and f"{store / 'broken'} cannot be used" in captured.err
    assert rows["--".join(PAIR)]["embedded"] and rows["--".join(PAIR)]["grade"] == "works"
    assert "works (keeps 8 of 8 facts)" in captured.err and "works; " in captured.err


def test_list_answers_whether_a_pair_has_a_translator(
    make: Make, folders: Folders, capsys: Printed
) -> None:
    make("mine", receipt(0.01))

    def listed(source: str, target: str) -> tuple[str, str]:
        assert run(["list", "--source", source, "--target", target]) == 0
        return capsys.readouterr()

    out, err = listed(str(folders["dense"]), str(folders["moe"]))
    assert "  mine\n" in out and "works; " in out
    assert "with the package" not in out and not err
    out, err = listed(str(folders["moe"]), str(folders["dense"]))
    (line,) = out.splitlines()
    assert line.startswith("no translator from ") and "make one with `kvlingo-mlx pair /" in line
    out, err = listed(*PAIR)
    assert "--".join(PAIR) in out and "mine" not in out
    out, err = listed("me/absent", PAIR[1])
    assert "no translator from me/absent" in out and "me/absent is not on this machine" in err
    assert run(["list", "--target", PAIR[1]]) == 0
    assert capsys.readouterr().out.count(f" to {PAIR[1]};") == 2


def test_find_translator_is_public(make: Make, models: Models, folders: Folders) -> None:
    folder = make("mine", receipt(0.01))
    assert kv.find_translator(models["dense"], models["moe"]) == folder
    with pytest.raises(kv.MissingTranslatorError, match="kvlingo-mlx pair .*kvlingo-mlx import"):
        kv.find_translator(models["moe"], models["dense"])
    with pytest.raises(ValueError, match="give what kvlingo_mlx.load returns"):
        kv.find_translator(folders["dense"], models["moe"])


def test_a_name_that_list_shows_is_a_translator(
    make: Make, models: Models, capsys: Printed, monkeypatch: Patch, tmp_path: Path
) -> None:
    folder = make("mine", receipt(0.01))
    assert kv.load_translator("mine").path == folder
    embedded = "--".join(PAIR)
    assert kv.load_translator(embedded).path == TRANSLATORS / embedded
    pair = models["dense"], models["moe"]
    assert kv.generate(*pair, PROMPT, translator="mine", max_tokens=1) is not None
    for words in (["show", "mine"], ["verify", "mine"], ["show", embedded]):
        assert run(words) == 0, capsys.readouterr().err
    assert run(["import", "mine", "--out", str(tmp_path / "copy")]) == 0
    monkeypatch.chdir(Path(shutil.copytree(TRANSLATORS, tmp_path / "here")))
    assert kv.load_translator(embedded).path == Path(embedded)  # a folder here comes first


def test_list_and_show_tell_what_tune_chose(make: Make, capsys: Printed) -> None:
    folder = make("mine", receipt(0.01))
    path = folder / "translator_config.json"
    config = json.loads(path.read_text())
    tuning = {"measured_kl": 0.0123, "measured_recall": 0.9, "layers_kl_seconds": []}
    config["provenance"] |= {"native_layers": 2, "tuning": tuning}
    path.write_text(json.dumps(config))
    for words in (["list"], ["show", "mine"]):
        assert run(words) == 0
        assert "tuned to 2 native layers of 4, recall 0.9, KL 0.0123" in capsys.readouterr().out
    for stranger in ({"measured_recall": "0.9"}, [], None, {"measured_kl": True}):
        config["provenance"]["tuning"] = stranger
        path.write_text(json.dumps(config))
        assert run(["list"]) == 0 and "recall" not in capsys.readouterr().out


def test_remove(make: Make, store: Path, tmp_path: Path, capsys: Printed) -> None:
    mine, other = make("mine", None), make("other", None)

    elsewhere = Path(shutil.copytree(mine, tmp_path / "elsewhere"))
    embedded = TRANSLATORS / "--".join(PAIR)
    (mine / "notes.txt").write_text("mine")
    for name, said in (
        ("none", "`kvlingo-mlx list` shows what is"),
        *((name, "is not in the local store") for name in (elsewhere, "../../elsewhere", store)),
        *((name, "comes with the package and stays") for name in (embedded, embedded.name)),
        ("mine", "holds notes.txt, which is no file of a translator"),
    ):
        fails(["remove", str(name), "--yes"], said, capsys)
    (mine / "notes.txt").unlink()
    assert run(["remove", "mine"]) == 2 and "--yes" in capsys.readouterr().err
    assert mine.exists()
    assert run(["remove", "mine", "--yes"]) == 0 and not mine.exists()
    assert run(["remove", str(other), "--yes"]) == 0 and not other.exists()
    assert elsewhere.exists() and embedded.exists() and list(store.iterdir()) == []
    (store / "link").symlink_to(elsewhere)
    assert run(["remove", "link", "--yes"]) == 0
    assert elsewhere.exists() and list(store.iterdir()) == []


def test_remove_asks(make: Make, capsys: Printed, monkeypatch: Patch) -> None:
    mine = make("mine", None)
    remove = importlib.import_module("kvlingo_mlx.cli.remove")
    monkeypatch.setattr(remove.sys.stdin, "isatty", lambda: True, raising=False)
    answers = iter([False, True])

    def confirm(question: str, *, abort: bool, err: bool) -> None:
        assert str(mine) in question and abort
        if not next(answers):
            raise remove.typer.Abort

    monkeypatch.setattr(remove.typer, "confirm", confirm)
    assert run(["remove", "mine"]) == 130 and mine.exists()
    assert run(["remove", "mine"]) == 0 and not mine.exists()
