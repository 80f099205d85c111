"""``kvlingo-mlx`` with converted models registered: for MLX, and for PyTorch where it is used."""

from benchmarks.paper.converted_mla import register
from kvlingo_mlx.cli import main

if __name__ == "__main__":
    register()
    main()
