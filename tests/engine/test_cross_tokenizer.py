"""Hand-over between two tokenizers: against PyTorch, against one tokenizer, against mlx-lm."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import (
    KVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import kvlingo_mlx as kv
from benchmarks.paper.evaluation import reuse
from kvlingo_mlx.caches.entries import PositionedKVCache
from kvlingo_mlx.cli import run
from kvlingo_mlx.engine.fill import bring, take_over
from kvlingo_mlx.engine.plan import Plan, align
from kvlingo_mlx.evaluation import lineup, probes
from kvlingo_mlx.evaluation.compare import evaluate
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.loading import pairing
from kvlingo_mlx.loading.translators import load_translator
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import encode
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from tests.support import plain_models, tiny
from tests.support.identity import identity_of
from tests.support.two_tokenizers import TALK, write_mistral, write_qwen, write_translator

FOLLOWING = [7, 30, 41, 9]
PAIRS = (("qwen", "mistral"), ("mistral", "qwen"))
TOLERANCE, WRONG = 1e-4, 1e-2
TEXT = "The ferryman said: you and the other one, in the house, use the money. " * 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models."""
    root = tmp_path_factory.mktemp("cross")
    write_qwen(root / "qwen"), write_mistral(root / "mistral")
    return root


@pytest.fixture(scope="module")
def opened(root: Path) -> Callable[[str], LanguageModel]:
    """A model by name, loaded once."""
    return cache(lambda name: kv.load(root / name))


@pytest.fixture(scope="module")
def folder(root: Path) -> Callable[..., Path]:
    """The folder of a random translator."""

    def make(source: str, target: str, **options: Any) -> Path:
        name = "-".join([source, target, *map(str, options.values())])
        if not (root / name).exists():
            write_translator(root / name, root / source, root / target, **options)
        return root / name

    return make


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The PyTorch reference; tests that need it are skipped where PyTorch is absent."""
    pytest.importorskip("torch")
    return importlib.import_module("tests.support.cross_reference")


def logits(model: LanguageModel, caches: list, tokens: list[int]) -> np.ndarray:
    """(T, vocabulary), a token at a time."""
    rows = [model.model(mx.array([[token]]), cache=caches)[0, -1] for token in tokens]
    return np.array(mx.stack(rows))


# ---- against PyTorch ---------------------------------------------------------------------


@pytest.mark.parametrize(("pair", "options"), [
    *((pair, {"capture": point}) for pair in PAIRS for point in ("pre_norm", "post_norm")),
    (PAIRS[0], {"nu": 2, "bias": True}),
    (PAIRS[1], {"head_mixing": False, "head_map": (0, 0)}),
])  # fmt: skip
def test_parity(
    pair: tuple[str, str], options: dict[str, Any], root: Path, folder: Callable[..., Path],
    opened: Callable[[str], LanguageModel], reference: ModuleType,
) -> None:  # fmt: skip
    """Stretch by stretch at true positions in PyTorch, one pass at shifted ones here."""
    source, target, translator = *map(opened, pair), folder(*pair, **options)
    folders = root / pair[0], root / pair[1], translator
    expected = reference.hand_over(*folders, TALK, FOLLOWING)
    last = encode(target, TALK)[-1]
    for step in (2048, 13):
        handed = kv.hand_over(source, target, TALK, translator=translator, prefill_step_size=step)
        found = logits(target, handed, [last, *FOLLOWING])
        assert np.abs(found - expected).max() < TOLERANCE
    control = reference.hand_over(*folders, TALK, FOLLOWING, canonical=True)
    assert np.abs(control - expected).max() > WRONG


def test_the_pair_shows_what_can_go_wrong(opened: Callable[[str], LanguageModel]) -> None:
    """Entries more and fewer than positions, shared and empty ones, a content that moves."""
    for names, more in zip(PAIRS, (True, False), strict=True):
        plan = align(*map(opened, names), TALK)
        assert (plan.shift > 0) == more and plan.shift != 0
        assert len(set(plan.positions.tolist())) < len(plan.positions)
        assert (np.diff(plan.positions) < 0).any()  # the system message
        assert len(plan.own) > 0 and plan.num_read < len(plan.source_ids)
        whole = plan.groups[:, 1] - plan.groups[:, 0]
        assert (whole > 1).any() and not plan.is_identity
        for row, own in zip(plan.visible, plan.own, strict=True):
            translated = [stop <= own for _, stop in plan.groups]
            assert row.tolist() == [*translated, *(other <= own for other in plan.own)]


# ---- against one tokenizer ------------------------------------------------------------------


def across(translator: Any) -> Any:
    """The same maps, said to be between two tokenizers."""
    return replace(translator, config=replace(translator.config, alignment="minimal_groups"))


@pytest.mark.parametrize("prompt", [TALK, TEXT], ids=["messages", "text"])
@pytest.mark.parametrize("step", [2048, 50])
def test_identical_tokenizers_give_the_same_bits(
    prompt: Any, step: int, root: Path, opened: Callable[[str], LanguageModel]
) -> None:
    write_qwen(root / "other", seed=8, layers=4, kv_heads=1)
    source, target = opened("qwen"), opened("other")
    if not (root / "one").exists():
        tiny.write_random_translator(root / "one", root / "qwen", root / "other", nu=2)
    translator = load_translator(root / "one")
    tokens = encode(target, prompt)
    expected = kv.hand_over(source, target, tokens, translator=translator, prefill_step_size=step)
    found = kv.hand_over(
        source, target, prompt, translator=across(translator), prefill_step_size=step
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs) is KVCache and ours.offset == theirs.offset
        for a, b in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert np.array_equal(np.array(a), np.array(b))


# ---- what families must allow --------------------------------------------------------------


class TruePositions(KVCache):
    """Rotates where its offset says, however many entries it holds."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        return self.put(keys, values)

    def put(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, count: int, *args: Any, **kwargs: Any) -> mx.array | None:
        held = 0 if self.keys is None else self.keys.shape[2]
        return mx.arange(held + count) <= held + mx.arange(count)[:, None]


