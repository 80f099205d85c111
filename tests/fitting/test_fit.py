"""fit on the device: planted maps, norms against a plain reference, samples, refusals."""

import json
from pathlib import Path

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx import fitting
from kvlingo_mlx.fitting.attention import attention_mass
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample, to_samples, tokenise
from tests.support import plain_models, tiny
from tests.support.random_samples import samples

CUT = 1e-4  # of the largest singular value: 1e-8 of the largest eigenvalue


def test_a_record_beyond_either_context_is_left_out(tmp_path: Path) -> None:
    """The shorter context counts, whichever model has it."""
    names = {"short": 64, "long": 512}
    folders = {
        name: tiny.write_tiny_model(tmp_path / name, "qwen3", seed=1, layers=2, kv_heads=1,
                                    head_dim=16)
        for name in names
    }  # fmt: skip
    for name, context in names.items():
        config = json.loads((folders[name] / "config.json").read_text())
        config["max_position_embeddings"] = context
        (folders[name] / "config.json").write_text(json.dumps(config))
    short, long = (kv.load(folders[name]) for name in names)
    data = [*samples(2, 30), *samples(1, 100)]
    for pair in ((short, long), (long, short)):
        assert kv.fit(*pair, data).config.provenance["samples"] == 2


def test_ids_of_the_continuation_are_checked(models: dict[str, LanguageModel]) -> None:
    """The attention pass embeds them too, and MLX reads out of bounds without a word."""
    wrong = Sample((5, 6, 7, 8), (330, 7))
    with pytest.raises(ValueError, match="token id 330 is outside the 320 ids"):
        kv.fit(models["dense"], models["wide"], [wrong], norm="attention")


def test_an_answer_before_any_question_is_none(models: dict[str, LanguageModel]) -> None:
    tokenizer = models["dense"].tokenizer
    opening = {"role": "assistant", "content": "Welcome."}
    asked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    assert tokenise({"messages": [opening]}, tokenizer).continuation == ()
    sample = tokenise({"messages": [opening, *asked]}, tokenizer)
    assert tokenizer.decode(list(sample.continuation)).startswith("Yes.")
    both = tokenise({"text": "not this", "messages": asked}, tokenizer)
    assert tokenizer.decode(list(both.continuation)).startswith("Yes.")


def test_head_wise_maps_are_least_squares(models: dict[str, LanguageModel]) -> None:
    """Each head by the same head of two source layers; mixing ones are in ``test_fit_hybrids``."""
    ends, data, seen = (models["dense"], models["moe"]), samples(10, 60), list[tuple[int, int]]()
    told = lambda done, total: seen.append((done, total))  # noqa: E731
    made = kv.fit(*ends, data, nu=2, head_mixing=False, ridge=0.0, progress=told)
    assert seen == [(done, 10) for done in range(1, 11)]
    states = [[capture.whole(end, each.prefix, "pre_norm") for each in data] for end in ends]

    def rows(end: int, layer: int, head: int) -> np.ndarray:
        every = np.concatenate([np.array(each.keys[layer][0]) for each in states[end]])
        return every[:, 32 * head : 32 * head + 32]

    for layer, reads in enumerate(made.config.assignment.keys):
        for head, weight in enumerate(made.to_weights().as_float32(f"keys.{layer}.weight")):
            x = np.concatenate([rows(0, source, head) for source in reads], axis=1)
            # Fits, not maps, are compared: directions near the cut may fall on either side.
            fitted = x @ np.linalg.lstsq(x, rows(1, layer, head), rcond=CUT)[0]
            assert np.linalg.norm(x @ weight.T - fitted) < 1e-4 * np.linalg.norm(fitted)


