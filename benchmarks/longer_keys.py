"""A translator whose keys deviate from their mean a little more than it was trained to.

    python benchmarks/longer_keys.py TRANSLATOR 1.15 --readings FOLDER --out FOLDER
    python benchmarks/longer_keys.py TRANSLATOR slope --readings FOLDER --out FOLDER

A map by least squares writes keys that are drawn to their mean, by as much as they are uncertain.
That is right where all rows of a cache are translated; beside rows that the target read itself they
lose. A number is the factor; ``slope`` takes one for each head, with which a key that is translated
changes as much as the target's own does: var(own) / cov(translated, own). The means, which keep
their place by a bias, are of every second reading (``real_pair.py read``).
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.real_pair import Item, opened_translator
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.tensor_file import Weights


@torch.no_grad()
def moments(folder: Path, readings: Path) -> list[dict[str, np.ndarray]]:
    """For each target layer, sums over tokens of translated and own keys and their products."""
    made = opened_translator(folder, wrong=False)
    found: list[dict[str, Any]] = [defaultdict(float) for _ in made.config.target.layers]
    for path in sorted(readings.glob("*.pt"))[::2]:
        item = Item(path)
        states, rows = item.reading().states, item.rows
        for layer, sums in enumerate(found):
            ours = made.layer(layer, states)[0].double().numpy()
            theirs = item.kept["tk"][layer][:rows].double().numpy()
            sums["rows"] += rows
            sums["ours"] += ours.sum(0)
            sums["theirs"] += theirs.sum(0)
            sums["both"] += (ours * theirs).sum(0)
            sums["square"] += (theirs * theirs).sum(0)
    return found


def factors(sums: dict[str, np.ndarray], factor: str, heads: int) -> np.ndarray:
    """The factor of each number of a key, all of a head alike."""
    width = len(sums["ours"])
    if factor != "slope":
        return np.full(width, float(factor))
    own = sums["square"] - sums["theirs"] ** 2 / sums["rows"]
    shared = sums["both"] - sums["ours"] * sums["theirs"] / sums["rows"]
    by_head = own.reshape(heads, -1).sum(1) / shared.reshape(heads, -1).sum(1)
    return np.repeat(by_head, width // heads)


def main() -> None:
    """Write the translator with longer keys."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("translator", type=Path)
    parser.add_argument("factor", help="a number above 0, or slope")
    parser.add_argument("--readings", type=Path, required=True, help="of real_pair.py read")
    parser.add_argument("--out", type=Path, required=True, help="the new translator's folder")
    args = parser.parse_args()
    config, weights = translator_folder.read(args.translator)
    arrays = {name: weights.as_float32(name) for name in weights.arrays}
    for layer, sums in enumerate(moments(args.translator, args.readings)):
        geometry, means = config.target.layers[layer], sums["ours"] / sums["rows"]
        longer = factors(sums, args.factor, geometry.kv_heads)
        print(f"layer {layer}: {longer.min():.3f} to {longer.max():.3f}")
        weight = arrays[f"keys.{layer}.weight"]
        arrays[f"keys.{layer}.weight"] = (
            longer.astype(np.float32).reshape(*weight.shape[:-1], 1) * weight
        )
        for side, added in (
            ("keys", (1 - longer) * means),
            ("values", np.zeros(geometry.width("values"))),
        ):
            before = arrays.get(f"{side}.{layer}.bias", 0.0)
            scale = longer if side == "keys" else 1.0
            arrays[f"{side}.{layer}.bias"] = (scale * before + added).astype(np.float32)
    translator_folder.write(args.out, config, Weights("float32", arrays))


if __name__ == "__main__":
    main()
