"""lm-eval's tasks behind any condition; with nothing translated, mlx-lm's own evaluation."""

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np
import pytest
import yaml
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from benchmarks.paper import commands as verbs
from benchmarks.paper.tasks import ADDED, NAMES
from kvlingo_mlx.caches import memory
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.errors import KVLingoError, MissingExtraError
from kvlingo_mlx.evaluation import conditions, lineup
from kvlingo_mlx.evaluation.harness import benchmarks, running
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support.fixtures import Models, Pair, Patch
from tests.support.identity import identity_of
from tests.support.lm_eval_tasks import offline
from tests.support.recalling import MOST, TALKS, Makers, alone, asked, prompt, recalled, same

lm_eval = pytest.importorskip("lm_eval")

import datasets  # noqa: E402
import lm_eval.evaluator as reference_harness  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from mlx_lm.evaluate import MLXLM  # noqa: E402

from kvlingo_mlx.evaluation.harness.adapter import PrefixLM  # noqa: E402
from kvlingo_mlx.evaluation.harness.answers import Ends  # noqa: E402
from kvlingo_mlx.evaluation.harness.on_mlx import MLXDecoder  # noqa: E402

KINDS = ("tiny_choice", "tiny_words", "tiny_answers", "tiny_texts")


@pytest.fixture(autouse=True)
def local(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Patch) -> None:
    offline(tmp_path_factory.getbasetemp(), monkeypatch)
    monkeypatch.setattr(reference_harness, "add_env_info", lambda storage: None)  # slow


class LastTokenApart(MLXLM):
    """mlx-lm's model, which runs a prompt's last token by itself, as its ``generate`` does.

    Rounding depends on how many tokens are run at once, so this makes equality exact.
    """

    def _process_prompt(self, prompt: Sequence[int], step_size: int = 2048) -> Any:
        tokens = mx.array(prompt)[None]
        cache = make_prompt_cache(self._model)
        if tokens.shape[1] > 1:
            self._model(tokens[:, :-1], cache=cache)
        logits = self._model(tokens[:, -1:], cache=cache)
        return nn.log_softmax(logits[:, -1, :].astype(mx.float32)), cache


def reference(model: MLXLM, folder: Path, tasks: Sequence[str], **options: Any) -> dict[str, Any]:
    """What mlx-lm's own ``evaluate`` does with a model it has loaded."""
    manager = TaskManager(include_path=folder, include_defaults=False)
    return reference_harness.simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0,
        apply_chat_template=model.use_chat_template, **options,
    )  # fmt: skip


def responses(found: dict[str, Any], task: str) -> list[list[Any]]:
    """Each item's responses: ours, or those lm-eval logged for the reference."""
    if "tasks" in found:
        return [item["responses"] for item in found["tasks"][task]["items"]]
    return [[one for request in sample["resps"] for one in request]
            for sample in found["samples"][task]]  # fmt: skip


def as_lists(values: list[list[Any]]) -> list[list[Any]]:
    return [[list(map(float, v)) if isinstance(v, tuple) else v for v in row] for row in values]


class Recorded:
    """A model's own caches, and the prefixes for which they were made."""

    def __init__(self, model: LanguageModel) -> None:
        self.native, self.tokenizer = conditions.native(model), model.tokenizer
        self.lengths, self.texts = list[int](), list[str]()

    def __call__(self, tokens: Sequence[int]) -> list:
        self.lengths.append(len(tokens))
        self.texts.append(self.tokenizer.decode(tokens))
        return self.native(tokens)


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(models: Models, task_folder: Path) -> Run:
    """Tasks of "dense" behind a condition, by itself the native one."""

    def run(*tasks: str, make: conditions.CacheMaker | None = None, **options: Any) -> dict:
        model = models["dense"]
        own: dict[str, Any] = {"condition": "x", "include_path": task_folder, "added": ADDED}
        return running.run(model, make or conditions.native(model), tasks, **own | options)

    return run


