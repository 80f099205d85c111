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

import pytest
import yaml
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from benchmarks.paper.tasks import ADDED, NAMES
from kvlingo_mlx.errors import KVLingoError, MissingExtraError
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.harness import running
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support.fixtures import Models, Patch
from tests.support.identity import identity_of
from tests.support.lm_eval_tasks import offline

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
    "opened, text, answer, stopped",
    [
        (False, "four\n\nQ: and?", "four", True),
        (False, "fourQ: \n\n", "four", True),
        (False, "<think>\nso\n\nQ: hm</think>\n\nfour\n\nmore", "\n\nfour", True),
        (True, "so\n\nQ: hm</think>four", "four", False),
        (False, "<think>\nso\n\nthen", "<think>\nso", False),
        (False, "a</think>b\n\nc", "b", True),
    ],
)
def test_where_answers_end(opened: bool, text: str, answer: str, stopped: bool) -> None:
    found = Ends(["\n\n", "Q:"], "<think>", "</think>", opened)
    assert found.cut(text) == answer
    assert found.stopped(text) is stopped


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


def test_a_trace_that_never_ends_is_no_answer(models: Models) -> None:
    lm = PrefixLM(MLXDecoder(models["dense"], conditions.native(models["dense"])), condition="x")
    for opened, written, answer in (
        (False, "<think>\nso", ""), (True, "so", ""), (False, "four", "four"),
        (False, "<think>\nso</think>four", "four"), (True, "so</think>four", "four"),
    ):  # fmt: skip
        response = Ends([], "<think>", "</think>", opened).cut(written)
        assert lm.without_trace(response) == answer


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


def test_no_network(run: Run, task_folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
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


def test_a_tasks_own_module_is_missing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("import nosuchmodule.part\n")
    (tmp_path / "needy.yaml").write_text("task: needy\nprocess_docs: !function code.docs\n")
    with pytest.raises(MissingExtraError, match="needy needs nosuchmodule.*pip install nosuch"):
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
