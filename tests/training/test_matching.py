"""Matching what a target's attention gathers: against plain loops, and what it brings."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.group import Group
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.samples import Sample, tokenise
from kvlingo_mlx.training import distill
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from kvlingo_mlx.training.recipe import MATCHING, Recipe
from kvlingo_mlx.training.runtime import matched_positions, pair_of
from kvlingo_mlx.training.trainer import Trainer
from tests.support.fixtures import Folders, Models, Patch
from tests.support.kinds import rotated
from tests.support.trainings import Random, random_arrays
from tests.support.two_tokenizers import TALK, write_mistral, write_qwen

HAS_TORCH = importlib.util.find_spec("torch") is not None
RUNTIMES = ["mlx", pytest.param("torch", marks=pytest.mark.skipif(not HAS_TORCH, reason="torch"))]


def pair_on(runtime: str, folders: Folders, names: tuple[str, str]) -> Any:
    if runtime == "mlx":
        return pair_of(*(kv.load(folders[name]) for name in names))
    from kvlingo_mlx.cuda import model as torch_model

    return pair_of(*(torch_model.load(str(folders[name]), dtype="float32") for name in names))


def gathered(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    scores = keys @ query / math.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ values


def wrong_share(
    source: LanguageModel,
    target: LanguageModel,
    config: Any,
    arrays: Any,
    tokens: list[int],
    aligned: AlignedPrefix | None = None,
) -> float:
    """The error in float64 by loops over layers, queries and heads (Qwen3)."""
    every = range(len(tokens))
    rows, places, others, queried, ends = [*every], [*every], list[int](), [*every], [*every]
    if aligned is not None:
        rows, places = aligned.rows.tolist(), aligned.positions.tolist()
        ends = [stop - 1 for _, stop in aligned.groups.tolist()]
        covered = {place for group in aligned.groups.tolist() for place in range(*group)}
        others = [place for place in every if place not in covered]
        queried = sorted({*others, *ends})
    heard = tokens if aligned is None else list(aligned.source_ids)
    read, own = (capture.whole(m, t, "pre_norm") for m, t in ((source, heard), (target, tokens)))
    modules = [a.q_proj for a in target.attentions]
    recorder = capture.Recorder(modules)
    with recorder.recording():
        target.model(kv.backend.mx.array([tokens]))
        projected = recorder.take()
    eps, base = target.config["rms_norm_eps"], target.config["rope_theta"]
    total = 0.0
    for t, attention in enumerate(target.attentions):
        dim = target.geometry.layers[t].key_dim
        scales = {n: np.array(attention[n].weight, np.float64) for n in ("q_norm", "k_norm")}

        def heads(
            rows: Any, norm: str = "", places: Any = every, dim: int = dim, scales: Any = scales
        ) -> np.ndarray:
            """By head, the vectors of all places."""
            rows = np.array(rows, np.float64).reshape(len(places), -1, dim)
            if norm:
                rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * scales[norm]
                rows = rotated(rows, np.array(places)[:, None, None], base)
            return rows.swapaxes(0, 1)

        def mapped(side: str, t: int = t) -> np.ndarray:
            states = [np.array(read.side(side)[s][0], np.float64)[rows] for s in
                      config.assignment.side(side)[t]]  # fmt: skip
            return np.concatenate(states, -1) @ arrays[f"{side}.{t}.weight"].astype(np.float64).T

        queries = heads(projected[t][0], "q_norm")
        native = heads(own.keys[t][0], "k_norm"), heads(own.values[t][0])
        made = heads(mapped("keys"), "k_norm", places), heads(mapped("values"), "", places)
        wrong = whole = 0.0
        for place in queried if aligned else matched_positions(len(tokens)):
            for h, each in enumerate(queries):
                kv_head = h * len(native[0]) // len(queries)
                right = gathered(each[place], *(side[kv_head, : place + 1] for side in native))
                seen = [n for n, end in enumerate(ends) if end <= place]
                also = [other for other in others if other <= place]
                ours = gathered(each[place], *(
                    np.concatenate([one[kv_head, seen], its[kv_head, also]])
                    for one, its in zip(made, native, strict=True)
                ))  # fmt: skip
                wrong += float(((ours - right) ** 2).sum())
                whole += float((right**2).sum())
        total += wrong / whole / len(target.attentions)
    return total


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_error_is_that_of_plain_loops(
    models: Models, folders: Folders, runtime: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("kvlingo_mlx.training.runtime.QUERIES", 7)
    tokens = np.random.default_rng(0).integers(5, 280, 24).tolist()
    pair = pair_on(runtime, folders, ("dense", "wide"))
    config = make_config(pair.source, pair.target, TrainingPlan(nu=2))
    arrays = random_arrays(config, 3)
    made = pair.trainable(config, arrays)
    reading = pair.read(Sample(tuple(tokens[:15]), (*tokens[15:], 7)), config, attends=True)
    expected = wrong_share(models["dense"], models["wide"], config, arrays, tokens)
    assert pair.match(made, reading) == pytest.approx(expected, rel=1e-4) and expected > 0.1


@pytest.fixture(scope="module")
def two(root: Path) -> Folders:
    """Two models of two tokenizers."""
    return {"mistral": write_mistral(root / "mistral"), "qwen": write_qwen(root / "qwen")}


def talk_of(pair: Any) -> Sample:
    record = {"messages": [*TALK, {"role": "assistant", "content": "It is 24, and hers."}]}
    return tokenise(record, pair.target.tokenizer, source_tokenizer=pair.source.tokenizer)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_between_two_tokenizers_too(two: Folders, runtime: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr("kvlingo_mlx.training.runtime.QUERIES", 10_000)
    pair = pair_on(runtime, two, ("mistral", "qwen"))
    sample = talk_of(pair)
    aligned, tokens = sample.aligned, [*sample.prefix, *sample.continuation[:-1]]
    assert aligned is not None and len(aligned.own) and np.ptp(aligned.groups, 1).max() > 1
    config = make_config(pair.source, pair.target, TrainingPlan(nu=2))
    arrays = random_arrays(config, 3)
    made, reading = pair.trainable(config, arrays), pair.read(sample, config, attends=True)
    mlx = [kv.load(two[name]) for name in ("mistral", "qwen")]
    expected = wrong_share(*mlx, config, arrays, tokens, aligned)
    assert pair.match(made, reading) == pytest.approx(expected, rel=1e-4) and expected > 0.1
    nothing = {"rows": aligned.rows[:0], "positions": aligned.positions[:0]}
    nothing |= {"groups": aligned.groups[:0], "own": np.arange(len(sample.prefix) - 1)}
    alone = replace(sample, aligned=replace(aligned, **nothing))
    assert pair.match(made, pair.read(alone, config, attends=True), 1.0) == 0.0


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_model_of_its_own_has_nothing_to_learn(folders: Folders, runtime: str) -> None:
    pair = pair_on(runtime, folders, ("dense", "dense"))
    config = make_config(pair.source, pair.target, TrainingPlan())
    arrays = random_arrays(config)
    arrays = {name: np.eye(len(array), dtype=np.float32) for name, array in arrays.items()}
    made, reading = pair.trainable(config, arrays), pair.read(Random().sample(1), config, True)
    assert pair.match(made, reading, 1.0) < 1e-9
    arrays["values.1.weight"] *= 1.1  # every value a tenth too large, so the outputs are as well
    made = pair.trainable(config, arrays)
    share = 0.01 / len(config.target.layers)
    assert pair.match(made, reading, 1.0) == pytest.approx(share, rel=1e-4)
    assert made.gather(Group())


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("native", [0, 2])
def test_a_training_that_matches_lowers_the_error_and_goes_on(
    folders: Folders, tmp_path: Path, runtime: str, native: int
) -> None:
    """All stages learn of the same readings, whatever the runtime; the paper's has one stage."""
    pair = pair_on(runtime, folders, ("dense", "wide"))
    sizes = {"steps": 40, "batch": 2, "validate_every": 10, "reads": 6, "whitened": True}
    recipe, data = Recipe(**sizes, learning_rates=(3e-3,)), Random(different=6)
    plan = TrainingPlan(
        recipe=recipe, matching=0.5, held_out=2, fit_samples=20, native_layers=native
    )
    ends = pair.source, pair.target
    stages: list[tuple[str, float]] = []
    curves: list[Any] = []
    trainer = Trainer(
        *ends, data, plan, tmp_path / "made",
        progress=lambda stage, report: stages.append((stage, report.loss)),
    )  # fmt: skip
    read: list[int] = []
    whole = type(pair).read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(pair), "read", lambda *asked: (read.append(1), whole(*asked))[1], raising=True
        )
        patch.setattr(distill, "complaints", lambda curve: (curves.append([*curve]), {})[1])
        patch.setattr(type(pair), "spans", None)  # which a closed form would read by itself
        trainer.run()
    told = [math.isfinite(curve[-1]["train_kl"][0]) for curve in curves if len(curve) > 1]
    assert told == sorted(told) and {*told} == {False, True}  # a share of wrong is no KL
    names = [stage for stage, _ in stages]
    assert names == ["matching"] * 20 + ["stage2"] * 20
    losses = [loss for stage, loss in stages if stage == "matching"]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    provenance = kv.load_translator(str(tmp_path / "made")).config.provenance
    assert provenance["matching"] == 0.5 and provenance["steps"] == 20
    assert len(read) <= 6 + 2  # each conversation once, the held-out ones too
    assert provenance["samples"] == 20 and provenance["prefix_tokens"] > 20 * 20


