"""What vLLM is asked for, by a vLLM of planted times."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.paper.reproducing.tables import tables
from benchmarks.paper.timing import vllm_serving


def test_the_tables_rows_are_served() -> None:
    assert [row[1] for row in tables()["app:tab:vllm"].rows] == list(vllm_serving.SERVED_ROWS)


class Planted:
    """A vLLM of planted times: 1 ms a prompt token, 5 ms for each generated after the first."""

    __version__ = "9.9"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, short: bool = False) -> None:
        self.now, self.opened, self.prompts, self.asked = 0.0, [], [], []
        self.configs: list[dict[str, Any]] = []
        self.short = short
        monkeypatch.setattr(vllm_serving, "perf_counter", lambda: self.now)
        monkeypatch.setitem(sys.modules, "vllm", self)  # type: ignore[arg-type]

    def SamplingParams(self, **given: Any) -> dict[str, Any]:
        self.asked.append(given)
        return given

    def LLM(self, **given: Any) -> Planted:
        self.opened.append(given)
        self.configs.append(json.loads((Path(given["model"]) / "config.json").read_text()))
        return self

    def generate(self, prompts: Any, asked: Any, use_tqdm: bool) -> list[Any]:
        ((prompt,), count) = (prompts, asked["max_tokens"] - self.short)
        self.prompts.append(prompt["prompt_token_ids"])
        self.now += 1e-3 * len(prompt["prompt_token_ids"]) + 5e-3 * (count - 1)
        answer = types.SimpleNamespace(token_ids=list(range(count)))
        return [types.SimpleNamespace(outputs=[answer])]


def test_vllm_is_asked_as_the_paper_did(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Planted(monkeypatch)
    serving = vllm_serving.Serving(tokens=(20, 40), requests=3, decoded=5)
    names = ("qwen3-0.6b", "gemma-3-12b-4kv")
    results = vllm_serving.time_models(names, serving)
    assert results["version"] == "9.9" and list(results["models"]) == list(names)
    for found in results["models"].values():
        assert [length["tokens"] for length in found] == [20, 40]
        for length in found:
            assert length["first_token"] == pytest.approx([1e-3 * length["tokens"]] * 3)
            assert length["per_token"] == pytest.approx([5e-3] * 3)
    for opened in planted.opened:
        assert opened["enable_prefix_caching"] is False and opened["load_format"] == "dummy"
        assert opened["max_model_len"] == 45 and opened["dtype"] == "bfloat16"
    assert len({tuple(prompt) for prompt in planted.prompts}) == len(planted.prompts)
    assert all(asked["ignore_eos"] and asked["temperature"] == 0 for asked in planted.asked)
    kinds = [config["architectures"] for config in planted.configs]
    assert kinds == [["Qwen3ForCausalLM"], ["Gemma3ForCausalLM"]]
    narrow = planted.configs[1]
    assert (narrow["num_key_value_heads"], narrow["num_hidden_layers"]) == (4, 48)
    assert narrow["hidden_size"] == 3840 and narrow["layer_types"].count("full_attention") == 8
    config = vllm_serving.config_of_record(names, serving)
    assert config["requests"] == 3 and config["client"] == "in process"
    defaults = vllm_serving.Serving()
    assert (defaults.requests, defaults.decoded, defaults.dtype) == (16, 128, "bfloat16")
