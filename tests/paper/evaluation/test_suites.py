"""The paper's suites: what is in them, one score out of many items, and the verb."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.paper.commands import run
from benchmarks.paper.evaluation import suite_runs, suites
from benchmarks.paper.evaluation.suites import BASE, PAPER, benchmark, chosen
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.errors import MissingExtraError
from kvlingo_mlx.evaluation import conditions, lineup
from kvlingo_mlx.evaluation.compare import Outcome, Scored
from kvlingo_mlx.loading.models import load

pytest.importorskip("lm_eval")


from benchmarks.paper.evaluation.judge import Judge, read_prompts
from benchmarks.paper.tasks import JUDGED, NAMES
from kvlingo_mlx.evaluation.harness import running
from kvlingo_mlx.evaluation.harness.adapter import PrefixLM, RequestedAnswer
from tests.support import paper_records
from tests.support.fixtures import Patch, Printed
from tests.support.lm_eval_tasks import offline, write_task

PAIR = ["eval", "--source", "tiny-qwen3-s", "--target", "tiny-qwen3-l"]


@pytest.fixture(autouse=True)
def local(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Patch) -> None:
    offline(tmp_path_factory.getbasetemp(), monkeypatch, "gsm8k")


def test_the_papers_table() -> None:
    """Budgets off and on, modes and counts, copied by hand from the table of the suite."""
    table = {
        "mmlu_pro": (1024, 8192, "off/on", 1400), "arc_challenge": (1024, 8192, "off/on", None),
        "gsm8k": (2048, 2048, "on", 256), "ifeval": (1024, 1024, "off", None),
        "coqa": (128, 2048, "off", 256), "quac": (128, 2048, "off", 256),
        "repliqa": (512, 2048, "off/on", 512), "repliqa_facts": (512, 2048, "off/on", 512),
        "repliqa_all": (512, 2048, "off/on", 512), "xquad": (128, 2048, "off", 256),
        "mt_bench_101": (2048, 2048, "off/on", 256), "multichallenge": (2048, 2048, "off", None),
        "ruler": (2048, 2048, "off/on", 400), "longmemeval": (2048, 2048, "off/on", None),
        "longbench_v2": (512, 4096, "off/on", None),
    }  # fmt: skip
    modes = {(False,): "off", (True,): "on", (False, True): "off/on"}
    found = {row.name: (*row.budget, modes[row.reasoning], row.draw or row.limit) for row in PAPER}
    assert found == table
    assert all(row.shots == 5 and row.limit == 2000 and row.chat is False for row in BASE)
    assert [row.task for row in PAPER if row.judged] == [r.task for r in PAPER if r.task in JUDGED]
    assert benchmark("ruler").lengths == (4096, 8192, 16384, 32768)
    theirs = {"gsm8k", "ifeval", "needles", "arc_challenge", "boolq", "winogrande"}
    assert {row.task for row in (*PAPER, *BASE)} <= {*NAMES} | theirs


def test_what_a_user_chooses() -> None:
    off, on = (set(r.name for r in chosen("paper", mode)) for mode in (False, True))
    assert off - on == {"ifeval", "coqa", "quac", "xquad", "multichallenge"}
    assert on - off == {"gsm8k"}
    assert [r.name for r in chosen("paper: xquad,ruler ,xquad")] == ["xquad", "ruler"]
    assert [r.name for r in chosen("paper:gsm8k")] == ["gsm8k"]  # named, so in any mode
    assert [r.name for r in chosen("base")] == ["arc_challenge", "squad", "boolq", "winogrande"]
    kept, told = suites.without_judge(chosen("paper"), "paper")
    assert "mt_bench_101, multichallenge, longmemeval" in told and "--judge MODEL" in told
    assert not [r for r in kept if r.judged] and len(kept) == 8
    assert suites.without_judge(chosen("base"), "base") == (list(BASE), "")


def items(scores: np.ndarray, groups: Sequence[str], metric: str = "f1") -> list[Scored]:
    """Items of questions (rows) in groups (columns); NaN is no score."""
    return [
        Scored(f"{g}/{q}", g, f"q{q}", {} if np.isnan(s) else {metric: float(s)})
        for q, row in enumerate(scores) for g, s in zip(groups, row, strict=True)
    ]  # fmt: skip


def outcome(metric: str, **found: list[Scored]) -> Outcome:
    tables: Any = {name: {"mean": {}} for name in found}
    return Outcome("task", (metric, "parsed"), 3, 7, tables, found)


@pytest.fixture
def drawn() -> Callable[..., np.ndarray]:
    rng = np.random.default_rng(3)
    return lambda *shape: rng.random(shape)


def test_groups_count_once_whatever_their_size(drawn: Callable[..., np.ndarray]) -> None:
    scores = drawn(7, 3)
    scores[2:, 1] = np.nan
    found = suite_runs.pooled("groups", items(scores, ["a", "b", "c"], "acc"), "acc")
    columns = [c[~np.isnan(c)].astype(np.float64) for c in scores.T]
    errors = [c.std(ddof=1) / np.sqrt(len(c)) for c in columns]
    assert found.value == pytest.approx(np.mean([c.mean() for c in columns]), abs=1e-14)
    assert found.error == pytest.approx(np.sqrt(np.sum(np.square(errors))) / 3, abs=1e-14)
    assert found.value != pytest.approx(np.nanmean(scores))
    assert found.count == 7 + 2 + 7


def test_rungs_are_clustered_by_question(drawn: Callable[..., np.ndarray]) -> None:
    """Against a plain loop; items taken as if they were independent have a smaller error."""
    scores = np.round(drawn(9, 1) + 0.3 * (drawn(9, 4) - 0.5))
    scores[0, 2] = np.nan  # a judge's reply without a verdict
    all_items = items(scores, ["oracle", "8k", "16k", "32k"], "accuracy")
    means = []
    for row in scores:
        known = [s for s in row if s == s]
        means.append(sum(known) / len(known))
    middle = sum(means) / len(means)
    error = (sum((m - middle) ** 2 for m in means) / (len(means) - 1) / len(means)) ** 0.5
    found = suite_runs.pooled("clusters", all_items, "accuracy")
    assert (found.value, found.error) == pytest.approx((middle, error), abs=1e-14)
    assert found.count == 9
    assert suite_runs.pooled("items", all_items, "accuracy").error < 0.7 * error


def test_xquad_is_pooled_and_compared_question_by_question(
    drawn: Callable[..., np.ndarray],
) -> None:
    languages = paper_records.LANGUAGES
    native, other = drawn(6, 11), drawn(6, 11)
    row = benchmark("xquad")
    mixed = items(other, languages)
    random.Random(1).shuffle(mixed)
    found = suite_runs.summarised(
        row, outcome("f1", native=items(native, languages), translated=mixed)
    )
    assert found.task == "xquad" and found.metrics == ("f1", "did")
    assert set(found.tables["translated"]) == {*languages, "mean"}
    mean = found.tables["translated"]["mean"]["f1"]
    assert mean.value == pytest.approx(other.mean())
    assert mean.error == pytest.approx(other.std(ddof=1) / np.sqrt(66))
    gain = other - native
    wanted = gain[:, 1:].mean(axis=1) - gain[:, 0]  # English is the first column
    did = found.tables["translated"]["mean"]["did"]
    assert did.value == pytest.approx(wanted.mean(), abs=1e-14)
    assert did.error == pytest.approx(wanted.std(ddof=1) / np.sqrt(6), abs=1e-14)
    for at, language in enumerate(languages[1:], 1):
        one = found.tables["translated"][language]["did"]
        wanted = gain[:, at] - gain[:, 0]
        assert one.value == pytest.approx(wanted.mean(), abs=1e-14)
        assert one.error == pytest.approx(wanted.std(ddof=1) / np.sqrt(6), abs=1e-14)
    assert found.tables["translated"]["en"]["did"].count == 0
    assert {t["did"].count for t in found.tables["native"].values()} == {0}
    # Paired: what all languages lose alike is no difference.
    shifted = items(native - 0.25, languages)
    same = suite_runs.summarised(row, outcome("f1", native=items(native, languages), x=shifted))
    assert same.tables["x"]["mean"]["did"].value == pytest.approx(0, abs=1e-14)
    assert same.tables["x"]["mean"]["did"].error == pytest.approx(0, abs=1e-14)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return paper_records.write(tmp_path)


@pytest.fixture
def asked(monkeypatch: Patch) -> list[tuple[str, dict[str, Any]]]:
    """A scripted model: what it was asked, with the options; it knows all that is planted."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def answer(self: PrefixLM, context: str, options: dict[str, Any]) -> str:
        seen.append((context, options))
        if number := re.search(r"blue (\d)", context):
            return number[0] if " text " in context and "de text" not in context else "red"
        return "The answer is (B)"

    def answers(
        self: PrefixLM, asked: Sequence[RequestedAnswer]
    ) -> Iterator[tuple[RequestedAnswer, str]]:
        return ((each, answer(self, each.context, each.options)) for each in asked)

    monkeypatch.setattr(PrefixLM, "_answers", answers)
    return seen


