"""Who decodes in an evaluation, by its place: MLX, or PyTorch on the machine that trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvlingo_mlx.backend import on_gpu

from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.errors import KVLingoError
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


def with_mlx(work: Work, what: Sequence[str]) -> Work:
    """A run in which MLX decodes, if there is anything that MLX alone measures.

    Args:
        work: The run.
        what: What MLX alone measures, in words.

    Raises:
        KVLingoError: PyTorch has a GPU here, and MLX has none.
    """
    if not what or on_mlx(work.place):
        return work
    told = f"{', '.join(what)}: by MLX alone, which answers this entry; {work.trains} trains"
    if work.trains.startswith("cuda") and not on_gpu():
        raise KVLingoError(
            f"{told}; and MLX sees no GPU here: pip install 'mlx[cuda13]' (nothing was trained "
            "or answered yet)"
        )
    work.heard.warn(told)
    return replace(work, decoder="mlx")
