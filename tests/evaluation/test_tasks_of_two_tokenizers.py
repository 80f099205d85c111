"""lm-eval's tasks where the two models have tokenizers and chat templates of their own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import pytest

import kvlingo_mlx as kv
from benchmarks.paper.commands import run
from benchmarks.paper.tasks import ADDED
from kvlingo_mlx.embedded import dialogues, zoo
from kvlingo_mlx.errors import KVLingoError, KVLingoWarning
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.renderings import text_of
from kvlingo_mlx.tokenization.samples import between
from tests.support import TESTS
from tests.support.fixtures import Models, Patch, Printed
from tests.support.lm_eval_tasks import QUAC, offline

pytest.importorskip("lm_eval")


from kvlingo_mlx.evaluation.harness import running

OTHERS = TESTS / "zoo"
PAIRS = (("tiny-qwen3-s", "tiny-mistral"), ("tiny-mistral", "tiny-qwen3-s"))
KINDS = ("tiny_choice", "tiny_words", "tiny_answers")


@pytest.fixture(autouse=True)
def local(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Patch) -> None:
    offline(tmp_path_factory.getbasetemp(), monkeypatch)


@pytest.fixture(scope="module")
def zoo_models() -> Models:
    return {"tiny-qwen3-s": kv.load(zoo("tiny-qwen3-s")),
            "tiny-mistral": kv.load(OTHERS / "models" / "tiny-mistral")}  # fmt: skip


def translator(source: str, target: str) -> Any:
    return kv.load_translator(OTHERS / "translators" / f"{source}--{target}")


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_targets_own_cache_is_what_it_always_was(
    zoo_models: Models, task_folder: Path, pair: tuple[str, str], chat: bool
) -> None:
    """Every request's prefix is the target's own rendering; contexts are the source's, too."""
    source, target = (zoo_models[name] for name in pair)
    seen: list[AlignedPrefix] = []
    native = conditions.native(target)

    def watched(prefix: Any) -> list:
        seen.append(prefix)
        return native(prefix)

    options: dict[str, Any] = {
        "condition": "x", "include_path": task_folder, "apply_chat_template": chat, "limit": 3,
        "num_fewshot": 1, "max_gen_toks": 6,
    }  # fmt: skip
    alone = running.run(target, native, KINDS, **options)
    both = running.run(target, watched, KINDS, source_tokenizer=source.tokenizer, **options)
    assert both["tasks"] == alone["tasks"]
    assert seen and all(isinstance(prefix, AlignedPrefix) for prefix in seen)
    if not chat:
        for prefix in seen:
            text = target.tokenizer.decode(list(prefix.target_ids), skip_special_tokens=True)
            theirs = text_of(source.tokenizer, text.removeprefix("<s>").lstrip(" "))
            assert prefix.source_ids == tuple(theirs.ids.tolist())


def conversations(folder: Path, count: int) -> tuple[Path, list[tuple[list[dict], str]]]:
    """Dialogues of the zoo as a file of MultiChallenge, and what should be recalled."""
    talks = list(dialogues.held_out(count, facts=(6, 10)))
    rows = [{"question_id": f"m{i}", "axis": "x", "target_question": "?", "pass_criteria": "YES",
             "conversation": list(talk.messages)} for i, talk in enumerate(talks)]  # fmt: skip
    path = folder / "talks.json"
    path.write_text(json.dumps(rows))
    return path, [(list(talk.messages), talk.asked[0].value) for talk in talks]


@pytest.mark.parametrize("pair", PAIRS)
def test_answers_are_those_of_an_alignment_made_by_hand(
    zoo_models: Models, tmp_path: Path, pair: tuple[str, str]
) -> None:
    """Against a greedy loop over logits, from a prefix that is aligned without lm-eval."""
    source, target = (zoo_models[name] for name in pair)
    make = conditions.translated(source, target, translator(*pair))
    path, talks = conversations(tmp_path, 3)
    with pytest.warns(KVLingoWarning, match="cannot merge such caches .* written one at a time"):
        found = running.run(
            target, make, ["multichallenge"], added=ADDED, condition="x",
            data={"multichallenge": path}, source_tokenizer=source.tokenizer, max_gen_toks=8,
        )  # fmt: skip
    for item, (messages, _) in zip(found["tasks"]["multichallenge"]["items"], talks, strict=True):
        sample = between(messages, source.tokenizer, target.tokenizer)
        assert sample.aligned is not None and item["prefix_tokens"] == len(sample.prefix)
        cache, tokens, last = make(sample.aligned), [], sample.prefix[-1]
        while len(tokens) < 8:
            logits = target.model(mx.array([[last]]), cache=cache)[0, -1]
            last = int(mx.argmax(logits).item())
            if last in target.tokenizer.eos_token_ids:
                break
            tokens.append(last)
        assert item["responses"] == [target.tokenizer.decode(tokens)]


def test_a_prompt_that_is_cut_is_refused(zoo_models: Models, task_folder: Path) -> None:
    source, target = zoo_models["tiny-qwen3-s"], zoo_models["tiny-mistral"]
    with pytest.raises(KVLingoError, match="was cut, or changes hands within; between two"):
        running.run(
            target, conditions.native(target), ["tiny_answers"], condition="x", max_length=12,
            include_path=task_folder, source_tokenizer=source.tokenizer,
        )  # fmt: skip


def test_a_template_that_refuses_a_tasks_messages_is_named(
    zoo_models: Models, task_folder: Path, monkeypatch: Patch
) -> None:
    source, target = zoo_models["tiny-qwen3-s"], zoo_models["tiny-mistral"]
    refuses = kv.load(zoo("tiny-qwen3-s")).tokenizer
    monkeypatch.setattr(
        refuses._tokenizer, "chat_template", "{{ raise_exception('no system message') }}"
    )
    assert source.tokenizer is not refuses
    with pytest.raises(KVLingoError, match="does not take a task's messages .no system message"):
        running.run(
            target, conditions.native(target), ["tiny_answers"], condition="x",
            include_path=task_folder, source_tokenizer=refuses,
        )  # fmt: skip


def test_the_verb_takes_such_pairs(tmp_path: Path, capsys: Printed) -> None:
    quac = tmp_path / "quac.json"
    quac.write_text(json.dumps(QUAC))
    pair = ["eval", "--source", "tiny-qwen3-s", "--target", str(OTHERS / "models/tiny-mistral"),
            str(OTHERS / "translators/tiny-qwen3-s--tiny-mistral"), "--max-tokens", "3",
            "--out", str(tmp_path / "o.jsonl")]  # fmt: skip
    record = tmp_path / "r.json"
    more: Sequence[str] = ["--baselines", "hidden,canonical", "--json", str(record)]
    assert run([*pair, "--tasks", "quac", "--task-data", f"quac={quac}", *more]) == 0
    means = json.loads(record.read_text())["results"]["means"]["quac"]
    assert set(means) == {"native", "translated", "prefix hidden", "canonical"}
    record.unlink()
    suite = ["--suite", "paper:quac,ruler", "--task-data", f"quac={quac}", "--lengths", "300"]
    assert run([*pair, *suite, "--limit", "1", *more]) == 2
    assert "no question for the task quac" in capsys.readouterr().err  # its dialogue is short