@pytest.fixture(scope="module")
def models() -> Any:
    return load(zoo("tiny-qwen3-s")), load(zoo("tiny-qwen3-l"))


def of(
    name: str, models: Any, files: dict[str, str], suite: str = "paper", **options: Any
) -> Outcome:
    judge = options.pop("judge", None)
    hidden = lineup.Condition("hidden", (conditions.hidden(models[1]),), {"hidden": True})
    line = [lineup.native(models[1]), hidden]
    settings = suite_runs.Settings(data=files, **options)
    return suite_runs.run(benchmark(name, suite), models, line, settings, judge=judge)


def test_planted_answers_are_scored(models: Any, files: dict[str, str], asked: list) -> None:
    found = of("mmlu_pro", models, files, limit=28)
    table = found.tables["native"]
    by_category: dict[str, list[float]] = {}
    for item in found.items["native"]:
        by_category.setdefault(item.group, []).append(item.scores["acc"])
    macro = np.mean([np.mean(scores) for scores in by_category.values()])
    assert table["mean"]["acc"].value == pytest.approx(macro) and 0 < macro < 1
    assert found.count == 28 and table["mean"]["parsed"].value == pytest.approx(1)
    right = {r["question_id"]: r["answer"] == "B" for r in paper_records.mmlu_pro()}
    assert all(i.scores["acc"] == right[int(i.item)] for i in found.items["native"])
    assert {options["max_gen_toks"] for _, options in asked} == {1024}
    assert of("arc_challenge", models, files).tables["native"]["mean"]["acc"].value == 1 / 3


