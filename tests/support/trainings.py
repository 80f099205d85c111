"""Small trainings in both runtimes on samples of random tokens."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import tiny

torch = pytest.importorskip("torch")

from kvlingo_mlx.cuda import model as torch_model  # noqa: E402
from kvlingo_mlx.cuda.model import TorchModel  # noqa: E402
from kvlingo_mlx.evaluation import conditions  # noqa: E402
from kvlingo_mlx.evaluation.continuation import log_probabilities  # noqa: E402
from kvlingo_mlx.format.translator_config import TranslatorConfig  # noqa: E402
from kvlingo_mlx.group import Group  # noqa: E402
from kvlingo_mlx.models.hidden import hidden_states, logits_of  # noqa: E402
from kvlingo_mlx.models.language_model import LanguageModel  # noqa: E402
from kvlingo_mlx.stage1.norms import norm_named  # noqa: E402
from kvlingo_mlx.stage1.passes import ClosedForm  # noqa: E402
from kvlingo_mlx.tokenization.samples import Sample  # noqa: E402
from kvlingo_mlx.training import checkpoints, distill  # noqa: E402
from kvlingo_mlx.training.objectives import objective_named  # noqa: E402
from kvlingo_mlx.training.on_mlx import gradients  # noqa: E402
from kvlingo_mlx.training.on_mlx.gradients import TranslatedLayer  # noqa: E402
from kvlingo_mlx.training.on_mlx.translator import MLXTranslator  # noqa: E402
from kvlingo_mlx.training.plan import TrainingPlan, make_config  # noqa: E402
from kvlingo_mlx.training.recipe import MATCHING, Recipe  # noqa: E402
from kvlingo_mlx.training.runtime import Pair  # noqa: E402
from kvlingo_mlx.training.trainer import Trainer  # noqa: E402
from tests.support.random_samples import Random, random_arrays  # noqa: E402
from tests.support.reference import rms_norm  # noqa: E402

# What plans of every kind say; ``native_layers`` go with any of them.
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"nu": 2},
    "head-wise": {"head_mixing": False, "nu": 2},
    "joint": {"joint": True},
    "mlp": {"kind": "mlp", "nu": 2},
    "head-wise mlp": {"kind": "mlp", "head_mixing": False},
    "linear_mlp": {"kind": "linear_mlp"},
    "post_norm": {"capture": "post_norm"},
    "post_rope": {"capture": "post_rope", "nu": 2},
}


def linear_config(source: TorchModel, target: TorchModel, **options: Any) -> TranslatorConfig:
    return make_config(source, target, TrainingPlan(**options))


def closed_form(
    config: TranslatorConfig,
    pair: Pair,
    data: list[Sample],
    norm: str = "frobenius",
    ridge: float | None = None,
) -> ClosedForm:
    """A finished fit of ``data``."""
    made = ClosedForm(config, pair, lambda: data, norm_named(norm), ridge=ridge, learns=True)
    made.run()
    return made


def altered(
    folder: Path, copy: Path, *, weights: Callable[[dict], Any] = len, **config: Any
) -> Path:
    """A copy of a model folder with other weights or config; a value of ... removes its key."""
    shutil.copytree(folder, copy)
    read = json.loads((copy / "config.json").read_text()) | config
    kept = {key: value for key, value in read.items() if value is not ...}
    (copy / "config.json").write_text(json.dumps(kept))
    tensors = load_file(copy / "model.safetensors")
    weights(tensors)
    tiny.write_tensors(copy / "model.safetensors", tensors)
    return copy


def device_kl(
    source: LanguageModel, target: LanguageModel, translator, sample: Sample, layers: int = 0
) -> float:
    translated = conditions.translated(source, target, translator, layers)
    caches = conditions.native(target), translated
    native, translated = (
        np.concatenate([np.array(block, np.float64) for block in log_probabilities(
            target, make(sample.prefix), sample.prefix[-1], sample.continuation
        )])
        for make in caches
    )  # fmt: skip
    return float((np.exp(native) * (native - translated)).sum(axis=-1).mean())


def double(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TorchModel:
    """A model in float64 throughout; transformers' own RMSNorm goes through float32."""
    model = torch_model.load(str(folder), dtype=torch.float64)
    model.model.set_experts_implementation("eager")  # the others know float32 at most
    for module in model.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", rms_norm)
    return model


def learnt(
    pair: Pair, config: TranslatorConfig, sample: Sample, objective: str = "kl"
) -> tuple[float, dict[str, np.ndarray]]:
    """A conversation's loss, and its gradient by tensor."""
    made = pair.trainable(config, random_arrays(config, 3))
    reading = pair.read(sample, config, attends := objective == MATCHING)
    if attends:
        loss = pair.match(made, reading, 0.5)
    else:
        loss = pair.loss(made, reading, objective_named(objective, 0.3), 0.5).value
    assert made.gather(Group())
    if pair.runtime == "mlx":
        found = {name: np.array(g) for name, g in made.gradients.items()}
    else:
        found = {name: t.grad.numpy() for name, t in made.tensors.items()}
    return loss, found


