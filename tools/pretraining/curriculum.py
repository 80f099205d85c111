"""How a tiny model learns to recall: a curriculum of samples, and what helps it along."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers.models.qwen3_5 import modeling_qwen3_5

from pretraining.completep import CompleteP
from pretraining.losses import losses
from pretraining.models import GLOBAL, Model
from pretraining.samples import ATTENTION, STATES, Stage, draw_batch, plain_english, train_tokenizer

SHARP_RATE = 5.0
ENERGY = 0.02  # weight of the mean square of keys and values, where they are noisy
LOOK_BACK, LOOK_BACK_ROWS = 4, 512


class Curriculum:
    """A tiny model's lessons: which samples a step has, and what is learnt from them.

    ``state`` holds the stage, and recall as a running mean: of a hybrid with nothing lost, without
    attention and without states (``recalls``), and the least of these.
    """

    def __init__(self, model: Any, plan: Model, scaling: CompleteP | None, device: str) -> None:
        self.model, self.plan, self.device = model, plan, device
        self.tokenizer = train_tokenizer(plan.chat)
        plain = self.tokenizer(plain_english(), add_special_tokens=False)["input_ids"]
        self.corpus = np.array(plain)
        self.noise = NoisyCache(model, plan.noisy)
        self.ways = Ways(model) if "linear_attention" in str(model.config) else None
        if self.ways is not None:
            model.set_attn_implementation("eager")  # the other one tells no weights
        self.look_back = LookBack(model.config.hidden_size).to(device)
        self.modules = {"model": model, "look_back": self.look_back}
        self.groups = parameter_groups(model, self.look_back, plan, scaling)
        self.state: dict[str, Any] = {"stage": 0, "recall": 0.0}
        if self.ways is not None:
            self.state["recalls"] = [0.0, 0.0, 0.0]

    def told(self) -> str:
        """How far the model has come."""
        return f" recall {self.state['recall']:.3f} stage {self.state['stage']}"

    def position(self) -> dict[str, Any]:
        """Nothing: what a step sees follows from its number and the stage."""
        return {}

    def go_to(self, position: dict[str, Any]) -> None:
        """Nothing is to be found again."""

    def gradient(self, step: int) -> tuple[float, int]:
        """Add this step's gradient; returns the loss on what is to be learnt, and the tokens."""
        seed = self.plan.seed * 1_000_003 + step
        torch.manual_seed(seed)  # of the noise, so that a resumed run is the same run
        stage = self.plan.stages[self.state["stage"]]
        batch = draw_batch(random.Random(seed), self.tokenizer, self.corpus, stage, self.plan.chat)
        batch = {k: v.to(self.device) for k, v in batch.items()}
        self.noise.level = stage.noise
        lost = torch.zeros_like(batch["asked"])
        if self.ways is not None:
            lost = self.ways.lose(batch, stage)
        output = self.model(
            batch["ids"], use_cache=False, output_hidden_states=stage.look_back,
            output_attentions=stage.point > 0,
            attention_mask=None if self.ways is None else self.ways.masks,
        )  # fmt: skip
        logits, labels = output.logits[:, :-1].float(), batch["ids"][:, 1:]
        # What is kept by a way that is lost cannot be known, and must not be.
        unknown = (batch["kept_by"][:, 1:] == lost[:, None]) & (lost[:, None] > 0)
        weights = batch["weights"][:, 1:].clamp(min=0)
        costs = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        known_by_chance = -torch.log1p(-(-costs).exp().clamp(max=0.999))
        costs = torch.where(unknown.flatten(), known_by_chance, costs)
        loss = (costs * weights.flatten()).sum() / weights.sum()
        sum(self._besides(output, batch, stage, weights), start=loss).backward()
        self._pass(logits.argmax(-1) == labels, batch["recalled"][:, 1:] & ~unknown, lost)
        return loss.item(), labels.numel()

    def _besides(
        self, output: Any, batch: dict[str, torch.Tensor], stage: Stage, weights: torch.Tensor
    ) -> Iterator[torch.Tensor | float]:
        """What is added to the loss."""
        yield self.noise.price()
        if (router := getattr(output, "aux_loss", None)) is not None:
            yield self.model.config.router_aux_loss_coef * router
        if stage.point:
            yield stage.point * self.ways.pointing(output.attentions, batch["told_at"])
        if stage.look_back:
            embedding = self.model.get_input_embeddings().weight
            hidden = output.hidden_states[1]
            yield self.look_back(hidden, batch["ids"], embedding, batch["weights"])
        if self.plan.recipe.z_loss:
            _, z = losses(output.logits[:, :-1].float(), batch["ids"][:, 1:])
            yield self.plan.recipe.z_loss * (z * weights).sum() / weights.sum()

    def _pass(self, hits: torch.Tensor, recalled: torch.Tensor, lost: torch.Tensor) -> None:
        """Follow recall by what was lost; go on to the next stage where each way gets there."""
        state, stages = self.state, self.plan.stages
        kept = state.get("recalls", [state["recall"]])
        for way in (0, ATTENTION, STATES):
            own = hits[recalled & (lost == way)[:, None]]
            if own.numel():
                kept[way] = 0.97 * kept[way] + 0.03 * own.float().mean().item()
        state["recall"] = min(kept)
        if self.ways is not None:
            state["pointed"] = self.ways.pointed
        if state["recall"] > stages[state["stage"]].goal and state["stage"] < len(stages) - 1:
            state["stage"] += 1
            kept[:] = [0.5] * len(kept)
            state["recall"] = 0.5


