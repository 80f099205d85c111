"""Pretrain a model from scratch: the zoo's tiny ones, and the paper's pair. PyTorch, resumable.

    python tools/pretrain.py tiny-qwen3-s --out kvlingo_mlx/embedded/models/tiny-qwen3-s

A model of the zoo starts from its own random seed and sees its own stream of samples: chat
whose answers depend on the prefix (kvlingo_mlx.embedded.dialogues), random sequences that
repeat (they make copying appear early), and plain English that every Python ships
(pydoc_data.topics). Copying comes first; then the number of facts in a dialogue
grows in stages, the next one once recall on the last reaches its goal.

Hybrids learn some answers by attention alone and others by recurrent states alone
(``pretraining.curriculum.Ways``), so that a translation of one without the other is worth little.

    torchrun --nproc-per-node 8 tools/pretrain.py qwen3-1.7b --out scratch/qwen3-1.7b \
        --data nemotron-cc/ --tokenizer cl100k --device cuda

A released architecture (qwen3-0.6b, qwen3-1.7b, ...) is trained by the recipe of the paper's
appendix on models pretrained from scratch, which is the default (``pretraining.models.PAPER``):
35 billion tokens in sequences of 4,096, 256 a step, CompleteP from a base of width 512 and depth
32. ``--sliced-from`` takes a small model's first weights out of a large one (a folder, or a name
here: the first weights of that model). tiny-scratch-s and tiny-scratch-l are a pair by that recipe
that learns what the zoo does, or from ``--data``.

    python tools/pretrain.py tiny-scratch-l --out scratch/l
    python tools/pretrain.py tiny-scratch-s --out scratch/s
    python tools/pretrain.py tiny-scratch-s --sliced-from scratch/l --out scratch/s-sliced

The folder written at the end is a Hugging Face model in the released spelling, which
both mlx-lm and transformers load. Training state lives in OUT.partial until then; the
same command resumes it. One JSON line per log step goes to OUT.partial/log.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pretraining.curriculum import Curriculum
from pretraining.folders import write_folder
from pretraining.models import MODELS, Model
from pretraining.packed import Documents, Packed
from pretraining.training import Training, first_weights, plain_weights, slice_out
from runs import SETTINGS, check_above_0, check_device, check_free, check_least, told
from runs import tokenizer_of as read_tokenizer

from kvlingo_mlx.cuda.runtime import join, leave, local_device
from kvlingo_mlx.format.atomic import alone
from kvlingo_mlx.group import Group

# What of a recipe can be asked otherwise.
OPTIONS = {
    "steps": "steps", "lr": "rate", "warmup": "warmup", "batch": "batch", "length": "length"
}  # fmt: skip


def plan_of(given: argparse.Namespace) -> Model:
    """The named model, with what was asked otherwise.

    Raises:
        ValueError: There is no such model, or an option means nothing for it.
    """
    if given.model not in MODELS:
        raise ValueError(f"{given.model} is no model; name one of {', '.join(MODELS)}")
    plan = MODELS[given.model]
    if given.data and plan.recipe.base:
        plan = replace(plan, stages=(), sharp=())
    if plan.stages:
        asked = [n for n in ("data", "tokenizer", "batch", "length", "micro") if getattr(given, n)]
        if asked:
            raise ValueError(
                f"{given.model} learns from dialogues of its own, and --{asked[0]} means nothing "
                "for it; leave it out"
            )
    elif not (given.data and given.tokenizer):
        raise ValueError(f"{given.model} learns from text; give --data and --tokenizer")
    check_free(Path(given.out))
    check_above_0({name: getattr(given, name) for name in (*OPTIONS, "micro", "threads")})
    check_least({"seed": given.seed}, 0)
    check_least({"length": given.length}, 2)  # the first token of a sequence is only read
    asked = {name: getattr(given, option) for option, name in OPTIONS.items()}
    changed = {name: value for name, value in asked.items() if value is not None}
    seed = plan.seed if given.seed is None else given.seed
    return replace(plan, seed=seed, recipe=replace(plan.recipe, **changed))


def training_of(given: argparse.Namespace, plan: Model, group: Group) -> Training:
    """The run that a command asks for, at its beginning."""
    device = local_device(given.device)
    if plan.stages and group.size > 1:
        raise ValueError(f"{given.model} is trained by one process; start it without torchrun")
    settings: dict[str, Any] = {
        "model": given.model, "seed": plan.seed, "sliced_from": given.sliced_from
    }  # fmt: skip
    model, scaling = first_weights(plan)
    if given.sliced_from:
        slice_out(model, scaling, given.sliced_from)
    if plan.stages:
        lessons: Any = Curriculum(model.to(device), plan, scaling, device)
    else:
        documents = Documents(given.data, tokenizer_of(given.tokenizer, model), plan.seed)
        settings["data"] = documents.digest
        lessons = Packed(model.to(device), plan, scaling, documents, group, given.micro or 1)
    return Training(lessons, scaling, plan.recipe, Path(given.out), settings, group)


def tokenizer_of(name: str, model: Any) -> Any:
    """A tokenizer by folder or Hub id; the model's config learns its special tokens."""
    tokenizer, most = read_tokenizer(name), model.config.vocab_size
    if len(tokenizer) > most:
        raise ValueError(
            f"the tokenizer {name} has {len(tokenizer)} tokens, and the model {most}; give a "
            "smaller one"
        )
    for special in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, special, getattr(tokenizer, special))
    return tokenizer


