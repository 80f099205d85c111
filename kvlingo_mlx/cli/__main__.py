"""python -m kvlingo_mlx.cli: the command line without its script."""

from kvlingo_mlx.cli import main

main()
