"""The fine-tune that brings a converted model back towards its original, and the baseline's."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.embedded.dialogues import for_fitting
from tests.support import repository_tools

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = zoo("tiny-qwen3-s")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return repository_tools.tool("recover_mla")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "talks.jsonl"
    talks = [{"messages": d.conversation()} for d in for_fitting(40, facts=(4, 8))]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with latents that are too narrow to answer well."""
    root, tool = tmp_path_factory.mktemp("converted"), repository_tools.tool("convert_mla")
    config = transformers.AutoConfig.from_pretrained(SMALL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMALL)
    records = ({"messages": d.conversation()} for d in for_fitting(40))
    tokens = tool.packed(records, tokenizer, 8, 128)
    tool.calibrate(config, tool.Weights(SMALL), tokens, root / "work")
    tool.convert(SMALL, root / "work", root / "out", tool.Settings(rank=16, rotary=64))
    return root / "out"


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    facts = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in facts.items():
            patch.setenv(name, value)
        torch.distributed.init_process_group("gloo")
        yield
        torch.distributed.destroy_process_group()


def recipe_of(tool: ModuleType, **more: Any) -> Any:
    return tool.Recipe(**{
        "steps": 8, "rate": 2e-4, "tokens": 512, "held_out": 4, "validate_every": 100,
        "keep_every": 3, **more,
    })  # fmt: skip


def talks_of(tool: ModuleType, data: Path, recipe: Any) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMALL)
    return tool.Conversations([str(data)], tokenizer, recipe)


def test_the_rate_rises_for_two_percent_and_falls_in_a_line(tool: ModuleType) -> None:
    recipe = tool.Recipe()
    found = [recipe.factor(step) for step in (0, 1199, 2399, 2400, 61_200, 119_999)]
    assert found == pytest.approx([1 / 2400, 0.5, 1, 1, 0.5, 1 / 117_600])


def test_the_losses_are_the_papers(tool: ModuleType, data: Path, converted: Path) -> None:
    """Against NumPy, of whole logits: the last turn alone, and KL from the model's own side."""
    sample = talks_of(tool, data, recipe_of(tool)).sample(3)
    assert sample.continuation and "assistant" not in sample.continuation
    auto = transformers.AutoModelForCausalLM
    models = [auto.from_pretrained(f, dtype=torch.float32).eval() for f in (converted, SMALL)]
    with torch.no_grad():
        found = [float(loss) for loss in tool.losses(*models, sample)]
        ids = torch.tensor([sample.prefix + sample.continuation])
        rows = [m(ids).logits[0].double().numpy()[len(sample.prefix) - 1 : -1] for m in models]
    ours, theirs = (r - np.log(np.exp(r).sum(-1, keepdims=True)) for r in rows)
    ce = -ours[np.arange(len(ours)), list(sample.continuation)].mean()
    kl = (np.exp(ours) * (ours - theirs)).sum(axis=-1).mean()
    other = (np.exp(theirs) * (theirs - ours)).sum(axis=-1).mean()
    assert found == pytest.approx([ce, kl], rel=1e-4)
    assert abs(other - kl) > 0.01 * kl


def test_losses_on_several_exchanges(tool: ModuleType, data: Path) -> None:
    """From the first of their answers on, questions included; the text as a plain join of turns."""
    (talk,) = for_fitting(1, facts=(4, 8))
    turns = talk.conversation()
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMALL)
    for exchanges in (1, 3, 99):
        talks = talks_of(tool, data, recipe_of(tool, exchanges=exchanges))
        sample = talks._sample((0, 0))
        first = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"][-exchanges:][0]
        header = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        expected = "".join(
            f"{header}{turn['content']}<|im_end|>\n" if turn["role"] == "assistant"
            else f"<|im_start|>user\n{turn['content']}<|im_end|>\n"
            for turn in turns[first:]
        )  # fmt: skip
        found = tokenizer.decode(sample.continuation)
        assert found.strip() == expected.removeprefix(header).strip()
        assert tokenizer.decode(sample.prefix).endswith(header)


