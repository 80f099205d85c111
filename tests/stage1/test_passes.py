"""A fit in several passes, stopped after any sample and resumed from its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvlingo_mlx.fitting.rows import Rows
from kvlingo_mlx.format.assignment import relative_depth
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.stage1.passes import MEMORY, ClosedForm, Hooks
from kvlingo_mlx.tokenization.samples import Sample

PLACES = {"once": MEMORY, "a map a pass": 1, "some maps a pass": 40_000}


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def data() -> list[Sample]:
    rng = np.random.default_rng(4)
    made = [tuple(rng.integers(5, 280, 60 + 9 * i).tolist()) for i in range(4)]
    return [Sample(tokens[:50], tokens[50:]) for tokens in made] + [Sample((), (7,))]


def fit(
    models: dict[str, LanguageModel],
    data: list[Sample],
    norm: str,
    method: str | None,
    memory: int,
    hooks: Hooks,
) -> ClosedForm:
    source, target = models["narrow"], models["narrow_moe"]
    depths = [len(model.attentions) for model in (source, target)]
    config = TranslatorConfig(source.spec(), target.spec(), relative_depth(*depths, 2))
    rows = Rows(source, target)
    return ClosedForm(config, rows, lambda start: data[start:], norm, method, 2, memory, hooks)


@pytest.mark.parametrize("memory", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(
    ("norm", "method"),
    [("sink_8", None), ("frobenius", "r2"), ("sink_8", "greedy"), ("attention_mass", "r2")],
)
def test_stopped_after_any_sample(
    models: dict[str, LanguageModel],
    data: list[Sample],
    tmp_path: Path,
    norm: str,
    method: str | None,
    memory: int,
) -> None:
    """Stopped again and again, each time after one more call: the maps of a fit in one go."""
    whole = fit(models, data, norm, method, memory, Hooks())
    whole.run()
    path, counts, stops = tmp_path / "sums.safetensors", {}, 0

    def keep(part: ClosedForm) -> None:
        save_file(part.tensors(), path)
        counts.update(part.counts())
        raise Stopped

    while True:
        part = fit(models, data, norm, method, memory, Hooks())
        part.hooks = Hooks(keep=lambda part=part: keep(part))
        if stops:
            part.restore(load_file(path), counts)
        try:
            part.run()
        except Stopped:
            stops += 1
            continue
        break
    assert stops == whole.part * (len(data) + 1)
    assert part.config.assignment == whole.config.assignment
    assert part.facts() == whole.facts() and whole.used == 4
    assert set(part.weights) == set(whole.weights)
    assert all(np.array_equal(part.weights[name], a) for name, a in whole.weights.items())
    if memory == 1:
        assert whole.part >= 2 * len(models["narrow_moe"].attentions)


def test_passes_change_nothing(models: dict[str, LanguageModel], data: list[Sample]) -> None:
    """Without a choice of layers the sums are the same products, however many passes."""
    found = [fit(models, data, "sink_8", None, memory, Hooks()) for memory in PLACES.values()]
    for each in found:
        each.run()
    assert len({each.part for each in found}) == 3
    for name, weight in found[0].weights.items():
        assert all(np.array_equal(each.weights[name], weight) for each in found[1:])
