"""Write a translator folder by hand: NumPy, safetensors and json, and nothing of kvlingo_mlx.

    python examples/write_translator.py --out my-translator
    kvlingo-mlx import my-translator

It describes two models by the files in their folders, makes a matrix for every target layer, and
writes the three files of the format (docs/reference/translator-format.md). The matrices here only
copy heads, so the result is valid and useless; put your own numbers in ``copy_heads``, or give them
in an .npz file whose arrays have the format's tensor names. Give the probes in it too, by their
names, computed by the code that you trust: else they are computed here from the same arrays, and
the self-test cannot find what went wrong before.

It covers one kind, linear and head-mixing without biases, and models like Qwen3: a k_norm, RoPE
without scaling, full attention in every layer.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

NORM_ENDS = ("norm.weight", "layernorm.weight")


# ---- what a model is: its cache layers and three fingerprints ---------------------------


def canonical(value: object) -> bytes:
    """JSON with sorted keys and no spaces: equal facts give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def cache_layers(config: dict) -> list[dict]:
    """One entry for every layer that owns keys and values, in order."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config["num_key_value_heads"]
    return [
        {"layer": i, "kv_heads": heads, "key_dim": dim, "value_dim": dim,
         "attention": "full", "window": None}
        for i in range(config["num_hidden_layers"])
    ]  # fmt: skip


def geometry_fingerprint(config: dict) -> str:
    """What shapes the cache."""
    layers = cache_layers(config)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    rope = {
        "type": "default", "base": float(theta), "dims": layers[0]["key_dim"],
        "traditional": False, "scaling": [],
    }  # fmt: skip
    facts = {
        "model_type": config["model_type"],
        "layers": layers,
        "rope": [rope] * len(layers),
        "norm_eps": config["rms_norm_eps"],
        "embedding_rows": config["vocab_size"],
    }
    return hashlib.sha256(canonical(facts)).hexdigest()


def norm_weights(file: Path) -> dict[str, np.ndarray]:
    """A safetensors file's norms in float32, bfloat16 ones too, which NumPy does not know."""
    blob = np.memmap(file, np.uint8, "r")
    begin = 8 + int.from_bytes(blob[:8].tobytes(), "little")
    found = {}
    for name, entry in json.loads(blob[8:begin].tobytes()).items():
        if name.endswith(NORM_ENDS):
            start, stop = entry["data_offsets"]
            array = np.array(blob[begin + start : begin + stop])
            if entry["dtype"] == "BF16":
                array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                array = array.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]])
            found[name.removesuffix(".weight")] = array.astype(np.float32)
    return found


def norms_fingerprint(folder: Path) -> str:
    """All norms' weights as float32, in the order of their modules' names."""
    arrays: dict[str, np.ndarray] = {}
    for file in folder.glob("model*.safetensors"):
        arrays |= norm_weights(file)
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(folder: Path) -> str:
    """The vocabulary with its added tokens, by id."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {**tokenizer["model"]["vocab"]}
    vocabulary |= {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    entries = sorted((index, token) for token, index in vocabulary.items())
    return hashlib.sha256(canonical(entries)).hexdigest()


def describe(folder: Path) -> dict:
    """The model spec of a model's folder."""
    config = json.loads((folder / "config.json").read_text())
    return {
        "name": folder.name,  # its Hub id, where it has one
        "revision": None,
        "model_type": config["model_type"],
        "fingerprint": {
            "geometry": geometry_fingerprint(config),
            "norms": norms_fingerprint(folder),
            "tokenizer": tokenizer_fingerprint(folder),
        },
        "layers": cache_layers(config),
    }


# ---- what a translator is: an assignment and its matrices -------------------------------


def bands(num_source: int, num_target: int, nu: int) -> list[list[int]]:
    """For every target layer, ``nu`` neighbouring source layers at its relative depth."""
    found = []
    for t in range(num_target):
        centre = t * (num_source - 1) / max(num_target - 1, 1)
        start = min(max(round(centre - (nu - 1) / 2), 0), num_source - nu)
        found.append(list(range(start, start + nu)))
    return found


def copy_heads(target: dict, sources: list[dict], dim: str) -> np.ndarray:
    """A head-mixing matrix (rows: target heads; columns: heads of every layer that is read)."""
    rows, width = target["kv_heads"] * target[dim], sources[0]["kv_heads"] * sources[0][dim]
    matrix = np.zeros((rows, len(sources) * width), np.float32)
    for number in range(len(sources)):  # columns: the first layer's heads, then the second's ...
        for head in range(target["kv_heads"]):
            read = head * sources[0]["kv_heads"] // target["kv_heads"]
            for i in range(min(target[dim], sources[0][dim])):
                column = number * width + read * sources[0][dim] + i
                matrix[head * target[dim] + i, column] = 1 / len(sources)
    return matrix


def probe(width: int) -> np.ndarray:
    """The known input of the self-test."""
    i = np.arange(width)
    return ((37 * i + 11) % 17 - 8) / 8


def write(
    out: Path, config: dict, tensors: dict[str, np.ndarray], given: dict[str, np.ndarray]
) -> None:
    """The three files. The self-test is what each map makes of its probe, as ``given`` or here."""
    out.mkdir(parents=True)
    (out / "translator_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, out / "translator.safetensors")
    probes = {
        f"{name}.probe_out": (array.astype(np.float64) @ probe(array.shape[-1])).astype(np.float32)
        for name, array in tensors.items()
        if name.endswith(".weight")
    }
    save_file(given or probes, out / "selftest.safetensors")


def embedded(name: str) -> Path:
    """The folder of an embedded tiny model; the package is found, not imported."""
    spec = importlib.util.find_spec("kvlingo_mlx")
    return Path(spec.submodule_search_locations[0]) / "embedded" / "models" / name


def main(arguments: list[str] | None = None) -> None:
    """Write a linear, head-mixing translator of pre-norm keys."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=embedded("tiny-qwen3-s"))
    parser.add_argument("--target", type=Path, default=embedded("tiny-qwen3-moe"))
    parser.add_argument("--nu", type=int, default=2, help="source layers per target layer")
    parser.add_argument("--numbers", type=Path, help="an .npz file: tensors, and probes")
    parser.add_argument("--out", type=Path, default=Path("my-translator"))
    given = parser.parse_args(arguments)
    if given.out.exists():
        parser.error(f"{given.out} exists; give another --out, or remove it")
    source, target = describe(given.source), describe(given.target)
    assignment = bands(len(source["layers"]), len(target["layers"]), given.nu)
    config = {
        "format_version": 1,
        "kind": "linear",
        "head_mixing": True,
        "joint": False,
        "capture": "pre_norm",
        "alignment": None,
        "source": source,
        "target": target,
        "assignment": {"keys": assignment, "values": assignment},
        "provenance": {"made_by": "examples/write_translator.py"},
    }
    probes: dict[str, np.ndarray] = {}
    if given.numbers is not None:
        arrays = {n: np.asarray(a, np.float32) for n, a in np.load(given.numbers).items()}
        probes = {n: array for n, array in arrays.items() if n.endswith(".probe_out")}
        tensors = {n: array for n, array in arrays.items() if n not in probes}
    else:
        tensors = {
            f"{side}.{t}.weight": copy_heads(
                target["layers"][t], [source["layers"][s] for s in reads], dim
            )
            for side, dim in (("keys", "key_dim"), ("values", "value_dim"))
            for t, reads in enumerate(assignment)
        }
    write(given.out, config, tensors, probes)
    print(f"wrote {given.out}: {len(tensors)} tensors; try `kvlingo-mlx import {given.out}`")


if __name__ == "__main__":
    main()
