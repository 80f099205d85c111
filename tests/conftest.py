"""Tiny random models shared by all tests, written once."""

import contextlib
import gc
import importlib.util
import json
import os
import signal
from pathlib import Path

# Before any of them is loaded. Where workers share the cores, the threads of their libraries
# wait for one another: on two cores that cost three times as much as all there was to compute.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # MLX computes in a thread of its own, and an operation of a tiny model takes less time than
    # waking that thread on another core does.
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    if hasattr(os, "sched_setaffinity") and workers == len(cores := os.sched_getaffinity(0)):
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        os.sched_setaffinity(0, {sorted(cores)[worker]})

from kvlingo_mlx.backend import mx

import pytest

import kvlingo_mlx as kv
from benchmarks.paper.timing import geometries
from kvlingo_mlx.cli import progress
from kvlingo_mlx.embedded import TRANSLATORS
from kvlingo_mlx.embedded.lookback import lookback
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.loading import notes
from kvlingo_mlx.models.language_model import LanguageModel

pytest.register_assert_rewrite("tests.support")  # before it is imported

from tests.support import tiny  # noqa: E402
from tests.support.lm_eval_tasks import write_tiny_tasks  # noqa: E402
from tests.support.opened import Families, quantised  # noqa: E402

pytest_plugins = ["tests.support.extras"]
# What the extra [test] brings; without all of it no test of a server runs.
SERVERS = ("anthropic", "httpx", "llguidance", "llm", "openai", "pydantic", "starlette", "uvicorn")
collect_ignore = [] if all(map(importlib.util.find_spec, SERVERS)) else ["remote", "serving"]


def pytest_configure() -> None:
    gc.disable()
    # A shell ignores it for what it starts in the background, and processes of tests inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    progress.FIRST = float("inf")  # a slow machine would write lines that no test expects


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end, so the garbage collector may pass it by."""
    gc.freeze()
    gc.enable()


SHAPES = {
    "dense": ("qwen3", 1, 3, 2, 32),
    "wide": ("qwen3", 2, 3, 4, 16),
    "moe": ("qwen3_moe", 3, 4, 2, 32),
    "narrow": ("qwen3", 4, 3, 1, 16),
    "narrow_moe": ("qwen3_moe", 5, 4, 1, 16),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a module's own models and translators are written."""
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by name: "dense", "wide" (equal depth and width), "moe" (deeper), "narrow"."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: tiny.write_tiny_model(
            root / name, kind, seed=seed, layers=layers, kv_heads=heads, head_dim=dim
        )
        for name, (kind, seed, layers, heads, dim) in SHAPES.items()
    }


@pytest.fixture(scope="session")
def models(folders: dict[str, Path]) -> dict[str, LanguageModel]:
    """The same, loaded."""
    return {name: kv.load(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def quantised_models(
    models: dict[str, LanguageModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, LanguageModel]:
    """4-bit copies of "dense" and "moe"."""
    root = tmp_path_factory.mktemp("quantised")
    return {name: quantised(models[name], root / name) for name in ("dense", "moe")}


@pytest.fixture(scope="session")
def pair() -> tuple[LanguageModel, LanguageModel]:
    """The embedded models that stand for the paper's, small and large."""
    return kv.load("tiny-qwen3-s"), kv.load("tiny-qwen3-l")


@pytest.fixture(scope="session")
def makers(pair: tuple[LanguageModel, LanguageModel]) -> dict[str, conditions.CacheMaker]:
    translator = kv.load_translator(TRANSLATORS / "tiny-qwen3-s--tiny-qwen3-l")
    return {
        "native": conditions.native(pair[1]),
        "translated": conditions.translated(*pair, translator),
        "shuffled": conditions.translated(*pair, conditions.shuffled(translator)),
        "hidden": conditions.hidden(pair[1]),
    }


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One local task of lm-eval's of each kind, and a group of two."""
    return write_tiny_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of two hundred conversations."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in lookback(200)))
    return str(path)


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty translator store of the test's own."""
    home = tmp_path / "kvlingo-home"
    monkeypatch.setenv("KVLINGO_HOME", str(home))
    return home / "translators"


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random numbers in every test, and nothing was told yet."""
    mx.random.seed(0)
    monkeypatch.setattr(notes, "_told", set())


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit that plans as ever, and does not end what has begun."""
    limiting = "kvlingo_mlx.timing.switching.Stopwatch.limiting"
    monkeypatch.setattr(limiting, lambda clock: contextlib.nullcontext())


SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 256,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 64,
}  # fmt: skip


@pytest.fixture
def small_geometries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen3-4b", "qwen3-30b-a3b", "gemma-3-4b"):
        more = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
        more = more if "a3b" in name else {"sliding_window_pattern": 2}
        made = {**geometries.GEOMETRIES[name], **SMALL, **more}
        monkeypatch.setitem(geometries.GEOMETRIES, name, made)
