"""Training on MLX against training on PyTorch: gradients, steps, checkpoints, whole runs."""

import gc
import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx, nn

import numpy as np
import pytest
from mlx.utils import tree_map_with_path

torch = pytest.importorskip("torch")

import kvlingo_mlx as kv  # noqa: E402
from kvlingo_mlx.cuda.model import TorchModel  # noqa: E402
from kvlingo_mlx.cuda.translator import TorchTranslator  # noqa: E402
from kvlingo_mlx.format import translator_folder  # noqa: E402
from kvlingo_mlx.format.maps import first_readers, head_map_of, maps_of  # noqa: E402
from kvlingo_mlx.models.language_model import LanguageModel  # noqa: E402
from kvlingo_mlx.training.checkpoints import Checkpoint  # noqa: E402
from kvlingo_mlx.training.distill import Distillation, Run  # noqa: E402
from kvlingo_mlx.training.objectives import objective_named  # noqa: E402
from kvlingo_mlx.training.on_mlx import gradients  # noqa: E402
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator  # noqa: E402
from kvlingo_mlx.training.plan import TrainingPlan, make_config  # noqa: E402
from kvlingo_mlx.training.recipe import Recipe  # noqa: E402
from kvlingo_mlx.training.runtime import Pair, pair_of  # noqa: E402
from tests.support import trainings  # noqa: E402
from tests.support.fixtures import Folders, Patch  # noqa: E402
from tests.support.trainings import (  # noqa: E402
    Random,
    altered,
    die_after,
    distance,
    learnt,
    random_arrays,
    training,
)

KINDS = trainings.KINDS | {"native": {"native_layers": 2}}
Models = dict[str, LanguageModel]
TorchModels = dict[str, TorchModel]


def both(models: Models, torch_models: TorchModels, names: tuple[str, str]) -> tuple[Pair, Pair]:
    return tuple(pair_of(*(found[n] for n in names)) for found in (models, torch_models))


NAMES = [("dense", "wide"), ("dense", "moe"), ("moe", "dense")]


@pytest.mark.parametrize(
    ("names", "kind"),
    [*((names, "linear") for names in NAMES[1:]), *zip(NAMES * 3, KINDS, strict=True)],
    ids=str,
)
def test_gradients_equal(
    models: Models, torch_models: TorchModels, names: tuple[str, str], kind: str
) -> None:
    sample = Random(90, 20).sample(1)
    ours, theirs = both(models, torch_models, names)
    config = make_config(ours.source, ours.target, TrainingPlan(**KINDS[kind]))
    objective = "mixed" if kind == "linear" else "kl"
    loss, found = learnt(ours, config, sample, objective)
    expected, wanted = learnt(theirs, config, sample, objective)
    assert loss == pytest.approx(expected, rel=1e-4) and expected > 0.05
    assert distance(found, wanted) < 1e-5


def test_long_prefixes_are_read_in_chunks(models: Models, monkeypatch: Patch) -> None:
    pair = pair_of(models["dense"], models["wide"])
    config = make_config(pair.source, pair.target, TrainingPlan(native_layers=1))
    sample = Random(90, 40).sample(1)
    loss, whole = learnt(pair, config, sample, "kl")
    monkeypatch.setattr(gradients, "STEP", 16)
    monkeypatch.setattr("kvlingo_mlx.training.on_mlx.losses.LOGITS", 7 * 320)  # seven tokens
    again, chunked = learnt(pair, config, sample, "kl")
    assert again == pytest.approx(loss, rel=1e-5)
    assert distance(chunked, whole) < 1e-5


