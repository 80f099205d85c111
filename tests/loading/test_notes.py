"""What is told of a pair that fits and yet differs: commit, bits, fine-tune, length; each once."""

import dataclasses
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
import transformers

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import TRANSLATORS
from kvlingo_mlx.evaluation import verification
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.fingerprints import ROUNDED, SAME
from kvlingo_mlx.loading import notes
from kvlingo_mlx.loading.grading import Agreement, Receipt
from kvlingo_mlx.loading.pairing import check_pair
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators.base import Translator
from tests.support import plain_models, tiny
from tests.support.fixtures import Folders, Models, Patch, Printed
from tests.support.identity import TOKENS, identity_of
from tests.support.opened import quantised
from tests.support.random_samples import samples
from tests.support.warned import told

GOOD = Receipt(0.01, 1.0, 0, 1.0).to_json()


@pytest.fixture(scope="module")
def fitted(models: Models) -> Translator:
    """From "dense" to "moe", on prefixes of up to 40 tokens; a good one by its receipt."""
    found = kv.fit(models["dense"], models["moe"], [*samples(2, 30), *samples(1, 40)])
    return with_provenance(found, receipt=GOOD)


def with_provenance(translator: Translator, **facts: Any) -> Translator:
    """The same maps under a provenance in which ``facts`` stand; None takes one out."""
    merged = {**translator.config.provenance, **facts}
    kept = {name: fact for name, fact in merged.items() if fact is not None}
    config = dataclasses.replace(translator.config, provenance=kept)
    return dataclasses.replace(translator, config=config)


def test_another_commit_is_told_and_used(models: Models) -> None:
    model = models["dense"]
    old, new = (dataclasses.replace(model, name="me/m", revision=c * 40) for c in "ab")
    translator = identity_of(old)
    hand_over = lambda m: kv.hand_over(m, m, TOKENS, translator=translator)  # noqa: E731
    assert told(lambda: hand_over(old)) == []
    (text,) = told(lambda: hand_over(new))
    assert "made with commit aaaaaaaaaaaa of me/m, and this is bbbbbbbbbbbb" in text
    assert "`kvlingo-mlx verify TRANSLATOR --source me/m --target me/m`" in text
    assert told(lambda: hand_over(new)) == []  # once
    elsewhere = dataclasses.replace(new, name="you/m")  # copies have commits of their own
    assert told(lambda: hand_over(elsewhere)) == told(lambda: hand_over(model)) == []


def test_every_field_that_differs_is_named(
    models: Models, fitted: Translator, tmp_path: Path
) -> None:
    shape = {"seed": 1, "layers": 3, "kv_heads": 4, "head_dim": 16}
    other = tiny.write_tiny_model(tmp_path / "o", "qwen3", **shape)
    fields = "kv_heads of layer 0: 4, expected 2; key_dim of layer 0: 16, expected 32; value_dim"
    with pytest.raises(kv.IncompatibleTranslatorError, match=fields):
        check_pair(fitted.config, kv.load(other), models["moe"])


def test_few_bits_are_told_once(
    models: Models, quantised_models: Models, fitted: Translator
) -> None:
    four, moe = quantised_models["dense"], models["moe"]

    def use(t: Translator, *pair: LanguageModel) -> list[str]:
        return told(lambda: kv.hand_over(*pair, TOKENS[:30], translator=t))

    assert use(fitted, models["dense"], moe) == []
    (text,) = use(fitted, four, moe)
    assert f"it was fitted on float32 and {four.name} runs in 4 bits" in text
    assert "measures what that costs" in text
    assert use(fitted, four, moe) == []
    assert len(use(fitted, quantised_models["dense"], quantised_models["moe"])) == 1  # the target
    on_four_bits = with_provenance(kv.fit(four, moe, samples(3, 30)), receipt=GOOD)
    assert on_four_bits.config.fitted_on("source") == "4 bits"
    assert use(on_four_bits, four, moe) == []
    silent = with_provenance(fitted, precision=None)
    assert silent.config.fitted_on("source") is None and use(silent, four, moe) == []