LATENT = ("deepseek_v3", "glm4_moe_lite", "deepseek_v2", "minicpm3", "converted_mla")
OTHERS = ("qwen3", "qwen3_moe", *LATENT)
IDS = tiny.random_tokens(40)
STRETCHES = ((0, 5, False), (5, 15, True), (15, 22, False), (22, 33, True), (33, 39, False))


def several(start: int, stop: int) -> list[int]:
    """Rows of a stretch, some twice and some not at all."""
    rows = range(start, stop)
    return sorted([*rows[::3], *rows[::2], *rows[1::4], *rows[2:4]])


def stretch_by_stretch(model: LanguageModel, kind: type) -> np.ndarray:
    """Logits from caches that rotate where they are told, entries put between what is read."""
    own = make_prompt_cache(model.model)
    model.model(mx.array(IDS)[None], cache=own)
    slow: list[Any] = [kind() for _ in model.attentions]
    for start, stop, translated in STRETCHES:
        if not translated:
            model.model(mx.array(IDS[start:stop])[None], cache=slow)
            continue
        rows = mx.array(several(start, stop))
        for known, layer in zip(own, slow, strict=True):
            layer.put(known.keys[:, :, rows], known.values[:, :, rows])
            layer.offset = stop
    return logits(model, slow, [IDS[-1], *FOLLOWING])


def differing(model: LanguageModel) -> float:
    """How far one pass is from stretch by stretch at true positions, in logits."""
    rows = np.concatenate([several(a, b) for a, b, translated in STRETCHES if translated])
    native = np.concatenate([np.arange(a, b) for a, b, translated in STRETCHES if not translated])
    plan = AlignedPrefix(
        tuple(IDS), tuple(IDS), rows, rows, np.stack([rows, rows + 1], axis=1), native
    )
    assert plan.shift != 0
    translator = identity_of(model, capture=model.family.points[0])
    spans = capture.prefill(model, IDS[: plan.num_read])
    fast = take_over(Plan(model, model, IDS, translator, aligned=plan), spans).cache
    expected = stretch_by_stretch(model, TruePositions)
    found = logits(model, fast, [IDS[-1], *FOLLOWING])
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", [*sorted(plain_models.CONFIGS), *OTHERS])
def test_every_family_that_is_let_through_is_exact(name: str, tmp_path: Path) -> None:
    if name in OTHERS:
        facts = {"seed": 3, "layers": 3, "kv_heads": 2, "head_dim": 32}
        if name in LATENT:
            facts |= {"kv_heads": 4}
        model = kv.load(tiny.write_tiny_model(tmp_path, name, **facts))
    else:
        model = kv.load(plain_models.write_plain_model(tmp_path, name))
    try:
        pairing.check_positions(model)
    except kv.UnsupportedModelError as error:
        assert "cannot take over from a model of another tokenizer" in str(error)
        windows = any(g.window for g in model.geometry.layers)
        assert windows or differing(model) > 1e-3  # it is refused for a reason
        return
    assert differing(model) < 1e-4
    expected = stretch_by_stretch(model, TruePositions)  # as a conversation's lines have it, too
    found = stretch_by_stretch(model, PositionedKVCache)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


# ---- what mlx-lm does with such caches ------------------------------------------------------