@pytest.mark.parametrize("name, chat", [("dense", False), ("moe", True)])
def test_native_and_identity_equal_mlx_lm(
    models: Models, task_folder: Path, name: str, chat: bool
) -> None:
    model = models[name]
    own = LastTokenApart(str(model.path), batch_size=1, use_chat_template=chat)
    wanted = reference(own, task_folder, KINDS)
    identity = conditions.translated(model, model, identity_of(model))
    for make in (conditions.native(model), identity):
        found = running.run(
            model, make, KINDS, condition="x", include_path=task_folder, apply_chat_template=chat
        )
        for task in KINDS:
            assert responses(found, task) == as_lists(responses(wanted, task))
            for metric, values in found["tasks"][task]["metrics"].items():
                assert values["value"] == wanted["results"][task][f"{metric},none"]


def test_controls_differ(models: Models, run: Run) -> None:
    """The negative control: were prefixes not read through the condition, these would agree."""
    model = models["dense"]
    fitted = kv.fit(model, model, [{"text": "one two three four five " * 9}], ridge=0.0)
    mixed = conditions.translated(model, model, conditions.shuffled(fitted))
    native, hidden, shuffled = (
        run(*KINDS, make=make) for make in (None, conditions.hidden(model), mixed)
    )
    for task in ("tiny_choice", "tiny_words", "tiny_answers"):
        for control in (hidden, shuffled):
            pairs = zip(responses(native, task), responses(control, task), strict=True)
            assert sum(own != other for own, other in pairs) >= 5
    assert responses(native, "tiny_texts") == responses(hidden, "tiny_texts")  # no prefix there


def test_long_contexts_lose_their_front_as_in_mlx_lm(
    models: Models, task_folder: Path, run: Run
) -> None:
    model, tasks = models["dense"], ("tiny_choice", "tiny_words")
    own = LastTokenApart(str(model.path), max_tokens=24, use_chat_template=False)
    wanted = reference(own, task_folder, tasks)
    make = Recorded(model)
    options: dict[str, Any] = {"make": make, "apply_chat_template": False}
    found = run(*tasks, "tiny_answers", max_length=24, **options)
    whole = run(*tasks, **options)
    for task in tasks:
        assert responses(found, task) == as_lists(responses(wanted, task))
        assert responses(found, task) != responses(whole, task)
    assert max(make.lengths[:17]) == 24 < max(make.lengths[17:])
    item = found["tasks"]["tiny_answers"]["items"][-1]
    text = json.loads((task_folder / "tiny_answers.jsonl").read_text().splitlines()[-1])["text"]
    assert item["prefix_tokens"] == len(model.tokenizer.encode(text)) > 24


@pytest.mark.parametrize(
    "opened, text, answer, stopped, untraced",
    [
        (False, "four\n\nQ: and?", "four", True, "four"),
        (False, "fourQ: \n\n", "four", True, "four"),
        (False, "<think>\nso\n\nQ: hm</think>\n\nfour\n\nQ:", "\n\nfour", True, "\n\nfour"),
        (True, "so\n\nQ: hm</think>four", "four", False, "four"),
        (False, "<think>\nso\n\nthen", "<think>\nso", False, ""),  # a trace that never ends
        (True, "so", "<think>so", False, ""),
        (False, "a</think>b\n\nc", "b", True, "b"),
    ],
)
def test_where_answers_end(
    models: Models, opened: bool, text: str, answer: str, stopped: bool, untraced: str
) -> None:
    found = Ends(["\n\n", "Q:"], "<think>", "</think>", opened)
    assert found.cut(text) == answer
    assert found.stopped(text) is stopped
    lm = PrefixLM(MLXDecoder(models["dense"], conditions.native(models["dense"])), condition="x")
    assert lm.without_trace(answer) == untraced