def finish(training: Training, given: argparse.Namespace, plan: Model) -> None:
    """Write the model's folder, and let go of the state: the next run may be another."""
    weights = plain_weights(training.model, training.scaling)
    if not plan.stages and training.model.device.type == "cuda":  # in which it was computed
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    state = training.state
    recipe = dict(
        seed=plan.seed, steps=plan.recipe.steps, peak_lr=plan.recipe.rate,
        training_tokens=state["tokens"],
        **({"train_recall": round(state["recall"], 4)} if plan.stages else {}),
        **({"sliced_from": given.sliced_from} if given.sliced_from else {}),
        seconds=round(state["seconds"]), threads=given.threads, device=given.device,
    )  # fmt: skip
    lessons = training.lessons
    write_folder(Path(given.out), training.model, lessons.tokenizer, weights, recipe)
    for name in ("state.pt", SETTINGS):
        (training.partial / name).unlink()


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help=", ".join(MODELS))
    parser.add_argument("--out", required=True, help="folder to write; OUT.partial holds the state")
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument("--lr", type=float, help="the peak learning rate; default: the recipe's")
    parser.add_argument("--warmup", type=int, help="steps; default: the recipe's")
    parser.add_argument("--seed", type=int, help="default: the model's own")
    parser.add_argument("--sliced-from", help="a folder, a Hub id, or a name of a model here")
    parser.add_argument("--data", nargs="+", help="JSONL or text files, folders, or Hub datasets")
    parser.add_argument("--tokenizer", help="a folder, or a Hub id")
    parser.add_argument("--batch", type=int, help="sequences a step, of all processes")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--micro", type=int, help="sequences that a process runs at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser.parse_args(words)


@told
def main() -> None:
    given = parsed()
    plan = plan_of(given)
    check_device(given.device)
    torch.set_num_threads(given.threads)
    if given.device.startswith("cuda"):
        torch.cuda.set_device(local_device(given.device))
    group, out = join(given.device), Path(given.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with alone(out, wait=0) if group.leads else contextlib.nullcontext():
        if group.leads:
            check_free(out)  # again: another run may have ended meanwhile
        training = training_of(given, plan, group)
        for _ in training.run(given.model):
            pass
        if group.leads:
            finish(training, given, plan)
        group.wait()
    leave(group)


if __name__ == "__main__":
    main()
