"""Training in PyTorch: stage 1 and self-distillation (stage 2), on a GPU or in a small CPU run.

This is the only room that imports torch. It needs the ``[cuda]`` extra and imports no MLX. It
writes a translator folder, which ``kvlingo-mlx import`` copies to a Mac.
"""

from __future__ import annotations

from kvlingo_mlx.errors import needs_extra


def check_extra() -> None:
    """Refuse (MissingExtraError) an installation without PyTorch and transformers."""
    with needs_extra("cuda", "training needs PyTorch"):
        import torch  # noqa: F401
        import transformers  # noqa: F401