def test_modes_have_their_budgets(models: Any, files: dict[str, str], asked: list) -> None:
    of("repliqa", models, files, limit=2, judge=lambda: lambda prompt: "[[yes]]")
    of("repliqa", models, files, limit=2, thinking=True, judge=lambda: lambda p: "[[yes]]")
    closed = "<think>\n\n</think>"
    modes = {(options["max_gen_toks"], closed in context) for context, options in asked}
    assert modes == {(512, True), (2048, False)}
    asked.clear()
    of("gsm8k", models, files, limit=2, max_tokens=9)
    assert {options["max_gen_toks"] for _, options in asked} == {9}
    assert all(context.count("Question:") == 1 for context, _ in asked)  # no example is shown


def test_a_judged_benchmark(models: Any, files: dict[str, str], asked: list) -> None:
    prompts: list[str] = []

    def judge() -> Any:
        return lambda prompt: (
            prompts.append(prompt) or ("[[no]]" if "What number 1" in prompt else "[[yes]]")
        )

    found = of("longmemeval", models, files, lengths=[1024, 1536], judge=judge)
    table = found.tables["native"]
    assert set(table) == {"oracle", "1k", "1536", "mean"}
    assert table["mean"]["accuracy"].value == pytest.approx(2 / 3)
    assert table["mean"]["accuracy"].count == 3  # questions, not answers
    assert table["mean"]["accuracy"].error == pytest.approx(np.std([1, 0, 1], ddof=1) / 3**0.5)
    assert len(prompts) == 2 * 9
    with pytest.raises(ValueError, match="a model judges the answers of longmemeval; give a judge"):
        of("longmemeval", models, files)
    own = {
        "longmemeval/multi-session": "{answer} Answer yes or no only.",
        "longmemeval/temporal-reasoning": "{answer}",
        "longmemeval/abstention": "{answer} [[no]]",
    }
    prompts.clear()
    of("longmemeval", models, files, lengths=[1024], judge=judge, prompts=own)
    assert sum(p.startswith("The answer is (B) Explain briefly") for p in prompts) == 8


def test_needles_are_even_and_grouped_by_length(models: Any) -> None:
    found = of("ruler", models, {}, limit=3, lengths=[260, 300], max_tokens=2)
    groups = [item.group for item in found.items["native"]]
    assert groups.count("260") == groups.count("300") == 4  # three, rounded up to two forms
    assert {item.cluster.split("/")[0] for item in found.items["native"]} == set(
        suites.NEEDLE_FORMS)  # fmt: skip
    assert set(found.tables["native"]) == {"260", "300", "mean"}


def test_base_models_see_examples_in_plain_text(models: Any, tmp_path: Path, asked: list) -> None:
    folder = tmp_path / "squad"
    folder.mkdir()
    for split in ("train", "validation"):
        rows = [{"id": f"{split}{i}", "title": "t", "context": f"{split} says blue {i}.",
                 "question": "What?", "answers": {"text": [f"blue {i}"], "answer_start": [0]}}
                for i in range(7)]  # fmt: skip
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = of("squad", models, {"squad_v1": str(folder)}, suite="base", limit=3)
    assert found.count == 3 and "f1" in found.tables["native"]["mean"]
    context = asked[0][0]
    assert context.count("Question:") == 6 and context.count("train says") == 5
    assert context.count("validation says") == 1 and "<|im_start|>" not in context
    alone = {"squad_v1": str(folder / "train.jsonl")}
    with pytest.raises(ValueError, match="squad_v1 shows 5 examples, and .* a folder with a file"):
        of("squad", models, alone, suite="base", limit=1)


