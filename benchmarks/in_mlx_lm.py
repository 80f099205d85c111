"""What mlx-lm's own server reads anew where the model changes at every turn, with us and without.

    python benchmarks/in_mlx_lm.py --json FILE

Ten turns of a conversation through OpenAI's client, answered by two models in turns: by
`mlx_lm.server`, and by `kvlingo-mlx in-mlx-lm` with translators that are fitted here, as the
embedded ones read keys that no cache holds. Both are told the same history, whatever they answer.
The share of a prompt's tokens that the asked model reads itself, by turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai
from http_servers import Server

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.reporting import measure

NAMES = "tiny-qwen3-l", "tiny-qwen3-s"
STOCK = ["-c", "from mlx_lm.server import main; main()"]
OURS = ["-m", "kvlingo_mlx.cli", "in-mlx-lm"]
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


def talk_of(turns: int, seed: int) -> list[dict[str, str]]:
    """A user's messages, each with facts of its own, and answers to them."""
    found = []
    for told in dialogues.held_out(turns, seed=seed, facts=(8, 12)):
        texts = [message["content"] for message in told.conversation() if message["role"] == "user"]
        found += [{"role": "user", "content": " ".join(texts)}]
        found += [{"role": "assistant", "content": "I shall keep all of this in mind."}]
    return found


def turns_of(server: Server, talk: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Each turn's prompt in tokens, and the share of them that the model read itself."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
    found = []
    for turn in range(len(talk) // 2):
        model, asked = str(kv.zoo(NAMES[turn % 2])), talk[: 2 * turn + 1]
        answer: Any = client.chat.completions.create(
            model=model, messages=asked, max_tokens=8, extra_body=PLAIN
        )
        usage = answer.usage
        share = 1 - usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens
        found.append({"prompt": usage.prompt_tokens, "read": share})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--fitted", type=int, default=12, help="conversations of the fits")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--json", default="-")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVLINGO_HOME"] = folder
        models = [kv.load(name) for name in NAMES]
        for source, target in (models, models[::-1]):
            told = [{"messages": t.conversation()} for t in dialogues.for_fitting(args.fitted)]
            made = kv.fit(source, target, told, capture="post_norm")
            made.save(Path(folder) / "translators" / f"{source.name}-{target.name}")
        talk, found = talk_of(args.turns, 1), {}
        for name, command in (("mlx_lm.server", STOCK), ("in-mlx-lm", OURS)):
            first = [*command, "--model", str(kv.zoo(NAMES[0]))]
            server = Server(first, args.port, Path(folder) / "log")
            try:
                server.ready()
                found[name] = turns_of(server, talk)
            finally:
                server.process.terminate()
                server.process.wait()
            shares = " ".join(f"{turn['read']:4.0%}" for turn in found[name])
            print(f"{name:18s} {shares}", file=sys.stderr)
    config = {"models": NAMES, "turns": args.turns, "fitted": args.fitted}
    measure.append_json(args.json, measure.record("in_mlx_lm", config, found))


if __name__ == "__main__":
    main()