def test_generation_stops_at_a_stop_string(models: Models, monkeypatch: Patch) -> None:
    """Not at its budget: with the stop string that stands first in a long answer."""
    model = models["dense"]
    decoder = MLXDecoder(model, conditions.native(model))
    lm = PrefixLM(decoder, condition="x", use_chat_template=False)

    def write(stops: str | list[str]) -> str:
        arguments = "the hero", {"until": stops, "max_gen_toks": 60}
        return lm.generate_until([Instance("generate_until", {}, arguments, 0)])[0]

    text = write([])
    stop = text[5:8]
    steps: list[int] = []
    forward = type(model.model).__call__
    monkeypatch.setattr(
        type(model.model), "__call__",
        lambda self, *args, **kw: (steps.append(1), forward(self, *args, **kw))[1],
    )  # fmt: skip
    assert write(stop) == text[: text.find(stop)]
    assert len(steps) < 25


def test_thinking_switch_and_budget(models: Models, run: Run) -> None:
    make = Recorded(models["dense"])
    options: dict[str, Any] = {"make": make, "limit": 1}
    before = MLXLM.apply_chat_template
    for thinking in (False, True):
        found = run("tiny_answers", enable_thinking=thinking, max_gen_toks=3, **options)
        (text,) = responses(found, "tiny_answers")[0]
        assert len(make.tokenizer.encode(text)) <= 3
    run("tiny_answers", apply_chat_template=False, **options)
    assert make.texts[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert make.texts[1].endswith("<|im_start|>assistant\n")
    assert "<|im_start|>" not in make.texts[2]
    assert MLXLM.apply_chat_template is before


def test_one_cache_serves_all_continuations(models: Models, run: Run) -> None:
    make, steps = Recorded(models["dense"]), []
    progress = lambda done, total: steps.append((done, total))  # noqa: E731
    run("tiny_choice", "tiny_words", make=make, progress=progress)
    assert len(make.lengths) == 6 + 5  # two contexts of tiny_words are the same
    assert steps[-1] == (11, 11) and [done for done, _ in steps] == sorted(d for d, _ in steps)


def test_limit_and_examples(models: Models, run: Run) -> None:
    found = run("tiny_choice", limit=2)
    assert [item["id"] for item in found["tasks"]["tiny_choice"]["items"]] == [0, 1]
    make = Recorded(models["dense"])
    for seed in (3, 3, 4):
        run("tiny_choice", make=make, limit=2, num_fewshot=2, seed=seed)
    seen = make.texts
    assert seen[:2] == seen[2:4] != seen[4:]
    assert seen[0].count("Answer:") == 3 and seen[0].count("<|im_start|>assistant") == 3


def test_interrupted_runs_go_on(models: Models, run: Run, tmp_path: Path) -> None:
    recorded, file = Recorded(models["dense"]), tmp_path / "responses.jsonl"
    calls = recorded.lengths

    def again(stop: int | None = None, batch_size: int = 8, **options: Any) -> dict[str, Any]:
        """``batch_size`` answers at once."""
        calls.clear()

        def make(tokens: Sequence[int]) -> list:
            if len(calls) == stop:
                raise KeyboardInterrupt
            return recorded(tokens)

        return run(*KINDS, make=make, decode=partial(MLXDecoder, batch_size=batch_size), **options)

    whole = again()
    count = len(calls)
    assert count == 6 + 5 + 5
    for stop, kept in ((8, 8), (6, 14)):  # within log-likelihoods; as the fourth answer begins
        with pytest.raises(KeyboardInterrupt):
            again(stop=stop, responses=file, batch_size=1)
        assert len(file.read_text().splitlines()) == kept
    with file.open("a") as torn:  # killed while writing
        torn.write('{"key": "abc", "respo')
    for made in (count - 14, 0):
        assert again(responses=file) == whole and len(calls) == made
    changes: tuple[tuple[dict[str, Any], int], ...] = (
        ({"condition": "two"}, count),
        ({"max_gen_toks": 2}, 5),  # the generated ones alone
        ({"apply_chat_template": False}, count),
    )
    for options, made in changes:
        again(responses=file, **options)
        assert len(calls) == made
    file.write_text("my notes\n")
    with pytest.raises(ValueError, match="line 1: not a line of kept responses"):
        again(responses=file)


def test_numbers_that_are_none_are_refused(models: Models, run: Run) -> None:
    model = models["dense"]

    def make(tokens: Sequence[int]) -> list:
        cache = conditions.native(model)(tokens)
        cache[0].values = cache[0].values * float("nan")
        return cache

    for task in ("tiny_words", "tiny_answers"):
        with pytest.raises(KVLingoError, match="is not a number"):
            run(task, make=make)


def test_lm_eval_is_missing(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtraError, match=r'pip install "kvlingo-mlx\[eval\]"'):
        run("tiny_choice")


def test_no_such_task(run: Run, tmp_path: Path, monkeypatch: Patch) -> None:
    """Close matches come from lm-eval's own tasks, here three instead of fourteen thousand."""
    for name in ("gsm8k", "gsm8k_cot", "hellaswag"):
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n")
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "manager.py"))
    for name, said in (
        ("gsm8", r"no task gsm8; did you mean gsm8k or gsm8k_cot\?"),
        ("longmemevl", r"did you mean longmemeval or longmemeval_rungs\?"),
        ("tiny_choise", "did you mean tiny_choice"),
        ("xyzzy", "no task xyzzy; see lm-eval's list"),
    ):
        with pytest.raises(ValueError, match=said):
            run("tiny_choice", name)


