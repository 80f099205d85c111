"""Models that MLX cannot run on a device are refused in a line, and what the line advises runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.models import language_model
from tests.support.opened import quantised
from tests.support.tiny import write_tiny_model

SHAPE = {"seed": 1, "layers": 2, "kv_heads": 2, "head_dim": 32}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_experts_in_16_bits_are_refused_on_a_cpu(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By verbs before they compute, in Python also where no weight was read."""
    monkeypatch.setattr(language_model, "on_gpu", lambda: False)
    model = write_tiny_model(tmp_path / "moe", "qwen3_moe", dtype=dtype, **SHAPE)
    dense = write_tiny_model(tmp_path / "dense", "qwen3", dtype=dtype, **SHAPE)
    pair = ["--source", str(dense), "--target", str(model)]
    for verb in (["generate", "--strategy", "native", "--prompt", "x"], ["bench"]):
        assert run([*verb, *pair]) == 2
        error = capsys.readouterr().err
        assert f"{model} has experts in {dtype}, and on a CPU" in error
        assert f"`mlx_lm.convert --hf-path {model} --mlx-path COPY -q`" in error
        assert error.count("\n") == 1
    assert run(["show", str(model)]) == 0
    lazy = kv.load(model, lazy=True)
    with pytest.raises(kv.UnsupportedModelError, match=f"has experts in {dtype}"):
        kv.generate(lazy, lazy, [5, 6, 7], strategy="native", max_tokens=1)
    monkeypatch.setattr(language_model, "on_gpu", lambda: True)
    few = quantised(kv.load(model), tmp_path / "few")
    monkeypatch.setattr(language_model, "on_gpu", lambda: False)
    assert kv.generate(few, few, [5, 6, 7], strategy="native", max_tokens=1) is not None
    assert kv.load(dense).precision == dtype
