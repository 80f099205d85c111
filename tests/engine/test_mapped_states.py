"""Translators that map recurrent states, through every function that hands over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.engine.guarding import divergence
from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.evaluation import verification
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.loading.grading import GUARD, cuts
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.hidden import hidden_states
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from tests.support import hybrid_models, tiny
from tests.support.identity import identity_of
from tests.support.native_caches import TOKENS, alike, entries, native

pytestmark = pytest.mark.filterwarnings("ignore::kvlingo_mlx.errors.KVLingoWarning")
# Of each rule two models, of which no width or head count is alike.
PAIRS: dict[str, Any] = {
    "gated_delta": (
        ("qwen3_5", {}),
        ("qwen3_5", dict(linear_key_head_dim=12, linear_num_value_heads=6,
                         linear_value_head_dim=20, num_key_value_heads=1)),
    ),
    "mamba2": (("nemotron_h", {}), ("granitemoehybrid", {})),
}  # fmt: skip
PREFIX = len(TOKENS) - 1


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LanguageModel, ...]]:
    root = tmp_path_factory.mktemp("pairs")
    return {
        rule: tuple(
            kv.load(hybrid_models.write_hybrid_model(root / rule / str(n), name, seed=n, **more))
            for n, (name, more) in enumerate(ends, 1)
        )
        for rule, ends in PAIRS.items()
    }


@pytest.fixture(scope="module")
def translators(pairs: dict[str, tuple[LanguageModel, ...]]) -> dict[str, Translator]:
    return {
        rule: hybrid_models.random_translator(*ends, nu=2, state_maps=True)
        for rule, ends in pairs.items()
    }


def states(cache: Any) -> dict[int, np.ndarray]:
    return {
        t: np.array(each.cache[1])[0] for t, each in enumerate(cache) if caches.is_recurrent(each)
    }


def expected(source: LanguageModel, translator: Translator, tokens: Any) -> dict[int, np.ndarray]:
    """The target's states, by the format page and single products in float64."""
    kept, arrays = states(native(source, tokens, 64)), translator.floats()
    config, out = translator.config, {}
    for t, layer in enumerate(config.target.layers):
        if layer.recurrence is None:
            continue
        left, right = (arrays[f"states.{t}.{n}"].astype(np.float64) for n in ("left", "right"))
        heads, rows, columns = (
            layer.recurrence.value_heads,
            *kept[config.assignment.keys[t][0]].shape[1:],
        )
        out[t] = np.zeros((heads, left.shape[1], right.shape[2]))
        for h in range(heads):
            for j, s in enumerate(config.assignment.keys[t]):
                state = kept[s][h * len(kept[s]) // heads].astype(np.float64)
                one = left[h][:, j * rows : (j + 1) * rows]
                out[t][h] += one @ state @ right[h][j * columns : (j + 1) * columns]
    return out


def near(found: dict[int, np.ndarray], wanted: dict[int, np.ndarray]) -> None:
    assert found.keys() == wanted.keys() and wanted
    for t, state in wanted.items():
        assert np.abs(found[t] - state).max() < 1e-4 * np.abs(state).max(), t


def same(found: Any, wanted: Any, tolerance: float = 0.0) -> None:
    """Caches of the prefix hold the same, whatever room they have beyond it."""
    for mine, theirs in zip(entries(found), entries(wanted), strict=True):
        assert mine.shape == theirs.shape and np.abs(mine - theirs).max() <= tolerance


@pytest.mark.parametrize("step_size", [1, 7, 64])
@pytest.mark.parametrize("rule", PAIRS)
def test_states_are_those_of_the_page(
    pairs: Any, translators: Any, rule: str, step_size: int
) -> None:
    """However the prefix is cut; tails are empty, and attention is translated as usual."""
    source, target = pairs[rule]
    found = kv.hand_over(
        source, target, TOKENS, translator=translators[rule], prefill_step_size=step_size
    )
    near(states(found), expected(source, translators[rule], TOKENS[:-1]))
    assert not any(np.array(each.cache[0]).any() for each in found if caches.is_recurrent(each))
    assert {each.offset for each in found if not caches.is_recurrent(each)} == {PREFIX}
    (span,) = capture.prefill(source, TOKENS[:-1], 64)
    plain = hybrid_models.random_translator(source, target, nu=2)
    own = {n: a for n, a in translators[rule].floats().items() if not n.startswith("states.")}
    plain = build(plain.config, Weights("float32", plain.floats() | own))
    other = caches.empty(target)
    caches.append(other, plain(span), target)
    same(*([c for c in each if not caches.is_recurrent(c)] for each in (found, other)), 1e-4)


@pytest.mark.parametrize("rule", PAIRS)
def test_unit_matrices_leave_a_state_as_it_is(pairs: Any, rule: str) -> None:
    """Bit by bit; what follows differs no more than by the empty tails."""
    model = pairs[rule][0]
    same = identity_of(model, state_maps=True)
    own = native(model, TOKENS[:-1], 64)
    for step_size in (5, 64):
        found = kv.hand_over(model, model, TOKENS, translator=same, prefill_step_size=step_size)
        wanted = native(model, TOKENS[:-1], step_size)
        for t, state in states(found).items():
            assert np.array_equal(state, states(wanted)[t])
    for each, theirs in zip(found, own, strict=True):
        if caches.is_recurrent(each):
            each.cache[0] = theirs.cache[0]
    last = mx.array([TOKENS[-1:]])
    assert alike(model.model(last, cache=found), model.model(last, cache=own), 1e-4)


WAYS: list[dict[str, Any]] = [
    {"native_tail": 3}, {"native_tail": 1, "prefill_step_size": 4}, {"native_head": 6},
    {"native_layers": 1}, {"native_layers": 3, "native_tail": 5, "prefill_step_size": 7},
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("rule", PAIRS)
def test_native_parts(pairs: Any, translators: Any, rule: str, way: dict[str, Any]) -> None:
    """The state of a translated layer is that of the last token before the native tail.

    A cache of the caller's own goes on, and holds the whole prefix of the source afterwards.
    """
    source, target = pairs[rule]
    tail, layers = way.get("native_tail", 0), way.get("native_layers", 0)
    stop, given = PREFIX - tail, {"translator": translators[rule], **way}
    found = kv.hand_over(source, target, TOKENS, **given)
    own = make_prompt_cache(source.model)
    again = kv.hand_over(source, target, TOKENS, prompt_cache=own, **given)
    same(again, found, 1e-5)
    for t, state in states(native(source, TOKENS[:-1], 64)).items():
        assert states(own)[t] == pytest.approx(state, abs=1e-5)
    if not tail:
        wanted = expected(source, translators[rule], TOKENS[:stop])
        near({t: s for t, s in states(found).items() if t >= layers},
             {t: s for t, s in wanted.items() if t >= layers})  # fmt: skip
    whole = kv.hand_over(source, target, TOKENS[: stop + 1], translator=translators[rule],
                         **{n: v for n, v in way.items() if n != "native_tail"})  # fmt: skip
    step = way.get("prefill_step_size", 2048)
    for start in range(stop, PREFIX, step):
        target.model(mx.array([TOKENS[start : min(start + step, PREFIX)]]), cache=whole)
    for t, state in states(whole).items():
        assert states(found)[t] == pytest.approx(state, abs=1e-5)
    own = states(native(target, TOKENS[:-1], step))
    for t in range(layers):
        if t in own:
            assert states(found)[t] == pytest.approx(own[t], abs=1e-5)


def rotated(source: LanguageModel, target: LanguageModel) -> Translator:
    """Maps of keys as they are cached."""
    plain = hybrid_models.random_translator(source, target, state_maps=True)
    config = replace(plain.config, capture="post_rope")
    return build(config, Weights("float32", plain.floats()))


@pytest.mark.parametrize("more", [0, 20])
@pytest.mark.parametrize("rule", PAIRS)
def test_a_filled_cache_is_read_back(pairs: Any, rule: str, more: int, tmp_path: Path) -> None:
    """Keys as they are cached, and the states; nothing is read twice."""
    source, target = pairs[rule]
    given = {"translator": rotated(source, target)}
    file = str(tmp_path / "c.safetensors")
    save_prompt_cache(file, native(source, TOKENS[: PREFIX - more], 64))
    again = load_prompt_cache(file)
    found = kv.hand_over(source, target, TOKENS, prompt_cache=again, **given)
    wanted = kv.hand_over(source, target, TOKENS, **given)
    same(found, wanted, 1e-4)


def test_a_filled_cache_beyond_the_state_that_is_mapped(pairs: Any) -> None:
    """And one that is not the source's; where nothing is translated, no state is wanted."""
    source, target = pairs["gated_delta"]
    given: dict[str, Any] = {"translator": rotated(source, target)}
    own = native(source, TOKENS[:-1], 64)
    with pytest.raises(ValueError, match=f"holds {PREFIX} tokens, .* mapped after {PREFIX - 4}"):
        kv.hand_over(source, target, TOKENS, prompt_cache=own, native_tail=4, **given)
    spoiled = [native(target, TOKENS[:20], 64)]
    for wrong in (None, mx.zeros((1, 4, 8, 15)), mx.zeros((2, 4, 8, 16))):
        spoiled.append(native(source, TOKENS[:20], 64))
        spoiled[-1][0].cache[1] = wrong
    for own in spoiled:
        with pytest.raises(
            ValueError, match=r"layer 0 of the caches holds .*, expected a tail and"
        ):
            kv.hand_over(source, target, TOKENS, prompt_cache=own, **given)
    own, layers = native(source, TOKENS[:20], 64), len(target.attentions)
    kv.hand_over(source, target, TOKENS, prompt_cache=own, native_layers=layers, **given)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_maps_of_states_stay_floats(
    pairs: Any, translators: Any, bits: int, tmp_path: Path
) -> None:
    folder = translators["gated_delta"].save(tmp_path / "t")
    packed, floats = kv.load_translator(folder, quantize=bits), translators["gated_delta"].floats()
    for name, array in floats.items():
        assert np.array_equal(packed.floats()[name], array) == name.startswith("states.")
    numbers = sum(array.size for array in floats.values())  # states' count, too
    assert translators["gated_delta"].num_parameters == numbers
    assert packed.nbytes < translators["gated_delta"].nbytes == 4 * numbers
    kv.hand_over(*pairs["gated_delta"], TOKENS, translator=packed)


def test_plain_models_have_no_states(pairs: Any, tmp_path: Path) -> None:
    """Nor are those of one rule made of another's."""
    facts: Any = dict(seed=1, layers=3, kv_heads=2, head_dim=32)
    plain = kv.load(tiny.write_tiny_model(tmp_path / "plain", "qwen3", **facts))
    delta, mamba = pairs["gated_delta"][0], pairs["mamba2"][0]
    for ends, message in (
        ((plain, mamba), "has none"), ((mamba, plain), "has none"), ((plain, plain), "has none"),
        ((delta, mamba), "of one rule"),
    ):  # fmt: skip
        with pytest.raises(IncompatibleTranslatorError, match=message):
            kv.fit(*ends, [{"text": "a b"}], state_maps=True)


@pytest.mark.parametrize("rule", PAIRS)
def test_a_receipt_maps_the_state_at_each_cut(pairs: Any, translators: Any, rule: str) -> None:
    """What a guard would measure where the text is cut short, by a hand-over of that much."""
    source, target = pairs[rule]
    tokens = [int(t) for t in np.random.default_rng(0).integers(5, 280, 260)]
    found = verification.usual(source, target, translators[rule], tokens)
    stops, wanted = cuts(len(tokens) - 1), list[float]()
    for stop in stops:
        begun = stop - GUARD
        both = (
            (source, native(source, tokens[:begun], 64)),
            (target, kv.hand_over(*pairs[rule], tokens[: begun + 1], translator=translators[rule])),
        )
        read = [(model, hidden_states(model, tokens[begun:stop], cache)) for model, cache in both]
        wanted.append(divergence(*read))
    assert len(stops) == 4 and found == pytest.approx(wanted, rel=1e-4)