def test_no_network(run: Run, tmp_path: Path, monkeypatch: Patch) -> None:
    """Nobody is waited for: no connection is tried again after a pause."""
    paused: list[float] = []
    monkeypatch.setattr(time, "sleep", paused.append)
    (tmp_path / "far.yaml").write_text(
        yaml.safe_dump({"task": "far", "dataset_path": "some/where", "test_split": "test",
                        "doc_to_text": "a", "doc_to_target": "b"})
    )  # fmt: skip
    for name in NAMES:
        with pytest.raises(KVLingoError, match=f"the data of {name} cannot be had .*offline.*"
                                               f"give a local file for {name}"):  # fmt: skip
            run(name)
    with pytest.raises(
        KVLingoError, match="the data of far cannot be had .*file for far, or a fol"
    ):
        run("far", include_path=tmp_path)
    assert paused == []


def test_lengths_that_were_not_asked_have_no_score() -> None:
    """lm-eval's niah gives them -1; another measure may be -1."""
    given = {"4096,none": -1, "8192,none": 0.5, "mcc,none": -1.0, "mcc_stderr,none": 0.1}
    assert running._scored(given) == {"8192": 0.5, "mcc": -1.0}


@pytest.mark.parametrize(
    "code, message",
    [
        ("import nosuchmodule.part", "needy needs nosuchmodule.*pip install nosuchmodule$"),
        ("raise ImportError('Please install `x`.')", "needy cannot be loaded: Please install `x`."),
    ],
)
def test_a_tasks_own_module_is_missing(run: Run, tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "code.py").write_text(f"{code}\n")
    (tmp_path / "needy.yaml").write_text("task: needy\nprocess_docs: !function code.docs\n")
    with pytest.raises(MissingExtraError, match=message):
        run("needy", include_path=tmp_path)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
        ({"data": {"gsm8k": "x.jsonl"}}, "given for gsm8k, which is none of the tasks"),
        ({"include_path": "/no/such/folder"}, "no folder of task files"),
    ],
)
def test_bad_arguments(run: Run, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("tiny_choice", **options)
    with pytest.raises(ValueError, match="give a list of names"):
        run()


def test_nothing_is_left_behind(run: Run, capfd: pytest.CaptureFixture) -> None:
    import lm_eval.api.task as noisy

    bar, level = noisy.tqdm, logging.getLogger("lm_eval").level
    hidden = datasets.are_progress_bars_disabled()
    capfd.readouterr()
    run("tiny_choice", limit=1, num_fewshot=1)
    assert capfd.readouterr() == ("", "")
    assert noisy.tqdm is bar and logging.getLogger("lm_eval").level == level
    assert datasets.are_progress_bars_disabled() == hidden


# ---- several answers at once; the references are mlx-lm's own decoding, one at a time ----------


def lm(model: LanguageModel, make: conditions.CacheMaker, size: int = 5, **more: Any) -> PrefixLM:
    return PrefixLM(MLXDecoder(model, make, size), condition="x", **more)


def test_answers_written_together_are_those_written_alone(pair: Pair, makers: Makers) -> None:
    """Prompts of 30 to 500 tokens, 5 at once; greedy choices may differ where two are a tie."""
    target, recall = pair[1], {}
    contexts = [prompt(target, talk) for talk in TALKS]
    tokens = [target.tokenizer.encode(c, add_special_tokens=False) for c in contexts]
    for name, make in makers.items():
        found = lm(target, make).generate_until(asked(contexts))
        recall[name] = recalled(found)
        if name in ("native", "translated"):  # the others are controls
            wanted = [alone(target, t, make(t)) for t in tokens]
            assert same(found, wanted) >= 15 / 16, name
            assert abs(recall[name] - recalled(wanted)) <= 1 / 16
    assert min(recall["native"], recall["translated"]) > 0.8
    assert max(recall["hidden"], recall["shuffled"]) < 0.3


def test_each_ends_at_its_own_place(pair: Pair, makers: Makers) -> None:
    """Stop strings and budgets of its own, beside others that go on."""
    target, make = pair[1], makers["native"]
    contexts = [prompt(target, talk) for talk in TALKS[:6]]
    whole = lm(target, make).generate_until(asked(contexts))
    requests = []
    for n, (context, answer) in enumerate(zip(contexts, whole, strict=True)):
        until = [answer[8:11]] if n % 2 else []
        requests += asked([context], until, most=3 + n if n % 3 == 0 else MOST)
    found = lm(target, make).generate_until(requests)
    for n, (answer, text) in enumerate(zip(whole, found, strict=True)):
        if n % 3 == 0:
            ids = target.tokenizer.encode(answer, add_special_tokens=False)[: 3 + n]
            answer = target.tokenizer.decode(ids)
        assert text == (answer[: answer.find(whole[n][8:11])] if n % 2 else answer)
    assert len(set(map(len, found))) >= 3


def counted(decoder: MLXDecoder, seen: list[int]) -> MLXDecoder:
    """The same, with the number of answers that are in hand at each look for room."""
    fits = decoder._fits

    def look(wanted: Any, running: dict) -> bool:
        seen.append(len(running))
        return fits(wanted, running)

    decoder._fits = look  # type: ignore[method-assign]
    return decoder


def test_fewer_at_once_where_memory_is_short(
    pair: Pair, makers: Makers, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, make = pair[1], makers["translated"]
    contexts = [prompt(target, talk) for talk in TALKS[:6]]
    most: dict[str, int] = {}
    answers = {}
    longest = max(len(target.tokenizer.encode(c)) for c in contexts) + MOST
    for name, free in (("all", None), ("two", 3), ("one", 0)):
        # Two together need three: the joined caches, and the copy of those that were there.
        room = None if free is None else free * memory.cache_bytes(target, longest)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "free", lambda room=room: room)
            patch.setattr(memory, "check_caches", lambda *args: None)
            patch.setattr(conditions, "check_caches", lambda *args: None)
            seen: list[int] = []
            decoder = counted(MLXDecoder(target, make, 4), seen)
            answers[name] = PrefixLM(decoder, condition="x").generate_until(asked(contexts))
        most[name] = max(seen)
    # At a look, those in hand are one fewer than are written where the next one fits.
    assert most == {"all": 4, "two": 2, "one": 1}
    assert answers["all"] == answers["two"] == answers["one"]


# ---- across a line-up, and in the verb -----------------------------------------------------------

PAIR = ["eval", "--source", "tiny-qwen3-s", "--target", "tiny-qwen3-l"]


def test_seeds_are_averaged_item_by_item_and_groups_weighted(
    models: Models, task_folder: Path, monkeypatch: Patch
) -> None:
    # A group may name tasks of lm-eval's own, so all of them would be read; this one names none.
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(task_folder / "none" / "manager.py"))
    model, names = models["dense"], ["tiny_group", "tiny_words"]
    seeds = (conditions.native(model), conditions.hidden(model))
    line = [lineup.native(model), lineup.Condition("two", seeds)]
    found = benchmarks.evaluate(model, names, line, include_path=task_folder)
    assert [o.task for o in found] == ["tiny_choice", "tiny_other", "tiny_words", "tiny_group"]
    single = [
        running.run(model, make, names, condition=str(i), include_path=task_folder)["tasks"]
        for i, make in enumerate(seeds)
    ]
    tables = {o.task: o.tables["two"]["mean"] for o in found}
    squares, values, differ = [], [], []
    for name in ("tiny_choice", "tiny_other"):
        runs = [[item["scores"]["acc_norm"] for item in run[name]["items"]] for run in single]
        differ.append(runs[0] != runs[1])
        both = np.mean(runs, axis=0)
        values.append(both.mean())
        squares.append((both.std(ddof=1) / np.sqrt(len(both))) ** 2)
        assert tables[name]["acc_norm"].value == pytest.approx(values[-1])
        assert tables[name]["acc_norm"].error == pytest.approx(np.sqrt(squares[-1]))
    assert any(differ)
    assert tables["tiny_group"]["acc_norm"].value == pytest.approx(np.mean(values))
    assert tables["tiny_group"]["acc_norm"].error == pytest.approx(np.sqrt(sum(squares)) / 2)
    # A perplexity is no mean over items: the seeds' mean, without an error.
    two = [run["tiny_words"]["metrics"]["perplexity"]["value"] for run in single]
    assert tables["tiny_words"]["perplexity"].value == pytest.approx(np.mean(two))
    assert np.isnan(tables["tiny_words"]["perplexity"].error)
    assert found[0].count == len(single[0]["tiny_choice"]["items"])
    # Each seed alone, and the group of their tasks.
    for outcome in found[:2]:
        alone = [run[outcome.task]["metrics"]["acc_norm"] for run in single]
        each = [table["mean"]["acc_norm"] for table in outcome.seeds["two"]]
        assert [m.value for m in each] == pytest.approx([one["value"] for one in alone])
        assert [m.error for m in each] == pytest.approx([one["error"] for one in alone])
    whole = [table["mean"]["acc_norm"].value for table in found[3].seeds["two"]]
    parts = [[t["mean"]["acc_norm"].value for t in o.seeds["two"]] for o in found[:2]]
    assert whole == pytest.approx(np.mean(parts, axis=0)) and list(found[3].seeds) == ["two"]


