"""Write receipts into translators that were trained before trainings left any.

    python tools/leave_receipts.py kvlingo_mlx/embedded/translators/*

What PyTorch measures with the stored weights on the bundled conversations goes into their
provenance, for ``kvlingo-mlx verify``; their weights stay as they are.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from kvlingo_mlx.cuda import model as torch_model
from kvlingo_mlx.cuda.pair import TorchPair
from kvlingo_mlx.embedded import zoo
from kvlingo_mlx.format import translator_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", help="of translators between embedded models")
    for folder in parser.parse_args().folders:
        config, weights = translator_folder.read(folder)
        source, target = (
            torch_model.load(str(zoo(spec.name)), dtype=torch.float32)
            for spec in (config.source, config.target)
        )
        arrays = {name: weights.as_float32(name) for name in weights.arrays}
        found = TorchPair(source, target).receipt(config, arrays)
        left = {**config.provenance, "receipt": found}
        left_with = dataclasses.replace(config, provenance=left)
        translator_folder.write(folder, left_with, weights, overwrite=True)
        print(folder, left["receipt"], flush=True)


if __name__ == "__main__":
    main()