def run(tool: ModuleType, model: Path, talks: Any, folder: Path, steps: int | None = None) -> Any:
    """A run to its end, or as it stands after ``steps`` lines of its log."""
    recovery = tool.Recovery(model, SMALL, talks.recipe, "cpu")
    settings = {**vars(talks.recipe), "model": str(model)}
    lines = []
    for line in tool.recover(recovery, talks, folder, settings):
        lines.append(line)
        if steps is not None and line["step"] == steps and "norm" in line:
            os.kill(os.getpid(), signal.SIGINT)
    return recovery, lines


def weights(recovery: Any) -> dict[str, np.ndarray]:
    found = recovery.model.state_dict().items()
    return {n: getattr(t, "full_tensor", lambda t=t: t)().numpy().copy() for n, t in found}


def test_a_run_recovers_and_a_stopped_one_goes_on(
    tool: ModuleType, data: Path, converted: Path, tmp_path: Path
) -> None:
    """KL and cross-entropy on held-out conversations fall; stopped at step 4 it ends the same."""
    talks = talks_of(tool, data, recipe_of(tool))
    whole, lines = run(tool, converted, talks, tmp_path / "whole")
    assert lines[-1]["held_out_kl"] < 0.9 * lines[0]["held_out_kl"]
    assert lines[-1]["held_out_ce"] < lines[0]["held_out_ce"]
    with pytest.raises(KeyboardInterrupt):
        run(tool, converted, talks, tmp_path / "stopped", 4)
    again, rest = run(tool, converted, talks, tmp_path / "stopped")
    assert [line["step"] for line in rest] == [5, 6, 7, 8, 8] and rest[-1] == lines[-1]
    first, second = weights(whole), weights(again)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    whole.write(converted, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(np.array_equal(first[name], loaded[name].numpy()) for name in first)
    config = (tmp_path / "out" / "config.json").read_text()
    assert config == (converted / "config.json").read_text()
    assert (tmp_path / "out" / "tokenizer.json").exists()
    other = talks_of(tool, data, recipe_of(tool, rate=1e-4))
    with pytest.raises(ValueError, match=r"other settings \(rate was 0.0002, is 0.0001\)"):
        run(tool, converted, other, tmp_path / "whole")


def test_the_original_begins_at_no_divergence(tool: ModuleType, data: Path, tmp_path: Path) -> None:
    """The baseline is the same run of another model."""
    talks = talks_of(tool, data, recipe_of(tool, steps=2))
    _, lines = run(tool, SMALL, talks, tmp_path / "baseline")
    assert abs(lines[0]["held_out_kl"]) < 1e-6 < lines[-1]["held_out_kl"]


def test_the_command_writes_no_diverged_model(
    tool: ModuleType, data: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By its end; the same command with a usable one writes it, and lets go of the run's state."""
    monkeypatch.setattr(tool, "start", lambda device: None)  # the tests' own group
    monkeypatch.setattr(tool.dist, "destroy_process_group", lambda: None)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    words = [converted, SMALL, out, "--data", data, "--steps", 1, "--tokens", 512, "--held-out", 2]
    monkeypatch.setattr(sys, "argv", ["recover", *map(str, words)])
    validate = tool.Recovery.validate

    def lost(self: Any, held_out: Any) -> dict[str, float]:
        return {**validate(self, held_out), "held_out_ce": float("nan")}

    with monkeypatch.context() as patch:
        patch.setattr(tool.Recovery, "validate", lost)
        with pytest.raises(SystemExit, match="so no model is written; remove"):
            tool.main()
    assert not out.exists() and (partial / "state").exists()
    tool.main()
    assert out.exists() and [path.name for path in partial.iterdir()] == ["log.jsonl"]
    assert "the loss on what is held out was nan" not in capsys.readouterr().out
    with tool.alone(tmp_path / "other", wait=0):
        sys.argv[3] = str(tmp_path / "other")
        with pytest.raises(SystemExit, match=r"process \d+ is writing other in"):
            tool.main()
