"""Who decodes in an evaluation: MLX, or PyTorch on the machine that trained."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.models.language_model import LanguageModel

Models = tuple[LanguageModel, LanguageModel]


def on_mlx(work: Work) -> bool:
    """Whether MLX decodes."""
    return work.place == "mlx"


def load(work: Work, source: str, target: str) -> Models:
    """Two models on the run's device; one model alone is opened once."""
    if on_mlx(work):
        from kvlingo_mlx.loading.models import load_pair

        return load_pair(source, target)
    from kvlingo_mlx.cuda.runtime import load_as_stored

    place = work.place
    opened: Any = {name: load_as_stored(name, place) for name in dict.fromkeys((source, target))}
    return opened[source], opened[target]


def ways(work: Work) -> Any:
    """The functions that fill caches."""
    if on_mlx(work):
        from kvlingo_mlx.evaluation import conditions

        return conditions
    from kvlingo_mlx.cuda import decoding

    return decoding


def decoders(work: Work) -> dict[str, Any]:
    """Who decodes from caches."""
    room = "evaluation.harness.on_mlx" if on_mlx(work) else "cuda.decoding"
    module = importlib.import_module(f"kvlingo_mlx.{room}")
    decoder = module.MLXDecoder if on_mlx(work) else module.TorchDecoder
    return {"decode": decoder}


def writer(work: Work, models: Models) -> Any:
    """The source as a decoder, which writes traces."""
    return decoders(work)["decode"](models[0], ways(work).native(models[0]))


def check_mlx(work: Work, what: str) -> None:
    """Refuse what MLX alone measures.

    Raises:
        ValueError: PyTorch decodes in this run.
    """
    if not on_mlx(work):
        raise ValueError(
            f"{what} is measured by MLX alone, and --device is {work.place}; give "
            "--device mlx where MLX is installed (what was scored already is kept)"
        )
