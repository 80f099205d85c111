"""The training stream: what it reads, what a sample looks like, and which samples come when."""

import json
import math
import random
import sys
import types
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.paper.reproducing.lengths import prefix_histogram
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.errors import MissingExtraError
from kvlingo_mlx.tokenization import records as records_room
from kvlingo_mlx.tokenization.records import open_source
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.conversations import keeps_system, normalise, to_sample, until
from kvlingo_mlx.training.data import Stream
from kvlingo_mlx.training.mixture import Mixture, plain_text
from tests.support import real_templates
from tests.support.fixtures import Patch, Temp

MODEL = Path(dialogues.__file__).parent / "models" / "tiny-qwen3-s"
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (real_templates.FOLDER / "mistral-nemo.jinja").read_text()
SPECIALS = {
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
}
SMALL = Mixture().scaled(2048)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "<think>\nfirst trace\n</think>\n\none!"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "two!", "reasoning_content": "second trace"},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "three!"},
]


def family(name: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.model_max_length = 10**9
    if name != "qwen3":
        marks = SPECIALS[name]
        tokenizer.add_special_tokens(
            {"bos_token": marks[0], "additional_special_tokens": marks[1:]}
        )
        tokenizer.chat_template = {"gemma": GEMMA, "mistral": MISTRAL}[name]
    if name == "mistral":
        tokenizer.eos_token = "</s>"
    return tokenizer


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return family("qwen3")


def write(path: Path, records: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def conversation(number: int, facts: int, *, reasons: bool) -> dict[str, Any]:
    """A dialogue which no other shares an opening, a question or an answer with."""
    told = dialogues.dialogue(random.Random(number), facts, 3)
    messages = [
        m | {"content": f"#{number}.{i} {m['content']}"} for i, m in enumerate(told.conversation())
    ]
    for message in messages:
        if reasons and message["role"] == "assistant":
            message["reasoning_content"] = f"Let me see #{number}."
    return {"uuid": f"u{number}", "messages": messages, "reasoning": "on" if reasons else "off"}


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """Dialogues of very uneven lengths, most of them short, every fourth with traces."""
    rng = random.Random(0)
    facts = [min(100, 2 + int(rng.paretovariate(0.8) * 2)) for _ in range(600)]
    return [conversation(i, n, reasons=i % 4 == 0) for i, n in enumerate(facts)]


@pytest.fixture(scope="module")
def data(told: list[dict[str, Any]], tmp_path_factory: Temp) -> str:
    return write(tmp_path_factory.mktemp("data") / "told.jsonl", told)


@pytest.fixture(scope="module")
def stream(data: str, qwen3: Any) -> Stream:
    return Stream([data], qwen3, SMALL, seed=3, planned=256)


@pytest.fixture(scope="module")
def draws(stream: Stream) -> list[Any]:
    return [stream.draw(index) for index in range(256)]


def texts(tokenizer: Any, sample: Sample) -> tuple[str, str]:
    return tokenizer.decode(list(sample.prefix)), tokenizer.decode(list(sample.continuation))


@pytest.mark.parametrize("chunk", [7, 1 << 24])
def test_jsonl_is_read_by_offset(tmp_path: Path, monkeypatch: Patch, chunk: int) -> None:
    monkeypatch.setattr(records_room, "CHUNK", chunk)
    path = tmp_path / "some.jsonl"
    lines = ['{"text": "eins"}', "", '{"text": "zw\u00f6lf"}\r', "\r", "   ", '{"text": "\u4f60"}']
    path.write_bytes("\n".join(lines).encode())
    source, weight = open_source(path)
    assert weight == 1.0
    assert source.name == str(path)
    expected = [
        ({"text": "eins"}, 1),
        ({"text": "zw\u00f6lf"}, 3),
        (None, 5),
        ({"text": "\u4f60"}, 6),
    ]
    assert len(source.sizes) == len(expected)
    order = [3, 0, 2, 1, 3]
    read = [source.read(number) for number in order]
    assert read == [(expected[n][0], f"{path}, line {expected[n][1]}") for n in order]


def test_files_folders_and_weights(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "bare").mkdir()
    write(tmp_path / "b" / "late.jsonl", [{"text": "3"}])
    path = write(tmp_path / "a@home.jsonl", [{"text": "1"}, {"text": "2"}])
    write(tmp_path / "other.txt", [{"text": "no"}])
    source, weight = open_source((tmp_path, 2.5))
    assert weight == 2.5 and open_source(path)[1] == 1.0 and open_source(f"{path}@0.25")[1] == 0.25
    assert [source.read(i)[0]["text"] for i in range(len(source.sizes))] == ["1", "2", "3"]
    assert source.read(2)[1] == f"{tmp_path / 'b' / 'late.jsonl'}, line 1"
    for weight in ("0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="a@home.jsonl: weight .*, expected a positive number"):
            open_source(f"{path}@{weight}")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty.jsonl holds no records; each line should be"):
        open_source(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="bare holds no .jsonl file"):
        open_source(tmp_path / "bare")
    for name in ("absent.jsonl", "owner/absent.jsonl", "no such thing", "a/b/c"):
        with pytest.raises(ValueError, match=f"{name} does not exist; give a JSONL file, a folder"):
            open_source(name)


@pytest.fixture
def hub(monkeypatch: Patch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    row = {"uuid": "a", "reasoning": "off", "tools": None}
    rows = [row | {"messages": conversation(i, 9, reasons=False)["messages"]} for i in range(30)]
    splits = {"reasoning_off": rows[:10], "reasoning_on": rows[10:]}

    def load_dataset(name: str, config: str | None, split: str | None) -> Any:
        calls.append((name, config, split))
        if name == "nobody/nothing":
            raise FileNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub")
        return splits if split is None else splits[split]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return calls


def test_hugging_face_datasets(hub: list[tuple[Any, ...]], qwen3: Any) -> None:
    whole, weight = open_source("nvidia/Chat-v2@3")
    assert (len(whole.sizes), weight) == (30, 3.0)
    assert whole.read(9)[1] == "nvidia/Chat-v2:reasoning_off, record 10"
    record, where = whole.read(10)
    assert where == "nvidia/Chat-v2:reasoning_on, record 1"
    assert record["messages"][0]["content"].startswith("#10.0 ")
    assert len(open_source("nvidia/Chat-v2:reasoning_on")[0].sizes) == 20
    assert len(open_source("nvidia/Chat-v2:default:reasoning_off")[0].sizes) == 10
    assert hub == [
        ("nvidia/Chat-v2", None, None),
        ("nvidia/Chat-v2", None, "reasoning_on"),
        ("nvidia/Chat-v2", "default", "reasoning_off"),
    ]
    assert Stream(["nvidia/Chat-v2"], qwen3, Mixture(packed_share=0)).sample(0).continuation


def test_hugging_face_refusals(hub: list[tuple[Any, ...]], monkeypatch: Patch) -> None:
    with pytest.raises(
        ValueError, match="dataset nobody/nothing cannot be loaded: .*doesn't exist"
    ):
        open_source("nobody/nothing")
    with pytest.raises(ValueError, match="a/b:c:d:e: expected owner/name, owner/name:split or"):
        open_source("a/b:c:d:e")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r'pip install "kvlingo-mlx\[cuda\]"'):
        open_source("nvidia/Chat-v2")


ASK, SAY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
CALLED = '{"name": "f", "arguments": {}}'
GIVEN = "Result of f:\n42"


def answer(content: str, trace: str | None = None) -> list[dict[str, Any]]:
    more = {} if trace is None else {"reasoning_content": trace}
    return [ASK, {"role": "assistant", "content": content, **more}]


@pytest.mark.parametrize(
    ("messages", "kept"),
    [
        ([ASK, CALL, {"role": "tool", "content": "42"}, SAY], f"q {CALLED} {GIVEN} a"),
        ([ASK, SAY, *answer("  "), ASK, SAY], "q a q"),
        ([ASK, SAY, *answer("<think>\ncut")], "q a q"),
        ([SAY, ASK, SAY], "q a"),
        ([ASK, ASK, SAY, SAY], "q\n\nq a\n\na"),
        ([ASK, CALL], f"q {CALLED}"),
        ([{"role": "system", "content": ""}, *answer("ho", " why\n")], "q ho (why)"),  # Nemotron's
        (answer("<think>\nwhy\n</think>\n\nyes"), "q yes (why)"),
        (answer("why</think>yes"), "q yes (why)"),
        (answer("<think>\n\n</think>\n\nyes"), "q yes"),
        (answer("I <think> so"), "q I <think> so"),
    ],
)
def test_conversations_are_read_up_to_a_hole(messages: list[Any], kept: str) -> None:
    """Their turns; a reasoning trace stands apart, here in brackets."""
    record = {"uuid": "0", "reasoning": "on", "tools": None, "messages": messages}
    found = normalise(record, "here")["messages"]
    said = [
        m["content"] + (f" ({m['reasoning_content']})" if "reasoning_content" in m else "")
        for m in found
    ]
    assert " ".join(said) == kept
    assert all(m["role"] == ("user", "assistant")[n % 2] for n, m in enumerate(found))


def test_malformed_records_are_skipped_and_named(tmp_path: Path, qwen3: Any) -> None:
    """The others are trained on, also those that ``serve`` takes; none at all ends it in a line."""
    bad = ['{"messages": [', '{"prompt": "x"}', "[]", "55", '{"messages": "hi"}']
    good = [
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "s"}]}, ASK, SAY]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [ASK, CALL, {"role": "tool", "content": None}, SAY]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "x"}, ASK, SAY]},
        *(conversation(i, 9, reasons=False) for i in range(30)),
    ]
    path = Path(write(tmp_path / "some.jsonl", good))
    path.write_text(path.read_text().rstrip() + "\n\n" + "\n".join(bad) + "\n")
    stream = Stream([path], qwen3, SMALL)
    assert stream.skipped == len(bad)
    (told,) = [note for note in stream.notes if "skipped" in note]
    assert told.startswith(
        f"data: 5 records are skipped: {path}, line 36: not JSON (Expecting value"
    )
    assert f"{path}, line 37: expected {{" in told and "\n" not in told
    assert told.endswith("; and 2 more")
    (tmp_path / "bad.jsonl").write_text("\n".join(bad) + "\n")
    with pytest.raises(ValueError, match="no record of .*bad.jsonl can be used; 5 records are ski"):
        Stream([tmp_path / "bad.jsonl"], qwen3)


