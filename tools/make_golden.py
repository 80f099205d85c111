"""Write the golden files of tests/engine/test_parity.py from the PyTorch reference.

    python tools/make_golden.py          # two pairs of tiny random models
    python tools/make_golden.py --zoo    # every embedded pair, on the start of a dialogue

Run it again when the tiny models, the zoo or the format change, and only then: what it
writes is what the MLX path is held to where PyTorch is absent.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from kvlingo_mlx.embedded import dialogues

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests are not installed

from tests.support import reference, tiny

ZOO_TOKENS = 40


def dialogue_tokens(folder: Path, count: int) -> list[int]:
    """The first tokens of a held-out dialogue, by a model's own chat template."""
    messages = list(next(dialogues.held_out(1)).messages)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)[:count]


def write_golden(name: str, folders: tiny.Folders, tokens: list[int]) -> None:
    """Write the whole cache and the logits."""
    expected = reference.hand_over(*folders, tokens)
    np.savez_compressed(
        tiny.GOLDEN / f"{name}.npz",
        digest=tiny.digest(*folders),
        tokens=np.array(tokens, np.int32),
        keys=np.stack(expected.keys),
        values=np.stack(expected.values),
        logits=expected.logits,
    )


def write_tiny() -> None:
    """The golden files of the random pairs."""
    with tempfile.TemporaryDirectory() as root:
        for case in tiny.GOLDEN_CASES:
            folders = tiny.write_case(Path(root), case)
            write_golden(case.name, folders, tiny.random_tokens(tiny.GOLDEN_TOKENS))


def write_zoo() -> None:
    """The golden files of the embedded pairs."""
    for folders in tiny.embedded_cases():
        tokens = dialogue_tokens(folders[1], ZOO_TOKENS)
        write_golden(f"zoo-{folders[2].name}", folders, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zoo", action="store_true", help="the embedded pairs instead")
    tiny.GOLDEN.mkdir(exist_ok=True)
    write_zoo() if parser.parse_args().zoo else write_tiny()


if __name__ == "__main__":
    main()
