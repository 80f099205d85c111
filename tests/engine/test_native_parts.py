"""Hand-overs of which the target reads a part itself: layers, first tokens, last tokens."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from kvlingo_mlx.engine import hybrid
from kvlingo_mlx.evaluation import conditions, lineup, tuning
from kvlingo_mlx.evaluation.lineup import Condition
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators import build
from tests.support import tiny
from tests.support.command_line import fails
from tests.support.native_caches import WRONG, errors, held, native
from tests.support.tiny import Case

TOKENS = tiny.random_tokens(41)
# A map's numbers are sums of at most 128 products. In another order each addition rounds otherwise,
# by at most half an eps of what has been summed.
ROUNDING = 128 * float(np.finfo(np.float32).eps)
CASES = (
    Case("moe2x32", "dense4x16", nu=2),
    Case("dense4x16", "moe2x32", nu=2),
    Case("gemma2x32", "gemma4x16"),
    Case("llama2x16", "mistral4x24"),
    Case("same2x32", "shared2x32", nu=2),
    Case("mla48", "mla64"),
    Case("mla48", "mla_v2"),
)

load = functools.cache(kv.load)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    """A pair of every way to attend and to cache."""
    return request.param


def opened(root: Path, case: Case) -> tuple[LanguageModel, LanguageModel, Path]:
    source, target, folder = tiny.write_case(root, case)
    return load(source), load(target), folder


def arrays(cache: Any) -> tuple[np.ndarray, np.ndarray]:
    """What one cache layer holds, oldest token first."""
    keys, values = held(cache)
    return keys[0], values[0]


def equal(one: Any, other: Any) -> bool:
    """Whether two cache layers hold the same numbers, to the bit, up to the same position."""
    pairs = zip(arrays(one), arrays(other), strict=True)
    return one.offset == other.offset and all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("heal", ["idle", "layers"])
def test_what_is_translated_is_read_behind(root: Path, case: Case, heal: str) -> None:
    """In chunks, behind the native head; in the end all is as the target would have read it."""
    source, target, translator = opened(root, case)
    part = {"native_layers": 2, "native_head": 5, "native_tail": 4}
    asked = {"translator": translator, "prefill_step_size": 16, "heal": heal, **part}
    if any(geometry.window is not None for geometry in target.geometry.layers):
        with pytest.raises(kv.UnsupportedModelError, match="cannot be healed"):
            kv.hand_over(source, target, TOKENS, **asked)
        return
    cache = kv.hand_over(source, target, TOKENS, **asked)
    assert cache.left == len(TOKENS) - 1 - 5
    while cache.left:
        cache.heal(1e-6)
    for c, own in zip(cache, native(target, TOKENS[:-1], 2048), strict=True):
        for a, b in zip(arrays(c), arrays(own), strict=True):
            assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()


def test_layers_to_read_at_once_have_a_default(root: Path) -> None:
    """A quarter of all, unless the translator was tuned or somebody says how many."""
    source, target, translator = opened(root, CASES[0])
    config, weights = translator_folder.read(translator)
    most, own = len(target.attentions), native(target, TOKENS[:-1], 2048)
    tuned = dataclasses.replace(config, provenance={**config.provenance, "native_layers": 2})
    for found, given, wanted in (
        (config, None, -(-most // 4)), (tuned, None, 2), (tuned, 0, 0), (config, 1, 1),
    ):  # fmt: skip
        cache = kv.hand_over(
            source, target, TOKENS, translator=build(found, weights), native_layers=given,
            heal="layers",
        )  # fmt: skip
        same = [equal(c, o) for c, o in zip(cache, own, strict=True)]
        assert same == [True] * wanted + [False] * (most - wanted)


def test_a_cache_that_heals_says_what_is_wrong(root: Path) -> None:
    source, target, translator = opened(root, CASES[0])
    with pytest.raises(ValueError, match="heal is 'interleaved'; give idle or layers"):
        kv.hand_over(source, target, TOKENS, translator=translator, heal="interleaved")
    cache = kv.hand_over(source, target, TOKENS, translator=translator, heal="idle")
    with pytest.raises(ValueError, match="seconds is 0; give a number above 0"):
        cache.heal(0)
    for layer in cache:
        layer.trim(3)
    with pytest.raises(ValueError, match="hold 37 tokens, fewer than the 40 of the prompt"):
        cache.heal()


def test_no_later_layer_runs(root: Path, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one is entered, and the last one that is runs no further than its keys and values."""
    _, target, _ = opened(root, case)
    calls: list[tuple[str, int]] = []

    def watch(module: Any, part: str, layer: int) -> None:
        """Note every call of one module."""

        class Noted(type(module)):  # type: ignore[misc]
            def __call__(self, *args: Any, **options: Any) -> Any:
                calls.append((part, layer))
                return super().__call__(*args, **options)

        monkeypatch.setattr(module, "__class__", Noted)

    for i, block in enumerate(target.model.layers):
        watch(block.mlp, "mlp", i)
        watch(block, "block", i)
    for layers in range(1, len(target.attentions)):
        cache = make_prompt_cache(target.model)
        hybrid.read_layers(target, TOKENS, cache, 16, layers)
        assert [layer for part, layer in calls if part == "block"] == list(range(layers)) * 3
        assert [layer for part, layer in calls if part == "mlp"] == list(range(layers - 1)) * 3
        assert [c.offset for c in cache] == [len(TOKENS)] * layers + [0] * (len(cache) - layers)
        calls.clear()
    hybrid.read_layers(target, TOKENS, make_prompt_cache(target.model), 16)  # the counts see all
    assert calls.count(("mlp", 0)) == 3