def test_show_and_verify_tell_of_precisions(
    tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    """Of an embedded translator, which keeps what its receipt was made in."""
    found = Agreement(Receipt(0.03, 0.95, 0, 0.5), 8, 65)
    monkeypatch.setattr(verification, "agreement", lambda *_, **options: found)
    four = quantised(kv.load("tiny-qwen3-s"), tmp_path / "four")
    folder = str(TRANSLATORS / "tiny-qwen3-s--tiny-qwen3-l")
    assert run(["show", folder]) == 0
    assert "source in float32, target in float32" in capsys.readouterr().out
    assert run(["show", str(four.path)]) == 0
    assert "weights                4 bits" in capsys.readouterr().out
    ends = ["--source", str(four.path), "--target", "tiny-qwen3-l"]
    assert run(["verify", folder, *ends]) == 0
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("warning: the translator from tiny-qwen3-s to tiny-qwen3-l is used, ")
    assert "fitted on float32 and" in line and "runs in 4 bits" in line
    assert "in 4 bits, tiny-qwen3-l in float32" in captured.out


def tuned(model: LanguageModel, folder: Path, size: float) -> LanguageModel:
    """A copy with an adapter of rank 2 fused into one layer's values, as a folder."""
    copy = kv.load(model.path)
    value = copy.attentions[1].v_proj
    rng = np.random.default_rng(0)
    rows, columns = value.weight.shape
    change = rng.normal(size=(rows, 2)) @ rng.normal(size=(2, columns))
    scale = size * mx.linalg.norm(value.weight) / np.linalg.norm(change)
    value.weight = value.weight + scale * mx.array(change, mx.float32)
    shutil.copytree(model.path, folder)
    copy.model.save_weights(str(folder / "model.safetensors"))
    return kv.load(folder)


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_fused_adapter_is_told(
    models: Models, fitted: Translator, tmp_path: Path, role: str
) -> None:
    pair = {"source": models["dense"], "target": models["moe"]}
    pair[role] = tuned(pair[role], tmp_path / "tuned", 0.03)
    assert pair[role].norms_fingerprint == fitted.config.to_json()[role]["fingerprint"]["norms"]
    use = lambda t: told(lambda: kv.hand_over(*pair.values(), TOKENS[:30], translator=t))  # noqa: E731
    (text,) = use(fitted)
    assert f"projections of {pair[role].name} differ from those that it was fitted on" in text
    assert "a LoRA adapter fused in" in text and "kvlingo-mlx verify" in text
    assert use(fitted) == []
    assert use(with_provenance(fitted, projections=None)) == []  # older ones keep none
    stranger: Any = [None, {}, {role: None}, {role: [1.0]}, {role: ["a"] * 8}, {role: [1e400] * 24}]
    for kept in stranger:
        assert use(with_provenance(fitted, projections=kept)) == []


def test_rounding_is_no_fine_tune(
    models: Models, quantised_models: Models, fitted: Translator, tmp_path: Path
) -> None:
    """The same weights in 16 bits, or in 4, where nothing can be said of projections."""
    half = kv.load(models["dense"].path)
    half.model.set_dtype(mx.bfloat16)
    numbers = fitted.config.provenance["projections"]["source"]
    difference = half.projections.difference(numbers)
    assert SAME < difference < ROUNDED and half.precision == "bfloat16"
    assert models["dense"].projections.difference(numbers) < SAME / 10
    assert quantised_models["dense"].projections is None
    slight = tuned(models["dense"], tmp_path / "tuned", 0.01).projections
    assert slight.difference(numbers) > SAME


def test_a_prompt_beyond_what_was_tested_is_told_once(
    models: Models, fitted: Translator, tmp_path: Path, capsys: Printed
) -> None:
    pair = models["dense"], models["moe"]
    assert fitted.config.provenance["longest_prefix"] == 40
    assert run(["show", str(fitted.save(tmp_path / "t"))]) == 0
    out = capsys.readouterr().out
    assert "longest_prefix" in out and "projections" not in out  # which are compared, not read

    def use(count: int, translator: Translator = fitted) -> list[str]:
        given = {"translator": translator, "max_tokens": 1}
        return told(lambda: kv.generate(*pair, TOKENS[:count], **given))

    assert use(41) == []  # of which 40 are translated
    (text,) = use(42)
    assert "the prompt has 42 tokens" in text and "prefixes of at most 40" in text
    assert "fit it on longer conversations" in text
    assert use(50) == [] and told(lambda: kv.hand_over(*pair, TOKENS, translator=fitted)) == []
    for kept in (None, 0, "40", True, 40.0):  # older translators, and strangers'
        assert use(50, with_provenance(fitted, longest_prefix=kept)) == []
    native = {"strategy": "native", "max_tokens": 1}
    assert told(lambda: kv.generate(*pair, TOKENS[:50], **native)) == []


BAD = Receipt(0.4, 0.5, 0, 1.0).to_json()
UNMEASURED = r"nobody has measured .*`kvlingo-mlx verify \w+ --source .*dense --target .*moe`"
UNKNOWN = {"kl": 0.1, "top1": 0.9, "prompts": GOOD["prompts"]}  # of an older version


@pytest.mark.parametrize(
    ("receipt", "expected"),
    [
        (BAD, "loses a part: KL 0.4000 .*`kvlingo-mlx pair .*dense .*moe --force`"),
        (BAD | {"kl": 0.9}, "is useless: KL 0.9000"),
        (UNKNOWN, UNMEASURED),
        (None, UNMEASURED),
        (GOOD, None),
    ],
    ids=["some", "useless", "old", "none", "works"],
)
def test_every_use_tells_of_a_grade_once(
    models: Models, fitted: Translator, store: Path, receipt: dict | None, expected: str | None
) -> None:
    pair = models["dense"], models["moe"]
    translator = with_provenance(fitted, receipt=receipt)

    def talk(given: list[Translator]) -> kv.Conversation:
        both = {"small": pair[0], "large": pair[1]}
        return kv.Conversation(both, given, on_missing="reprefill")

    def check(action: Callable[[], Any]) -> None:
        notes._told.clear()
        texts = told(action)
        assert len(texts) == (expected is not None)
        assert all(re.search(expected or "", text) for text in texts)
        assert told(action) == []

    check(lambda: kv.generate(*pair, TOKENS[:9], translator=translator, max_tokens=1))
    check(lambda: talk([translator]))
    translator.save(store / "stored")
    check(lambda: talk([]))  # before the switch that needs it


def test_a_tuned_translator_is_not_judged_without_its_native_layers(
    models: Models, fitted: Translator
) -> None:
    tuned = with_provenance(fitted, receipt=BAD, native_layers=2)
    pair = models["dense"], models["moe"]
    assert told(lambda: kv.hand_over(*pair, TOKENS[:9], translator=tuned)) == []


def test_a_conversation_tells_which_translators_it_lacks(
    models: Models, fitted: Translator
) -> None:
    both = {"small": models["dense"], "large": models["moe"]}
    (text,) = told(lambda: kv.Conversation(both))
    assert "no translator from small to large, none from large to small" in text
    assert "make one with `kvlingo-mlx pair " in text and "-c on_missing=reprefill" in text
    assert told(lambda: kv.Conversation(both)) == []  # once
    (text,) = told(lambda: kv.Conversation(both, [fitted]))
    assert "no translator from large to small: switching so will fail" in text
    notes._told.clear()
    for options in ({"on_missing": "reprefill"}, {"switching": "reprefill"}):
        assert told(lambda given=options: kv.Conversation(both, **given)) == []
    assert told(lambda: kv.Conversation({"small": models["dense"]})) == []


def test_training_keeps_the_longest_prefix(tmp_path: Path, folders: Folders) -> None:
    """Of the closed form's and the held-out conversations; both models' projections too."""
    torch = pytest.importorskip("torch")
    from kvlingo_mlx.cuda import model as torch_model
    from tests.support.trainings import Random, training

    names = ("dense", "wide")
    pair = {n: torch_model.load(str(folders[n]), dtype=torch.float32) for n in names}
    provenance = translator_folder.read_config(
        training(pair, tmp_path / "t", steps=0).run()
    ).provenance
    prefixes = [len(sample.prefix) for sample in Random().held_out(3)]  # which are all there are
    assert provenance["longest_prefix"] == max(prefixes) > min(prefixes)
    assert provenance["precision"] == {"source": "float32", "target": "float32"}
    for role, name in zip(("source", "target"), names, strict=True):
        numbers = provenance["projections"][role]
        assert kv.load(folders[name]).projections.difference(numbers) < SAME


def test_transformers_advice_about_configs_is_kept_out(tmp_path: Path) -> None:
    """It only loads the tokenizer. What it says otherwise is heard, before and after too."""
    folder = plain_models.write_plain_model(tmp_path / "m", "xverse")
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        kv.load(folder)
        assert heard == []
        transformers.PretrainedConfig.from_pretrained(folder)
        assert len(heard) == 1 and "You are using a model of type `xverse`" in heard[0]
    finally:
        logger.removeHandler(handler)
