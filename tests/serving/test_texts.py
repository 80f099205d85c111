"""Plain texts that are gone on with: an answer keeps the tokens in which its model wrote it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pydantic")

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.models import prompts
from kvlingo_mlx.serving import talks
from kvlingo_mlx.serving.engine import Engine
from kvlingo_mlx.serving.messages import Ask, Piece, Sampling
from kvlingo_mlx.serving.settings import Settings
from kvlingo_mlx.serving.talks import Spelling, spelt
from tests.support.engines import Clients, Told
from tests.support.languages import sentencepiece

NAMES = {"large": "tiny-qwen3-l", "moe": "tiny-qwen3-moe"}
TEXT = "The home of Anna is Rome. " * 8 + "The home of Oscar"


@pytest.fixture
def clients(tmp_path: Path) -> Clients:
    models = {name: str(zoo(folder)) for name, folder in NAMES.items()}
    return Clients(Engine(Settings(models=models, conversations=tmp_path / "kept")))


def completed(clients: Clients, prompt: str, model: str = "large", **facts: Any) -> Told:
    return clients.together([Ask(model=model, prompt=prompt, max_tokens=12, **facts)])[0]


def ids(told: Told) -> list[int]:
    return [e.token for p in told.events if isinstance(p, Piece) for e in p.logprobs]


@pytest.mark.parametrize("seed", [7, 8, 10, 11])
def test_an_answer_keeps_its_tokens(clients: Clients, seed: int) -> None:
    """Hot answers are spelt as no tokenizer would; the next prompt reads its own end alone."""
    model = kv.load(zoo("tiny-qwen3-l"))
    hot = Sampling(temperature=1.6, seed=seed)
    first = completed(clients, TEXT, sampling=hot, logprobs=0)
    tokens = [*model.tokenizer.encode(TEXT), *ids(first)]
    if first.end.reason == "stop":
        del tokens[-1]  # the end of the answer has no text
    whole = TEXT + first.text
    assert "\ufffd" not in whole, "a text that a client can send back"
    again = model.tokenizer.encode(whole + " Rome")
    assert again != [*tokens, *model.tokenizer.encode(" Rome")], "it is spelt unusually"
    second = completed(clients, whole + " Rome")
    new = len(model.tokenizer.encode(" Rome"))
    assert second.usage.prompt_tokens == len(tokens) + new
    assert second.usage.read_tokens == new
    switched = completed(clients, whole + " Rome", "moe")
    assert switched.usage.prompt_tokens == len(tokens) + new


def test_a_known_text_is_not_read_by_the_tokenizer_again(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = TEXT + completed(clients, TEXT).text
    read: list[str] = []
    encode = prompts.encode
    monkeypatch.setattr(
        talks, "encode", lambda model, text: [read.append(text), encode(model, text)][1]
    )
    second = completed(clients, said + " Rome")
    assert second.usage.strategy == "kept"
    third = completed(clients, said + " Rome" + second.text + " Oslo", "moe")
    assert third.usage.strategy == "translate"
    assert completed(clients, said + " Oslo", "moe").usage.cached_tokens, "another way to go on"
    assert not read
    completed(clients, "Another text")
    assert read == ["Another text"]


@pytest.mark.parametrize("legacy", [True, False])
def test_a_tokenizer_that_reads_a_rest_otherwise(legacy: bool) -> None:
    """Llama's tokenizer puts a space before every text, so a rest is read with what precedes it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=sentencepiece(legacy=legacy))
    model: Any = SimpleNamespace(name="m", tokenizer=tokenizer)
    begun, rest = "Anna lives in Ro", "me, and Oscar in Oslo."
    known = tokenizer.encode(begun, add_special_tokens=False)
    talk: Any = SimpleNamespace(
        texts=SimpleNamespace(lines={"m": None}), said=Spelling("", [], ()).answered(begun, known)
    )
    alone = tokenizer.encode(rest, add_special_tokens=False)
    assert tokenizer.decode([*known, *alone]) != begun + rest, "read alone, it is another text"
    whole = spelt([talk], "m", model, begun + rest).tokens
    assert tokenizer.decode(whole, skip_special_tokens=True).strip() == begun + rest
    assert spelt([talk], "another", model, begun + rest).tokens == whole
