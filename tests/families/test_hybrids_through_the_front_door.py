"""Hybrids by every verb and function that treats them otherwise, and what is refused."""

import json
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx.utils import tree_map

import kvlingo_mlx as kv
from benchmarks.paper.evaluation import recalled
from kvlingo_mlx import caches
from kvlingo_mlx.caches import validation
from kvlingo_mlx.cli import run
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.errors import CacheError
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation import continuation as quality
from tests.support import ROOT, TESTS, hybrid_models
from tests.support.command_line import fails
from tests.support.identity import identity_of
from tests.support.native_caches import TOKENS, native

pytestmark = pytest.mark.filterwarnings("ignore::kvlingo_mlx.errors.KVLingoWarning")
PROMPT = "The river was wide and the boat was small, so they waited."
WIDER: dict[str, Any] = {
    "hidden_size": 96, "linear_key_head_dim": 12, "linear_num_value_heads": 6,
    "linear_value_head_dim": 16, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two unlike hybrids of one rule, a text, and two translators."""
    root = tmp_path_factory.mktemp("room")
    hybrid_models.write_hybrid_model(root / "small", "qwen3_5")
    hybrid_models.write_hybrid_model(root / "large", "qwen3_5", seed=2, **WIDER)
    texts = [f"{PROMPT} Number {i} of them had {i * i} coins and a rope. " * 3 for i in range(6)]
    records = (json.dumps({"text": text}) + "\n" for text in texts)
    (root / "texts.jsonl").write_text("".join(records))
    assert run(fit(root, "translator")) == 0
    assert run(fit(root, "mapped", "-c", "state_maps=true")) == 0
    return root


def fit(root: Path, name: str, *more: str) -> Any:
    """The words of a fit."""
    pair = ["--source", str(root / "small"), "--target", str(root / "large")]
    out = ["--data", str(root / "texts.jsonl"), "--out", str(root / name)]
    return ["fit", *pair, *out, *more]


def generate(root: Path, *more: str, translator: str = "translator") -> list[str]:
    """The words of a generation."""
    pair = ["--source", str(root / "small"), "--target", str(root / "large")]
    asked = ["--prompt", PROMPT, "--max-tokens", "5"]
    return ["generate", *pair, *asked, "--translator", str(root / translator), *more]


def test_show_tells_of_recurrent_layers(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(room / "small")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "recurrent layers 6 by gated_delta state bytes 19200" in told
    # Six layers: a tail of 3 tokens of 96 numbers, and 4 matrices of 8 by 16, in float32.
    assert 6 * 4 * (3 * 96 + 4 * 8 * 16) == 19200
    model = kv.load(room / "small")
    assert caches.state_bytes(model) == 19200
    made = caches.empty(model)
    model.model(mx.array([TOKENS]), cache=made)
    kept = [c for c in made if caches.is_recurrent(c)]
    assert sum(array.nbytes for array in caches.arrays(kept)) == 19200
    assert run(["show", str(room / "translator")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "a recurrence over 96 and 8 numbers" in told
    assert "can be folded no: some layers keep a recurrent state" in told


@pytest.mark.parametrize(
    "more",
    [
        ("--nu", "2", "--norm", "sink_4", "-c", "ridge=0.01"),
        ("--assignment", "greedy", "-c", "capture=post_rope"),
        ("-c", "state_maps=true", "--assignment", "greedy", "--nu", "2", "-c", "capture=post_rope"),
        ("-c", "state_maps=true", "--memory-gb", "0.0001"),
    ],
)
def test_fits(room: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    assert run(fit(room, str(tmp_path / "t"), *more)) == 0
    assert run(["verify", str(tmp_path / "t")]) == 0


@pytest.mark.parametrize("translator", ["translator", "mapped"])
def test_answers(room: Path, translator: str) -> None:
    for more in (
        ("-c", "native_layers=3", "-c", "quantize=8"),
        ("-c", "native_head=4", "-c", "native_tail=4"),
        ("--kv-bits", "4", "-c", "quantized_kv_start=0", "-c", "kv_group_size=32"),
    ):
        assert run(generate(room, *more, translator=translator)) == 0, more


@pytest.mark.parametrize("name", ["granitemoehybrid", "lfm2"])
def test_states_are_exact_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Keys are rotated in float32 before they are rounded, as in all families."""
    model = kv.load(hybrid_models.write_hybrid_model(tmp_path, name))
    model.model.update(tree_map(lambda a: a.astype(mx.bfloat16), model.model.parameters()))
    model.model.save_weights(str(tmp_path / "model.safetensors"))
    model, tokens = kv.load(tmp_path), TOKENS[:20]
    own = native(model, tokens[:-1], 7)
    made = kv.hand_over(model, model, tokens, translator=identity_of(model), prefill_step_size=7)
    for mine, theirs in zip(made, own, strict=True):
        if caches.is_recurrent(mine):
            held = zip(caches.held(mine).values(), caches.held(theirs).values(), strict=True)
            assert all(a.dtype == b.dtype and bool(mx.array_equal(a, b)) for a, b in held)


def test_maps_of_states_by_the_other_verbs(
    room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluated beside their controls, tuned, timed, imported; exported they are not."""
    monkeypatch.chdir(tmp_path)
    pair = ["--source", str(room / "small"), "--target", str(room / "large")]
    own = [*pair, "--translator", str(room / "mapped")]
    talk = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "so they did"}]
    Path("chats.jsonl").write_text("\n".join(json.dumps({"messages": talk}) for _ in range(3)))
    chats = ["--data", "chats.jsonl"]
    scores = ["--tasks", "continuation", "--baselines", "shuffled,hidden"]
    assert run(["eval", str(room / "mapped"), *pair, *scores, *chats]) == 0
    assert run(["tune", *own, *chats, "--native-layers", "0,4", "-c", "trials=1"]) == 0
    assert run(["bench", *own, "-p", "64", "-n", "1"]) == 0
    monkeypatch.setenv("KVLINGO_HOME", str(tmp_path / "home"))
    assert run(["import", str(room / "mapped")]) == 0
    words = ["export", str(room / "mapped"), "--to", "veloxquant", "--out", str(tmp_path / "o")]
    fails(words, "it has recurrent layers, which the format does not know", capsys)
    capsys.readouterr()
    assert run(["show", str(room / "mapped")]) == 0
    assert "recurrent states mapped" in " ".join(capsys.readouterr().out.split())


def test_an_unlike_state_is_damage(room: Path) -> None:
    """What is checked of every hand-over: the shapes of states, too."""
    model = kv.load(room / "small")
    made = kv.hand_over(model, model, TOKENS, translator=identity_of(model))
    validation.validate_cache(made, model, len(TOKENS) - 1)
    made[0].cache[1] = made[0].cache[1][:, :1]
    with pytest.raises(CacheError, match="layer 0 of the cache .* its state has shape"):
        validation.validate_cache(made, model, len(TOKENS) - 1)


def test_answers_need_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo's hybrid was taught to recall some attributes by attention, others by states.

    Each way alone recalls its part of the attributes, and neither of them the other's.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    trained = kv.load(TESTS / "zoo" / "models" / "tiny-qwen3.5-s")
    trained.model.set_dtype(mx.float32)  # a CPU is slow with the 16 bits that it is stored in
    talks = dialogues.held_out(7, seed=3, facts=(6, 12))
    recurrent = pytest.importorskip("recurrent")
    own = conditions.native(trained)
    makers = {
        "by attention": recurrent.hidden(own, trained, True),
        "by states": recurrent.hidden(own, trained, False),
        "by nothing": conditions.hidden(trained),
    }
    scores = recalled.score(trained, [quality.recall_sample(trained, t) for t in talks], makers)
    recall = {way: score.recall for way, score in scores.items()}
    assert recall["native"] > 0.85 and recall["by nothing"] < 0.1
    for way in ("by attention", "by states"):
        assert 0.2 < recall[way] < 0.75, recall
    hits = {way: np.array(score.hits) for way, score in scores.items()}
    assert (hits["by attention"] & hits["by states"]).mean() < 0.5 * recall["native"]
    assert (hits["by attention"] | hits["by states"]).mean() > 0.8 * recall["native"]