@pytest.fixture(params=PAIRS, ids="-".join)
def handed(
    request: pytest.FixtureRequest, folder: Callable[..., Path],
    opened: Callable[[str], LanguageModel],
) -> tuple[LanguageModel, Callable[[], list], int]:  # fmt: skip
    """A target, what makes its cache, and its last token."""
    source, target = map(opened, request.param)
    translator = load_translator(folder(*request.param))
    return (
        target,
        lambda: kv.hand_over(source, target, TALK, translator=translator),
        encode(target, TALK)[-1],
    )


def decode(model: LanguageModel, caches: list, token: int, count: int = 6, **options: Any) -> list:
    steps = generate_step(
        mx.array([token]), model.model, max_tokens=count, prompt_cache=caches, **options
    )
    return [int(found) for found, _ in steps]


def test_saved_loaded_and_trimmed(handed: Any, tmp_path: Path) -> None:
    target, make, last = handed
    caches = make()
    prefix = caches[0].offset
    expected = decode(target, make(), last)
    save_prompt_cache(str(tmp_path / "saved.safetensors"), caches)
    loaded = load_prompt_cache(str(tmp_path / "saved.safetensors"))
    for each in (caches, loaded):
        assert decode(target, each, last) == expected
        assert trim_prompt_cache(each, each[0].offset - prefix) > 0
        assert decode(target, each, last) == expected
        assert each[0].offset > prefix
        with pytest.raises(ValueError, match=f"from another tokenizer, whose {prefix} entries"):
            trim_prompt_cache(each, each[0].offset - prefix + 1)


def test_kv_bits(handed: Any) -> None:
    target, make, last = handed
    caches = make()
    prefix = caches[0].offset
    decode(target, caches, last, kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    assert type(caches[0]).__name__ == "TranslatedQuantizedKVCache"
    with pytest.raises(ValueError, match="hand over again"):
        caches[0].trim(caches[0].offset - prefix + 1)
    assert caches[0].trim(2) == 2


def test_batches_with_prompts_of_its_own(handed: Any) -> None:
    """Alone or beside a prompt that mlx-lm prefilled, whichever comes first."""
    target, make, last = handed
    ids = [3, 5, 8, 13, 21, 34, 55]
    read = make_prompt_cache(target.model)
    target.model(mx.array(ids[:-1])[None], cache=read)
    expected = [decode(target, make(), last), decode(target, read, ids[-1])]
    for order in ((0, 1), (1, 0)):
        read = make_prompt_cache(target.model)
        target.model(mx.array(ids[:-1])[None], cache=read)
        caches, tokens = (make(), read), ([last], ids[-1:])
        generator = BatchGenerator(target.model, max_tokens=6)
        uids = generator.insert(
            [tokens[i] for i in order], caches=[caches[i] for i in order], max_tokens=[6, 6]
        )
        found: dict[int, list[int]] = {uid: [] for uid in uids}
        for _ in range(12):
            for response in generator.next_generated():
                found[response.uid].append(response.token)
        generator.close()
        assert [found[uid] for uid in uids] == [expected[i] for i in order]


# ---- generate, and what it refuses ------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_generate(
    pair: tuple[str, str], folder: Callable[..., Path], opened: Callable[[str], LanguageModel]
) -> None:
    source, target = map(opened, pair)
    translator = folder(*pair)
    for prompt in (TALK, TEXT, TALK[1:2], f"<s>{TEXT}"):
        plan = align(source, target, prompt)
        ids = [encode(model, prompt) for model in (source, target)]
        assert [list(plan.source_ids), list(plan.target_ids)] == ids
        handed = kv.hand_over(source, target, prompt, translator=translator)
        expected = decode(target, handed, encode(target, prompt)[-1])
        responses = list(
            kv.stream_generate(source, target, prompt, translator=translator, max_tokens=6)
        )
        ended = [t for t in expected if t not in target.tokenizer.eos_token_ids]
        assert [r.token for r in responses][: len(ended)] == expected[: len(ended)]
        assert responses[-1].prompt_tokens == len(encode(target, prompt))


def test_the_stored_translator_is_found(
    folder: Callable[..., Path], opened: Callable[[str], LanguageModel], store: Path
) -> None:
    source, target = map(opened, PAIRS[0])
    with pytest.raises(kv.MissingTranslatorError):
        kv.generate(source, target, TEXT)
    store.mkdir(parents=True)
    (store / "pair").symlink_to(folder(*PAIRS[0]))
    assert kv.generate(source, target, TEXT, max_tokens=3) == kv.generate(
        source, target, TEXT, max_tokens=3, translator=folder(*PAIRS[0])
    )