def test_records_without_an_answer_are_skipped_and_counted(tmp_path: Path, qwen3: Any) -> None:
    good = [conversation(i, 9, reasons=False) for i in range(30)]
    useless = [{"messages": [ASK]}, {"messages": []}, {"text": "plain"}, {"messages": [ASK, ASK]}]
    stream = Stream([write(tmp_path / "some.jsonl", [*good, *useless])], qwen3, SMALL)
    drawn = [stream.draw(index) for index in range(24)]
    assert stream.skipped == len(useless)
    assert max(record for draw in drawn for _, record in draw.records) < len(good)
    message = "no assistant turn in .*none.jsonl: none of 4 .* to kvlingo-mlx train --plain-text"
    with pytest.raises(ValueError, match=message):
        Stream([write(tmp_path / "none.jsonl", useless)], qwen3)
    with pytest.raises(ValueError, match="no training data; name a JSONL file"):
        Stream([], qwen3)
    tokenizer = family("qwen3")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        Stream([tmp_path / "some.jsonl"], tokenizer)


ON, OFF = 4, 6  # the turns of TALK with a trace and without
RENDERED = {
    ("gemma", OFF): (
        "<bos><start_of_turn>user\nBe brief.\n\none?<end_of_turn>\n<start_of_turn>model\none!"
        "<end_of_turn>\n<start_of_turn>user\ntwo?<end_of_turn>\n<start_of_turn>model\ntwo!"
        "<end_of_turn>\n<start_of_turn>user\nthree?<end_of_turn>\n<start_of_turn>model\n",
        "three!<end_of_turn>",
    ),
    ("mistral", ON): (
        "<s>[INST]Be brief.\n\none?[/INST]one!</s>[INST]two?[/INST]",
        "<think>\nsecond trace\n</think>\n\ntwo!</s>",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "turn"), RENDERED)
