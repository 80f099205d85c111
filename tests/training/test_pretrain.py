"""Pretraining by its command: resumed, shared by processes, and the folder that it ends with."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.embedded.dialogues import for_fitting
from kvlingo_mlx.group import Group
from kvlingo_mlx.loading.models import load
from tests.support import ROOT, tool

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = zoo("tiny-qwen3-s")


@pytest.fixture(scope="module")
def pretrain() -> ModuleType:
    return tool("pretrain")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums come out alike, and the count of threads as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo's tokenizer is not trained anew."""
    monkeypatch.setattr(
        tool("pretraining.curriculum"), "train_tokenizer",
        lambda chat: transformers.AutoTokenizer.from_pretrained(SMALL),
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "talks.jsonl"
    talks: list[dict[str, Any]] = [{"messages": d.conversation()} for d in for_fitting(20)]
    talks += [{"text": f"Sentence {n} of a plain text. " * (n % 7)} for n in range(20)]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return path


def words(data: Path, out: Path, *more: str) -> list[str]:
    return [
        "tiny-scratch-s", "--data", str(data), "--tokenizer", str(SMALL), "--out", str(out),
        "--batch", "4", "--length", "48", "--steps", "6", "--warmup", "2", "--threads", "1", *more,
    ]  # fmt: skip


def training(pretrain: ModuleType, asked: list[str]) -> Any:
    given = pretrain.parsed(asked)
    return pretrain.training_of(given, pretrain.plan_of(given), Group())


def weights(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("learns", ["text", "dialogues"])
def test_a_run_goes_on_to_the_bit(
    pretrain: ModuleType, data: Path, tmp_path: Path, quick: None,
    monkeypatch: pytest.MonkeyPatch, learns: str,
) -> None:  # fmt: skip
    """Killed between two states, told to stop, and resumed, it ends as one that ran through."""
    monkeypatch.setattr(tool("pretraining.training"), "KEEP_EVERY", 2)
    monkeypatch.setattr(tool("pretraining.training"), "LOG_EVERY", 1)
    asked = ["tiny-scratch-s", "--out", str(tmp_path / "whole"), "--steps", "6"]
    if learns == "text":
        asked = words(data, tmp_path / "whole")
    whole = training(pretrain, asked)
    losses = list(whole.run("whole"))
    assert len({*losses}) == 6
    assert learns == "dialogues" or losses[-1] < losses[0]  # drills are learnt later
    asked[asked.index(str(tmp_path / "whole"))] = str(tmp_path / "stopped")
    killed = training(pretrain, asked).run("killed")
    assert [next(killed) for _ in range(4)] == losses[:4]  # step 4 is done, 2 is kept
    killed.close()
    stopped = training(pretrain, asked)
    with pytest.raises(KeyboardInterrupt):
        for loss in stopped.run("stopped"):
            assert loss == losses[2]
            os.kill(os.getpid(), signal.SIGINT)
    again = training(pretrain, asked)
    assert list(again.run("again")) == losses[3:]
    assert same(weights(whole.model), weights(again.model))
    log = (tmp_path / "stopped.partial" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2, 3, 4, 5, 6]
    assert whole.state["tokens"] == again.state["tokens"] > 6 * 100


def test_a_step_is_adamws_on_the_mean_over_the_batch(
    pretrain: ModuleType, data: Path, tmp_path: Path
) -> None:
    """The gradient against cross-entropy and z-loss of the whole batch at once, in float64."""
    run = training(pretrain, words(data, tmp_path / "out", "--micro", "3"))
    reference = training(pretrain, words(data, tmp_path / "out"))
    ids = torch.tensor([lane.next() for lane in reference.lessons.lanes.values()])
    model = reference.model.double()
    logits = model(ids, use_cache=False).logits[:, :-1]
    ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    (ce + 1e-4 * torch.logsumexp(logits, -1).square().mean()).backward()
    loss, tokens = run.lessons.gradient(0)
    assert (loss, tokens) == (pytest.approx(ce.item(), rel=1e-5), 4 * 48)
    for name, parameter in run.model.named_parameters():
        expected = model.get_parameter(name).grad
        error = (parameter.grad - expected).norm() / expected.norm()
        assert error < 1e-4, name


def test_two_processes_are_one(pretrain: ModuleType, data: Path, tmp_path: Path) -> None:
    """Under torchrun, by the command: the same batches, so the same losses and weights."""
    script = str(ROOT / "tools" / "pretrain.py")
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ranks += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    hidden = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    clean = {k: v for k, v in os.environ.items() if k not in hidden}
    one_asked, two_asked = (
        words(data, tmp_path / name, "--steps", "3", "--lr", "1e-4") for name in ("one", "two")
    )
    given = pretrain.parsed(one_asked)
    plan = pretrain.plan_of(given)
    alone = pretrain.training_of(given, plan, Group())
    list(alone.run("one"))
    pretrain.finish(alone, given, plan)
    done = subprocess.run(
        [sys.executable, *ranks, script, *two_asked], capture_output=True, text=True, env=clean,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("one", "two")
    )
    start = tool("pretraining.training").first_weights(
        tool("pretraining.models").MODELS["tiny-scratch-s"]
    )
    moved = start[1].plain(start[0])
    for name in one:
        assert (one[name] - two[name]).abs().max() < 1e-5, name
    assert max((one[n] - moved[n]).abs().max() for n in one) > 1e-4  # it did learn
    recipes = [json.loads((tmp_path / n / "recipe.json").read_text()) for n in ("one", "two")]
    assert [r["training_tokens"] for r in recipes] == [3 * 4 * 48] * 2


def test_the_folder_is_a_plain_model_for_both_libraries(
    pretrain: ModuleType, data: Path, tmp_path: Path
) -> None:
    """In the released spelling; its logits are those of the model that was trained."""
    given = pretrain.parsed(words(data, tmp_path / "out", "--steps", "2"))
    plan = pretrain.plan_of(given)
    run = pretrain.training_of(given, plan, Group())
    list(run.run("run"))
    pretrain.finish(run, given, plan)
    assert not list((tmp_path / "out.partial").iterdir())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == 10000.0 and "rope_parameters" not in config
    assert config["eos_token_id"] == 2 and config["torch_dtype"] == "float32"
    ids = [5, 77, 300, 12, 9, 640]
    with torch.no_grad():
        expected = run.model(torch.tensor([ids])).logits[0].numpy()
        auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        found = auto(torch.tensor([ids])).logits[0].numpy()
    from kvlingo_mlx.backend import mx

    ours = np.array(load(str(tmp_path / "out")).model(mx.array([ids]))[0])
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() < 1e-5 * scale
    assert np.abs(ours - expected).max() < 1e-4 * scale


def test_the_zoo_sees_what_it_saw() -> None:
    """The tokenizer and the first 20 batches are those of the committed model and its log."""
    samples, models = tool("pretraining.samples"), tool("pretraining.models")
    tokenizer = samples.train_tokenizer()
    assert tokenizer.get_vocab() == transformers.AutoTokenizer.from_pretrained(SMALL).get_vocab()
    corpus = np.array(tokenizer(samples.plain_english(), add_special_tokens=False)["input_ids"])
    plan = models.MODELS["tiny-qwen3-s"]
    tokens = 0
    for step in range(20):
        rng = samples.random.Random(plan.seed * 1_000_003 + step)
        batch = samples.draw_batch(rng, tokenizer, corpus, plan.stages[0], plan.chat)
        tokens += batch["ids"][:, 1:].numel()
    results = ROOT / "benchmarks" / "results" / "pretrain-tiny-qwen3-s.jsonl"
    first = json.loads(results.read_text().splitlines()[0])
    assert (first["step"], first["tokens"]) == (20, tokens)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["qwen3-2b"], "qwen3-2b is no model; name one of tiny-qwen3-s, tiny-qwen3-l"),
        (["qwen3-0.6b"], "qwen3-0.6b learns from text; give --data and --tokenizer"),
        (["tiny-qwen3-s", "--batch", "4"], "--batch means nothing for it; leave it out"),
        (["tiny-scratch-s", "--steps", "0"], "--steps is 0; give more than 0"),
        (["tiny-scratch-l", "--sliced-from", "tiny-scratch-s"],
         "hidden_size is 128 there, 192 here"),
        (["tiny-scratch-s", "--sliced-from", "tiny-mistral"], "'mistral' cannot be sliced"),
        (["tiny-scratch-s", "--data", "{data}", "--tokenizer", "{config}"], "has no tokenizer"),
        (["tiny-scratch-s", "--sliced-from", "{config}"], "model.safetensors is damaged"),
        (["tiny-scratch-s", "--data", "x", "--tokenizer", "x", "--out", "{root}"],
         "exists; name another folder, or remove it"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(
    pretrain: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    asked: list[str], told: str,
) -> None:  # fmt: skip
    config = tmp_path / "config"  # of a model without a tokenizer, whose weights are a page
    config.mkdir()
    shutil.copy(SMALL / "config.json", config)
    (config / "model.safetensors").write_text("<!doctype html>")
    asked = [w.format(data=data, root=tmp_path, config=config, small=SMALL) for w in asked]
    line = ["pretrain.py", "--out", str(tmp_path / "out"), "--threads", "1", *asked]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as caught:
        pretrain.main()
    text = str(caught.value.code)
    assert text.startswith("error: ") and told in text and "\n" not in text
    assert not (tmp_path / "out").exists()
