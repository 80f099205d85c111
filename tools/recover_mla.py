"""Fine-tune a converted model back towards its original; the baseline is the original itself.

    torchrun --nproc-per-node 8 tools/recover_mla.py qwen3-4b-mla Qwen/Qwen3-4B qwen3-4b-recovered \
        --data dolci.jsonl --device cuda
    torchrun --nproc-per-node 8 tools/recover_mla.py Qwen/Qwen3-4B Qwen/Qwen3-4B qwen3-4b-baseline \
        --data dolci.jsonl --device cuda

The paper's recipe (appendix "MLA cache translation"), which is the default: the cross-entropy of a
conversation's last assistant turn, plus KL(model || original) on the same positions; 120,000 steps
of AdamW at 1e-5, 2 % warm-up, linear decay, weight decay 1e-4, gradients clipped at 1, one
conversation of at most 4,096 tokens for each GPU. 512 conversations are held out by the hash of
their content. Longer conversations are passed over: the paper does not say what it does with them.
``--exchanges``: the losses are on the last so many questions and answers, from the first of these
answers on. A tiny model that is trained on its last answers alone forgets how questions go.

Weights and the optimizer's state are in float32, shared out among the GPUs (FSDP), and computed
with in bfloat16 on CUDA. State is kept in OUT.partial; the same command resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runs import (
    LOG,
    SETTINGS,
    begin,
    beside_weights,
    check_above_0,
    check_device,
    check_free,
    check_least,
    clipped,
    go_on,
    model_folder,
    open_data,
    tokenizer_of,
    told,
    trim_log,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.paper.converted_mla import on_torch  # which registers the family
from kvlingo_mlx.cuda.runtime import TorchGroup, local_device
from kvlingo_mlx.format.atomic import alone
from kvlingo_mlx.format.fingerprints import files_fingerprint
from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.conversations import keeps_system, normalise, replies, to_sample, until

STRIDE = 7919  # from a conversation that is of no use to the next one tried


@dataclass(frozen=True)
class Recipe:
    """The paper's recipe; ``steps`` are of one conversation for each process.

    The losses are on the replies of the last ``exchanges``, and on the questions between them.
    """

    steps: int = 120_000
    rate: float = 1e-5
    warmup: float = 0.02
    decay: float = 1e-4
    clip: float = 1.0
    kl: float = 1.0
    exchanges: int = 1
    tokens: int = 4096
    held_out: int = 512
    validate_every: int = 2000
    keep_every: int = 500
    seed: int = 0

    def factor(self, step: int) -> float:
        """The share of the peak rate at a step (from 0): linear warm-up, then linear to 0."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return (step + 1) / rise
        return (self.steps - step) / max(1, self.steps - rise)


# ---- conversations --------------------------------------------------------------------


