"""``kvlingo-mlx`` with converted models registered: for MLX, and for PyTorch where it is used."""

import contextlib
import importlib

from kvlingo_mlx.cli import main

if __name__ == "__main__":
    for side in ("on_mlx", "on_torch"):
        with contextlib.suppress(ImportError):  # what an extra brings may be missing
            importlib.import_module(f"benchmarks.paper.converted_mla.{side}")
    main()
