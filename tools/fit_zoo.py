"""Fit the zoo's translators and write them into the package.

    python tools/fit_zoo.py [--dialogues 400] [--norm frobenius] [--nu 4]

Every target layer reads the relative-depth band of ``nu`` source layers. Dialogues are drawn
apart from those that judge quality. Maps are stored in bfloat16, which halves the package.
"""

from __future__ import annotations

import argparse
import itertools

from kvlingo_mlx import checkpoint
from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo, zoo_names
from kvlingo_mlx.fitting import fit
from kvlingo_mlx.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dialogues", type=int, default=400)
    parser.add_argument("--norm", default="frobenius")
    parser.add_argument("--nu", type=int, default=4)
    args = parser.parse_args()
    models = {name: load(zoo(name)) for name in zoo_names()}
    records = [{"messages": talk.conversation()} for talk in dialogues.for_fitting(args.dialogues)]
    for source, target in itertools.permutations(models, 2):
        pair = models[source], models[target]
        translator = fit(*pair, records, norm=args.norm, nu=args.nu)
        folder = TRANSLATORS / f"{source}--{target}"
        weights = translator.to_weights().cast("bfloat16")
        checkpoint.write(folder, translator.config, weights)
        size = (folder / checkpoint.WEIGHTS_FILE).stat().st_size
        print(f"{folder.name}: {size / 1e6:.2f} MB, nu = {args.nu}")


if __name__ == "__main__":
    main()
