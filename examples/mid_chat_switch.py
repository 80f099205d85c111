"""Switch models in the middle of a chat: what one model read is translated for the other.

    python examples/mid_chat_switch.py
    python examples/mid_chat_switch.py --small Qwen/Qwen3-0.6B --large Qwen/Qwen3-1.7B \\
        --translator 0.6b-to-1.7b --translator 1.7b-to-0.6b
"""

from __future__ import annotations

import argparse

import kvlingo_mlx as kv

TOLD = (
    "Please remember this. The home of Paul is Oslo. The hotel of Emma is Lima. "
    "The code of Rosa is A4."
)
ASKED = ("What is the hotel of Emma?", "What is the code of Rosa?")


def main(arguments: list[str] | None = None) -> None:
    """Tell the small model some facts, and ask the large one and the small one about them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", default="tiny-qwen3-s", help="a folder or Hub id")
    parser.add_argument("--large", default="tiny-qwen3-l", help="a folder or Hub id")
    parser.add_argument(
        "--translator", action="append", default=[], help="a folder or Hub id; else the store's"
    )
    given = parser.parse_args(arguments)
    models = {"small": kv.load(given.small), "large": kv.load(given.large)}
    with kv.Conversation(models, given.translator, enable_thinking=False) as talk:
        ask(talk, "small", TOLD)
        ask(talk, "large", ASKED[0])  # it never read the facts: they were translated for it
        ask(talk, "small", ASKED[1])  # and back: only the large model's turn was new to it
        print()
        for line in talk.stats().lines:
            print(f"{line.name} holds {line.tokens} tokens, {line.translated} of them translated")


def ask(talk: kv.Conversation, name: str, message: str) -> None:
    """Print a model's answer, and where the tokens before it came from."""
    print(f"\n> {message}")
    for response in talk.stream_reply(name, message, max_tokens=40):
        print(response.text, end="", flush=True)
    print(
        f"\n[{name}: {response.cached_tokens} tokens held, "
        f"{response.translated_tokens} translated ({response.ahead_tokens} of them ahead), "
        f"{response.read_tokens} read; first token after {response.ttft_s:.3f} s]"
    )


if __name__ == "__main__":
    main()