@pytest.mark.parametrize(("name", "bits"), [("wide", 4), ("moe", 8)])
def test_a_quantised_model_learns_as_its_dequantised_weights(
    folders: Folders, name: str, bits: int
) -> None:
    source, target, plain = (kv.load(folders[n]) for n in ("dense", name, name))

    def quantised(path: str, module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        return hasattr(module, "to_quantized") and weight.shape[-1] % 32 == 0

    nn.quantize(target.model, group_size=32, bits=bits, class_predicate=quantised)
    stored = dict(target.model.named_modules())
    assert any(hasattr(m, "bits") for m in stored.values())

    def dequantised(path: str, array: mx.array) -> mx.array:
        place, _, last = path.rpartition(".")
        module = stored[place]
        if last != "weight" or not hasattr(module, "bits"):
            return array
        parts = (module.weight, module.scales, module.biases)
        return mx.dequantize(*parts, group_size=module.group_size, bits=module.bits)

    plain.model.update(tree_map_with_path(dequantised, plain.model.parameters()))
    sample = Random(90, 20).sample(1)
    found = []
    for model in (target, plain):
        pair = pair_of(source, model)
        config = make_config(source, model, TrainingPlan(nu=2))
        found.append(learnt(pair, config, sample, "kl"))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert distance(found[0][1], found[1][1]) < 1e-4


@dataclass
class Counted:
    """A function, and how often it was called."""

    function: Any
    calls: int = 0

    def __call__(self, *asked: Any) -> Any:
        self.calls += 1
        return self.function(*asked)


def distillation(
    pair: Pair,
    steps: int,
    checkpoints: Checkpoint | None = None,
    different: int = 40,
    reads: int | None = None,
) -> Distillation:
    config = make_config(pair.source, pair.target, TrainingPlan(nu=2))
    arrays = random_arrays(config, 3)
    runs = [Run(rate, pair.trainable(config, arrays)) for rate in (1e-3, 3e-3)]
    rates = (1e-3, 3e-3)
    recipe = Recipe(steps=steps, batch=2, validate_every=10, learning_rates=rates, reads=reads)
    stream = Random(different=different)
    return Distillation(pair, runs, stream, stream.held_out(3), recipe, checkpoints)


def test_what_is_learned_from_again_is_read_once(
    models: Models, torch_models: TorchModels, monkeypatch: Patch
) -> None:
    """As a stream that repeats its first six samples, at a pass for each of them."""
    for pair in both(models, torch_models, ("dense", "wide")):
        repeated = distillation(pair, 12, different=6)
        repeated.run()
        read = Counted(type(pair).read)
        monkeypatch.setattr(type(pair), "read", lambda *asked, read=read: read(*asked))
        once = distillation(pair, 12, reads=6)
        once.run()
        assert read.calls == 6  # the three that are held out are among these samples
        for found, expected in zip(once.runs, repeated.runs, strict=True):
            wanted = expected.translator.arrays()
            assert distance(found.translator.arrays(), wanted) < 1e-6


@pytest.mark.parametrize("first", ["mlx", "torch"])
def test_one_runtime_goes_on_where_the_other_stopped(
    models: Models, torch_models: TorchModels, tmp_path: Path, first: str
) -> None:
    """With the optimizer's moments, as if it had never stopped."""
    pairs = both(models, torch_models, ("dense", "wide"))
    one, other = pairs if first == "mlx" else pairs[::-1]
    whole = distillation(one, 20)
    whole.run()
    half = distillation(one, 20, Checkpoint(tmp_path / "kept", {}))

    def stop(report: Any) -> None:
        half.stop.signal = signal.SIGINT if report.step == 10 else None

    with pytest.raises(KeyboardInterrupt):
        half.run(stop)
    assert half.step == 10
    rest = distillation(other, 20, Checkpoint(tmp_path / "kept", {}))
    rest.run()
    assert rest.step == whole.step == 20
    for found, expected in zip(rest.runs, whole.runs, strict=True):
        assert found.held_out == pytest.approx(expected.held_out, rel=1e-4)
        arrays = found.translator.arrays()
        for name, array in expected.translator.arrays().items():
            assert np.abs(arrays[name] - array).max() < 1e-4 * np.abs(array).max()


COORDINATES: dict[str, tuple[tuple[int, ...], bool]] = {
    "own": ((3, 5), False),
    "white": ((3, 5), True),
    "white, by head": ((2, 3, 5), True),
    "white, of many inputs": ((2, 2048), True),  # whose steps are half as long
}


@pytest.mark.parametrize("case", COORDINATES)
def test_the_optimizer_is_pytorchs(models: Models, case: str) -> None:
    """Ten clipped AdamW steps over planted gradients, on the numbers that learn."""
    config = make_config(models["dense"], models["wide"], TrainingPlan())
    rng, name = np.random.default_rng(0), "keys.0.weight"
    shape, learns = COORDINATES[case]
    start, inputs = rng.normal(size=shape), shape[-1]
    unit, white = np.ones((*shape[:-1], 1)), np.eye(inputs)
    arrays = {name: start}
    if learns:
        size = rng.uniform(0.1, 2, shape[:-1])
        spread = rng.normal(size=(*shape[:-2], inputs, inputs))
        white = spread @ spread.swapaxes(-1, -2) / inputs + np.eye(inputs)
        arrays |= {f"{name}/white": white, f"{name}/size": size}
        unit = size[..., None] * (0.5 if "many" in case else 1.0)
    own = torch.tensor(start / unit @ np.linalg.inv(white), requires_grad=True)
    theirs = torch.optim.AdamW([own], weight_decay=0.0)
    both = [
        made.from_arrays(config, arrays, *place)  # type: ignore[attr-defined]
        for made, place in ((MLXTranslator, ()), (TorchTranslator, ("cpu",)))
    ]
    for step in range(10):
        gradient = rng.normal(size=shape) * 10.0 ** (step % 3 - 1)
        own.grad = torch.tensor(gradient / max(1.0, np.linalg.norm(gradient)))
        theirs.param_groups[0]["lr"] = rate = 1e-2 / (step + 1)
        theirs.step()
        both[0].learn({name: mx.array(gradient.astype(np.float32))})
        both[1].tensors[name].grad = torch.tensor(gradient)
        expected = unit * (own.detach().numpy() @ white)
        for ours in both:
            ours.update(rate, 1.0)
            assert np.abs(ours.arrays()[name] - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(expected - start).max() > 1e-2


@pytest.mark.parametrize("exact", [2, 3])
def test_exact_outputs_have_coordinates(models: Models, exact: int) -> None:
    """A map whose first outputs, or all, have no error under the closed form."""
    config = make_config(models["dense"], models["wide"], TrainingPlan())
    name, start = "keys.0.weight", np.random.default_rng(0).normal(size=(3, 5))
    size = np.where(np.arange(3) < exact, 0.0, 0.5)
    arrays = {name: start, f"{name}/white": 2 * np.eye(5), f"{name}/size": size}
    for made in (MLXTranslator.from_arrays, TorchTranslator.from_arrays):
        place = ("cpu",) if made == TorchTranslator.from_arrays else ()
        found = made(config, arrays, *place).arrays()[name]  # type: ignore[operator]
        assert np.abs(found - start).max() < 1e-5


@pytest.mark.parametrize("mixing", [True, False])
@pytest.mark.parametrize("runtime", [0, 1])
def test_coordinates_change_steps_alone(
    models: Models, torch_models: TorchModels, runtime: int, mixing: bool
) -> None:
    """The loss stays; the gradient follows from that of the weights by the chain rule."""
    pair = both(models, torch_models, ("dense", "wide"))[runtime]
    config = make_config(pair.source, pair.target, TrainingPlan(nu=2, head_mixing=mixing))
    data = [Random(60, 20, different=99).sample(number) for number in range(7)]
    fit = trainings.closed_form(config, pair, data[1:])
    reading = pair.read(data[0], config, attends=True)
    found, whole = [], fit.weights | fit.coordinates
    for made in (pair.trainable(config, fit.weights), learning := pair.trainable(config, whole)):
        for _ in range(2):  # the second time, what was made white is at hand
            made.forget()
            matched = pair.match(made, reading, 1.0)
        lost = pair.loss(made, reading, objective_named("kl"), 1.0).value
        slopes = made.gradients if runtime == 0 else {n: t.grad for n, t in made.tensors.items()}
        arrays = made.arrays()
        found.append((matched, lost, {n: np.asarray(a) for n, a in slopes.items()}, arrays))
    assert learning.inputs.white
    del reading
    gc.collect()
    assert not learning.inputs.white, "kept longer than its conversation"
    (other_matched, other_lost, plain, wanted), (matched, lost, slopes, weights) = found
    assert matched == pytest.approx(other_matched, rel=1e-4) and matched > 1e-3
    assert lost == pytest.approx(other_lost, rel=1e-4) and lost > 1e-3
    first, every = first_readers(config), [m.name for m in maps_of(config)]
    for name in every:
        begins, name = first[name], f"{name}.weight"
        size = fit.coordinates[f"{name}/size"][..., None]
        expected = size * plain[name] @ fit.coordinates[f"{begins}.weight/white"]
        assert np.abs(slopes[name] - expected).max() < 1e-3 * np.abs(expected).max()
        assert np.abs(weights[name] - wanted[name]).max() < 1e-4 * np.abs(wanted[name]).max()


@pytest.mark.parametrize("mixing", [True, False])
def test_states_are_white_in_the_coordinates_of_their_map(models: Models, mixing: bool) -> None:
    """Against the states themselves; outputs have the size of their error."""
    pair = pair_of(models["dense"], models["wide"])
    config = make_config(pair.source, pair.target, TrainingPlan(nu=2, head_mixing=mixing))
    data = [Random(60, different=99).sample(i) for i in range(24)]
    fit = trainings.closed_form(config, pair, data)
    states = [each for sample in data for each in pair.spans(sample, config.capture)]
    m = maps_of(config)[1]
    head = () if mixing else (1,)

    def rows(end: int, layer: int, heads: int) -> np.ndarray:
        each = [np.array(pair.rows(both[end], [("keys", layer)]), np.float64) for both in states]
        every = np.concatenate(each)
        if mixing:
            return every
        dim = every.shape[1] // heads
        source = head_map_of(config)[1] if end == 0 else 1
        return every[:, source * dim : (source + 1) * dim]

    read = [rows(0, layer, config.source.layers[layer].kv_heads) for _, layer in m.reads]
    x = np.concatenate(read, axis=1)
    white = x @ fit.coordinates[f"{first_readers(config)[m.name]}.weight/white"][head]
    before, found = (np.linalg.eigvalsh(each.T @ each / len(x)) for each in (x, white))
    assert 0.9 < found[-1] <= 1.0 + 1e-6  # damped where there is next to nothing
    assert before[-1] / np.median(before) > 2 * found[-1] / np.median(found)
    y = rows(1, m.layer, config.target.layers[m.layer].kv_heads)
    wrong = x @ fit.weights[f"{m.name}.weight"][head].T - y
    size = fit.coordinates[f"{m.name}.weight/size"][head]
    assert np.abs(np.sqrt((wrong**2).mean(0)) - size).max() < 1e-4 * size.max()


@pytest.mark.parametrize("kind", ["whitened", "joint", "linear_mlp", "native"])
def test_a_whole_training_on_mlx(models: Models, tmp_path: Path, kind: str) -> None:
    first = Recipe(
        steps=12, batch=2, learning_rates=(1e-2,), objective="reconstruction", validate_every=12
    )
    options = {**KINDS.get(kind, {}), "hidden": 16, "stage1_recipe": first}
    options |= {"whitened": kind == "whitened"}
    made = training(models, tmp_path / "t", steps=12, learning_rates=(1e-3,), **options)
    out = made.run()
    log = [json.loads(line) for line in (tmp_path / "t.log.jsonl").read_text().splitlines()]
    assert log[-1]["held_out"][0] < log[0]["held_out"][0]
    config = translator_folder.read_config(out)
    assert {"mlx", "mlx_lm"} <= set(config.provenance) and "torch" not in config.provenance
    assert config.native_layers == (2 if kind == "native" else 0)
    assert made.finished() and made.run() == out
    pair = models["dense"], models["wide"]
    assert kv.generate(*pair, "hello there", translator=out, max_tokens=4)


def test_other_weights_are_not_gone_on_with(
    models: Models, torch_models: TorchModels, folders: Folders, tmp_path: Path, monkeypatch: Patch
) -> None:
    """By the other runtime, which knows a model by its files."""

    def fused(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.self_attn.q_proj.weight"] += np.float32(0.01)

    with monkeypatch.context() as patched:
        die_after(patched, 3)
        with pytest.raises(KeyboardInterrupt):
            training(torch_models, tmp_path / "t", keep_every=0.0).run()
    place = tmp_path / folders["wide"].name
    changed = kv.load(altered(folders["wide"], place, weights=fused))
    object.__setattr__(changed, "name", models["wide"].name)
    with pytest.raises(ValueError, match="target's weights was .* is .*; give the same"):
        training({**models, "wide": changed}, tmp_path / "t", keep_every=0.0).run()
    assert isinstance(training(models, tmp_path / "t", keep_every=0.0).run(), Path)


def test_models_of_two_runtimes_are_refused(
    models: Models, torch_models: TorchModels, tmp_path: Path
) -> None:
    mixed = {"dense": models["dense"], "wide": torch_models["wide"]}
    with pytest.raises(ValueError, match="were loaded by different runtimes"):
        training(mixed, tmp_path / "t").run()