def test_refusals(folder: Callable[..., Path], opened: Callable[[str], LanguageModel]) -> None:
    source, target = map(opened, PAIRS[0])
    translator = load_translator(folder(*PAIRS[0]))
    with pytest.raises(ValueError, match="token ids, which the two tokenizers .* give text"):
        kv.hand_over(source, target, [1, 2, 3], translator=translator)
    for options in ({"native_layers": 1}, {"native_head": 4}, {"native_tail": 2}):
        with pytest.raises(ValueError, match="cannot be used between two tokenizers"):
            kv.hand_over(source, target, TALK, translator=translator, **options)
    rotated = replace(translator, config=replace(translator.config, capture="post_rope"))
    with pytest.raises(kv.IncompatibleTranslatorError, match="rotated at the source's; use"):
        kv.hand_over(source, target, TALK, translator=rotated)
    one = replace(translator, config=replace(translator.config, alignment=None))
    with pytest.raises(kv.IncompatibleTranslatorError, match="tokenizers of .* differ"):
        kv.hand_over(source, target, TALK, translator=one)
    with pytest.raises(ValueError, match="has another vocabulary"):
        kv.generate(source, target, TALK, translator=translator, draft_model=source)


def test_windows_are_refused(root: Path, opened: Callable[[str], LanguageModel]) -> None:
    gemma = kv.load(
        tiny.write_tiny_model(
            root / "gemma", "gemma3_text", seed=1, layers=3, kv_heads=1, head_dim=32
        )
    )
    with pytest.raises(kv.UnsupportedModelError, match="windows of 16 tokens, which count entries"):
        pairing.check_positions(gemma)
    pairing.check_positions(opened("mistral"))


# ---- evaluation and the command line ---------------------------------------------------------


def test_evaluation(folder: Callable[..., Path], opened: Callable[[str], LanguageModel]) -> None:
    """Every condition by its own account; teacher forcing goes on from the handed-over cache."""
    source, target = map(opened, PAIRS[1])
    translator = load_translator(folder(*PAIRS[1]))
    records = [{"messages": [*TALK, {"role": "assistant", "content": "It is 24."}]}]
    task = probes.continuation(target, records, 1, 512, source.tokenizer)
    (item,) = task.items
    line = [
        lineup.native(target),
        lineup.translated("own", source, target, [translator]),
        *(lineup.baseline(n, source, target, [translator])
          for n in ("hidden", "shuffled", "canonical", "text")),
    ]  # fmt: skip
    found = evaluate(target, [task], line, Journal())["continuation"]
    kl = {name: scored.scores["kl"] for name, (scored,) in found.items()}
    assert kl.pop("native") == 0.0 and len(set(kl.values())) == len(kl) == 5
    plan = Plan(source, target, item.read.target_ids, translator, aligned=item.read)
    handed = bring(plan).cache
    entries = handed[0].offset
    tokens = [item.prefix[-1], *item.sample.continuation[:-1]]
    native = make_prompt_cache(target.model)
    target.model(mx.array(item.prefix[:-1])[None], cache=native)
    both = (logits(target, c, tokens).astype(np.float64) for c in (native, handed))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in both)
    assert kl["own"] == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-4)
    assert line[1].at_switch is not None
    again = line[1].at_switch(item.read)()
    assert again[0].offset == entries == item.read.num_entries
    with pytest.raises(kv.IncompatibleTranslatorError, match="other tokens cannot be reused"):
        reuse.baseline("reuse", source, target)
    with pytest.raises(ValueError, match="'canonical', which needs a pair of two tokenizers"):
        one = replace(translator, config=replace(translator.config, alignment=None))
        lineup.baseline("canonical", source, target, [one])


def test_the_command_line(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [str(root / "qwen"), str(root / "mistral")]
    pair = ["--source", ends[0], "--target", ends[1]]
    data, out = tmp_path / "data.jsonl", tmp_path / "fitted"
    record = {"messages": [*TALK, {"role": "assistant", "content": "It is 24."}]}
    data.write_text(json.dumps(record) + "\n")
    assert run(["fit", *pair, "--data", str(data), "--out", str(out), "--nu", "2"]) == 0
    assert run(["show", str(out)]) == 0
    assert "minimal_groups" in capsys.readouterr().out
    models = ["--prefill-model", ends[0], "--decode-model", ends[1], "--translator", str(out)]
    assert run(["generate", *models, "-p", "Who is it?", "--max-tokens", "3"]) == 0
    assert run(["eval", *pair, str(out), "--tasks", "continuation", "--data",
                str(data), "--baselines", "hidden,canonical", "--limit", "1",
                "--out", str(tmp_path / "scores.jsonl")]) == 0  # fmt: skip
    assert "canonical" in capsys.readouterr().out
    for verb in (["bench", *pair, "--translator", str(out)],
                 ["tune", *ends, "--translator", str(out), "--data", str(data)]):  # fmt: skip
        assert run(verb) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert "between two tokenizers" in error