def test_samples_of_other_families(name: str, turn: int) -> None:
    tokenizer = family(name)
    messages = normalise({"messages": TALK}, "here")["messages"]
    assert not keeps_system(tokenizer) and keeps_system(family("qwen3"))
    cut = until(messages, turn, fold=True)
    assert all(set(message) == {"role", "content"} for message in cut)
    assert texts(tokenizer, to_sample(cut, tokenizer, 2048)) == RENDERED[name, turn]


TURNS = [
    {"role": role, "content": f"{number}{mark}"}
    for number in ("one", "two", "three", "four")
    for role, mark in (("user", "?"), ("assistant", "!"))
]


def test_streams_that_go_on(tmp_path: Path, qwen3: Any) -> None:
    """Natural samples go on to the end; packs hold all turns once, the last ones at the end."""
    path = tmp_path / "talks.jsonl"
    talks = [
        [m | {"content": f"#{number} {m['content']}"} for m in TURNS[: 2 * (number % 4 + 1)]]
        for number in range(200)
    ]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    mixture = replace(Mixture().limited(400, 300), later_turns=True)
    stream = Stream((str(path),), qwen3, mixture, 0, None, 64)
    plain = Stream((str(path),), qwen3, replace(mixture, later_turns=False), 0, None, 64)
    seen = Counter[int]()
    for draw in map(stream.draw, range(64)):
        number = draw.records[0][1]
        prefix, answers = texts(qwen3, draw.sample)
        asked = [w for w in ("one", "two", "three", "four") if f"#{number} {w}?" in prefix]
        told = [w for w in ("one", "two", "three", "four") if f"#{number} {w}!" in answers]
        whole = ["one", "two", "three", "four"][: number % 4 + 1]
        assert told == whole[whole.index(told[0]) :] and asked[-1] == told[0]
        assert f"#{number} {told[0]}!" not in prefix
        if draw.kind == "packed":
            assert len(told) == (len(whole) + 1) // 2  # at most the later half
        seen[len(told)] += 1
    assert {1, 2, 3} <= set(seen)
    assert all(
        qwen3.decode(draw.sample.continuation).count("!") == 1
        for draw in map(plain.draw, range(64))
    )