@pytest.mark.parametrize(("step", "layers"), [(2048, 1), (16, 0)])
def test_first_tokens_are_the_targets_own(root: Path, case: Case, step: int, layers: int) -> None:
    """In every layer, where its window still holds them; the others are plainly translated."""
    source, target, translator = opened(root, case)
    head = 9
    hand_over = functools.partial(
        kv.hand_over, source, target, translator=translator, prefill_step_size=step,
        native_layers=layers,
    )  # fmt: skip
    own, plain = native(target, TOKENS[:head], step), hand_over(TOKENS)
    cache = hand_over(TOKENS, native_head=head)
    for layer, (found, first, rest) in enumerate(zip(cache, own, plain, strict=True)):
        kept = min(len(TOKENS) - 1, target.geometry.layers[layer].window or len(TOKENS))
        held = max(0, head - (len(TOKENS) - 1 - kept))  # of the head
        for a, b, c in zip(arrays(found), arrays(first), arrays(rest), strict=True):
            if held:
                assert np.array_equal(a[:, :held], b[:, -held:])
            if layer >= layers:  # products of fewer tokens, so they may round otherwise
                assert errors([a[:, held:]], [c[:, held:]]).max() <= ROUNDING
                assert errors([a[:, held:]], [np.roll(c, 1, axis=1)[:, held:]]).min() > WRONG
        assert found.offset == len(TOKENS) - 1


@pytest.mark.parametrize("layers", [0, 1])
def test_last_tokens_are_run_by_the_target(root: Path, case: Case, layers: int) -> None:
    """As if they followed the hand-over of what is before them; if all are, it is a prefill."""
    source, target, translator = opened(root, case)
    tail = 6
    hand_over = functools.partial(
        kv.hand_over, source, target, translator=translator, native_layers=layers
    )
    expected = hand_over(TOKENS[:-tail])
    target.model(mx.array([TOKENS[-tail - 1 : -1]]), cache=expected)
    cache = hand_over(TOKENS, native_tail=tail)
    assert all(equal(a, b) for a, b in zip(cache, expected, strict=True))
    own = native(target, TOKENS[:-1], 2048)
    for parts in ({"native_head": 99}, {"native_head": 20, "native_tail": 20}):
        cache = kv.hand_over(source, target, TOKENS, translator=translator, **parts)
        assert all(equal(a, b) for a, b in zip(cache, own, strict=True))


@pytest.mark.parametrize("count", [5, 99])
def test_tokens_amid_translated_ones(root: Path, case: Case, count: int) -> None:
    """Against the model's own steps of one token, each in the place of a translated entry."""
    source, target, translator = opened(root, case)
    hand_over = functools.partial(kv.hand_over, source, target, translator=translator)
    if any(layer.window or layer.recurrence for layer in target.geometry.layers):
        with pytest.raises(kv.UnsupportedModelError, match="leave out native_middle"):
            hand_over(TOKENS, native_middle=count)
        return
    head, end = 3, len(TOKENS) - 1
    expected, plain = (hand_over(TOKENS, native_head=head) for _ in range(2))
    part = (end - head) / min(count, end - head)
    places = [head + int((n + 0.5) * part) for n in range(min(count, end - head))]
    for place in places:
        for cache in expected:
            cache.offset = place
        target.model(mx.array([TOKENS[place : place + 1]]), cache=expected)
    for cache in expected:
        cache.offset = end
    for step_size in (2, 2048):
        options: dict[str, Any] = {"native_head": head, "native_middle": count}
        found = hand_over(TOKENS, **options, prefill_step_size=step_size)
        for ours, right, before in zip(found, expected, plain, strict=True):
            assert ours.offset == end and type(ours) is type(right)
            for a, b, c in zip(arrays(ours), arrays(right), arrays(before), strict=True):
                assert errors([a], [b]).max() <= ROUNDING
                assert errors([a[:, places]], [c[:, places]]).min() > WRONG
    (answer,) = kv.stream_generate(
        source, target, TOKENS, translator=translator, max_tokens=1, **options
    )
    assert answer.translated_tokens == end - head - len(places) and answer.native_s > 0.0


