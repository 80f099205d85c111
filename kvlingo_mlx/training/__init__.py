"""The training path: stage 1 and self-distillation in PyTorch, for a GPU or a small CPU run.

The only room that imports torch; it needs the ``[cuda]`` extra and imports no MLX. What it
writes is a translator folder that ``kvlingo-mlx import`` brings to a Mac.
"""

from __future__ import annotations

from kvlingo_mlx.errors import MissingExtraError


def check_extra() -> None:
    """Refuse (MissingExtraError) an installation without PyTorch and transformers."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f'training needs PyTorch ({error.name} is missing): pip install "kvlingo-mlx[cuda]"'
        ) from None
