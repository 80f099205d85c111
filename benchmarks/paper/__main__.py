import contextlib
import importlib
import sys

from benchmarks.paper.commands import run
from kvlingo_mlx.cli import main

if __name__ == "__main__":
    # The package's command line hides PyTorch from verbs that do without; labels may need it.
    if not {"bench", "analyze", "--list", "--help"} & set(sys.argv):
        with contextlib.suppress(ImportError):
            importlib.import_module("torch")
    main(run)
