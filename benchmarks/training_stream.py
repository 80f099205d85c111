"""What the training stream earns on short chats, whatever the models' context: by seed.

    python benchmarks/training_stream.py --seeds 0 1 2 --steps 400 --json FILE

A pair of the zoo is copied with its context raised (512, 2,048 and 32,768 tokens), and trained by
`kvlingo-mlx train` on 4,300 different dialogues of at most 256 tokens, none packed. Beside it the
same training on plain shuffled epochs of the same records, which is what any trainer would do.
Every translator is judged by MLX on dialogues that nothing has seen, beside the closed form that it
began with. A stream that draws few records (as one did that asked for lengths which the data do not
have) falls below the closed form here. An arm that draws the very samples of another is not trained
again. One JSON line a seed and arm.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.embedded import dialogues, zoo
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training import command_line
from kvlingo_mlx.training.checkpoints import read_log
from kvlingo_mlx.training.data import Stream
from kvlingo_mlx.training.mixture import Mixture

LONGEST = 256
PLAIN = "plain epochs"


class Plain(Stream):
    """The same records and held-out samples, in plain shuffled epochs."""

    def sample(self, index: int) -> Sample:
        """Record ``index`` of an endless series of permutations, up to one of its replies."""
        table = self._index.training
        epoch, step = divmod(index, len(table))
        row = int(np.random.default_rng((self.seed, epoch)).permutation(len(table))[step])
        reply = random.Random(f"{self.seed}/{index}").randrange(int(np.diff(table.starts)[row]))
        draw = self._natural(self.mixture, table.place(row), reply)
        return self.sample(index + len(table)) if draw is None else draw.sample


def write_data(path: Path, tokenizer: Any, count: int, seed: int) -> None:
    """Dialogues of at most ``LONGEST`` tokens, none like another, most of them short."""
    rng, lines = random.Random(f"stream/{seed}"), set()
    while len(lines) < count:
        talk = dialogues.dialogue(rng, rng.randint(4, 16), rng.randint(1, 4))
        line = json.dumps({"messages": talk.conversation()})
        if len(tokenizer.apply_chat_template(talk.conversation())) <= LONGEST:
            lines.add(line)
    path.write_text("".join(f"{line}\n" for line in sorted(lines)))


def copy_model(name: str, folder: Path, context: int) -> str:
    """A model of the zoo that says it can read ``context`` tokens."""
    shutil.copytree(zoo(name), folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def train(names: Sequence[str], data: Path, out: Path, plain: bool, seed: int, args: Any) -> dict:
    """One training by the verb's own function; what the stream has drawn."""
    options = command_line.Options(
        source=names[0], target=names[1], data=(str(data),), dtype="float32", device="cpu",
        seed=seed, packed_share=0.0,
    )  # fmt: skip
    recipe = {"steps": args.steps, "batch": args.batch, "learning_rates": (args.lr,),
              "objective": "kl", "ce_weight": 1.0, "validate_every": 50}  # fmt: skip
    plan = {"fit_samples": args.fit_samples, "held_out": args.held_out}
    kept = command_line.Stream
    command_line.Stream = Plain if plain else Stream  # type: ignore[misc]
    try:
        heard = command_line.Listeners(lambda *_: None, print, print)
        done = command_line.train(command_line.Job(options, plan, recipe, str(out)), heard)
    finally:
        command_line.Stream = kept  # type: ignore[misc]
    assert done is not None and done.log is not None
    return {"held_out_kl": [line["held_out"][0] for line in read_log(done.log)]}


def samples_of(model: str, data: Path, context: int, plain: bool, seed: int, args: Any) -> list:
    """All that stage 2 reads."""
    count = args.steps * args.batch
    mixture = Mixture(packed_share=0.0).scaled(context)
    made = Plain if plain else Stream
    stream = made([str(data)], load(model).tokenizer, mixture, seed, planned=count)
    return [stream.sample(index) for index in range(count)]


def judge(names: Sequence[str], translators: dict[str, Any], args: Any) -> dict[str, Any]:
    source, target = (load(name) for name in names)
    talks = dialogues.held_out(args.dialogues, facts=(4, 16), seed=7)
    samples = [quality.recall_sample(target, talk, source) for talk in talks]
    makers = {"native": conditions.native(target), "hidden": conditions.hidden(target)}
    for name, folder in translators.items():
        makers[name] = conditions.translated(source, target, load_translator(folder))
    scores = quality.score(target, samples, makers)
    return {
        name: {"recall": float(np.mean(s.hits)), "recall_se": error(s.hits),
               "kl": float(np.mean(s.kl)), "kl_se": error(s.kl)}
        for name, s in scores.items()
    }  # fmt: skip


def error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def run_seed(seed: int, args: argparse.Namespace, keep: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = root / "chats.jsonl"
        write_data(data, load(zoo(args.pair.split(":")[1])).tokenizer, args.records, seed)
        done: list[tuple[list[Sample], dict]] = []
        for context in [*args.contexts, 0]:
            arm = f"context {context:,}" if context else PLAIN
            here = root / arm.replace(" ", "-")
            names = [copy_model(name, here / name, context or args.contexts[0])
                     for name in args.pair.split(":")]  # fmt: skip
            drawn = samples_of(names[1], data, context or args.contexts[0], not context, seed, args)
            facts = next((facts for samples, facts in done if samples == drawn), None)
            if facts is None:  # the same samples in the same order train to the same
                facts = train(names, data, here / "trained", not context, seed, args)
                facts["scores"] = judge(names, {"trained": here / "trained"}, args)
                facts["trained as"] = arm
                done.append((drawn, facts))
            counts = {"samples": len(drawn), "distinct": len(set(drawn))}
            keep({"seed": seed, "arm": arm, **counts, **facts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="tiny-qwen3-s:tiny-qwen3-l")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 32_768])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--records", type=int, default=4300)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--fit-samples", type=int, default=400)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--dialogues", type=int, default=48)
    parser.add_argument("--json", required=True)
    args = parser.parse_args()

    def keep(result: dict) -> None:
        scores = result["scores"]["trained"]
        print(f"seed {result['seed']}, {result['arm']}: {result['distinct']} of "
              f"{result['samples']} samples differ, recall {scores['recall']:.3f}, "
              f"KL {scores['kl']:.3f}", flush=True)  # fmt: skip
        measure.append_json(args.json, measure.record("training_stream", vars(args), result))

    for seed in args.seeds:
        run_seed(seed, args, keep)


if __name__ == "__main__":
    main()
