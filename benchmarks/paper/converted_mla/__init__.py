"""Models that ``tools/convert_mla.py`` made: grouped-query attention turned into latent attention.

``on_mlx`` tells mlx-lm and the package of them, ``on_torch`` transformers and training
(docs/decisions/023); the package alone refuses them. ``python -m benchmarks.paper.converted_mla
VERB ...`` is ``kvlingo-mlx`` with both registered.
"""

import contextlib
import importlib

MODEL_TYPE = "converted_mla"


def register() -> None:
    """Tell both runtimes of converted models, or the one that is installed."""
    for side in ("on_mlx", "on_torch"):
        with contextlib.suppress(ImportError):  # what an extra brings may be missing
            importlib.import_module(f"{__name__}.{side}")
