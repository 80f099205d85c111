"""From two models to a translator worth using, in one call and in a given time."""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.loading.models import load_pair
from kvlingo_mlx.loading.pairing import check_one_tokenizer
from kvlingo_mlx.machines import here
from kvlingo_mlx.making.result import Callbacks, PairResult
from kvlingo_mlx.making.run import Making, dialogues
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.training.plan import TrainingPlan, make_config

__all__ = ["Callbacks", "PairResult", "pair"]

TUNING = "choosing native layers", "leave out --max-kl and --min-recall (max_kl, min_recall)"


@checked
def pair(
    source: LanguageModel | str,
    target: LanguageModel | str,
    data: Sequence[str] | str | os.PathLike[str] = (),
    *,
    minutes: float = 60.0,
    out: str | os.PathLike[str] | None = None,
    max_kl: float | None = None,
    min_recall: float | None = None,
    nu: int | None = None,
    capture: str | None = None,
    seed: int = 0,
    force: bool = False,
    callbacks: Callbacks | None = None,
) -> PairResult:
    """Make a translator from ``source`` to ``target`` in the time there is, on MLX.

    Between a model and its LoRA it measures how good a cache is as it is; if that works, it learns
    nothing. Else it measures how fast this machine is and chooses lengths accordingly. It begins
    with a closed form, learns what the target's attention gathers (with one tokenizer), then what
    it predicts. If a quality is asked for, it chooses native layers. The result goes into the local
    store. The same call resumes after an interruption.

    Args:
        source: The model whose cache is translated.
        target: The model that decodes from it.
        data: JSONL files, folders or Hugging Face datasets of conversations, one or several; none
            for generated ones, which do for a first try.
        minutes: The time for everything: reading the models, the closed form, both trainings, the
            receipt. Too few are refused once this machine's speed is measured.
        out: The folder to write; default: SOURCE-to-TARGET, their names, here.
        max_kl: Tune to the fewest native layers with at most this KL, in nats per token.
        min_recall: Tune to the fewest that recall this share of the dialogues' answers.
        nu: The number of source layers that each target layer reads; None chooses the most that
            there is time to fit. Each makes a switch dearer.
        capture: The point where keys are read and written, as in :func:`kvlingo_mlx.fit`.
        seed: Chooses the samples.
        force: Whether to replace what is finished, here and in the store.
        callbacks: Functions that hear how the work proceeds.

    Raises:
        ValueError: An argument or the data are bad, or ``out`` holds something else.
        KVLingoError: The models do not go together, no gradient reaches the target's cache,
            training diverged, or there are several ranks of ``mlx.launch``.
        KeyboardInterrupt: A signal asked to stop; the work is kept.
    """
    started = time.monotonic()
    if here().several:
        raise KVLingoError("pair runs in one process; start it without mlx.launch")
    callbacks = callbacks or Callbacks()
    named = (data,) if isinstance(data, str | os.PathLike) else data
    sources = tuple(os.fspath(each) for each in named)
    folder = Path(out or _folder_name(source, target))
    translator_folder.check_destination(folder)
    ends = load_pair(source, target)
    if ends[0].is_same(ends[1]):
        raise ValueError(
            f"source and target are one model, {ends[0].name}, which needs no translator for its "
            "own caches; give two models"
        )
    task = None
    if (max_kl, min_recall) != (None, None):
        check_one_tokenizer(make_config(*ends, TrainingPlan()), *TUNING)
        task = dialogues(*ends, seed)
    names = {"source": ends[0].name, "target": ends[1].name}
    settings = {**names, "data": list(sources), "minutes": minutes}
    settings |= {"nu": nu, "capture": capture, "seed": seed}
    making = Making(
        ends, folder, settings, sources, 60.0 * minutes, force, callbacks, started, task
    )
    if not making.finished() and not making.as_it_is():
        making.train()
    if task is not None:
        making.tune(task, max_kl, min_recall)
    return making.done()


def _folder_name(source: LanguageModel | str, target: LanguageModel | str) -> str:
    """SOURCE-to-TARGET, without the owners of the models."""
    named = (m.name if isinstance(m, LanguageModel) else str(m) for m in (source, target))
    ends = (re.sub(r"[^\w.-]", "_", Path(name).name) for name in named)
    return "-to-".join(ends)