def test_attention_that_is_seen_and_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper's windows count, though its caches are whole; gemma2 computes by itself. What is
    seen is compared with transformers in test_training_families."""
    sample, found = samples(1, 30)[0], {}
    for name in ("llama", "gemma2", "llava"):
        (tmp_path / name).mkdir()
        model = kv.load(plain_models.write_plain_model(tmp_path / name, name))
        if name == "gemma2":
            with pytest.raises(kv.UnsupportedModelError, match="take another norm"):
                attention_mass(model, sample)
        else:
            found[name] = attention_mass(model, sample, step_size=7)
    assert (found["llama"][0] == 0).sum() == 30 - 15 and (found["llama"][1] > 0).all()
    monkeypatch.setattr(fitting.attention, "SCORE_NUMBERS", 400)  # few queries a block
    assert np.allclose(attention_mass(model, sample), found["llava"], atol=1e-6)
    assert np.allclose(*found.values(), atol=1e-6)


def test_conversation_is_cut_where_its_last_reply_opens(models: dict[str, LanguageModel]) -> None:
    model = models["dense"]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    decode = model.tokenizer.decode
    plain = tokenise({"messages": messages}, model.tokenizer)
    opened = "three<|im_end|>\n<|im_start|>assistant\n"
    assert decode(plain.prefix).endswith(opened + "<think>\n\n</think>\n\n")
    assert decode(plain.continuation).startswith("four")
    messages[-1]["content"] = "<think>\nhm\n</think>\n\nfour"
    reasoned = tokenise({"messages": messages}, model.tokenizer)
    assert decode(reasoned.prefix).endswith(opened)
    assert decode(reasoned.continuation).startswith("<think>\nhm")
    text = tokenise({"text": "abcdefgh"}, model.tokenizer)
    assert decode(text.prefix + text.continuation) == "abcdefgh"
    assert abs(len(text.prefix) - len(text.continuation)) <= 1


def test_samples_beyond_the_context_are_left_out(models: dict[str, LanguageModel]) -> None:
    model = models["dense"]
    data = [Sample((5,) * 513, (5,)), Sample((), (5,)), Sample((5,) * 510, (5,) * 9)]
    assert list(to_samples(data, model.tokenizer, model.context_length)) == [
        Sample((5,) * 510, (5,) * 2)
    ]
    with pytest.raises(ValueError, match="no usable sample"):
        kv.fit(model, model, data[:2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "euclid"}, "norm is 'euclid'; it must be one of frobenius"),
        ({"capture": "latent"}, "capture is 'latent'"),
        ({"nu": 0}, "nu is 0"),
        ({"nu": 4}, "nu is 4; it must be 1 to 3"),
        ({"ridge": -1e-9}, "ridge is -1e-09; give 0 or more, or leave it out"),
        ({"ridge": float("inf")}, "ridge is inf; give 0 or more"),
        ({"assignment": "best"}, "assignment is 'best'; it must be relative_depth, r2 or greedy"),
        ({"assignment": "r2", "nu": 4}, "nu is 4; it must be 1 to 3"),
        ({"assignment": Assignment(((0,),), ((0,),))}, "assignment.keys has 1 lists for 3 target"),
        ({"assignment": Assignment(((9,),) * 3, ((0,),) * 3)}, "expected distinct layers, 0 to 2"),
    ],
)
def test_bad_arguments(models: dict[str, LanguageModel], options: dict, message: str) -> None:
    with pytest.raises((ValueError, kv.KVLingoError), match=message):
        kv.fit(models["dense"], models["wide"], samples(1, 10), **options)
    with pytest.raises(ValueError, match="2 target heads are no multiple of 4 source"):
        kv.fit(models["wide"], models["dense"], samples(1, 9), head_mixing=False)


def test_numbers_that_are_none_name_their_map_and_models(tmp_path: Path) -> None:
    """A model whose second layer overflows: the first map that reads it is named."""
    sound, broken = (
        kv.load(tiny.write_tiny_model(tmp_path / name, "qwen3", seed=1, layers=2, kv_heads=1,
                                      head_dim=16))
        for name in ("sound", "broken")
    )  # fmt: skip
    projection = broken.model.layers[1].self_attn.v_proj
    projection.weight = mx.full(projection.weight.shape, mx.inf)
    for pair in ((broken, sound), (sound, broken)):
        with pytest.raises(ValueError, match=r"the map values\.1 .*broken"):
            kv.fit(*pair, samples(2, 30))
