"""A translator whose keys deviate from their mean more than its training left them.

    python benchmarks/longer_keys.py TRANSLATOR 1.15 --readings FOLDER --out FOLDER

Trainings that match attention do so by themselves (``training/coordinates.py``, which says why);
this is for translators that were trained before, and for other factors. What finds the mean is
taken from every second reading of ``real_pair.py read``.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.real_pair import Item
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.maps import first_readers, maps_of
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.stage1.closed_form import Moments, white
from kvlingo_mlx.training import coordinates


def main() -> None:
    """Write the translator with longer keys."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("translator", type=Path)
    parser.add_argument("factor", type=float)
    parser.add_argument("--readings", type=Path, required=True, help="of real_pair.py read")
    parser.add_argument("--out", type=Path, required=True, help="the new translator's folder")
    args = parser.parse_args()
    config, weights = translator_folder.read(args.translator)
    arrays = {name: weights.as_float32(name) for name in weights.arrays}
    known, items = dict(arrays), [Item(p) for p in sorted(args.readings.glob("*.pt"))[::2]]
    for m in maps_of(config):
        if m.name.startswith("keys.") and first_readers(config)[m.name] == m.name:
            reads = [[item.kept["sk"][layer] for _, layer in m.reads] for item in items]
            read = torch.cat([torch.cat(each, -1) for each in reads]).double().numpy()
            moments = Moments(read.T @ read, np.empty(0), np.empty(0), len(read))
            known[f"{m.name}.weight/white"] = white(moments)
            known[f"{m.name}.weight/mean"] = read.mean(0)
    coordinates.LONGER = args.factor
    found = {n: a.astype(np.float32) for n, a in coordinates.lengthened(known, config).items()}
    translator_folder.write(args.out, config, Weights("float32", arrays | found))


if __name__ == "__main__":
    main()