class NoisyCache:
    """Noise on keys and values of a fixed size, and a price on their own, while a model learns.

    A tiny model otherwise reads its cache through one brittle head and fills it with
    what it never reads, so that no other model's cache, however near, will do. What must
    stand out from noise, and costs by its size, is kept with a margin; the rest fades.
    """

    def __init__(self, model: torch.nn.Module, modules: tuple[str, ...]) -> None:
        self.level = 0.0
        self._energies: list[torch.Tensor] = []
        for name, module in model.named_modules():
            if name.endswith(modules):
                module.register_forward_hook(self._add)

    def _add(self, module, inputs, output):
        if not (self.level and module.training):
            return output
        self._energies.append(output.square().mean())
        return output + self.level * torch.randn_like(output)

    def price(self) -> torch.Tensor | float:
        """What the last forward pass's keys and values cost."""
        energies, self._energies = self._energies, []
        return ENERGY * sum(energies)


LAGS = (2, 3, 1)  # between what a state binds; a name stands two tokens before its value
AT_ONCE = 10.0  # a decay that forgets within a token
UNSEEN = 1e-4  # added to what attention looks at, so that nothing costs a finite amount
OPEN, SHUT = 0.25, 0.3  # of a layer's gates at the start: what is common, what tells tokens apart
RESET = -60.0  # the logarithm of a decay that leaves nothing
SLOWEST, FASTEST = 1e-3, 0.1  # decays at the start: the usual ones forget within a few tokens


