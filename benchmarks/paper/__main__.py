from benchmarks.paper.commands import run
from kvlingo_mlx.cli import main

if __name__ == "__main__":
    main(run)