def turn_text(message: dict[str, str], *, trace: bool = False) -> str:
    think = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if trace else ""
    return f"<|im_start|>{message['role']}\n{think}{message['content']}<|im_end|>"


def by_hand(messages: list[dict[str, str]], turn: int) -> tuple[str, str]:
    """Qwen3's rendering as the paper shows it, without a template."""
    reply = messages[turn]
    reasons = "reasoning_content" in reply
    header = "<|im_start|>assistant\n" + ("" if reasons else "<think>\n\n</think>\n\n")
    whole = turn_text(reply, trace=reasons).removeprefix("<|im_start|>assistant\n")
    return "".join(turn_text(m) + "\n" for m in messages[:turn]) + header, whole


def test_natural_samples_are_turns_of_their_record(
    draws: list[Any], told: list[dict[str, Any]], qwen3: Any
) -> None:
    turns = Counter()
    for draw in (d for d in draws if d.kind == "natural"):
        assert SMALL.natural[0] <= len(draw.sample.prefix) <= SMALL.natural[1]
        ((source, record),) = draw.records
        messages = told[record]["messages"]
        prefix, continuation = texts(qwen3, draw.sample)
        matching = [
            i for i, m in enumerate(messages) if by_hand(messages, i) == (prefix, continuation)
        ]
        assert len(matching) == 1, prefix[-200:]
        assert source == 0
        assert draw.reasoning == (record % 4 == 0)
        assert messages[matching[0]]["role"] == "assistant"
        turns[matching[0] == len(messages) - 1] += 1
    assert min(turns.values()) > 10, "not only the last turn of a conversation is drawn"