def test_a_draft_model_has_read_all(root: Path) -> None:
    """The prefill model that drafts holds the last tokens as well, which nobody translated."""
    source, target, translator = opened(root, CASES[1])
    options: dict[str, Any] = {
        "translator": translator, "max_tokens": 8, "native_layers": 1, "native_tail": 5,
    }  # fmt: skip
    drafted = kv.generate(source, target, TOKENS, draft_model=source, **options)
    assert drafted == kv.generate(source, target, TOKENS, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"native_layers": "auto"}, "has no tuned native layers; choose them with `kvlingo-"),
        ({"native_layers": -1}, "native_layers is -1; give a number from 0 to "),
        ({"native_layers": "two"}, "native_layers is 'two'; give a number of layers, or 'auto'"),
        ({"native_head": -1}, "native_head is -1; give a number of tokens, 0 or more"),
        ({"native_tail": 1.5}, "native_tail is 1.5; give a number of tokens, 0 or more"),
        ({"native_middle": -2}, "native_middle is -2; give a number of tokens, 0 or more"),
    ],
)
def test_what_means_nothing_is_refused(root: Path, options: dict, message: str) -> None:
    source, target, translator = opened(root, CASES[0])
    with pytest.raises(ValueError, match=message):
        kv.hand_over(source, target, TOKENS, translator=translator, **options)


@pytest.mark.parametrize("found", [99, "1"])
def test_a_folder_that_asks_for_what_is_not_there(root: Path, tmp_path: Path, found: Any) -> None:
    _, _, folder = opened(root, CASES[0])
    config = json.loads((folder / translator_folder.CONFIG_FILE).read_text())
    config["provenance"]["native_layers"] = found
    for name in (translator_folder.WEIGHTS_FILE, translator_folder.SELFTEST_FILE):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / translator_folder.CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(
        kv.MalformedTranslatorError, match=r"provenance.native_layers(\[.*\])? is .*expected"
    ):
        kv.load_translator(tmp_path)


def talk_file(folder: Path, **facts: Any) -> str:
    """A file with one conversation."""
    talk = [{"role": "user", "content": "say it on"}, {"role": "assistant", "content": "it is on"}]
    path = folder / "data.jsonl"
    path.write_text(json.dumps({"messages": talk, **facts}) + "\n")
    return str(path)


