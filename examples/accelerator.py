"""Let a small model read a prompt and a large one answer it; beside the large one alone.

    python examples/accelerator.py
    python examples/accelerator.py --source Qwen/Qwen3-4B --target Qwen/Qwen3-30B-A3B \\
        --translator 4b-to-30b --prompt "..."

This pays only where the source reads much faster than the target. The tiny embedded models read
equally fast, so expect no gain from them.
"""

from __future__ import annotations

import argparse

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import EXAMPLE


def main(arguments: list[str] | None = None) -> None:
    """Answer one prompt by both ways, and print what each took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="tiny-qwen3-s", help="who reads: a folder or Hub id")
    parser.add_argument("--target", default="tiny-qwen3-moe", help="who answers, likewise")
    parser.add_argument("--translator", help="a folder or Hub id; else the store's")
    parser.add_argument("--prompt", default=EXAMPLE)
    parser.add_argument("--max-tokens", type=int, default=40)
    given = parser.parse_args(arguments)
    source, target = kv.load(given.source), kv.load(given.target)
    prompt = [{"role": "user", "content": given.prompt}]
    for strategy in ("accelerator", "native"):
        translator = given.translator if strategy == "accelerator" else None
        text = ""
        for response in kv.stream_generate(
            source, target, prompt, translator=translator, strategy=strategy,
            max_tokens=given.max_tokens, enable_thinking=False,
        ):  # fmt: skip
            text += response.text
        print(f"{strategy}: {text.strip()}")
        print(
            f"    first token after {response.ttft_s:.3f} s: prefill {response.prefill_s:.3f} s, "
            f"translation {response.translate_s:.3f} s; {response.generation_tps:.0f} tokens/s"
        )


if __name__ == "__main__":
    main()
