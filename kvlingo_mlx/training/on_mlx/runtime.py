"""How a training on MLX opens its models."""

from kvlingo_mlx.backend import mx

from kvlingo_mlx.group import Group
from kvlingo_mlx.loading import models
from kvlingo_mlx.machines import here
from kvlingo_mlx.models.language_model import LanguageModel

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


def load(name: str, dtype: str | None, device: str) -> LanguageModel:
    """A model as it is stored, or its floats cast to ``dtype``.

    Raises:
        ValueError: ``dtype`` is given for a quantised model.
        MissingModelError, UnsupportedModelError, NotEnoughMemoryError: As for ``kvlingo_mlx.load``.
    """
    model = models.load(name)
    if dtype is not None:
        if model.bits is not None:
            raise ValueError(
                f"--dtype is {dtype}, but {model.name} has {model.bits}-bit weights, which stay as "
                "they are; leave it out"
            )
        model.model.set_dtype(DTYPES[dtype])
    return model


def check_device(device: str) -> None:
    """MLX has one device a machine."""


def join(device: str) -> Group:
    """The processes of ``mlx.launch``, or a group of one."""
    return here()


def leave(group: Group) -> None:
    """Nothing is left open."""
