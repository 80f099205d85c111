"""Maps of recurrent states in training: their gradients, the front door, and what is refused."""

import json
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.cli import run
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.delta_rule import in_chunks
from kvlingo_mlx.models.hidden import hidden_states, logits_of
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.objectives import objective_named
from kvlingo_mlx.training.on_mlx.pair import MLXPair
from kvlingo_mlx.training.plan import TrainingPlan, make_config
from tests.support import hybrid_models
from tests.support.trainings import Random, device_kl, log_of, random_arrays, training

PAIRS: dict[str, Any] = {
    "gated_delta": (("qwen3_5", {"num_hidden_layers": 4}),
                    ("qwen3_5", {"num_hidden_layers": 4, "linear_key_head_dim": 12,
                                 "linear_num_value_heads": 6, "linear_value_head_dim": 20})),
    "mamba2": (("nemotron_h", {}), ("granitemoehybrid", {})),
}  # fmt: skip


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    root, write = tmp_path_factory.mktemp("hybrids"), hybrid_models.write_hybrid_model
    return {
        f"{rule} {n}": kv.load(write(root / rule / str(n), name, seed=n, **more))
        for rule, ends in PAIRS.items()
        for n, (name, more) in enumerate(ends)
    }


def ends(hybrids: dict[str, LanguageModel], rule: str) -> tuple[LanguageModel, LanguageModel]:
    return hybrids[f"{rule} 0"], hybrids[f"{rule} 1"]


