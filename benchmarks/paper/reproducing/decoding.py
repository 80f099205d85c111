"""Who decodes in an evaluation, by its place: MLX, or PyTorch on the machine that trained."""

from __future__ import annotations

from typing import Any

from kvlingo_mlx.models.language_model import LanguageModel

Models = tuple[LanguageModel, LanguageModel]


def on_mlx(place: str) -> bool:
    """Whether MLX decodes; else PyTorch on a device of that name."""
    return place == "mlx"


def load(place: str, source: str, target: str) -> Models:
    """Two models; one model alone is opened once."""
    if on_mlx(place):
        from kvlingo_mlx.loading.models import load_pair

        return load_pair(source, target)
    from kvlingo_mlx.cuda import model, runtime

    here = {"dtype": "auto", "device": runtime.local_device(place)}
    opened: Any = {name: model.load(name, **here) for name in dict.fromkeys((source, target))}
    return opened[source], opened[target]  # with the same facts under the same names


def ways(place: str) -> Any:
    """The functions that fill caches."""
    if on_mlx(place):
        from kvlingo_mlx.evaluation import conditions

        return conditions
    from benchmarks.paper.gpu import decoding

    return decoding


def decoder(place: str) -> Any:
    """Who decodes from caches."""
    if on_mlx(place):
        from kvlingo_mlx.evaluation.harness.on_mlx import MLXDecoder

        return MLXDecoder
    return ways(place).TorchDecoder


def writer(place: str, models: Models) -> Any:
    """The source as a decoder, which writes traces."""
    return decoder(place)(models[0], ways(place).native(models[0]))


def check_mlx(place: str, what: str) -> None:
    """Refuse what MLX alone measures.

    Raises:
        ValueError: PyTorch decodes in this run.
    """
    if not on_mlx(place):
        raise ValueError(
            f"{what} is measured by MLX alone, and --device is {place}; give "
            "--device mlx where MLX is installed (what was scored already is kept)"
        )