def test_packed_samples_hold_whole_conversations(
    draws: list[Any], told: list[dict[str, Any]], qwen3: Any
) -> None:
    behind = 0
    for draw in (d for d in draws if d.kind == "packed"):
        assert SMALL.packed[0] <= len(draw.sample.prefix) <= SMALL.packed[1]
        prefix, continuation = texts(qwen3, draw.sample)
        lifted, *others = (told[record]["messages"] for _, record in draw.records)
        question, answer = lifted[-2:]
        header = by_hand([question, answer], 1)
        assert prefix.endswith(header[0])
        assert continuation == header[1]
        assert prefix.count(question["content"]) == 1
        assert answer["content"] not in prefix
        wholes = ["".join(turn_text(m) + "\n" for m in messages) for messages in others]
        remainder = "".join(turn_text(m) + "\n" for m in lifted[:-2])
        assert all(prefix.count(whole) == 1 for whole in [*wholes, remainder])
        assert len(prefix) == len(header[0]) + len(remainder) + sum(map(len, wholes))
        assert len(set(draw.records)) == len(draw.records)
        behind += prefix.index(remainder) > 0
        assert "Let me see" not in prefix
    assert 10 < behind < 118, "the evaluated conversation stands anywhere"


def test_a_sample_is_a_function_of_seed_and_index(data: str, qwen3: Any, draws: list[Any]) -> None:
    resumed = Stream([data], qwen3, SMALL, seed=3, planned=256)
    for index in (200, 17, 200, 255, 3):
        assert resumed.draw(index) == draws[index]
    other = Stream([data], qwen3, SMALL, seed=4)
    assert [other.sample(i) for i in range(8)] != [draw.sample for draw in draws[:8]]
    packed = [draw.sample for draw in draws if draw.kind == "packed"]
    assert len(set(packed)) == len(packed)


def numbers(text: str) -> set[int]:
    """The records whose turns a text holds: each turn begins with #record.turn."""
    return {int(part.split(".")[0]) for part in text.split("#")[1:]}


def test_held_out_records_never_train(stream: Stream, draws: list[Any], qwen3: Any) -> None:
    held = stream.held_out(16)
    assert len(set(held)) == len(held) == 16
    assert stream.reserved == 60
    kept = set().union(*(numbers(texts(qwen3, sample)[0]) for sample in held))
    trained = {record for draw in draws for _, record in draw.records}
    assert len(kept) > 30
    assert len(trained) > 300
    assert not kept & trained
    lengths = [len(sample.prefix) for sample in held]
    assert sum(length >= SMALL.packed[0] for length in lengths) == 8


def test_the_same_question_elsewhere_does_not_train(tmp_path: Path, qwen3: Any) -> None:
    """As in Nemotron: every question answered twice, with reasoning and without."""
    twice = [conversation(i % 40, 6, reasons=i >= 40) for i in range(80)]
    path = write(tmp_path / "twice.jsonl", twice)
    stream = Stream([path], qwen3, SMALL)
    kept = set().union(*(numbers(texts(qwen3, sample)[0]) for sample in stream.held_out(32)))
    drawn = [stream.draw(index) for index in range(64)]
    trained = {record % 40 for draw in drawn for _, record in draw.records}
    assert kept
    assert not kept & trained
    assert len(trained) > 25
    for draw in drawn:
        questions = Counter(record % 40 for _, record in draw.records)
        assert questions[draw.records[0][1] % 40] == 1, "its twin would give the answer away"


