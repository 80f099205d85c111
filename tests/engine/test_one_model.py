"""The same model at both ends: what mlx-lm alone does, and no search for a translator."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.generate import generate as mlx_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx.caches import arrays
from kvlingo_mlx.cli import run
from kvlingo_mlx.models.language_model import LanguageModel
from tests.support.identity import TOKENS, identity_of

WAYS = ("object", "two loads", "folder", "folder and object")


def ends(folder: Path, way: str) -> tuple[Any, Any]:
    model = kv.load(folder)
    return {
        "object": (model, model),
        "two loads": (model, kv.load(folder)),
        "folder": (str(folder), folder),
        "folder and object": (folder / ".." / folder.name, model),
    }[way]


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_mlx_lm_to_the_bit(
    folders: dict[str, Path], store: Path, name: str, way: str
) -> None:
    model = kv.load(folders[name])
    source, target = ends(folders[name], way)
    step = {"prefill_step_size": 7}
    responses = list(kv.stream_generate(source, target, TOKENS, max_tokens=12, **step))
    expected = mlx_generate(model.model, model.tokenizer, TOKENS, max_tokens=12, **step)
    assert "".join(r.text for r in responses) == expected
    assert responses[-1].strategy == "native" and responses[-1].translator is None
    found = kv.hand_over(source, target, TOKENS, **step)
    cache = make_prompt_cache(model.model)
    next(
        generate_step(mx.array(TOKENS[:-1]), model.model, prompt_cache=cache, max_tokens=0, **step),
        None,
    )
    for ours, theirs in zip(arrays(found), arrays(cache), strict=True):
        assert np.array_equal(np.array(ours), np.array(theirs))


def test_a_translator_that_is_given_is_used(models: dict[str, LanguageModel]) -> None:
    model = models["dense"]
    given = {"translator": identity_of(model), "max_tokens": 3}
    assert list(kv.stream_generate(model, model, TOKENS, **given))[-1].strategy == "accelerator"


def test_another_checkpoint_of_the_same_shape_is_another_model(
    folders: dict[str, Path], store: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(folders["dense"], tmp_path / "other")
    with pytest.raises(kv.MissingTranslatorError, match="no translator from"):
        kv.generate(folders["dense"], other, TOKENS)


@pytest.mark.parametrize(
    "option", [{"native_layers": 1}, {"native_tail": 2}, {"heal": "interleaved"}, {"guard": 8}]
)
def test_what_would_have_no_effect_is_refused(
    models: dict[str, LanguageModel], option: dict[str, Any]
) -> None:
    model = models["dense"]
    with pytest.raises(ValueError, match=f"{next(iter(option))} has no effect with .* as both"):
        kv.generate(model, model, TOKENS, **option)
    with pytest.raises(ValueError, match="prompt_cache is a cache of"):
        kv.hand_over(model, model, TOKENS, prompt_cache=make_prompt_cache(model.model))


def test_two_names_in_a_conversation(models: dict[str, LanguageModel], store: Path) -> None:
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


def test_the_command_line(folders: dict[str, Path], store: Path, capsys: Any) -> None:
    folder = str(folders["dense"])
    words = ["--prompt", "hi", "--max-tokens", "4", "--ignore-chat-template", "--no-verbose"]
    assert run(["generate", "--source", folder, "--target", folder, *words]) == 0
    model = kv.load(folder)
    expected = mlx_generate(model.model, model.tokenizer, "hi", max_tokens=4)
    assert capsys.readouterr().out == f"{expected}\n"
