"""The MLX hand-over against an independent PyTorch reference, live and from golden files."""

import functools
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kvlingo_mlx.backend import mx

import numpy as np
import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from tests.support import tiny
from tests.support.as_on_gpu import planned_for_a_gpu
from tests.support.native_caches import WRONG, errors, held
from tests.support.tiny import GOLDEN, GOLDEN_CASES, Case, Folders

TOKENS = 33
CACHE_TOLERANCE = 1e-5  # Frobenius norm, relative, of every layer and side
LOGITS_TOLERANCE = 1e-4  # absolute
# Of 32 tokens one chunk, two full ones, four and a short one; how products are laid out.
WAYS = ((2048, True), (16, None), (7, False))
CASES = (
    *(Case("dense4x16", "dense2x32", nu=nu) for nu in (1, 3)),
    Case("dense4x16", "moe2x32", nu=2),
    Case("moe2x32", "dense4x16", nu=2),
    Case("moe2x32", "dense2x32"),
    Case("dense2x32", "dense4x16", 2, False),
    Case("moe2x32", "dense4x16", 1, False),
    Case("dense2x32", "moe2x32", 2, False),
    Case("dense4x16", "dense2x32", 2, False, (("head_map", (3, 1)),)),
    Case("dense4x16", "moe2x32", 2, True, (("bias", True),)),
    Case("dense2x32", "dense4x16", 2, False, (("bias", True),)),
    Case("dense4x16", "moe2x32", 2, True, (("capture", "post_norm"),)),
    Case("dense4x16", "moe2x32", 2, True, (("capture", "post_rope"),)),
    Case("dense4x16", "moe2x32", 2, True, (("dtype", "bfloat16"),)),
    Case("gemma2x32", "gemma4x16"),
    Case("gemma4x16", "gemma1x32", nu=2),
    Case("gemma2x32", "gemma4x16", 2, False),
    Case("gemma2x32", "gemma4x16", 2, True, (("capture", "post_norm"), ("bias", True))),
    Case("gemma4x16", "gemma1x32", 2, True, (("capture", "post_rope"),)),
    Case("llama2x16", "mistral4x24", nu=3),
    Case("mistral4x24", "llama2x16"),
    Case("llama2x16", "ministral2x24"),
    Case("mistral4x24", "dense4x16", 2, True, (("capture", "post_rope"),)),
    Case("shared2x32", "same2x32", nu=2),
    Case("same2x32", "shared2x32"),
    Case("same2x32", "shared4x16", 2, True, (("bias", True),)),
    Case("shared2x32", "shared4x16", 2, False),
    Case("same2x32", "shared4x16", 2, True, (("capture", "post_norm"),)),
    Case("shared2x32", "same2x32", 2, True, (("capture", "post_rope"),)),
    Case("mla64", "mla48", nu=2),
    Case("mla48", "mla64"),
    Case("mla48", "mla_v2", nu=2),
    Case("mla_v2", "mla_glm", 2, True, (("bias", True),)),
    Case("mla_glm", "mla64", 2, False),
)
# One of every way to attend and to cache, for what must fail.
CONTROLS = (
    *GOLDEN_CASES,
    Case("gemma4x16", "gemma1x32", nu=2),
    Case("shared2x32", "same2x32", nu=2),
    Case("mla64", "mla48", nu=2),
    Case("mla48", "mla_v2", nu=2),
)
ABSORBED = ("mla64", "mla48", "mla_glm")  # mlx-lm caches rotated keys as their values
ZOO = tiny.embedded_cases()


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The PyTorch reference; tests that need it are skipped where PyTorch is absent."""
    pytest.importorskip("torch")
    return importlib.import_module("tests.support.reference")


@dataclass(frozen=True)
class Outcome:
    """A target's cache, (H, T, D) a layer, and its logits for the last token."""

    keys: Sequence[np.ndarray]
    values: Sequence[np.ndarray]
    logits: np.ndarray


load = functools.cache(kv.load)


def within_windows(folder: Path, outcome: Outcome) -> Outcome:
    """The last tokens alone where a model's layer attends to no more."""
    config = json.loads((folder / "config.json").read_text())
    keys, values = (
        [array[:, -(tiny.layer_window(config, t) or array.shape[1]) :] for t, array in enumerate(s)]
        for s in (outcome.keys, outcome.values)
    )
    return Outcome(keys, values, outcome.logits)


