"""Records of text are read as a prompt of text is: with the ``<s>`` that stands in front of it."""

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

import kvlingo_mlx as kv
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.tokenization import renderings
from kvlingo_mlx.tokenization.samples import Sample, to_samples, tokenise
from tests.support.fixtures import Models
from tests.support.two_tokenizers import write_mistral, write_qwen

TEXT = "In the house the money is hers, the rest of it is ours, and the river is long. " * 2
BOS = "<s>"


def adds_bos(folder: Path) -> Path:
    """The tokenizer of a model folder, made to put ``<s>`` in front of a text, as Llama's does."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    number = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, number)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def places(root: Path) -> dict[str, Path]:
    """Two Mistrals whose tokenizer adds ``<s>``, and a Qwen whose tokenizer adds nothing."""
    return {
        "one": adds_bos(write_mistral(root / "one")),
        "two": adds_bos(write_mistral(root / "two", seed=8)),
        "none": write_qwen(root / "none"),
    }


@pytest.fixture(scope="module")
def loaded(places: dict[str, Path]) -> Models:
    """The same, loaded."""
    return {name: kv.load(folder) for name, folder in places.items()}


def test_the_prompt_and_the_record_agree(loaded: Models) -> None:
    for name, model in loaded.items():
        prompt = encode(model, TEXT)
        first = model.tokenizer.bos_token_id
        assert (prompt[0] == first) == (name != "none")  # the hazard is there, and its control
        sample = tokenise({"text": TEXT}, model.tokenizer)
        assert [*sample.prefix, *sample.continuation] == prompt
        assert len(sample.prefix) == len(prompt) // 2
    one = loaded["one"]
    twice = tokenise({"text": BOS + TEXT}, one.tokenizer)  # it is there already: once is enough
    assert list(twice.prefix + twice.continuation) == encode(one, BOS + TEXT)
    assert (twice.prefix + twice.continuation).count(one.tokenizer.bos_token_id) == 1


def test_between_two_tokenizers(loaded: Models) -> None:
    """Each model's own prefix is what it would read of a prompt; a text's own ``<s>`` counts."""
    source, target = loaded["none"], loaded["one"]
    for text in (TEXT, BOS + TEXT):
        sample = tokenise({"text": text}, target.tokenizer, source_tokenizer=source.tokenizer)
        assert sample.prefix[0] == target.tokenizer.bos_token_id
        assert sample.prefix.count(target.tokenizer.bos_token_id) == 1
        assert list(sample.prefix) == encode(target, text)[: len(sample.prefix)]
        assert list(sample.source_prefix) == encode(source, text)[: len(sample.source_prefix)]
    (kept,) = to_samples([Sample((5, 6), (7,))], target.tokenizer, 99)
    assert kept.prefix == (5, 6)  # token ids are the user's own


def test_training_windows_begin_with_it(places: dict[str, Path], tmp_path: Path) -> None:
    """Wherever in a text a window lies, it is read from position 0 on, as a prompt would be."""
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    from kvlingo_mlx.training.data import Stream
    from kvlingo_mlx.training.mixture import plain_text

    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"{i} {TEXT * 4}"}) + "\n" for i in range(12)))
    windows = plain_text(prefix=24, continuation=16)
    for name, count in (("one", 1), ("none", 0)):
        tokenizer = AutoTokenizer.from_pretrained(places[name])
        stream = Stream((str(data),), tokenizer, windows, 0)
        for index in range(6):
            sample = stream.sample(index)
            assert (len(sample.prefix), len(sample.continuation)) == (24, 16)
            assert (sample.prefix[0] == tokenizer.bos_token_id) == bool(count)
            assert sample.prefix.count(tokenizer.bos_token_id) == count
            text = tokenizer.decode(sample.prefix[count:] + sample.continuation)
            assert " ".join(text.split())[4:-4] in " ".join(data.read_text().split())
        assert renderings.front(tokenizer) == ((tokenizer.bos_token_id,) if count else ())
