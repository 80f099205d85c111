"""What a step needs, by shapes, beside PyTorch's own counter; the benchmark, run small."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(ROOT / "benchmarks"))

import throughput_on_torch  # noqa: E402
import training_throughput  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

READ, ANSWER = 30, 12  # tokens
PAIR = 4 * 4 * 16  # operations of a query and a key: four heads of 16
MORE = {"layers": None, "nu": 1, "threads": None, "device": "cpu", "dtype": "float32"}


def counted(action: Any) -> dict[str, int]:
    """PyTorch's count by module; attention that writes its scores is counted by whole squares."""
    with FlopCounterMode(display=False) as counter:
        action()
    return {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}


def test_passes_are_what_pytorch_counts() -> None:
    ends = {"source": "tiny-s", "target": "tiny-l"}  # of two and three layers
    args = Namespace(prefix=READ + 1, continuation=ANSWER, **ends, **MORE)
    side = throughput_on_torch.Side(args, training_throughput.random_sample(args))
    flops = training_throughput.counted(side, args)
    found = {}
    for end, what, depth in zip(side.ends, ("source prefix", "target prefix"), (2, 3), strict=True):
        end.model.set_attn_implementation("eager")
        by = counted(lambda read=side.read, end=end: read(end))
        last = f"Model.layers.{depth - 1}"
        needed = sum(by[f"Qwen3{last}.self_attn.{tap}_proj"] for tap in "kv")
        squares = (depth - 1) * PAIR * READ * (READ - 1) // 2
        found[what] = by["Global"] - by[f"Qwen3{last}"] + needed - squares
    dropped = PAIR * ANSWER * (ANSWER - 1) // 2  # scores of later tokens, a layer
    forward, both = (
        counted(lambda b=back: side.continue_(backward=b))["Global"] for back in (False, True)
    )
    found["continuation"] = forward - 3 * dropped
    # Backward has twice the attention, but no gradient of the first layer's queries.
    found["continuation and backward"] = both - (3 + 6) * dropped + dropped // 2
    maps = 2 * 3 * (4 * READ * 32 * 32)  # both sides of three layers: products, and gradients
    assert flops == found | {"step": sum(found.values()) + maps}


@pytest.mark.parametrize(
    ("gpu", "dtype"),
    [("NVIDIA H100 PCIe", "bfloat16"), ("NVIDIA H100 PCIe", "float32"), ("Other", "bfloat16")],
)
def test_mfu_is_told_of_a_known_gpu_alone(
    gpu: str, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = f"--runtimes torch --source tiny-s --target tiny-moe --prefix 20 --continuation 8 \
        --trials 2 --dtype {dtype} --json {tmp_path / 'record'}"
    monkeypatch.setattr(sys, "argv", ["training_throughput.py", *words.split()])
    monkeypatch.setattr(throughput_on_torch.Side, "facts", lambda side: {"gpu": gpu})
    training_throughput.main()
    done = json.loads((tmp_path / "record").read_text())["results"]
    rate = done["flops"]["step"] / (sum(done["times"]["step"]) / 2)
    known = {"mfu": pytest.approx(rate / 756e12)} if "H100" in gpu and dtype != "float32" else {}
    assert {name: done[name] for name in ("mfu",) if name in done} == known