def test_what_is_chosen_is_kept_with_the_translator(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb, from data to a hand-over that heeds it; marked answers give recall."""
    source, target, folder = tiny.write_case(root, Case("llama2x16", "llama2x16"))
    own = tmp_path / "own"
    build(*translator_folder.read(folder)).save(own)
    data = talk_file(tmp_path, answers=["on"])
    command = ["tune", str(source), str(target), "--translator", str(own), "--data", data,
               "-c", "trials=1", "--out", str(tmp_path / "out.jsonl")]  # fmt: skip
    record = tmp_path / "record.jsonl"
    assert run([*command, "--max-kl", "0", "--json", str(record)]) == 0
    most = len(load(target).attentions)
    assert translator_folder.read_config(own).native_layers == most
    found = json.loads(record.read_text())["results"]
    ways = {(p["way"], p["layers"]): p for p in found["points"]}
    assert found["native_layers"] == most
    assert ways["native", most]["kl"]["value"] == 0 == ways["native", most]["layers"] - most
    assert all(ways["hybrid", j]["kl"]["value"] > 0 for j in range(most))
    assert all(ways["hybrid", j]["recall"] and ways["hybrid", j]["seconds"] for j in range(most))
    out = capsys.readouterr().out
    assert "nan" not in out  # one conversation has no error bar
    assert ("hidden", None) in ways and ("shuffled", None) in ways
    kls = [ways["hybrid", j]["kl"]["value"] for j in range(most)]
    for bound in kls:  # the smallest number that meets it; other ways do not count
        assert run([*command, "--max-kl", str(bound)]) == 0
        wanted = next(j for j in range(most) if kls[j] <= bound)
        assert translator_folder.read_config(own).native_layers == wanted
    assert run([*command, "--min-recall", "0"]) == 0
    assert translator_folder.read_config(own).native_layers == 0
    assert run([*command, "--max-kl", "1e9", "--native-layers", "1"]) == 0
    assert translator_folder.read_config(own).native_layers == 1
    hand_over = functools.partial(kv.hand_over, load(source), load(target), TOKENS)
    pairs = zip(hand_over(translator=own), hand_over(translator=own, native_layers=1), strict=True)
    assert all(equal(a, b) for a, b in pairs)
    capsys.readouterr()


def test_controls_do_not_follow_the_tuned_number(root: Path) -> None:
    """Shuffled maps stay what they are when a number is kept, and a journal tells them apart."""
    source, target, folder = opened(root, Case("llama2x16", "llama2x16"))
    translator, most = build(*translator_folder.read(folder)), len(target.attentions)
    own = native(target, TOKENS[:-1], 2048)

    def made(condition: Condition) -> list[bool]:
        cache = condition.makers[0](TOKENS)
        return [equal(a, b) for a, b in zip(cache, own, strict=True)]

    for layers in (0, 1, most):
        provenance = {**translator.config.provenance, "native_layers": layers}
        config = dataclasses.replace(translator.config, provenance=provenance)
        tuned = dataclasses.replace(translator, config=config)
        line = tuning.line_up(source, target, tuned, [0])
        for key in (("shuffled", None), ("hybrid", 0)):
            assert made(line[key]) == [False] * most
        plain = lineup.baseline("shuffled", source, target, [tuned])
        asked = lineup.baseline("shuffled", source, target, [tuned], layers)
        own_choice = lineup.baseline("shuffled", source, target, [tuned], None)
        assert made(plain) == [False] * most and plain.identity == line["shuffled", None].identity
        assert made(asked) == made(own_choice) == [True] * layers + [False] * (most - layers)
        assert asked.identity == own_choice.identity
        assert (asked.identity == plain.identity) == (layers == 0)
        plain_maker = conditions.translated(source, target, tuned)
        assert not any(equal(a, b) for a, b in zip(plain_maker(TOKENS), own, strict=True))


def test_what_cannot_be_kept_is_refused_before_measuring(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that the data cannot answer, and a folder with a file of somebody else's."""
    source, target, folder = tiny.write_case(root, Case("llama2x16", "llama2x16"))
    own, data = tmp_path / "own", talk_file(tmp_path)
    build(*translator_folder.read(folder)).save(own)
    command = ["tune", str(source), str(target), "--translator", str(own), "--data", data,
               "--out", str(tmp_path / "out.jsonl")]  # fmt: skip
    monkeypatch.setattr(tuning, "measure", None)
    assert run([*command, "--min-recall", "0.5"]) == 2
    assert "error: --min-recall needs data that mark answers" in capsys.readouterr().err
    (own / "training.log").write_text("mine")
    unknown = "holds training.log, which is no file of a translator"
    fails([*command, "--max-kl", "1"], unknown, capsys)
    assert (own / "training.log").read_text() == "mine"
    assert not (tmp_path / "out.jsonl").exists()


def test_eval_compares_hybrids(root: Path, tmp_path: Path) -> None:
    """All native layers are a prefill: nothing is lost, unlike with none."""
    source, target, folder = tiny.write_case(root, Case("llama2x16", "llama2x16"))
    most, kls = len(load(target).attentions), []
    data = talk_file(tmp_path)
    for layers in (0, most):
        record = tmp_path / f"{layers}.jsonl"
        command = ["eval", str(folder), "--source", str(source), "--target", str(target)]
        command += ["--data", data, "--tasks", "continuation", "--native-layers", str(layers)]
        # One journal for both: what is native must tell their scores apart.
        assert run([*command, "--out", str(tmp_path / "out"), "--json", str(record)]) == 0
        means = json.loads(record.read_text())["results"]["means"]["continuation"]["translated"]
        kls.append(next(iter(means.values()))["kl"]["value"])
    assert kls[0] > 0.0 == kls[1]