def evaluated(tmp_path: Path, *more: str) -> dict[str, Any]:
    record = tmp_path / "record.json"
    record.unlink(missing_ok=True)
    out = ["--out", str(tmp_path / "scores.jsonl"), "--json", str(record)]
    assert verbs.run([*PAIR, *out, *more]) == 0
    return json.loads(record.read_text())["results"]


def test_the_verb_runs_them_and_resumes(tmp_path: Path, task_folder: Path) -> None:
    options = ["--tasks", "recall,tiny_choice,tiny_answers", "--include-path", str(task_folder),
               "--limit", "3", "--baselines", "hidden", "--num-shots", "0",
               "--no-apply-chat-template", "--max-tokens", "4"]  # fmt: skip
    found = evaluated(tmp_path, *options)
    assert set(found["means"]) == {"recall", "tiny_choice", "tiny_answers"}
    assert set(found["means"]["tiny_choice"]) == {"native", "translated", "prefix hidden"}
    target = load(zoo("tiny-qwen3-l"))
    own = running.run(
        target, conditions.native(target), ["tiny_choice"], condition="x", limit=3,
        include_path=task_folder, apply_chat_template=False,
    )["tasks"]["tiny_choice"]  # fmt: skip
    means = found["means"]["tiny_choice"]["native"]["mean"]
    assert means["acc"] == pytest.approx(own["metrics"]["acc"])
    items = found["items"]["tiny_choice"]["native"]
    assert [i["scores"]["acc"] for i in items] == [i["scores"]["acc"] for i in own["items"]]
    kept = tmp_path / "scores.responses.jsonl"
    before = kept.read_text()
    assert len(before.splitlines()) == 3 * (3 + 3)  # conditions, contexts of both tasks
    assert evaluated(tmp_path, *options)["means"] == found["means"]
    assert kept.read_text() == before
