"""What is mlx-lm's own to the bit: identity maps, one model at both ends, a target that reads."""

import shutil
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.generate import generate as mlx_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

import kvlingo_mlx as kv
from kvlingo_mlx.caches import arrays
from kvlingo_mlx.engine import plan
from kvlingo_mlx.models import capture
from tests.support.fixtures import Folders, Models, Patch
from tests.support.identity import TOKENS, identity_of


def test_taps_leave_no_trace(models: Models) -> None:
    model = models["dense"]
    before = [type(a.k_proj) for a in model.attentions]
    spans = capture.prefill(model, TOKENS, 7)
    next(spans)
    assert [type(a.k_proj) for a in model.attentions] == before  # between two chunks, too
    spans.close()
    with pytest.raises(RuntimeError, match="captured already"), capture.Ear(model).listening():
        next(capture.prefill(model, TOKENS, 7))
    assert [type(a.k_proj) for a in model.attentions] == before


@pytest.mark.parametrize("way", ["object", "two loads", "folder", "folder and object"])
def test_it_is_mlx_lm_to_the_bit(folders: Folders, store: Path, way: str) -> None:
    """However it is named, and without a translator."""
    folder = folders["moe"]
    model = kv.load(folder)
    source, target = {
        "object": (model, model),
        "two loads": (model, kv.load(folder)),
        "folder": (str(folder), folder),
        "folder and object": (folder / ".." / folder.name, model),
    }[way]
    step: Any = {"prefill_step_size": 7}
    responses = list(kv.stream_generate(source, target, TOKENS, max_tokens=12, **step))
    expected = mlx_generate(model.model, model.tokenizer, TOKENS, max_tokens=12, **step)
    assert "".join(r.text for r in responses) == expected
    assert responses[-1].strategy == "native" and responses[-1].translator is None
    cache, prompt = make_prompt_cache(model.model), mx.array(TOKENS[:-1])
    next(generate_step(prompt, model.model, prompt_cache=cache, max_tokens=0, **step), None)
    found = kv.hand_over(source, target, TOKENS, **step)
    for ours, theirs in zip(arrays(found), arrays(cache), strict=True):
        assert np.array_equal(np.array(ours), np.array(theirs))
    given = {"translator": identity_of(model), "max_tokens": 3}
    assert list(kv.stream_generate(source, target, TOKENS, **given))[-1].strategy == "accelerator"


@pytest.mark.parametrize(
    "option", [{"native_layers": 1}, {"native_tail": 2}, {"heal": "interleaved"}, {"guard": 8}]
)
def test_what_would_have_no_effect_is_refused(models: Models, option: dict[str, Any]) -> None:
    model = models["dense"]
    with pytest.raises(ValueError, match=f"{next(iter(option))} has no effect with .* as both"):
        kv.generate(model, model, TOKENS, **option)
    with pytest.raises(ValueError, match="prompt_cache is a cache of"):
        kv.hand_over(model, model, TOKENS, prompt_cache=make_prompt_cache(model.model))


def test_two_names_in_a_conversation(models: Models, store: Path) -> None:
    """The second reads what the first wrote; a third model still needs a translator."""
    model = models["dense"]
    twice, once = kv.Conversation({"a": model, "b": model}), kv.Conversation({"a": model})
    for name in "abba":
        expected = once.reply("a", "hi there", max_tokens=4)
        assert twice.reply(name, "hi there", max_tokens=4) == expected
    assert twice.last_switch.translated == 0
    talk = kv.Conversation({"a": model, "b": models["wide"]})
    talk.reply("a", "hi", max_tokens=4)
    with pytest.raises(kv.MissingTranslatorError):
        talk.reply("b", "hi", max_tokens=4)


@pytest.mark.parametrize("step_size", [7, 2048])
def test_native_is_mlx_lms_own(models: Models, monkeypatch: Patch, step_size: int) -> None:
    """The source reads nothing, and no translator is looked for; with drafts and few bits, too."""
    source, target = models["dense"], models["wide"]
    monkeypatch.setattr(capture, "prefill", None)
    monkeypatch.setattr(plan, "resolve_translator", None)
    native: dict[str, Any] = {"strategy": "native"}
    penalty = {"logits_processors": make_logits_processors(repetition_penalty=1.5)}
    options: dict[str, Any] = {"max_tokens": 12, "prefill_step_size": step_size}
    expected = mlx_generate(target.model, target.tokenizer, TOKENS, **options, **penalty)
    *_, last = responses = list(
        kv.stream_generate(source, target, TOKENS, **native, **options, **penalty)
    )
    assert "".join(r.text for r in responses) == expected
    assert last.strategy == "native" and last.prompt_tokens == len(TOKENS)
    assert last.translate_s == 0 and 0 < last.prefill_s < last.ttft_s
    assert last.prompt_tps == pytest.approx(len(TOKENS) / last.ttft_s)
    expected = mlx_generate(target.model, target.tokenizer, TOKENS, **options)
    assert kv.generate(source, target, TOKENS, draft_model=source, **native, **options) == expected
    options |= {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    expected = mlx_generate(source.model, source.tokenizer, TOKENS, **options)
    assert kv.generate(target, source, TOKENS, **native, **options) == expected


def test_another_checkpoint_of_the_same_shape_is_another_model(
    folders: Folders, store: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(folders["dense"], tmp_path / "other")
    with pytest.raises(kv.MissingTranslatorError, match="no translator from"):
        kv.generate(folders["dense"], other, TOKENS)
