"""What a step of training needs, by shapes, beside PyTorch's own counter."""

import sys
from argparse import Namespace
from typing import Any

import pytest

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
flop_counter = pytest.importorskip("torch.utils.flop_counter")
on_torch = pytest.importorskip("throughput_on_torch")
throughput = pytest.importorskip("training_throughput")

READ, ANSWER = 30, 12  # tokens
PAIR = 4 * 4 * 16  # operations of a query and a key: four heads of 16
ENDS = {"source": "tiny-s", "target": "tiny-l", "device": "cpu", "dtype": "float32"}
MORE = {"prefix": READ + 1, "continuation": ANSWER, "layers": None, "nu": 1, "threads": None}


def counted(action: Any) -> dict[str, int]:
    """PyTorch's count by module; attention that writes its scores is counted by whole squares."""
    with flop_counter.FlopCounterMode(display=False) as counter:
        action()
    return {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}


def test_passes_are_what_pytorch_counts_and_no_peak_is_made_up() -> None:
    args = Namespace(**ENDS, **MORE)
    side, found = on_torch.Side(args, throughput.random_sample(args)), {}
    for end, what, depth in zip(side.ends, ("source prefix", "target prefix"), (2, 3), strict=True):
        end.model.set_attn_implementation("eager")
        by = counted(lambda read=side.read, end=end: read(end))
        last = f"Qwen3Model.layers.{depth - 1}"  # of which keys and values are needed
        needed = sum(by[f"{last}.self_attn.{tap}_proj"] for tap in "kv") - by[last]
        found[what] = by["Global"] + needed - (depth - 1) * PAIR * READ * (READ - 1) // 2
    ways = (counted(lambda b=back: side.continue_(backward=b)) for back in (False, True))
    forward, both = (way["Global"] for way in ways)
    dropped = PAIR * ANSWER * (ANSWER - 1) // 2  # scores of later tokens, a layer
    found["continuation"] = forward - 3 * dropped
    # Backward has twice the attention, but no gradient of the first layer's queries.
    found["continuation and backward"] = both - (3 + 6) * dropped + dropped // 2
    maps = 2 * 3 * (4 * READ * 32 * 32)  # both sides of three layers: products, and gradients
    assert throughput.counted(side, args) == found | {"step": sum(found.values()) + maps}
    gpus = [("NVIDIA H100 PCIe", "bfloat16"), ("NVIDIA H100 PCIe", "float32"), ("other", "float16")]
    assert [throughput.work.peak_of(*each) for each in gpus] == [756e12, None, None]
