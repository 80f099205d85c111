"""A model's run from its first weights to its folder, whatever it learns from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from runs import LOG, begin, clipped, go_on, model_folder, trim_log
from transformers import AutoModelForCausalLM

from kvlingo_mlx.group import ALONE, Group
from pretraining.completep import CompleteP
from pretraining.models import MODELS, Model, Recipe
from pretraining.slicing import sliced

CLIP = 1.0  # the largest norm of a step's gradient
LOG_EVERY, KEEP_EVERY = 20, 200


def first_weights(plan: Model) -> tuple[Any, CompleteP | None]:
    """A model drawn from its seed, and what scales it; the same on any machine."""
    torch.manual_seed(plan.seed)
    config, recipe = plan.config(), plan.recipe
    model, scaling = AutoModelForCausalLM.from_config(config), None
    if recipe.base is not None:
        scaling = CompleteP.of(config, recipe.base)
        scaling.initialise(model, recipe.std)
        scaling.attach(model)
    plan.start_norms(model)
    return model, scaling


def plain_weights(model: Any, scaling: CompleteP | None) -> dict[str, torch.Tensor]:
    """The weights of the model without scaling, a tied head left out."""
    weights = model.state_dict() if scaling is None else scaling.plain(model)
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def slice_out(model: Any, scaling: CompleteP | None, origin: str) -> None:
    """Replace a model's weights by a slice: of a folder's, or of the first ones of a known model.

    Raises:
        MissingModelError: There is no such model.
        ValueError: The model is no slice of it.
    """
    if origin in MODELS:
        large, scaled = first_weights(MODELS[origin])
    else:
        folder, scaled = model_folder(origin), None
        large = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = sliced(plain_weights(large, scaled), large.config, model.config)
    (CompleteP(1, 1) if scaling is None else scaling).load(model, found)


class Training:
    """One model's run: what is learnt, how far it got, and where that is kept.

    ``lessons`` say what a step learns from (:class:`~pretraining.curriculum.Curriculum`,
    :class:`~pretraining.packed.Packed`): they add to the gradient, and know the parameter groups,
    the modules that are kept and the tokenizer. ``settings`` must not change when it is resumed.
    """

    def __init__(
        self, lessons: Any, scaling: CompleteP | None, recipe: Recipe, out: Path,
        settings: dict[str, Any], group: Group = ALONE,
    ) -> None:  # fmt: skip
        self.lessons, self.scaling, self.recipe, self.group = lessons, scaling, recipe, group
        self.settings = settings | json.loads(json.dumps(asdict(recipe)))
        self.partial = Path(f"{out}.partial")
        self.model = lessons.model
        self.optimizer = torch.optim.AdamW(
            lessons.groups, lr=recipe.rate, betas=recipe.betas,
            fused=self.model.device.type == "cuda" or None,
        )  # fmt: skip
        self.state = lessons.state  # one dict: lessons read it and write to it
        self.state |= {"step": 0, "seconds": 0.0, "tokens": 0}

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self.state["step"]

    @property
    def _kept(self) -> dict[str, Any]:
        return {**self.lessons.modules, "optimizer": self.optimizer}

    # ---- state ----

    def resume(self) -> None:
        """Go on from the last saved step, if there is one."""
        path = self.partial / "state.pt"
        if path.exists():
            saved = torch.load(path, weights_only=True, map_location=self.model.device)
            for name, part in self._kept.items():
                part.load_state_dict(saved[name])
            self.state.update(saved["state"])
            self.lessons.go_to(saved.get("position", {}))
        if self.group.leads:
            trim_log(self.partial, lambda line: line["step"] > self.step)

    def keep(self, folder: Path) -> None:
        """Replace the state; all processes call this at the same step."""
        position = self.lessons.position()
        if self.group.leads:
            parts = {name: part.state_dict() for name, part in self._kept.items()}
            kept = {**parts, "state": dict(self.state), "position": position}
            torch.save(kept, folder / "state.tmp")
            os.replace(folder / "state.tmp", folder / "state.pt")
        self.group.wait()

    # ---- steps ----

    def run(self, name: str) -> Iterator[float]:
        """Train to the last step; yields each step's loss."""
        begin(self.partial, self.settings, self.group)
        self.resume()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        steps = self.recipe.steps
        with Progress(*columns, disable=not self.group.leads) as progress:
            bar = progress.add_task(name, total=steps, completed=self.step)
            advance = self._advance
            for line in go_on(self, advance, steps, self.partial, self.group, KEEP_EVERY):
                text = f"{name} loss {line['loss']:.3f}{self.lessons.told()}"
                progress.update(bar, completed=self.step, description=text)
                yield line["loss"]

    def _advance(self) -> Iterator[dict[str, Any]]:
        """One step, by the clock; every 20th goes into the log."""
        state, started = self.state, time.perf_counter()
        loss, tokens = self._learn()
        state["seconds"] += time.perf_counter() - started
        state["tokens"] += int(tokens)
        state["step"] += 1
        line = {**state, "loss": round(loss, 4)}
        if self.group.leads and self.step % LOG_EVERY == 0:
            with open(self.partial / LOG, "a") as log:
                log.write(json.dumps(line) + "\n")
        yield line

    def _learn(self) -> tuple[float, float]:
        """One optimizer step; returns the loss and the tokens of all processes."""
        rate = self.recipe.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["scale"] * rate
        self.optimizer.zero_grad(set_to_none=True)
        own = self.lessons.gradient(self.step)
        self.group.add(p.grad for p in self.model.parameters() if p.grad is not None)
        clipped(self.model.parameters(), CLIP, self.step)
        self.optimizer.step()
        loss, tokens = self.group.total(np.array(own, np.float64))
        return float(loss), float(tokens)
