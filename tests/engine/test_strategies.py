"""Which model reads a prompt: the strategies and their refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.generate import generate as mlx_generate
from mlx_lm.sample_utils import make_logits_processors

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.engine import plan
from kvlingo_mlx.loading import models
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators.base import Translator
from tests.support.identity import TOKENS

ZOO = ("tiny-qwen3-s", "tiny-qwen3-moe")


@pytest.fixture(scope="module")
def pair(models: dict[str, LanguageModel]) -> tuple[LanguageModel, LanguageModel, Translator]:
    source, target = models["dense"], models["wide"]
    return source, target, kv.fit(source, target, [{"text": "a b c d e f g h " * 12}])


# ---- native -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_size", [7, 2048])
def test_native_is_mlx_lms_own(
    pair: tuple[LanguageModel, LanguageModel, Translator],
    monkeypatch: pytest.MonkeyPatch,
    step_size: int,
) -> None:
    source, target, _ = pair
    monkeypatch.setattr(capture, "prefill", None)  # the source reads nothing
    monkeypatch.setattr(plan, "resolve_translator", None)
    penalty = {"logits_processors": make_logits_processors(repetition_penalty=1.5)}
    options: dict[str, Any] = {"max_tokens": 12, "prefill_step_size": step_size, **penalty}
    expected = mlx_generate(target.model, target.tokenizer, TOKENS, **options)
    responses = list(kv.stream_generate(source, target, TOKENS, strategy="native", **options))
    assert "".join(r.text for r in responses) == expected
    last = responses[-1]
    assert last.strategy == "native" and last.prompt_tokens == len(TOKENS)
    assert last.translate_s == 0 and 0 < last.prefill_s < last.ttft_s
    assert last.prompt_tps == pytest.approx(len(TOKENS) / last.ttft_s)


def test_native_with_a_draft_and_a_quantised_cache(
    pair: tuple[LanguageModel, LanguageModel, Translator],
) -> None:
    source, target, _ = pair
    plain = mlx_generate(target.model, target.tokenizer, TOKENS, max_tokens=12)
    options: dict[str, Any] = {"strategy": "native", "max_tokens": 12}
    assert kv.generate(source, target, TOKENS, draft_model=source, **options) == plain
    bits = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    expected = mlx_generate(source.model, source.tokenizer, TOKENS, max_tokens=12, **bits)
    assert kv.generate(target, source, TOKENS, **options, **bits) == expected


def test_native_needs_no_translator_and_reads_no_weights_of_the_source(
    folders: dict[str, Path], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy: dict[str, bool] = {}
    load = models.load

    def noted(model: Any, **options: Any) -> LanguageModel:
        lazy[str(model)] = options.get("lazy", False)
        return load(model, **options)

    monkeypatch.setattr(models, "load", noted)
    dense, wide = (str(folders[name]) for name in ("dense", "wide"))
    assert kv.generate(dense, wide, TOKENS, strategy="native", max_tokens=2)
    assert lazy == {dense: True, wide: False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--strategy", "fast"], "strategy is 'fast'; give accelerator or native"),
        (["generate", "--strategy", "switch"], "which only a conversation has"),
        (["generate", "--strategy", "auto"], "strategy is 'auto'; give accelerator or native"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments += ["--prefill-model", ZOO[0], "--decode-model", ZOO[1], "--prompt", "x"]
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