def test_a_local_file_replaces_the_data_of_any_task(
    models: Any, tmp_path: Path, asked: list
) -> None:
    write_task(tmp_path, "far", [{"text": "x"}], dataset_path="some/where",
               output_type="generate_until", doc_to_text="{{text}}", doc_to_target="B",
               num_fewshot=0)  # fmt: skip
    records = tmp_path / "mine.jsonl"
    records.write_text('{"text": "my own words"}\n')
    native = conditions.native(models[1])
    options: dict[str, Any] = {"condition": "x", "include_path": tmp_path}
    running.run(models[1], native, ["far"], data={"far": str(records)}, **options)
    assert "my own words" in asked[0][0]
    for place, told in (("none.jsonl", "none.jsonl cannot be read"), ("empty", "holds no file")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(Exception, match=told):
            data = {"far": str(tmp_path / place)}
            running.run(models[1], native, ["far"], data=data, **options)


def test_a_module_that_a_task_needs_is_missed_before_any_work(monkeypatch: Patch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="IFEval needs langdetect and immutabledict: pip"):
        suite_runs.check_modules(PAPER)
    suite_runs.check_modules(BASE)


def test_the_verb_runs_a_suite(
    tmp_path: Path, files: dict[str, str], asked: list, capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Judge, "_reply", lambda self, prompt: "Rating: [[1996]] or [[yes]]"
                        if "Rating" in prompt else "[[yes]]")  # fmt: skip
    record = tmp_path / "record.json"
    more = [word for name in ("mmlu_pro_written", "xquad_languages", "repliqa", "mt_bench_101")
            for word in ("--task-data", f"{name}={files[name]}")]  # fmt: skip
    assert run([*PAIR, "--suite", "paper:mmlu_pro,xquad,repliqa,mt_bench_101,ruler", *more,
                "--limit", "3", "--lengths", "260", "--max-tokens", "4", "--baselines", "hidden",
                "--out", str(tmp_path / "s.jsonl"), "--json", str(record),
                "--judge", "tiny-qwen3-s"]) == 0  # fmt: skip
    found = json.loads(record.read_text())
    assert found["config"]["suite"].startswith("paper:") and found["config"]["limit"] == 3
    means = found["results"]["means"]
    assert list(means) == ["mmlu_pro", "xquad", "repliqa", "mt_bench_101", "ruler"]
    assert set(means["xquad"]["translated"]["mean"]) == {"f1", "did"}
    assert means["repliqa"]["native"]["mean"]["correct"]["value"] == 1
    assert means["mt_bench_101"]["native"]["mean"]["rating"]["value"] is None  # 1996 is no rating
    printed = capsys.readouterr()
    shown = " ".join(printed.err.split())
    out = " ".join(printed.out.split())
    assert "xquad: f1, 33 items" in out and "xquad (mean), 33 items" in out
    assert out.count("xquad") == 3  # two tables and one of work, not one a language
    assert "mt_bench_101, native: 2 of the judge's replies are no verdict" in shown


def test_what_needs_a_judge_is_said_before_any_work(
    tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    none = ["eval", "--source", "/none", "--target", "/none", "--suite"]
    assert run([*none, "paper"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert "left out: a model judges the answers of repliqa," in told[0]
    assert not list(tmp_path.iterdir())


def test_prompts_are_files_of_a_folder_or_one_json(tmp_path: Path) -> None:
    texts = {
        "mt_bench_101/CM": "{conversation}\n{answer}\nRating: [[n]]",
        "longmemeval/multi-session": "{question} {reference} {answer} So?\nAnswer yes or no only.",
        "multichallenge": "{answer} {criterion} {{verdict: yes or no}}",
    }
    for name, text in texts.items():
        path = tmp_path / "prompts" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "prompts.json").write_text(json.dumps(texts))
    found = read_prompts(tmp_path / "prompts")
    assert found == read_prompts(tmp_path / "prompts.json") and set(found) == set(texts)
    assert found["mt_bench_101/CM"] == texts["mt_bench_101/CM"]
    memory = found["longmemeval/multi-session"]
    assert "yes or no only" not in memory and memory.endswith("[[yes]] or [[no]].")
    assert memory.startswith("{question} {reference} {answer} So? Explain")
    assert found["multichallenge"].startswith(texts["multichallenge"] + " Explain")