@pytest.mark.parametrize("mixing", [True, False])
def test_what_a_training_matches_is_lengthened_before_stage_2(
    folders: Folders, tmp_path: Path, monkeypatch: Patch, mixing: bool
) -> None:
    """Its keys deviate from their mean as many times more than those of the same training without
    that; its values are the same."""
    pair = pair_on("mlx", folders, ("dense", "wide"))
    recipe = Recipe(steps=4, batch=1, reads=3, whitened=True)
    plan = TrainingPlan(recipe=recipe, matching=0.5, held_out=1, fit_samples=20, head_mixing=mixing)
    data, made = Random(), []
    for factor in (1.0, 1.15):
        monkeypatch.setattr("kvlingo_mlx.training.coordinates.LONGER", factor)
        trainer = Trainer(pair.source, pair.target, data, plan, tmp_path / f"{factor}")
        made.append(trainer._stage1(trainer._held_out())[1])
    (before, after), config = made, trainer.config
    states = pair.read(data.sample(1), config, attends=True).whole[0]
    for t in range(len(config.target.layers)):
        keys = [np.array(pair.trainable(config, each).layer(t, states)[0]) for each in made]
        means = [each.mean(0) for each in keys]
        short, long = (each - mean for each, mean in zip(keys, means, strict=True))
        assert np.abs(long - 1.15 * short).max() < 0.05 * np.abs(short).max()
        assert np.abs(means[1] - means[0]).max() < 0.1 * np.abs(short).max()
        assert (before[f"values.{t}.weight"] == after[f"values.{t}.weight"]).all()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"matching": 1.0}, "give a share from 0 to below 1"),
        ({"matching": 0.5, "state_maps": True}, "leave it out"),
    ],
)
def test_what_cannot_be_matched_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TrainingPlan(**options)
    assert TrainingPlan(matching=0.25).matched == Recipe(
        steps=1250, objective=MATCHING, learning_rates=(1e-4,)
    )


@pytest.mark.parametrize("steps", range(4))
def test_no_step_is_lost_between_the_stages(steps: int) -> None:
    plan = TrainingPlan(matching=0.5, recipe=Recipe(steps=steps))
    assert (plan.matched.steps if plan.matched else 0) + plan.stage2.steps == steps
