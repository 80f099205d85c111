"""fit between hybrids: recurrent layers by the same least squares, with every option."""

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.fitting.attention import attention_mass
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.stage1.norms import token_weights
from tests.support import hybrid_models
from tests.support.command_line import run
from tests.support.random_samples import samples

# A source and a target of one kind of recurrence each.
PAIRS = {
    "gated_delta": (
        ("qwen3_5", {"num_hidden_layers": 4}),
        ("qwen3_next", {"num_hidden_layers": 4}),
    ),
    "mamba2": (("nemotron_h", {}), ("granitemoehybrid", {})),
    "short_conv": (("lfm2", {}), ("lfm2_moe", {})),
}
DATA = samples(7, 40)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LanguageModel, ...]]:
    root = tmp_path_factory.mktemp("hybrids")
    return {
        rule: tuple(
            kv.load(hybrid_models.write_hybrid_model(root / rule / name, name, seed=seed, **more))
            for seed, (name, more) in enumerate(ends, 1)
        )
        for rule, ends in PAIRS.items()
    }


def states(model: LanguageModel) -> list[KVStates]:
    """What mlx-lm's own prefill of each sample writes."""
    return [capture.whole(model, sample.prefix, "pre_norm") for sample in DATA]


def recorded(found: list[KVStates], side: str, layer: int) -> np.ndarray:
    """A layer's states of all samples, (tokens, width)."""
    return np.concatenate([np.array(each.side(side)[layer][0], np.float64) for each in found])


@pytest.mark.parametrize("norm", ["frobenius", "attention"])
@pytest.mark.parametrize("rule", PAIRS)
def test_equals_least_squares(
    pairs: dict[str, tuple[LanguageModel, ...]], rule: str, norm: str
) -> None:
    """On what plain mlx-lm writes; a norm of attention weighs a recurrent layer's tokens alike."""
    source, target = pairs[rule]
    translator = kv.fit(source, target, DATA, norm=norm, nu=2 if rule == "mamba2" else 1, ridge=0.0)
    layers = target.geometry.layers
    recurrent = next(n for n, layer in enumerate(layers) if layer.attention == rule)
    attention = next(n for n, layer in enumerate(layers) if layer.attention == "full")
    read, wanted = states(source), states(target)
    masses = [attention_mass(target, sample) for sample in DATA]
    for layer in (recurrent, attention):
        weights = [
            token_weights("attention_mass", len(sample.prefix), lambda mass=mass: mass)
            for sample, mass in zip(DATA, masses, strict=True)
        ]
        scale = np.sqrt(np.concatenate([each[layer] for each in weights]))[:, None]
        assert (np.ptp(scale) < 1e-9) == (layer == recurrent)
        scale = scale if norm == "attention" else np.ones_like(scale)
        for side in ("keys", "values"):
            reads = translator.config.assignment.side(side)[layer]
            assert all(
                source.geometry.layers[s].attention == layers[layer].attention for s in reads
            )
            x = np.concatenate([recorded(read, side, s) for s in reads], axis=1)
            y = recorded(wanted, side, layer)
            expected = np.linalg.lstsq(x * scale, y * scale, rcond=1e-4)[0]
            ours = x @ translator.to_weights().as_float32(f"{side}.{layer}.weight").T
            assert np.linalg.norm((ours - x @ expected) * scale) < 2e-4 * np.linalg.norm(y * scale)


def test_analyze(
    pairs: dict[str, tuple[LanguageModel, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its states are those of recurrences, too; heads of such a model are not aligned."""
    source, target = (str(model.path) for model in pairs["mamba2"])
    line = ["paper analyze", "--source", source, "--target", target, "--documents", "4"]
    assert run([*line, "--tokens", "300", "--no-mlp"]) == 0
    told = capsys.readouterr()
    assert "held-out R2" in told.out
    assert "differ in their KV heads" in " ".join((told.out + told.err).split())