def test_held_out_of_little_data(tmp_path: Path, qwen3: Any) -> None:
    few = [conversation(i, 12, reasons=False) for i in range(12)]
    stream = Stream([write(tmp_path / "few.jsonl", few)], qwen3, SMALL)
    assert stream.reserved == 2
    held = stream.held_out(8)
    assert 2 <= len(held) <= 8
    assert max(len(sample.prefix) for sample in held) < SMALL.packed[0], "too little to pack"
    with pytest.raises(ValueError, match="no sample in the 0 records held out of .*one.jsonl"):
        Stream([write(tmp_path / "one.jsonl", few[:1])], qwen3, Mixture(packed_share=0)).held_out()


def test_what_does_not_fit_is_refused(data: str, tmp_path: Path, qwen3: Any) -> None:
    long = Mixture(natural=(9000, 10_000), packed_share=0)
    with pytest.raises(ValueError, match=r"^no conversation with a prefix of 9000 to 10000 "):
        Stream([data], qwen3, long)
    few = write(tmp_path / "few.jsonl", [conversation(i, 9, reasons=False) for i in range(9)])
    with pytest.raises(
        ValueError, match=r"no concatenation with a prefix of 12288 to 16384 tokens in"
    ):
        Stream([few], qwen3, Mixture(packed_share=1))


def test_the_same_name_with_other_records_is_told(
    tmp_path: Path, qwen3: Any, hub: list[tuple[Any, ...]]
) -> None:
    def contents(*specs: Any) -> dict[str, str]:
        return Stream(specs, qwen3, SMALL).contents

    path = write(tmp_path / "a.jsonl", [conversation(i, 9, reasons=False) for i in range(9)])
    before = contents(path)
    assert before == contents(f"{path}@0.5")
    Path(path).write_text(Path(path).read_text().replace("#3.1 ", "#3_1 "))
    after = contents(path)
    assert list(before) == list(after) == [path] and before != after
    assert after[path].startswith(f"9 records of {Path(path).stat().st_size - 9} bytes, sha256 ")
    both = contents("nvidia/Chat-v2", "nvidia/Chat-v2:reasoning_on")
    assert both["nvidia/Chat-v2"].startswith("30 records of ")
    assert len({text.split()[-1] for text in both.values()}) == 2


