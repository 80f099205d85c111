"""Processes of their own, which start in half the time where PyTorch is installed."""

import sys

# transformers loads PyTorch wherever it finds it, and mlx-lm loads transformers.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def command_line(*words: str) -> list[str]:
    """The command kvlingo-mlx with these words."""
    return [
        sys.executable,
        "-c",
        WITHOUT_TORCH + "from kvlingo_mlx.cli import main; main()",
        *words,
    ]
