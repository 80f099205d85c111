"""Fitting and training between two tokenizers, on the device and in PyTorch."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from benchmarks.paper.evaluation.baselines import in_order
from kvlingo_mlx.engine import fill, generation
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample, tokenise
from tests.support.two_tokenizers import TALK, write_mistral, write_qwen, write_translator

torch = pytest.importorskip("torch")
cross_reference = pytest.importorskip("tests.support.cross_reference")
reference = pytest.importorskip("tests.support.reference")

from kvlingo_mlx.cuda import model as torch_model  # noqa: E402
from kvlingo_mlx.cuda.gradients import conversation_loss, read  # noqa: E402
from kvlingo_mlx.cuda.translator import TorchTranslator  # noqa: E402
from kvlingo_mlx.engine.plan import Plan  # noqa: E402
from kvlingo_mlx.training.objectives import objective_named  # noqa: E402
from kvlingo_mlx.training.plan import TrainingPlan, make_config  # noqa: E402
from kvlingo_mlx.training.recipe import Recipe  # noqa: E402
from kvlingo_mlx.training.runtime import pair_of  # noqa: E402
from kvlingo_mlx.training.trainer import Trainer  # noqa: E402
from tests.support.trainings import KINDS, closed_form, distance, learnt  # noqa: E402

PAIRS = (("qwen", "mistral"), ("mistral", "qwen"))
ANSWER = {"role": "assistant", "content": "The sum is 24, and the prefix is a long river."}
RECORDS = [
    {"messages": [*TALK, ANSWER]},
    {"messages": [*TALK[1:], {"role": "assistant", "content": "It is the money in the house."}]},
    {"text": "The other passenger is in the house, and you use the money of the ferryman. " * 4},
]
KL = objective_named("kl")
Opener = Callable[[str], Any]


@pytest.fixture(scope="module")
def root(root: Path) -> Path:
    """Both models."""
    write_qwen(root / "qwen"), write_mistral(root / "mistral")
    return root


@pytest.fixture(scope="module")
def opened(root: Path) -> Callable[[str], LanguageModel]:
    """A model by name, in MLX."""
    return cache(lambda name: kv.load(root / name))


@pytest.fixture(scope="module")
def loaded(root: Path) -> Opener:
    """A model by name, in PyTorch."""
    return cache(lambda name: torch_model.load(str(root / name), dtype=torch.float32))


def samples(source: Any, target: Any) -> list[Sample]:
    """The records as the two tokenizers cut them."""
    return [tokenise(r, target.tokenizer, source_tokenizer=source.tokenizer) for r in RECORDS]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_samples(pair: tuple[str, str], loaded: Opener) -> None:
    source, target = map(loaded, pair)
    for sample, record in zip(samples(source, target), RECORDS, strict=True):
        assert sample.aligned is not None and sample.continuation
        assert sample.prefix == sample.aligned.target_ids
        spelled = (
            target.tokenizer.decode(sample.prefix),
            source.tokenizer.decode(sample.source_prefix),
        )
        if "messages" in record:
            one = tokenise(record, target.tokenizer)
            assert (sample.prefix, sample.continuation) == (one.prefix, one.continuation)
            assert all(m["content"] in text for m in record["messages"][:-1] for text in spelled)
        else:
            halves = target.tokenizer.decode(sample.continuation, skip_special_tokens=True)
            assert record["text"].strip().endswith(halves.strip())
            assert len(halves) == pytest.approx(len(record["text"]) / 2, abs=12)


def test_samples_of_one_tokenizer_are_refused(opened: Callable[[str], LanguageModel]) -> None:
    with pytest.raises(ValueError, match="tokens of one tokenizer, and this pair has two; give"):
        kv.fit(opened("qwen"), opened("mistral"), [Sample((1, 2, 3), ())])
    with pytest.raises(kv.IncompatibleTranslatorError, match="rotated at the source's; use"):
        kv.fit(opened("qwen"), opened("mistral"), RECORDS, capture="post_rope")


@torch.no_grad()
def regressed(root: Path, pair: tuple[str, str], side: str, layers: list[int], t: int) -> Any:
    """The least-squares map of one target layer, by loops over groups, (out, in)."""
    source, target = (reference.load_model(root / name) for name in pair)
    rows: list[tuple[Any, Any]] = []
    index = 0 if side == "keys" else 1
    for record in RECORDS[:2]:
        prompt = record["messages"][:-1]
        read = [cross_reference.SlowLine(root / name).prompt(prompt) for name in pair]
        states = [
            reference.capture_projections(model, ids)[index]
            for model, (_, ids, _) in zip((source, target), read, strict=True)
        ]
        for content in (message["content"] for message in prompt):
            ours, theirs = (
                cross_reference.cuts(ends, text.index(content), len(content))
                for text, _, ends in read
            )
            shared = sorted(set(ours) & set(theirs))
            for low, high in itertools.pairwise(shared):
                mean = states[1][t][theirs[low] : theirs[high]].mean(dim=0).flatten()
                rows += [
                    (torch.cat([states[0][s][i].flatten() for s in layers]), mean)
                    for i in range(ours[low], ours[high])
                ]
    x, y = (torch.stack(column).double().numpy() for column in zip(*rows, strict=True))
    return np.linalg.lstsq(x, y, rcond=None)[0].T, x, y


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_both_closed_forms_regress_on_group_means(
    pair: tuple[str, str], root: Path, opened: Callable[[str], LanguageModel], loaded: Opener
) -> None:
    device = kv.fit(*map(opened, pair), RECORDS[:2], nu=1, ridge=0.0)
    assert device.config.alignment == "minimal_groups"
    source, target = map(loaded, pair)
    config = make_config(source, target, TrainingPlan(nu=1, recipe=Recipe(steps=0)))
    assert config.alignment == "minimal_groups"
    fit = closed_form(config, pair_of(source, target), samples(source, target)[:2], ridge=0.0)
    assert fit.tokens == device.config.provenance["prefix_tokens"]
    for name in ("keys.1", "values.2"):
        side, t = name.split(".")
        layers = list(config.assignment.side(side)[int(t)])
        expected, x, y = regressed(root, pair, side, layers, int(t))
        error = np.square(x @ expected.T - y).sum() / np.square(y).sum()
        assert error > 1e-3  # the data are more than the map can fit
        for found in (device.to_weights().arrays[f"{name}.weight"], fit.weights[f"{name}.weight"]):
            assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def torch_translator(folder: Path) -> TorchTranslator:
    found = kv.load_translator(folder)
    return TorchTranslator.from_arrays(found.config, found.to_weights().arrays, "cpu")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_loss_is_that_of_the_devices_cache(
    pair: tuple[str, str], root: Path, opened: Callable[[str], LanguageModel], loaded: Opener
) -> None:
    """One pass over four-dimensional masks, beside MLX's cache and a loop over its logits."""
    folder = root / "-".join(pair)
    if not folder.exists():
        write_translator(folder, root / pair[0], root / pair[1])
    source, target = map(loaded, pair)
    ends = tuple(map(opened, pair))
    sample = samples(source, target)[0]
    translator = torch_translator(folder)
    reading = read(source, target, sample, translator.config.capture)
    found = conversation_loss(target, translator, reading, KL).kl
    handed = fill.bring(
        Plan(*ends, sample.prefix, kv.load_translator(folder), aligned=sample.aligned)
    ).cache
    ids = mx.array([[sample.prefix[-1], *sample.continuation[:-1]]])
    student = ends[1].model(ids, cache=handed)
    teacher = ends[1].model(mx.array([[*sample.prefix, *sample.continuation[:-1]]]))
    teacher = teacher[:, len(sample.prefix) - 1 :]
    log_p, log_q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (teacher, student))
    expected = (mx.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean().item()
    assert found == pytest.approx(expected, abs=1e-4) and found > 1e-2
    assert sample.aligned is not None
    moved = replace(sample, aligned=in_order(sample.aligned))
    control = conversation_loss(target, translator, replace(reading, sample=moved), KL).kl
    assert abs(control - found) > 1e-3


class Talks:
    """The conversations over and over."""

    def __init__(self, source: Any, target: Any) -> None:
        self.found = samples(source, target)

    def sample(self, index: int) -> Sample:
        return self.found[index % 2]

    def held_out(self, count: int = 64) -> list[Sample]:
        return self.found[2:]


@pytest.mark.parametrize(
    ("pair", "kind"),
    [
        # Keys cannot stay rotated, and two heads cannot be read by one.
        *((PAIRS[1], kind) for kind in KINDS if kind != "post_rope"),
        *((PAIRS[0], kind) for kind in ("linear", "mlp")),
    ],
    ids=str,
)
def test_both_runtimes_have_the_same_gradients(
    pair: tuple[str, str], kind: str, opened: Opener, loaded: Opener
) -> None:
    found = []
    for load in (opened, loaded):
        ends = pair_of(*map(load, pair))
        config = make_config(ends.source, ends.target, TrainingPlan(**KINDS[kind]))
        sample = samples(ends.source, ends.target)[0]
        found.append(learnt(ends, config, sample))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4) and found[1][0] > 0.01
    assert distance(found[0][1], found[1][1]) < 1e-5