Gradients = dict[str, np.ndarray]


def distance(found: Gradients, expected: Gradients) -> float:
    """The largest relative difference, by the norm over all tensors of one name."""
    assert set(found) == set(expected)
    norms: dict[str, list[tuple[float, float]]] = {}
    for name, gradient in expected.items():
        pair = np.linalg.norm(found[name] - gradient), np.linalg.norm(gradient)
        norms.setdefault(name.rsplit(".", 1)[-1], []).append(pair)
    # Gates before a norm hardly matter: their gradients are sums that cancel.
    norms.get("gate", []).extend((0.0, size) for _, size in norms.get("b2", ()))
    errors, sizes = np.array([np.linalg.norm(pairs, axis=0) for pairs in norms.values()]).T
    assert (sizes > 0).all()
    return float((errors / sizes).max())


def traced(pair: Pair, made: MLXTranslator, reading: Any) -> float:
    """The loss and its gradients by MLX's own transformation of the whole pass."""
    target, sample, native = pair.target, reading.sample, reading.native
    starts = target.geometry.first_kept(len(sample.prefix) - 1)

    def loss(leaves: Any) -> mx.array:
        cache = gradients._cache(target, [*native, *leaves], sample)
        states = hidden_states(target, (sample.prefix[-1], *sample.continuation[:-1]), cache)
        ours, teacher = (logits_of(target, each) for each in (states, reading.teacher))
        ours, teacher = (x - mx.logsumexp(x, -1, keepdims=True) for x in (ours, teacher))
        return (mx.exp(teacher) * (teacher - ours)).sum() / len(sample.continuation)

    layers = [
        TranslatedLayer(target, made, reading, t, start)
        for t, start in enumerate(starts)
        if t >= len(native)
    ]
    value, found = mx.value_and_grad(loss)([layer.entry() for layer in layers])
    for layer, gradient in zip(layers, found, strict=True):
        made.learn(layer.pulled(gradient, 1.0))
    return value.item()


def check_gradients(
    pair: Pair, sample: Sample, plan: TrainingPlan | None = None, tolerance: float = 1e-5
) -> None:
    """The gradient that is taken layer by layer is that of one trace, of every tensor it is of."""
    config = make_config(pair.source, pair.target, plan or TrainingPlan())
    ours, theirs = (pair.trainable(config, random_arrays(config, 3)) for _ in range(2))
    reading = pair.read(sample, config)
    expected = traced(pair, theirs, reading)
    assert pair.loss(ours, reading, objective_named("kl"), 1.0).kl == pytest.approx(
        expected, rel=1e-5
    )
    found, wanted = ({n: np.array(g) for n, g in m.gradients.items()} for m in (ours, theirs))
    native = config.native_layers
    assert set(found) == {n for n in ours.arrays() if int(n.split(".")[1]) >= native}
    assert distance(found, wanted) < tolerance
    assert all(np.abs(each).max() > 0 for each in found.values())


def training(
    models: dict[str, TorchModel],
    out: Path,
    learning_rates: tuple[float, ...] = (1e-2,),
    *,
    pair: tuple[str, str] = ("dense", "wide"),
    stream: Random | None = None,
    seen: list[int] | None = None,
    warn: Callable[[str], None] = lambda text: None,
    keep_every: float = 900.0,
    **options: Any,
) -> Trainer:
    """A tiny training; ``seen`` takes the steps that it reports."""
    recipe = {"steps": 6, "batch": 2, "validate_every": 2, "objective": "kl", "seconds": None}
    recipe |= {"whitened": False}
    recipe |= {k: options.pop(k) for k in list(options) if k in recipe}
    stage2 = Recipe(learning_rates=learning_rates, **recipe)
    plan = TrainingPlan(fit_samples=6, held_out=3, recipe=stage2, **options)

    def progress(stage: str, report: Any) -> None:
        if seen is not None and stage == "stage2":
            seen.append(report.step)

    return Trainer(
        models[pair[0]], models[pair[1]], stream or Random(), plan, out, progress=progress,
        warn=warn, keep_every=keep_every,
    )  # fmt: skip


def log_of(out: Path) -> list[dict[str, Any]]:
    """The log of a training that wrote a folder, without what differs from run to run."""
    lines = checkpoints.read_log(checkpoints.log_of(out))
    return [{k: v for k, v in line.items() if k not in ("seconds", "spent")} for line in lines]


def die_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """A process that is gone in the middle of the next step."""
    advance, made = distill.Distillation.advance, []

    def dying(self: distill.Distillation) -> None:
        if len(made) == steps:
            raise KeyboardInterrupt
        made.append(1)
        advance(self)

    monkeypatch.setattr(distill.Distillation, "advance", dying)
