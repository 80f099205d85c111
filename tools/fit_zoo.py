"""Fit the zoo's translators and write them into the package.

    python tools/fit_zoo.py [--dialogues 400] [--norm frobenius]

Between models of equal depth every layer reads its counterpart; across depths it reads
the relative-depth band of three. Dialogues are drawn apart from those that judge quality.
"""

from __future__ import annotations

import argparse
import itertools

from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo, zoo_names
from kvlingo_mlx.fitting import fit
from kvlingo_mlx.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dialogues", type=int, default=400)
    parser.add_argument("--norm", default="frobenius")
    args = parser.parse_args()
    models = {name: load(zoo(name)) for name in zoo_names()}
    records = [{"messages": talk.conversation()} for talk in dialogues.for_fitting(args.dialogues)]
    for source, target in itertools.permutations(models, 2):
        pair = models[source], models[target]
        nu = 1 if len(pair[0].attentions) == len(pair[1].attentions) else 3
        translator = fit(*pair, records, norm=args.norm, nu=nu)
        folder = translator.save(TRANSLATORS / f"{source}--{target}")
        print(f"{folder.name}: {translator.nbytes / 1e6:.2f} MB, nu = {nu}")


if __name__ == "__main__":
    main()