class Conversations:
    """Conversations of all sources, apart from those held out; each ends with its last reply."""

    def __init__(self, specs: Sequence[str], tokenizer: Any, recipe: Recipe) -> None:
        self.tokenizer, self.recipe = tokenizer, recipe
        self.sources = [open_data(spec) for spec in specs]
        self.fold = not keeps_system(tokenizer)
        hashes = {
            (number, row): hashlib.sha256(canonical_json(found).encode()).hexdigest()
            for number, source in enumerate(self.sources)
            for row in range(len(source.sizes))
            if (found := self._messages((number, row)))
        }
        # What is said twice must not be trained on once.
        ordered = sorted(set(hashes.values()))
        reserved = set(ordered[: min(recipe.held_out, len(ordered) // 2)])
        self.digest = hashlib.sha256("".join(ordered).encode()).hexdigest()
        self.training = [place for place, name in hashes.items() if name not in reserved]
        firsts = {name: place for place, name in reversed(hashes.items()) if name in reserved}
        found = (self._sample(firsts[name]) for name in sorted(firsts))
        self.held_out = [sample for sample in found if sample is not None]
        if not self.training or not self.held_out:
            raise ValueError(
                f"{', '.join(specs)} has {len(ordered)} conversations with a reply, and "
                f"{len(self.held_out)} held out of at most {recipe.tokens} tokens; give more"
            )

    def sample(self, number: int) -> Sample:
        """Conversation ``number`` of an endless stream: a function of the seed and the number."""
        count = len(self.training)
        for tried in range(count):
            epoch, place = divmod(number + tried * STRIDE, count)
            found = self._sample(self.training[self._order(epoch % 1_000_000)[place]])
            if found is not None:
                return found
        raise ValueError(f"no conversation has at most {self.recipe.tokens} tokens; give others")

    def _order(self, epoch: int) -> np.ndarray:
        if getattr(self, "_epoch", (None,))[0] != epoch:
            rng = np.random.default_rng((self.recipe.seed, epoch))
            self._epoch = epoch, rng.permutation(len(self.training))
        return self._epoch[1]

    def _messages(self, place: tuple[int, int]) -> list[dict[str, str]]:
        record, where = self.sources[place[0]].read(place[1])
        return [] if record is None else normalise(record, where).get("messages", [])

    def _sample(self, place: tuple[int, int]) -> Sample | None:
        messages = self._messages(place)
        turns = replies(messages)
        first, last = turns[-self.recipe.exchanges :][0], turns[-1]
        whole, later = until(messages, first, fold=self.fold), messages[first + 1 : last + 1]
        sample = to_sample(whole, self.tokenizer, self.recipe.tokens, later=later)
        fits = len(sample.prefix) + len(sample.continuation) <= self.recipe.tokens
        return sample if fits and sample.continuation else None


# ---- the loss -------------------------------------------------------------------------


def losses(model: Any, original: Any, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy, and KL(model || original), each a mean over the continuation's tokens."""
    device = next(original.parameters()).device
    ids = torch.tensor([sample.prefix + sample.continuation], device=device)
    first, labels = len(sample.prefix), ids[0, len(sample.prefix) :]
    places = torch.arange(first - 1, ids.shape[1] - 1, device=device)

    def predicted(network: Any) -> torch.Tensor:
        return network(ids, logits_to_keep=places, use_cache=False).logits[0].float()

    with torch.no_grad():
        theirs = predicted(original).log_softmax(dim=-1)
    logits = predicted(model)
    ours = logits.log_softmax(dim=-1)
    return cross_entropy(logits, labels), (ours.exp() * (ours - theirs)).sum(dim=-1).mean()


# ---- the run --------------------------------------------------------------------------


class Recovery:
    """A model in training beside its frozen original, on every process."""

    def __init__(self, model: Path, original: Path, recipe: Recipe, device: str) -> None:
        self.recipe, self.device = recipe, local_device(device)
        self.group = TorchGroup(dist.get_rank(), dist.get_world_size())
        half = torch.bfloat16 if device == "cuda" else torch.float32
        auto = AutoModelForCausalLM
        self.original = auto.from_pretrained(original, dtype=half).to(self.device)
        self.original.eval().requires_grad_(False)
        self.model = auto.from_pretrained(model, dtype=torch.float32).to(self.device)
        self.model.train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        mesh = init_device_mesh(torch.device(self.device).type, (self.group.size,))
        for part in (*self.model.model.layers, self.model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        rate, decay = recipe.rate, recipe.decay
        self.optimizer = torch.optim.AdamW(self.model.parameters(), rate, weight_decay=decay)
        self.step = 0

    def advance(self, sample: Sample) -> dict[str, float]:
        """One step; the means of both losses over the processes, and the gradient's norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate * self.recipe.factor(self.step)
        ce, kl = losses(self.model, self.original, sample)
        (ce + self.recipe.kl * kl).backward()
        norm = clipped(self.model.parameters(), self.recipe.clip, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        means = self._means([ce.item(), kl.item()], 1.0)
        return {"step": self.step, "ce": means[0], "kl": means[1], "norm": norm}

    @torch.no_grad()
    def validate(self, held_out: Sequence[Sample]) -> dict[str, float]:
        """Both losses on the held-out conversations, each process with its own share of them."""
        size, rank = self.group.size, self.group.rank
        sums, count = np.zeros(2), 0
        self.model.eval()
        for start in range(0, len(held_out), size):  # all processes run equally often
            mine = start + rank < len(held_out)
            sample = held_out[min(start + rank, len(held_out) - 1)]
            both = [loss.item() for loss in losses(self.model, self.original, sample)]
            sums, count = sums + mine * np.array(both), count + mine
        self.model.train()
        ce, kl = self._means(sums.tolist(), float(count))
        return {"step": self.step, "held_out_ce": ce, "held_out_kl": kl}

    def _means(self, sums: list[float], count: float) -> list[float]:
        found = self.group.total(np.array([*sums, count]))
        return (found[:-1] / found[-1]).tolist()

    # ---- state ----

    def keep(self, folder: Path) -> None:
        """Replace the state in ``folder``: an earlier one is there until this one is whole."""
        new, old = folder / "state.new", folder / "state"
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "step": self.step}, checkpoint_id=new)
        if self.group.leads:
            shutil.rmtree(folder / "state.old", ignore_errors=True)
            if old.exists():
                old.rename(folder / "state.old")
            new.rename(old)
            shutil.rmtree(folder / "state.old", ignore_errors=True)
        self.group.wait()

    def resume(self, folder: Path) -> None:
        """Go on from the state in ``folder``, if there is one."""
        kept = next((p for n in ("state", "state.old") if (p := folder / n).exists()), None)
        if kept is None:
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        dcp.load(state, checkpoint_id=kept)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]

    def write(self, model: Path, out: Path) -> None:
        """Write the model in the dtype of its origin's config, with the origin's other files."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        tensors = get_model_state_dict(self.model, options=options)
        if self.group.leads:
            config = json.loads((model / "config.json").read_text())
            name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
            dtype = getattr(torch, name)
            tensors = {n: t.to(dtype) for n, t in tensors.items()}
            partial = out.with_name(f"{out.name}.writing")
            shutil.rmtree(partial, ignore_errors=True)
            self.model.save_pretrained(partial, state_dict=tensors)
            for path in beside_weights(model):
                shutil.copy(path, partial)
            partial.rename(out)
        self.group.wait()


def recover(
    recovery: Recovery, talks: Conversations, folder: Path, settings: dict[str, Any]
) -> Iterator[dict[str, float]]:
    """Train to the end, from where ``folder`` left off; yields what the log gets.

    Raises:
        ValueError: ``folder`` holds a run of other settings.
        FloatingPointError: Losses or gradients are not finite.
    """
    recipe, group = recovery.recipe, recovery.group
    begin(folder, settings, group)
    recovery.resume(folder)
    if group.leads:
        at = recovery.step
        trim_log(folder, lambda x: x["step"] > at or (x["step"] == at and "held_out_kl" in x))

    def advance() -> Iterator[dict[str, float]]:
        if recovery.step % recipe.validate_every == 0:
            yield recovery.validate(talks.held_out)
        yield recovery.advance(talks.sample(recovery.step * group.size + group.rank))

    for line in go_on(recovery, advance, recipe.steps, folder, group, recipe.keep_every):
        yield noted(line, folder, group)
    yield noted(recovery.validate(talks.held_out), folder, group)


def noted(line: dict[str, float], folder: Path, group: TorchGroup) -> dict[str, float]:
    """The line, which is in the log now."""
    if group.leads:
        with (folder / LOG).open("a") as log:
            log.write(json.dumps(line) + "\n")
    return line


def comparison(folder: Path, recipe: Recipe) -> str:
    """What a fine-tune's log says of a model that it made worse; of a better one nothing.

    Raises:
        FloatingPointError: It no longer predicts anything.
    """
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    held = [x["held_out_ce"] + recipe.kl * x["held_out_kl"] for x in lines if "held_out_ce" in x]
    if not math.isfinite(held[-1]):
        raise FloatingPointError(
            f"the loss on what is held out is {held[-1]} at the end, so no model is written; "
            f"remove {folder} and give a lower --rate"
        )
    if not held[-1] > held[0]:
        return ""
    return (
        f"the loss on what is held out was {held[0]:.4g} before and is {held[-1]:.4g} now; a "
        "lower --rate, or more steps, may help\n"
    )


def check_original(model: Path, original: Path) -> None:
    """Refuse (ValueError) an original that the model was not converted from, and is not itself."""
    own, config = files_fingerprint(original), AutoConfig.from_pretrained(model)
    made_of = getattr(config, "original", None)
    if made_of is None and config.model_type == on_torch.MODEL_TYPE:
        raise ValueError(f"{model} does not say which model it was made of; convert it again")
    if own not in (made_of, files_fingerprint(model)):
        raise ValueError(
            f"{model} was not converted from {original} (or from other files of it); name the "
            "model that it was converted from, or for the baseline the same model twice"
        )


def parsed() -> argparse.Namespace:
    """The command's options.

    Raises:
        ValueError: A number means nothing.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a converted model, or the original for the baseline")
    parser.add_argument("original", help="the unconverted model: a folder, or a Hub id")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", nargs="+", required=True, help="JSONL files or Hub datasets")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    known = vars(Recipe())
    for name, value in known.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = parser.parse_args()
    may_be_0 = ("warmup", "decay", "kl", "seed")
    check_above_0({name: getattr(given, name) for name in known if name not in may_be_0})
    check_least({name: getattr(given, name) for name in may_be_0}, 0)
    if given.warmup > 1:
        raise ValueError(f"--warmup is {given.warmup}; give a share of the steps, from 0 to 1")
    return given


def start(device: str) -> None:
    """Join the processes of torchrun, or begin a group of one."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 0)):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if device == "cuda":
        torch.cuda.set_device(local_device("cuda"))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


@told
def main() -> None:
    given = parsed()
    check_device(given.device)
    check_free(given.out)
    model, original = model_folder(given.model), model_folder(given.original)
    check_original(model, original)
    start(given.device)
    recipe = Recipe(**{name: getattr(given, name) for name in vars(Recipe())})
    talks = Conversations(given.data, tokenizer_of(model), recipe)
    folder = given.out.with_name(f"{given.out.name}.partial")
    settings = {
        **vars(recipe), "model": given.model, "original": given.original,
        "conversations": talks.digest, "processes": dist.get_world_size(),
    }  # fmt: skip
    leads = dist.get_rank() == 0
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with alone(given.out, wait=0) if leads else contextlib.nullcontext():
        if leads:
            check_free(given.out)  # again: another run may have ended meanwhile
        recovery = Recovery(model, original, recipe, given.device)
        for line in recover(recovery, talks, folder, settings):
            if leads and ("held_out_kl" in line or line["step"] % 100 == 0):
                print(json.dumps(line), flush=True)
        recovery.group.wait()  # until the log is whole
        worse = comparison(folder, recipe)
        recovery.write(model, given.out)
        if leads:
            print(worse, end="")
            for path in (folder / "state", folder / "state.old"):
                shutil.rmtree(path, ignore_errors=True)
            (folder / SETTINGS).unlink()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