def test_a_pair_is_trained_and_used(
    tmp_path: Path, opened: Callable[[str], LanguageModel], loaded: Opener
) -> None:
    source, target = map(opened, PAIRS[0])
    recipe = Recipe(steps=12, batch=2, learning_rates=(3e-3,), validate_every=3, reads=2)
    plan = TrainingPlan(nu=3, fit_samples=2, held_out=1, recipe=recipe, matching=0.5)
    folder = Trainer(source, target, Talks(source, target), plan, tmp_path / "out").run()
    translator = kv.load_translator(folder)
    assert translator.config.alignment == "minimal_groups" and translator.config.nu == 3
    source, target = map(loaded, PAIRS[0])
    first = closed_form(
        make_config(source, target, plan), pair_of(source, target), samples(source, target)[:2]
    ).weights
    losses = []
    for arrays in (first, translator.to_weights().arrays):
        made = TorchTranslator.from_arrays(translator.config, arrays, "cpu")
        readings = [read(source, target, s, "pre_norm") for s in samples(source, target)[:2]]
        losses.append(sum(conversation_loss(target, made, r, KL).kl for r in readings))
    assert losses[1] < losses[0]
    assert generation.generate(*map(opened, PAIRS[0]), TALK, translator=folder, max_tokens=4)


def test_native_layers_are_refused(loaded: Opener) -> None:
    with pytest.raises(ValueError, match="between two tokenizers every layer is translated"):
        make_config(*map(loaded, PAIRS[0]), TrainingPlan(native_layers=1))
