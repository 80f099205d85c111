"""Chat logs of any tool, as training data for any template: taken, or skipped and named."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlingo_mlx.errors import KVLingoWarning
from kvlingo_mlx.tokenization.records import Skipped
from kvlingo_mlx.tokenization.samples import read_jsonl, to_samples
from tests.support.real_templates import FAMILIES, NAMES, reference, write_real

Q, A = {"role": "user", "content": "fact0"}, {"role": "assistant", "content": "fact9"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "fact1"}'},
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "fact2"}


def calls(**more: Any) -> list[dict[str, Any]]:
    return [Q, {"role": "assistant", "content": None, **more}, RESULT, A]


# Records, each with how many facts a model must be given.
LOGS: list[tuple[Any, int]] = [
    ({"messages": [Q, A]}, 2),
    ({"messages": calls(tool_calls=[CALL])}, 4),
    ({"messages": calls(function_call={"name": "look", "arguments": '{"at": "fact1'})}, 4),
    ({"messages": calls(content=[{"type": "tool_use", "id": "call_1", "name": "look", "input":
                                  {"at": "fact1"}}])}, 4),
    ({"messages": [{"role": "developer", "content": "fact1"}, Q, A]}, 3),
    ({"messages": [Q, {"role": "system", "content": "fact1"}, {"role": "user", "content": "fact2"},
                   A]}, 4),
    ({"messages": [{"role": "system", "content": "fact1"}, {"role": "system", "content": "fact2"},
                   Q, A]}, 4),
    ({"messages": [Q, {"role": "critic", "content": "fact1"}, RESULT, A]}, 4),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "fact0"}, {"type":
      "image_url", "image_url": {"url": "data:,"}}]}, A], "tools": None}, 2),
    ({"conversations": [{"from": "system", "value": "fact1"}, {"from": "human", "value": "fact0"},
                        {"from": "function_call", "value": '{"name": "look", "arguments": {}}'},
                        {"from": "observation", "value": "fact2"}, {"from": "gpt", "value":
                        "fact9"}]}, 4),
    ({"system": "fact1", "messages": [Q, A]}, 3),
    ([Q, A], 2),
    ({"text": "fact0 and fact9"}, 2),
    # A request for a response, and what was logged of one.
    ({"input": [Q, {"type": "function_call", "call_id": "call_1", "name": "look", "arguments":
                    '{"at": "fact1"}'}, {"type": "function_call_output", "call_id": "call_1",
                    "output": "fact2"}, A]}, 4),
    ({"instructions": "fact1", "input": "fact0", "output": [{"type": "message", "role":
      "assistant", "content": [{"type": "output_text", "text": "fact9"}]}]}, 3),
    # mlx-lm's, with texts or messages, preferences, and instructions.
    ({"prompt": "fact0", "completion": "fact9"}, 2),
    ({"prompt": [{"role": "system", "content": "fact1"}, Q], "completion": [A]}, 3),
    ({"prompt": "fact2", "chosen": [Q, A], "rejected": [Q, {**A, "content": "fact1"}]}, 2),
    ({"system": "fact1", "prompt": "fact0", "chosen": "fact9", "rejected": "fact2"}, 3),
    ({"instruction": "fact0", "input": "fact1", "output": "fact9"}, 3),
    ({"instruction": "fact0", "input": "", "output": "fact9"}, 2),
    ({"prompt": "fact0", "completion": "fact9", "messages": None, "text": None}, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(root: Path) -> dict[str, Path]:
    return {family.name: write_real(root / family.name, family) for family in FAMILIES}


@pytest.mark.parametrize("name", NAMES)
def test_every_log_becomes_a_sample_of_every_template(
    folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    tokenizer, path = reference(folders[name]), tmp_path / "logs.jsonl"
    path.write_text("\n".join(json.dumps(log) for log, _ in LOGS), encoding="utf-8-sig")
    records, skipped = read_jsonl(path), Skipped()
    for record, (log, facts) in zip(records, LOGS, strict=True):
        (sample,) = to_samples([record], tokenizer, 4096, skipped=skipped)
        text = tokenizer.decode([*sample.prefix, *sample.continuation]).replace(" ", "")
        assert (
            len({fact for fact in ("fact0", "fact1", "fact2", "fact9") if fact in text}) == facts
        ), log
        assert sample.continuation
    assert not skipped


FIELDS = (
    "messages conversations input prompt completion output"
    " chosen instruction role content text tool_calls from value type function system"
)
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["messages", "text", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS.split()), inner, max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.filterwarnings("ignore::kvlingo_mlx.errors.KVLingoWarning")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(junk=st.lists(JSON, max_size=3), half=st.sampled_from([b"", b"\\ud83d", b"\xff"]))
def test_any_record_is_taken_or_named(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, junk: list[Any], half: bytes
) -> None:
    tokenizer = reference(folders["qwen3.5"])
    path, skipped = tmp_path_factory.mktemp("logs") / "logs.jsonl", Skipped()
    lines = [json.dumps({"messages": [Q, A]}).encode(), *(json.dumps(j).encode() for j in junk)]
    path.write_bytes(b"\n".join(lines).replace(b"fact0", b"fact0 " + half))
    for record in read_jsonl(path):
        assert record.get("text") is not None or record["messages"]
        list(to_samples([record], tokenizer, 4096, skipped=skipped))
    assert not skipped  # what can be read can be rendered


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    path = tmp_path / "logs.jsonl"
    path.write_text("\n".join([json.dumps({"messages": [Q, A]}), "{", '{"a": 1}', "[]", "no"]))
    with pytest.warns(KVLingoWarning) as told:
        assert len(read_jsonl(path)) == 1
    text = str(told[0].message)
    assert (
        text.startswith(f"3 records are skipped: {path}, line 3: expected {{") and "\n" not in text
    )
    assert f"; {path}, line 5: not JSON" in text
