"""What docs/reference/translator-format.md says, written out again for every kind: it is accepted.

Names, shapes, orders and probes are those of the page; nothing of the package makes them. Then
``verify`` computes each map through MLX, so a page that said anything else would be found out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import kvlingo_mlx as kv
from kvlingo_mlx.cli import run
from tests.docs.doc_pages import ROOT, blocks

PAGE = (ROOT / "docs" / "reference" / "translator-format.md").read_text(encoding="utf-8")
SOURCE, TARGET = "tiny-qwen3-s", "tiny-qwen3-moe"
HIDDEN = 5
Tensors = dict[str, np.ndarray]


def spec(name: str) -> dict:
    """A model spec without fingerprints."""
    config = json.loads((kv.zoo(name) / "config.json").read_text())
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    layers = [
        {"layer": i, "kv_heads": heads, "key_dim": dim, "value_dim": dim,
         "attention": "full", "window": None}
        for i in range(config["num_hidden_layers"])
    ]  # fmt: skip
    unknown = {"geometry": None, "norms": None, "tokenizer": None}
    return {"name": name, "revision": None, "model_type": config["model_type"],
            "fingerprint": unknown, "layers": layers}  # fmt: skip


def facts(**more: object) -> dict:
    """A config with every key of the page."""
    source, target = spec(SOURCE), spec(TARGET)
    reads = [[(t + 1) % 4, t % 4] for t in range(len(target["layers"]))]  # the order is ours
    return {
        "format_version": 1, "kind": "linear", "head_mixing": True, "joint": False,
        "capture": "pre_norm", "source": source, "target": target,
        "assignment": {"keys": reads, "values": reads}, "alignment": None, "provenance": {}, **more,
    }  # fmt: skip


def probe(width: int) -> np.ndarray:
    i = np.arange(width)
    return ((37 * i + 11) % 17 - 8) / 8


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def sizes(config: dict) -> tuple[int, int, int, int]:
    """Target heads, the width of one, source heads, columns that a map reads of one."""
    target, source = config["target"]["layers"][0], config["source"]["layers"][0]
    nu = len(config["assignment"]["keys"][0])
    return target["kv_heads"], target["key_dim"], source["kv_heads"], nu * source["key_dim"]


def linear(config: dict, rng: np.random.Generator) -> tuple[Tensors, Tensors]:
    """``linear``, head-mixing or head-wise, with a bias that the probes leave out."""
    heads, dim, source_heads, read = sizes(config)
    mixing = config["head_mixing"]
    shape = (heads * dim, source_heads * read) if mixing else (heads, dim, read)
    tensors: Tensors = {}
    probes: Tensors = {}
    for side in ("keys", "values"):
        for t in range(len(config["target"]["layers"])):
            weight = rng.normal(size=shape)
            tensors[f"{side}.{t}.weight"] = weight
            tensors[f"{side}.{t}.bias"] = rng.normal(size=heads * dim)
            probes[f"{side}.{t}.weight.probe_out"] = weight @ probe(shape[-1])
    return tensors, probes


def joint(config: dict, rng: np.random.Generator) -> tuple[Tensors, Tensors]:
    """One matrix: columns [all keys; all values], rows [keys; values]."""
    heads, dim, source_heads, read = sizes(config)
    shape = (2 * heads * dim, 2 * source_heads * read)
    tensors = {
        f"joint.{t}.weight": rng.normal(size=shape) for t in range(len(config["target"]["layers"]))
    }
    return tensors, {f"{n}.probe_out": w @ probe(shape[1]) for n, w in tensors.items()}


def layered(config: dict, rng: np.random.Generator) -> tuple[Tensors, Tensors]:
    """``mlp`` with gates or ``linear_mlp``, with a bias that the probes include."""
    heads, dim, source_heads, read = sizes(config)
    mixing, mlp = config["head_mixing"], config["kind"] == "mlp"
    width = read * (source_heads if mixing else 1)
    lead, rows = ((), heads * dim) if mixing else ((heads,), dim)
    x, tensors, probes = probe(width), {}, {}
    for side in ("keys", "values"):
        for t in range(len(config["target"]["layers"])):
            w1, b1 = rng.normal(size=(*lead, HIDDEN, width)), rng.normal(size=(*lead, HIDDEN))
            w2, b2 = rng.normal(size=(*lead, rows, HIDDEN)), rng.normal(size=(*lead, rows))
            bias, own = rng.normal(size=heads * dim), {}
            y = (w2 @ gelu(w1 @ x + b1)[..., None])[..., 0] + b2
            if mlp:
                gate = rng.normal(size=heads)
                y = y.reshape(heads, dim) / (1 + np.exp(-gate))[:, None]
                own = {"gate": gate}
            else:
                weight = rng.normal(size=(*lead, rows, width))
                y, own = y + weight @ x, {"weight": weight}
            y = y.reshape(heads, dim) + bias.reshape(heads, dim)
            own |= {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "bias": bias}
            tensors |= {f"{side}.{t}.{name}": array for name, array in own.items()}
            probes[f"{side}.{t}.probe_out"] = y.reshape(-1) if mixing else y
    return tensors, probes


CASES: dict[str, tuple[dict, Callable]] = {
    "linear": ({}, linear),
    "linear head-wise": ({"head_mixing": False, "head_map": [3, 1]}, linear),
    "joint": ({"joint": True}, joint),
    "mlp": ({"kind": "mlp"}, layered),
    "mlp head-wise": ({"kind": "mlp", "head_mixing": False, "head_map": [3, 1]}, layered),
    "linear_mlp": ({"kind": "linear_mlp"}, layered),
}


def write(folder: Path, config: dict, tensors: Tensors, probes: Tensors) -> Path:
    folder.mkdir()
    (folder / "translator_config.json").write_text(json.dumps(config))
    save_file(
        {n: a.astype(np.float32) for n, a in tensors.items()}, folder / "translator.safetensors"
    )
    save_file({n: a.astype(np.float32) for n, a in probes.items()}, folder / "selftest.safetensors")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_the_page_is_accepted_and_computed(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, maps = CASES[case]
    config = facts(**more)
    folder = write(tmp_path / "by-hand", config, *maps(config, np.random.default_rng(0)))
    pair = ["--source", SOURCE, "--target", TARGET]
    assert run(["import", str(folder), *pair, "--dtype", "float32"]) == 0, capsys.readouterr().err
    assert run(["verify", str(folder)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("case", ["joint", "mlp head-wise", "linear_mlp"])
def test_another_reading_of_the_page_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns in another order, a bias left out: the shapes are right, and it is noticed."""
    more, maps = CASES[case]
    config = facts(**more)
    tensors, probes = maps(config, np.random.default_rng(0))
    name = "joint.0.weight" if case == "joint" else "keys.0.w1"
    half = tensors[name].shape[-1] // 2
    tensors[name] = np.roll(tensors[name], half, axis=-1)
    folder = write(tmp_path / "by-hand", config, tensors, probes)
    assert run(["import", str(folder)]) == 2
    assert "self-test failed for" in capsys.readouterr().err


def test_the_page_has_every_key_of_a_config() -> None:
    for key in {*facts(), "head_map", *spec(SOURCE), *spec(SOURCE)["layers"][0]}:
        assert f"`{key}`" in PAGE


def test_the_pages_code_gives_the_packages_fingerprints() -> None:
    session: dict = {}
    code = [b for b in blocks(PAGE) if b.language == "python"]
    exec(next(b.text for b in code if "def canonical" in b.text), session)
    model = kv.load(SOURCE)
    fingerprint = session["tokenizer_fingerprint"](model.tokenizer.get_vocab())
    assert fingerprint == model.tokenizer_fingerprint
    layers = spec(SOURCE)["layers"]
    rope = {"type": "default", "base": 10000.0, "dims": 32, "traditional": False, "scaling": []}
    found = session["geometry_fingerprint"]("qwen3", layers, [rope] * 4, 1e-06, 1024)
    assert found == model.geometry.fingerprint
    modules = dict(model.model.named_modules())
    norms = {n: np.array(m.weight) for n, m in modules.items() if type(m).__name__ == "RMSNorm"}
    assert session["norms_fingerprint"](norms) == model.norms_fingerprint
