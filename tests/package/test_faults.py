"""Faults whose refusals the other files leave out; which row is shown where stands in FAULTS.md."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.loading.pairing import check_tokenizers
from tests.support import TESTS
from tests.support.fixtures import Folders, Logged, Models, Patch, Printed
from tests.support.identity import TOKENS, identity_of
from tests.support.tiny import amend
from tests.support.translator_folders import TENSORS, store

FAULTS = TESTS / "FAULTS.md"


def test_a_cut_off_file_says_how_much_it_lacks(tmp_path: Path) -> None:
    """Row 2: what the header promises, what is there, and what to do."""
    path = store(tmp_path / "t") / TENSORS
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(kv.MalformedTranslatorError) as caught:
        kv.load_translator(tmp_path / "t")
    told = f"its header tells of {len(whole)} bytes, it has {len(whole) - 100}; download or copy"
    assert told in str(caught.value)


@pytest.mark.parametrize("name", ["t.npz", "t.tar.gz"])
def test_archives_are_not_opened(tmp_path: Path, monkeypatch: Patch, name: str) -> None:
    """Row 10: a translator is a folder of four names, whatever else is called one."""
    path = tmp_path / name
    path.write_bytes(b"PK\x03\x04")
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(kv.MalformedTranslatorError) as caught:
        kv.load_translator(path)
    told = f"{path}: is a file; a translator is a folder with {translator_folder.CONFIG_FILE}"
    assert str(caught.value) == told


def test_a_models_own_code_is_not_run(folders: Folders, tmp_path: Path) -> None:
    """Row 21: mlx-lm would import what ``model_file`` names, transformers ``auto_map``."""
    for key, value in (("model_file", "evil.py"), ("auto_map", {"AutoTokenizer": "evil.T"})):
        folder = Path(shutil.copytree(folders["dense"], tmp_path / key))
        (folder / "evil.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')")
        for file in ("config.json", "tokenizer_config.json"):
            amend(folder / file, **{key: value})
        if key == "model_file":
            with pytest.raises(kv.MissingModelError, match="cannot be loaded .*evil.py"):
                kv.load(folder)
        else:
            kv.load(folder)
        assert not (tmp_path / "trace").exists()


def test_the_first_token_that_differs_is_named(
    models: Models, folders: Folders, tmp_path: Path
) -> None:
    """Row 24: its id, and what each vocabulary has there, where two tokenizers mean no."""
    folder = Path(shutil.copytree(folders["dense"], tmp_path / "m"))
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<think>", "<thonk>"))
    other, model = kv.load(folder), models["dense"]
    number = model.tokenizer.get_vocab()["<think>"]
    translator = identity_of(model)
    with pytest.raises(kv.IncompatibleTranslatorError, match="the vocabulary differs"):
        kv.generate(model, other, TOKENS, translator=translator)
    told = rf"\(id {number} is '<think>' and '<thonk>'\)"
    with pytest.raises(kv.IncompatibleTranslatorError, match=told):
        check_tokenizers(model, other)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([[5, 6], [7, 8]], "several prompts: hand each over, then mlx_lm's batch_generate"),
        (np.ones((2, 3), np.int32), "the token ids of one prompt"),
        ([1.5, 2.5], "give text, a list of messages of text, or the token ids"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}],
            "has a part of type 'image'; models read text alone",
        ),
        ({"role": "user", "content": "x"}, "give text, a list of messages"),
        (b"x", "give text, a list of messages"),
        (None, "the prompt is None; give text"),
    ],
    ids="batch array floats image message bytes none".split(),
)
def test_prompts_of_other_kinds(models: Models, prompt: Any, text: str) -> None:
    """Row 43: batches and pictures; the way that works is named."""
    model = models["dense"]
    for use in (kv.generate, kv.hand_over):
        with pytest.raises(ValueError, match=text):
            use(model, model, prompt, translator=identity_of(model))


def test_prompts_are_not_logged(models: Models, caplog: Logged, capsys: Printed) -> None:
    """Row 59: at no level of any library, whether it goes well or not."""
    model, secret = models["dense"], "the canary sings at midnight"
    translator = identity_of(model)
    with caplog.at_level(logging.DEBUG):
        kv.generate(model, model, secret, translator=translator, max_tokens=2)
        talk = kv.Conversation({"a": model, "b": model}, [translator])
        talk.reply("a", secret, max_tokens=2)
        with pytest.raises(ValueError, match="the context of") as caught:
            kv.generate(model, model, secret * 99, translator=translator)
    captured = capsys.readouterr()
    for text in (caplog.text, captured.out, captured.err, str(caught.value)):
        assert "canary" not in text


def test_every_row_names_tests_that_exist() -> None:
    """FAULTS.md, held to what it says."""
    files = {path.stem: path.read_text() for path in TESTS.rglob("test_*.py")}
    rows = [line.split("|")[1:-1] for line in FAULTS.read_text().splitlines() if line[:2] == "| "]
    numbers = [int(row[0]) for row in rows if row[0].strip().isdecimal()]
    assert numbers == sorted(numbers) and set(numbers) == set(range(1, 1 + numbers[-1]))
    for row in rows:
        for file, name in re.findall(r"`(test_\w+)::(test_\w+)`", row[-1]):
            assert f"def {name}(" in files[file], f"row {row[0]}: {file}::{name}"