def logits_error(found: Outcome, expected: Outcome) -> float:
    """The largest difference of a logit."""
    assert found.logits.shape == expected.logits.shape
    return float(np.abs(found.logits - expected.logits).max())


def assert_same(found: Outcome, expected: Outcome, tolerance: float = CACHE_TOLERANCE) -> None:
    """Every layer's keys and values and the logits agree; a NaN agrees with nothing."""
    assert errors(found.keys, expected.keys).max() <= tolerance
    assert errors(found.values, expected.values).max() <= tolerance
    assert logits_error(found, expected) <= LOGITS_TOLERANCE


def hand_over(
    folders: Folders, tokens: list[int], *, batched: bool | None = None, step: int = 2048
) -> Outcome:
    """Hand over on MLX, then run the last token; ``batched`` None is the default path."""
    source, target, folder = load(folders[0]), load(folders[1]), folders[2]
    translator: Path | Translator = folder
    if batched is not None:
        translator = build(*translator_folder.read(folder), batched=batched)
    cache = kv.hand_over(source, target, tokens, translator=translator, prefill_step_size=step)
    keys, values = zip(*([side[0] for side in held(each)] for each in cache), strict=True)
    logits = target.model(mx.array([tokens[-1:]]), cache=cache)[0, -1]
    return Outcome(keys, values, np.array(logits))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hand_over(case: Case, root: Path, reference: ModuleType) -> None:
    """Any chunk size and either layout of the matmuls gives the reference's cache; a GPU's too."""
    folders, tokens = tiny.write_case(root, case), tiny.random_tokens(TOKENS)
    expected = within_windows(folders[1], reference.hand_over(*folders, tokens))
    for step, batched in WAYS:
        assert_same(hand_over(folders, tokens, batched=batched, step=step), expected)
    with planned_for_a_gpu():
        for step in (2048, 16):
            assert_same(hand_over(folders, tokens, batched=True, step=step), expected)


@pytest.mark.parametrize("case", CONTROLS, ids=lambda case: case.name)
def test_rotation_counts(case: Case, root: Path, reference: ModuleType) -> None:
    """Negative control: keys rotated one position off are far from ours."""
    folders, tokens = tiny.write_case(root, case), tiny.random_tokens(TOKENS)
    shifted = reference.hand_over(*folders, tokens, first_position=1)
    shifted, found = within_windows(folders[1], shifted), hand_over(folders, tokens)
    sides = [errors(found.keys, shifted.keys), errors(found.values, shifted.values)]
    rotated, rest = sides[::-1] if case.target in ABSORBED else sides
    assert rotated.min() > WRONG
    assert rest.max() <= CACHE_TOLERANCE
    assert logits_error(found, shifted) > WRONG


def read_golden(name: str, folders: Folders) -> tuple[list[int], Outcome]:
    """A golden file's tokens, and the cache and logits expected of them."""
    path = GOLDEN / f"{name}.npz"
    assert path.exists(), f"{path.name} is missing: run tools/make_golden.py"
    with np.load(path) as file:
        assert str(file["digest"]) == tiny.digest(*folders), "other weights: make it again"
        expected = Outcome(file["keys"], file["values"], file["logits"])
        return file["tokens"].tolist(), expected


@pytest.mark.parametrize("case", GOLDEN_CASES, ids=lambda case: case.name)
def test_golden(case: Case, root: Path) -> None:
    """Every path gives what the reference gave when the golden file was made."""
    folders = tiny.write_case(root, case)
    tokens, expected = read_golden(case.name, folders)
    for step, batched in (*WAYS, (1, None)):
        assert_same(hand_over(folders, tokens, batched=batched, step=step), expected)


@pytest.mark.parametrize("folders", ZOO, ids=lambda folders: folders[2].name)
def test_zoo_golden(folders: Folders) -> None:
    """Every embedded pair gives what the reference gave on a dialogue."""
    tokens, expected = read_golden(f"zoo-{folders[2].name}", folders)
    assert_same(hand_over(folders, tokens, step=16), expected)