def test_mixtures() -> None:
    full = Mixture()
    assert (full.natural, full.packed) == ((10, 10_000), (12_288, 16_384))
    assert (full.packed_share, full.max_prefix, full.max_continuation) == (0.5, 16_384, 2048)
    assert full.scaled(16_384 + 2048) is full
    assert full.scaled(40_960) is full
    half = full.scaled(9216)
    assert (half.natural, half.packed) == ((10, 5000), (6144, 8192))
    assert (half.max_prefix, half.max_continuation) == (8192, 1024)
    for context in (64, 512, 2048, 4096):
        small = full.scaled(context)
        assert small.max_prefix + small.max_continuation == context
        assert math.isclose(small.packed[0] / context, 12_288 / 18_432, abs_tol=1 / context)
    assert plain_text().scaled(2048) == plain_text(256, 256)
    assert plain_text().scaled(100) == plain_text(50, 50)

    for facts, complaint in (
        ({"natural": (0, 10)}, "natural prefixes of 0 to 10 tokens: expected 0 < low <= high"),
        ({"packed": (12, 20_000)}, "max_prefix, which is 16384"),
        ({"packed_share": 1.5}, r"packed_share 1.5: expected a share from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=complaint):
            Mixture(**facts)


def test_plain_text_windows(tmp_path: Path) -> None:
    words = dialogues.NAMES + dialogues.CITIES
    rng = random.Random(1)
    books = [" ".join(rng.choice(words) for _ in range(n)) for n in (20, 900, 20_000, 1000, 800)]
    path = write(tmp_path / "books.jsonl", [{"text": book} for book in [*books, ""]])
    tokenizer = family("qwen3")
    tokenizer.chat_template = None
    stream = Stream([path], tokenizer, plain_text(), seed=2)
    drawn = [stream.draw(index) for index in range(24)]
    starts: list[int] = []
    for draw in drawn:
        assert (len(draw.sample.prefix), len(draw.sample.continuation)) == (256, 256)
        prefix, continuation = texts(tokenizer, draw.sample)
        assert prefix + continuation in books[draw.records[0][1]]
        assert (draw.kind, draw.reasoning) == ("text", False)
        starts.append(books[draw.records[0][1]].index(prefix))
    assert len({draw.sample for draw in drawn}) >= 20  # short books: a window may come twice
    assert min(starts) < 2000, "windows lie anywhere in a text"
    assert max(starts) > 50_000
    assert starts.count(0) < 3
    assert len({draw.records[0][1] for draw in drawn}) >= 3
    assert drawn[7] == Stream([path], tokenizer, plain_text(), seed=2).draw(7)
    short = tokenizer.decode(tokenizer.encode(books[2])[:700])
    stream = Stream(
        [write(tmp_path / "short.jsonl", [{"text": short}] * 3)], tokenizer, plain_text()
    )
    begins = {short.index(texts(tokenizer, stream.sample(index))[0]) for index in range(12)}
    assert len(begins) > 6
    with pytest.raises(ValueError, match=r"no text of 90000 tokens in .*books.jsonl; give longer"):
        Stream([path], tokenizer, plain_text(45_000, 45_000)).sample(0)
    talks = write(tmp_path / "talks.jsonl", [{"messages": [ASK, SAY]}])
    with pytest.raises(
        ValueError, match=r'no text in .*talks.jsonl: none of 1 records is \{"text"'
    ):
        Stream([talks], tokenizer, plain_text())


def test_histogram(stream: Stream, draws: list[Any]) -> None:
    rows = prefix_histogram(stream, count=64, bins=10)
    assert len(rows) == 10
    assert [row[0] for row in rows[1:]] == [row[1] for row in rows[:-1]]
    for low, high, on, off in rows:
        inside = [d.reasoning for d in draws[:64] if low <= len(d.sample.prefix) < high]
        assert (on, off) == (sum(inside), len(inside) - sum(inside))
    assert sum(on + off for *_, on, off in rows) == 64
    ratios = [high / low for low, high, *_ in rows]
    assert max(ratios) / min(ratios) < 1.1


def talks_of(sizes: Iterable[int]) -> list[dict[str, Any]]:
    """Conversations of about so many tokens, each with words of its own."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"Case {number}: " + f"note {number} " * (size // 3)},
                {"role": "assistant", "content": f"Case {number} is noted."},
            ]
        }
        for number, size in enumerate(sizes)
    ]


def test_no_run_ends_for_want_of_one_pack(tmp_path: Path, qwen3: Any) -> None:
    """Two conversations make a pack where they happen to fit, which one try in many does not."""
    sizes = [random.Random(n).choice([60, 170, 185, 200]) for n in range(300)]
    path = write(tmp_path / "talks.jsonl", talks_of(sizes))
    mixture = Mixture((10, 312), (384, 400), max_prefix=512, max_continuation=64)
    stream = Stream([path], qwen3, mixture, planned=1200)
    assert stream.mixture.packed_share == 0.5
    drawn = [stream.draw(index) for index in range(400)]
    packed = [len(draw.sample.prefix) for draw in drawn if draw.kind == "packed"]
    assert abs(len(packed) - 200) <= 2
    assert all(192 <= length <= 400 for length in packed)
    assert sum(length >= 384 for length in packed) > 100
