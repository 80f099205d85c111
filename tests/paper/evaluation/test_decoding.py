"""lm-eval's tasks decoded with PyTorch: the numbers of MLX, and the texts of transformers."""

import json
import re
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

import kvlingo_mlx as kv
from benchmarks.paper.commands import run
from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.models.language_model import LanguageModel

pytest.importorskip("lm_eval")
torch = pytest.importorskip("torch")

from lm_eval.api.instance import Instance  # noqa: E402

from benchmarks.paper.evaluation.switching_lm import SwitchingLM  # noqa: E402
from benchmarks.paper.gpu import decoding  # noqa: E402
from benchmarks.paper.gpu.decoding import TorchDecoder  # noqa: E402
from kvlingo_mlx.cuda import model  # noqa: E402
from kvlingo_mlx.cuda.model import TorchModel  # noqa: E402
from kvlingo_mlx.cuda.model import load as load_on_torch  # noqa: E402
from kvlingo_mlx.evaluation.harness.answers import TextToWrite  # noqa: E402
from kvlingo_mlx.evaluation.harness.on_mlx import MLXDecoder  # noqa: E402
from tests.support import tiny  # noqa: E402
from tests.support.fixtures import Patch, Printed  # noqa: E402
from tests.support.recalling import TALKS, recalled  # noqa: E402

NAMES = "tiny-qwen3-s", "tiny-qwen3-l"


Both = dict[str, tuple[Any, Any]]  # by condition: on MLX, with PyTorch
Ends = tuple[tuple[LanguageModel, LanguageModel], tuple[TorchModel, TorchModel]]


@pytest.fixture(scope="module")
def ends() -> Ends:
    mlx = tuple(kv.load(zoo(name)) for name in NAMES)
    return mlx, tuple(load_on_torch(name, dtype="auto", device="cpu") for name in NAMES)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def ways(ends: Ends) -> Both:
    translator = kv.load_translator(TRANSLATORS / "--".join(NAMES))
    control = conditions.shuffled(translator)
    return {
        name: tuple(make(module, *models) for module, models in
                    zip((conditions, decoding), ends, strict=True))
        for name, make in {
            "native": lambda module, source, target: module.native(target),
            "hidden": lambda module, source, target: module.hidden(target),
            "translated": lambda module, *pair: module.translated(*pair, translator),
            "half": lambda module, *pair: module.translated(*pair, translator, 2),
            "shuffled": lambda module, *pair: module.translated(*pair, control),
        }.items()
    }  # fmt: skip


@pytest.fixture(autouse=True)
def marked(monkeypatch: Patch) -> None:
    """The question of a dialogue is its last turn."""
    begin = SwitchingLM.__init__
    at = {"dialogues": "<|im_start|>user\n"}
    monkeypatch.setattr(SwitchingLM, "__init__", partialmethod(begin, question_at=at))


def prompts(model: Any, thinking: bool = False) -> list[str]:
    more: dict[str, Any] = {"tokenize": False, "enable_thinking": thinking}
    return [
        model.tokenizer.apply_chat_template(list(t.messages), add_generation_prompt=True, **more)
        for t in TALKS
    ]


def both(
    ends: Ends, made: tuple[Any, Any], point: str = "prompt"
) -> tuple[SwitchingLM, SwitchingLM]:
    found = []
    for (source, target), make, kind, module in zip(
        ends, made, (MLXDecoder, TorchDecoder), (conditions, decoding), strict=True
    ):
        decoder: Any = kind  # the two take models of their own
        writer = decoder(source, module.native(source), 5) if point == "trace" else None
        model = SwitchingLM(decoder(target, make, 5), condition="x", point=point, writer=writer)
        found.append(model)
    return found[0], found[1]


def request(kind: str, *arguments: Any) -> Instance:
    return Instance(kind, {}, arguments, 0, metadata=("dialogues", 0, 1))