def by_hand(
    source: LanguageModel, target: LanguageModel, config: Any, sample: Sample, native: int
) -> Any:
    """The loss of the maps' tensors: plain products, the target's own cache classes, one graph."""
    states = capture.whole(source, sample.prefix[:-1], config.capture)
    cache = make_prompt_cache(source.model)
    source.model(mx.array([list(sample.prefix[:-1])]), cache=cache)
    kept = {t: each.cache[1] for t, each in enumerate(cache) if caches.is_recurrent(each)}
    own = make_prompt_cache(target.model)
    target.model(mx.array([list(sample.prefix[:-1])]), cache=own)
    held = [dict(caches.held(each)) for each in own]
    following = (sample.prefix[-1], *sample.continuation[:-1])
    teacher = hidden_states(target, following, own)
    wanted = logits_of(target, teacher).astype(mx.float32)
    wanted = wanted - mx.logsumexp(wanted, axis=-1, keepdims=True)

    def loss(tensors: dict[str, mx.array]) -> mx.array:
        made = make_prompt_cache(target.model)
        for t, (each, layer) in enumerate(zip(made, target.geometry.layers, strict=True)):
            reads = config.assignment.keys[t]
            if t < native:
                for name, array in held[t].items():
                    end = None if caches.is_recurrent(each) else len(sample.prefix) - 1
                    caches.put_part(each, name, array if end is None else array[..., :end, :])
            elif layer.recurrence is not None:
                left, right = (tensors[f"states.{t}.{n}"] for n in ("left", "right"))
                heads = layer.recurrence.value_heads
                rows = []
                for h in range(heads):
                    total = 0.0
                    for j, s in enumerate(reads):
                        state = kept[s][0, h * kept[s].shape[1] // heads]
                        a, b = state.shape
                        one = left[h][:, j * a : (j + 1) * a]
                        total = total + one @ state @ right[h][j * b : (j + 1) * b]
                    rows.append(total)
                each.cache = [mx.zeros((1, *layer.recurrence.parts[0])), mx.stack(rows)[None]]
            else:
                sides = [
                    mx.concatenate([states.side(side)[s][0] for s in reads], axis=1)
                    @ tensors[f"{side}.{t}.weight"].T
                    for side in ("keys", "values")
                ]
                entry = caches.entry(target, t, *sides, config.capture)
                each.keys, each.values = entry
            if not caches.is_recurrent(each):
                each.offset = len(sample.prefix) - 1
        seen = logits_of(target, hidden_states(target, following, made)).astype(mx.float32)
        seen = seen - mx.logsumexp(seen, axis=-1, keepdims=True)
        return (mx.exp(wanted) * (wanted - seen)).sum(-1).mean()

    return loss


@pytest.mark.parametrize(("nu", "native"), [(1, 0), (2, 0), (1, 1)])
@pytest.mark.parametrize("rule", PAIRS)
def test_gradients(hybrids: dict[str, LanguageModel], rule: str, nu: int, native: int) -> None:
    """Of every tensor, beside one graph through plain products."""
    source, target = ends(hybrids, rule)
    config = make_config(source, target, TrainingPlan(nu=nu, state_maps=True, native_layers=native))
    pair, sample = MLXPair(source, target), Random(60, 9).sample(1)
    made = pair.trainable(config, random_arrays(config, 5))
    found = pair.loss(made, pair.read(sample, config), objective_named("kl"), 1.0)
    with in_chunks():
        loss = by_hand(source, target, config, sample, native)
        value, slopes = mx.value_and_grad(loss)(dict(made.tensors))
    assert found.kl == pytest.approx(value.item(), rel=1e-4)
    learnt = {n: a for n, a in made.tensors.items() if int(n.split(".")[1]) >= native}
    assert set(made.gradients) == set(learnt) and any(n.startswith("states") for n in learnt)
    for name in learnt:
        mine, theirs = np.array(made.gradients[name]), np.array(slopes[name])
        assert np.abs(theirs).max() > 0
        assert np.abs(mine - theirs).max() < 2e-3 * np.abs(theirs).max(), name


def curve(out: Path) -> list[dict[str, Any]]:
    return log_of(out.with_name(f"{out.name}.log.jsonl"))


@pytest.mark.parametrize("rule", PAIRS)
def test_the_loss_falls(hybrids: dict[str, LanguageModel], rule: str, tmp_path: Path) -> None:
    stream, pair = Random(different=2), (f"{rule} 0", f"{rule} 1")
    options: dict[str, Any] = {"pair": pair, "stream": stream, "state_maps": True, "nu": 2}
    training(hybrids, tmp_path / "t", (3e-3,), **options).run()
    losses = [line["held_out"][0] for line in curve(tmp_path / "t")]
    assert min(losses) < 0.8 * losses[0]
    kept = kv.load_translator(tmp_path / "t")
    assert kept.config.state_maps and kept.config.format_version == 3
    found = [device_kl(*ends(hybrids, rule), kept, sample) for sample in stream.held_out(3)]
    assert np.mean(found) == pytest.approx(min(losses), rel=0.01)


def test_the_verb(hybrids: dict[str, LanguageModel], tmp_path: Path, capsys: Any) -> None:
    source, target = ends(hybrids, "gated_delta")
    data = tmp_path / "chats.jsonl"
    talk = [{"role": "user", "content": "is it on? " * 9}, {"role": "assistant", "content": "yes"}]
    data.write_text("\n".join(json.dumps({"messages": talk}) for _ in range(30)))
    words = ["train", "--source", str(source.path), "--target", str(target.path), "--data",
             str(data), "-c", "state_maps=true", "--steps", "2", "--batch-size", "1", "-c",
             "held_out=2", "-c", "fit_samples=8", "-c", "val_every=2", "--device",
             "mlx"]  # fmt: skip
    assert run([*words, "--out", str(tmp_path / "t")]) == 0
    config = translator_folder.read_config(tmp_path / "t")
    assert config.state_maps and config.provenance["stage"] == 2
    assert run(["show", str(tmp_path / "t")]) == 0
    assert "recurrent states mapped" in " ".join(capsys.readouterr().out.split())
    assert run(["verify", str(tmp_path / "t")]) == 0


@pytest.mark.parametrize("native", [0, 2])
def test_mlps_have_no_closed_form_of_states(native: int) -> None:
    with pytest.raises(ValueError, match="maps of states .* a translator of kind mlp has none"):
        TrainingPlan(kind="mlp", state_maps=True, native_layers=native)
    TrainingPlan(kind="linear_mlp", state_maps=True)