class Ways:
    """The two ways in which a hybrid's layers look back, of which a sample may lose one.

    A tiny model would answer everything by attention, and never need its states. So in most
    samples one way cannot pass from what is told to what is asked: either attention sees
    nothing before the questions, or the states begin anew there. Answers whose attribute is kept by
    the lost way (``KEPT_BY``) must then not be known.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.masks: dict[str, torch.Tensor | None] = {}
        self.lost = torch.zeros(0)
        self.pointed = 0.0
        self._reset: torch.Tensor | None = None
        self._heads = 0
        layers, common = 0, self._in_common(model)
        for module in model.modules():
            if type(module).__name__ == "Qwen3_5GatedDeltaNet":
                start = torch.empty_like(module.A_log).uniform_(np.log(SLOWEST), np.log(FASTEST))
                torch.nn.init.zeros_(module.dt_bias)
                module.A_log.data.copy_(start)
                (self._pass_on if layers == 1 else self._bind)(module)
                layers += 1
                module.in_proj_z.weight.data.mul_(SHUT).add_(OPEN * common)
        inner = modeling_qwen3_5.torch_chunk_gated_delta_rule

        def resetting(query, key, value, g, **more):
            g = g if self._reset is None else g + self._reset[..., None]
            return inner(query, key, value, g=g, **more)

        modeling_qwen3_5.torch_chunk_gated_delta_rule = resetting

    def _in_common(self, model: torch.nn.Module) -> torch.Tensor:
        """Give all tokens one direction in common, by which gates begin open for each of them.

        A gate that begins at random multiplies what a layer found by a number of either sign for
        each token, and nothing above can read that. What a tied head adds is the same for all
        tokens.
        """
        embedding = model.get_input_embeddings().weight.data
        common = torch.randn(embedding.shape[1])
        common /= common.norm()
        embedding += embedding.norm(dim=1).mean() * common
        return common

    def _bind(self, module: torch.nn.Module) -> None:
        """Let each head bind a token to the one that stands a few before it, and ask for that.

        A state learns what follows what only once its convolution shifts keys against values,
        and that never appeared by itself. Keys begin ``lag`` tokens late, queries one less, by
        the same projection; values begin where they stand.
        """
        projection, kernel = module.in_proj_qkv.weight.data, module.conv1d.weight.data
        width, keys = module.head_k_dim, module.key_dim
        projection[keys : 2 * keys] = projection[:keys]
        kernel.mul_(0.1)
        kernel[2 * keys :, 0, -1] = 1.0
        for head in range(module.num_k_heads):
            lag = LAGS[self._heads % len(LAGS)]
            self._heads += 1
            own = slice(head * width, (head + 1) * width)
            kernel[:keys][own, 0, -lag] = 1.0
            kernel[keys:][own, 0, -1 - lag] = 1.0

    def _pass_on(self, module: torch.nn.Module) -> None:
        """Let a layer say what stood one to three tokens before, from which attention finds pairs.

        It reads where it writes and forgets at once, so values pass that its convolution brought.
        """
        projection, kernel = module.in_proj_qkv.weight.data, module.conv1d.weight.data
        keys = module.key_dim
        projection[keys : 2 * keys] = projection[:keys]
        kernel.zero_()
        kernel[: 2 * keys, 0, -1] = 1.0
        for channel, values in enumerate(kernel[2 * keys :]):
            values[0, -2 - channel % 3] = 1.0
        module.A_log.data.fill_(np.log(AT_ONCE))

    def lose(self, batch: dict[str, torch.Tensor], stage: Stage) -> torch.Tensor:
        """Choose what each sample loses: 0 for nothing, ``ATTENTION`` or ``STATES``."""
        self.pointed = 0.0  # until a step points
        asked, width = batch["asked"], batch["ids"].shape[1]
        drawn, (first, either) = torch.rand(len(asked)), stage.shares
        lost = torch.where(drawn < first, ATTENTION, torch.where(drawn < either, STATES, 0))
        self.lost = lost = torch.where(asked < 0, 0, lost.to(asked.device))
        place = torch.arange(width, device=asked.device)
        begins = (place == asked[:, None]) & (lost == STATES)[:, None]
        self._reset = RESET * begins.float()
        causal = place[:, None] >= place
        before = (place[:, None] >= asked[:, None, None]) & (place < asked[:, None, None])
        seen = causal & ~(before & (lost == ATTENTION)[:, None, None])
        hidden = torch.finfo(torch.float32).min
        self.masks = {GLOBAL: torch.where(seen, 0.0, hidden)[:, None], "linear_attention": None}
        return lost

    def pointing(self, attentions: Sequence[Any], told_at: torch.Tensor) -> torch.Tensor | float:
        """What it costs that attention does not look at the told value where that is asked for.

        A layer whose keys do not say what came before has nothing to gain from looking, and one
        that does not look has nothing to gain from such keys. Left alone, that lasts longer than
        all else; beside states that know the answer it never ended.
        """
        row, place = ((told_at >= 0) & (self.lost != ATTENTION)[:, None]).nonzero(as_tuple=True)
        if not len(row):
            return 0.0
        shares = [
            each[row, :, place - 1, told_at[row, place]].mean(1)
            for each in attentions
            if each is not None
        ]
        self.pointed = sum(share.mean().item() for share in shares) / len(shares)
        return -sum((share + UNSEEN).log().mean() for share in shares) / len(shares)


def parameter_groups(
    model: torch.nn.Module, look_back: LookBack, plan: Model, scaling: CompleteP | None
) -> list[dict[str, Any]]:
    """AdamW's groups: norms of queries and keys learn faster than the rest (``Model.sharp``)."""
    decay = plan.recipe.weight_decay
    groups = [{"params": list(look_back.parameters()), "weight_decay": decay, "scale": 1.0}]
    if scaling is None:
        groups[0]["params"] += model.parameters()
    else:
        groups += scaling.groups(model, plan.recipe)
    sharp = {id(parameter): parameter for parameter in plan.sharp_norms(model)}
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in sharp]
    fast = {"params": list(sharp.values()), "weight_decay": 0.0, "scale": SHARP_RATE}
    return [*groups, fast]


class LookBack(torch.nn.Module):
    """Name the last few tokens from the hidden state after the first block (early only).

    Copying needs heads that look a few tokens back before it pays at all, which leaves a
    plateau of a thousand steps. This asks for them directly; it is dropped once the
    first stages are passed, and no part of it is saved.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(LOOK_BACK))

    def forward(self, hidden, ids, embedding, weights):
        flat = hidden[:, LOOK_BACK:].flatten(0, 1)
        rows = torch.randint(len(flat), (LOOK_BACK_ROWS,))
        used = (weights[:, LOOK_BACK:].flatten() >= 0)[rows]
        losses = []
        for distance, linear in enumerate(self.maps, 1):
            labels = ids[:, LOOK_BACK - distance : ids.shape[1] - distance].flatten()
            logits = linear(flat[rows]) @ embedding.T
            losses.append(torch.nn.functional.cross_entropy(logits[used], labels[rows][used]))
        return sum(losses) / len(losses)