@pytest.mark.parametrize("point", ["prompt", "context"])
def test_scores_are_those_of_mlx(ends: Ends, ways: Both, point: str) -> None:
    requests = []
    for talk, context in zip(TALKS[:5], prompts(ends[0][1]), strict=False):
        for said in (talk.asked[0].say(dialogues.ANSWER), talk.asked[-1].say(dialogues.ANSWER)):
            requests.append(request("loglikelihood", context, said))
    seen = {}
    for name, made in ways.items():
        ours, theirs = (lm.loglikelihood(requests) for lm in both(ends, made, point))
        scores = [[score for score, _ in found] for found in (ours, theirs)]
        assert scores[1] == pytest.approx(scores[0], abs=1e-3), name
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
        seen[name] = scores[1]
    assert len({tuple(scores) for scores in seen.values()}) == len(ways)
    apart = max(abs(a - b) for a, b in zip(seen["translated"], seen["half"], strict=True))
    assert apart > 1e-2  # far above what the two runtimes differ by


def test_answers_are_those_of_mlx(ends: Ends, ways: Both) -> None:
    """After the source's reasoning; greedy choices may differ where two are a tie."""
    contexts = prompts(ends[0][1], thinking=True)
    requests = [request("generate_until", c, {"until": [], "max_gen_toks": 30}) for c in contexts]
    recall = {}
    for name, made in ways.items():
        ours, theirs = (lm.generate_until(requests) for lm in both(ends, made, "trace"))
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        assert same >= (15 if name in ("native", "translated", "half") else 12), name
        recall[name] = recalled(theirs)
    assert min(recall["native"], recall["translated"], recall["half"]) > 0.8
    assert max(recall["hidden"], recall["shuffled"]) < 0.3


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_families_write_together_what_transformers_writes(tmp_path: Path, kind: str) -> None:
    """Rows are padded in front; those of a model with windows are written one at a time."""
    heads, dim = (4, 16) if kind == "deepseek_v3" else (1, 32)
    shape = {"layers": 4, "kv_heads": heads, "head_dim": dim}
    folder = tiny.write_tiny_model(tmp_path / kind, kind, seed=1, **shape)
    theirs = model.load(str(folder), dtype=torch.float32)
    theirs.model.generation_config.eos_token_id = None
    decoder = TorchDecoder(theirs, decoding.native(theirs), 3)
    decoder.__dict__["_ends"] = set()  # random models end their turns anywhere
    assert decoder._size == (1 if kind == "gemma3_text" else 3)
    torch.manual_seed(0)
    texts = [torch.randint(3, 60, (n,)).tolist() for n in (40, 9, 25, 12)]
    taken: dict[int, list[int]] = {n: [] for n in range(len(texts))}
    wanted = [
        TextToWrite(tuple(t), 12 + 4 * n, lambda t, n=n: taken[n].append(t))  # type: ignore[misc]
        for n, t in enumerate(texts)
    ]
    assert sorted(map(id, decoder.write(wanted))) == sorted(map(id, wanted))
    for n, tokens in enumerate(texts):
        ids = torch.tensor([tokens])
        written = theirs.model.generate(ids, max_new_tokens=12 + 4 * n, do_sample=False)
        assert taken[n] == written[0, len(tokens) :].tolist(), n


def test_the_verb_on_a_device(tmp_path: Path, task_folder: Path, capsys: Printed) -> None:
    pair = ["eval", "--source", NAMES[0], "--target", NAMES[1], "--include-path", str(task_folder),
            "--tasks", "tiny_answers", "--limit", "3", "--max-tokens", "6", "--thinking",
            "--switch-at", "prompt,trace"]  # fmt: skip
    means = []
    for device in ("mlx", "cpu"):
        record, out = tmp_path / f"{device}.json", str(tmp_path / "scores.jsonl")
        assert run([*pair, "--device", device, "--out", out, "--json", str(record)]) == 0
        means.append(json.loads(record.read_text())["results"]["means"])
    assert means[0].keys() == means[1].keys()
    assert means[0]["tiny_answers"].keys() == means[1]["tiny_answers"].keys()
    assert len(means[1]["tiny_answers"]) == 8
    for options, told in (
        (
            ["--tasks", "recall"],
            "--device cpu decodes lm-eval's tasks .*take recall out of --tasks",
        ),
        (["--baselines", "text"], "take text out of --baselines, or use --device mlx"),
        (["--compare"], "--compare has no effect with --device cpu, which runs PyTorch"),
        (["--device", "tpu"], "--device is 'tpu'; it must be mlx, cuda, cuda:N or cpu"),
    ):
        capsys.readouterr()
        base = pair[:5]
        tasks = [] if "--tasks" in options else ["--tasks", "quac"]
        assert run([*base, *tasks, "--device", "cpu", *options]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert re.search(told, error), error
