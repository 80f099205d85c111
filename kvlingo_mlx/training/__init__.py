"""Training: stage 1 and self-distillation (stage 2), on MLX or PyTorch.

The loop, the data, the checkpoints and the recipe are here and know neither runtime. ``on_mlx`` and
the room ``cuda`` compute: the passes, the gradients, the optimizer's step. ``cuda`` needs the
extra of that name and imports no MLX.
"""

from kvlingo_mlx.errors import needs_extra


def check_extra() -> None:
    """Refuse (MissingExtraError) an installation without PyTorch and transformers."""
    with needs_extra("cuda", "PyTorch needs it; --device mlx does not"):
        import torch  # noqa: F401
        import transformers  # noqa: F401


def has_cuda() -> bool:
    """Whether PyTorch is installed and finds a CUDA GPU."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.device_count())
