"""Turn a model with grouped-query attention (Qwen3, Llama, Mistral) into one with latent attention.

    python tools/convert_mla.py Qwen/Qwen3-4B qwen3-4b-mla --data dolci.jsonl --device cuda

The method is CARE's (Zhou et al., ICLR 2026, "Covariance-Aware and Rank-Enhanced Decomposition").
docs/decisions/023 says what is exact and what was chosen here. The model as it is reads 256
sequences of 1,024 tokens, layer by layer, so that one layer's weights are in memory at a time. What
was measured lies in WORK (``--work``): another rank or width needs no second reading.

``--ranks fixed`` gives every layer ``--rank``. ``residual`` and ``total`` share the same sum out
among the layers, CARE's way or by what a rank removes of a layer's whole energy. ``--metric
weights`` is a plain SVD of the weights, to compare with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from runs import (
    beside_weights,
    check_above_0,
    check_device,
    check_free,
    model_folder,
    open_data,
    tokenizer_of,
    told,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.paper.converted_mla.on_torch import MODEL_TYPE
from kvlingo_mlx.errors import UnsupportedModelError
from kvlingo_mlx.format.atomic import alone
from kvlingo_mlx.format.fingerprints import files_fingerprint
from kvlingo_mlx.tokenization.samples import tokenise
from kvlingo_mlx.training.conversations import normalise

FAMILIES = ("qwen3", "llama", "mistral")
INDEX = "model.safetensors.index.json"
FACTS = "facts.json"  # of a calibration
KEPT = (  # of the original's config; all else is Qwen3's default or the latents'
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How a model is converted.

    Attributes:
        rank: The width of a layer's latents, or their mean over the layers.
        ranks: ``fixed``, or by what a layer's next ranks are worth: ``residual``, ``total``.
        multiple: Ranks that layers share out are multiples of this; quantisation asks for 64.
        rotary: The width of the rotary key.
        metric: ``covariance`` of the inputs, or ``weights`` alone.
        shrinkage: How much of the root of the covariance is replaced by a multiple of 1.
        apart: Whether no latent serves both keys and values, as in CARE.
    """

    rank: int = 1024
    ranks: str = "fixed"
    multiple: int = 64
    rotary: int = 64
    metric: str = "covariance"
    shrinkage: float = 0.01
    apart: bool = False


@dataclass(frozen=True)
class Shape:
    """The widths of the model's attention, and its rotation in radians a position, (D / 2,)."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    norms: bool
    frequencies: tuple[float, ...]

    @property
    def keys(self) -> int:
        """The width of a token's keys, and of its values."""
        return self.kv_heads * self.dim

    @property
    def full_rank(self) -> int:
        """The rank from which on latents hold all keys and values."""
        return min(self.hidden, 2 * self.keys)


class Weights:
    """A checkpoint's tensors by name, each read from its file when it is asked for.

    They are those that the index names, or else in ``model*.safetensors``, as for mlx-lm. Mistral's
    folders have a second checkpoint beside these, ``consolidated.safetensors``.

    Raises:
        FileNotFoundError: A file of the checkpoint is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, dict[str, Path]()
        paths = sorted(folder.glob("model*.safetensors")) or [folder / "model.safetensors"]
        if (index := folder / INDEX).exists():
            names = json.loads(index.read_text())["weight_map"].values()
            paths = [folder / name for name in sorted({*names})]
        if missing := [path.name for path in paths if not path.exists()]:
            raise FileNotFoundError(
                f"{folder} has no {', '.join(missing)}; download or save the whole model"
            )
        for path in paths:
            with safe_open(path, "pt") as file:
                # Old checkpoints of Llama have the frequencies among their weights.
                names = list(file.keys())
                names = [n for n in names if not n.endswith("rotary_emb.inv_freq")]
                self.files |= dict.fromkeys(names, path)

    def check(self, config: Any) -> None:
        """Refuse (ValueError) a checkpoint that lacks tensors of the model, or has other shapes."""
        wanted = _skeleton(config).state_dict()
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        if missing := sorted({*wanted} - tied - {*self.files}):
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise ValueError(
                f"{self.folder} has no tensor {missing[0]}{more}; give the whole model, and not an "
                "adapter"
            )
        for name in sorted({*wanted} & {*self.files}):
            with safe_open(self.files[name], "pt") as file:
                shape = file.get_slice(name).get_shape()
            if shape != [*wanted[name].shape]:
                raise ValueError(
                    f"{self.folder}: {name} is {shape}, and by config.json it is "
                    f"{[*wanted[name].shape]}; give the config that belongs to these weights"
                )

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name)

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose names begin so, by the rest of their names."""
        return {n.removeprefix(prefix): self[n] for n in self.files if n.startswith(prefix)}


# ---- the model as it is ---------------------------------------------------------------


def shape_of(config: Any) -> Shape:
    """The attention's shape by a config of transformers.

    Raises:
        UnsupportedModelError: It is not grouped-query attention of one of ``FAMILIES``.
    """
    if config.model_type not in FAMILIES:  # whose config and rotary module may be of any kind
        raise _refused([f"model_type {config.model_type!r}"])
    windows = {"sliding_attention"} & set(getattr(config, "layer_types", None) or ())
    found = {
        "biases": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        "windows": windows or (config.model_type == "mistral" and config.sliding_window),
        f"activation {config.hidden_act!r}": config.hidden_act != "silu",
        "quantised weights": getattr(config, "quantization_config", None)
        or getattr(config, "quantization", None),
    }
    rotation = _rotation(config)
    kind = rotation.rope_type
    found[f"RoPE {kind!r}"] = kind in ("dynamic", "longrope") or rotation.attention_scaling != 1
    if odd := [name for name, is_so in found.items() if is_so]:
        raise _refused(odd)
    return Shape(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        config.model_type == "qwen3",
        tuple(rotation.inv_freq.double().tolist()),
    )


def _refused(odd: Sequence[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this model has {', '.join(odd)}, which cannot be converted; give a "
        f"{', '.join(FAMILIES)} with full attention, without biases, whose RoPE is fixed, in "
        "float32 or 16 bits"
    )


def _skeleton(config: Any) -> Any:
    """The model without any weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def _rotation(config: Any) -> Any:
    """The model's rotary module, with its frequencies."""
    return type(_skeleton(config).model.rotary_emb)(config)


# ---- calibration ----------------------------------------------------------------------


def moments_file(layer: int) -> str:
    """Where the moments of a layer lie."""
    return f"moments-{layer:05}.safetensors"


def packed(records: Iterable[Any], tokenizer: Any, sequences: int, length: int) -> torch.Tensor:
    """The first conversations (sequences, length), one after the other, without padding.

    Raises:
        ValueError: The records hold fewer tokens.
    """
    ids: list[int] = []
    for record in records:
        sample = tokenise(record, tokenizer)
        ids += sample.prefix + sample.continuation
        if len(ids) >= sequences * length:
            return torch.tensor(ids[: sequences * length]).view(sequences, length)
    raise ValueError(
        f"the data hold {len(ids)} tokens, and {sequences} sequences of {length} need "
        f"{sequences * length}; give more with --data, or ask for less with --sequences"
    )


def read_records(specs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The usable records of files, folders or Hub datasets, in their order."""
    for source in map(open_data, specs):
        for number in range(len(source.sizes)):
            record, where = source.read(number)
            found = {"messages": []} if record is None else normalise(record, where)
            if found.get("messages") or found.get("text"):
                yield found


@torch.no_grad()
def calibrate(
    config: Any, weights: Weights, tokens: torch.Tensor, work: Path, device: str = "cpu"
) -> None:
    """Read (sequences, length) tokens layer by layer; leave each layer's moments in ``work``.

    A layer's file holds ``covariance`` (hidden, hidden) of what enters attention, not centred, and
    ``queries`` (heads, D) and ``keys`` (KV heads, D): mean squares before rotation. ``FACTS`` is
    written last and says what was read.
    """
    work.mkdir(parents=True, exist_ok=True)
    model, rotation = _skeleton(config).model, _rotation(config).to(device)
    hidden = weights["model.embed_tokens.weight"][tokens]
    angles = rotation(hidden[:1].to(device), torch.arange(tokens.shape[1], device=device)[None])
    for index, layer in enumerate(model.layers):
        layer.to_empty(device=device)
        layer.load_state_dict(weights.under(f"model.layers.{index}."))
        layer.to(hidden.dtype)
        moments = Moments(layer, shape_of(config))
        for row in range(len(hidden)):
            states = layer(hidden[row : row + 1].to(device), position_embeddings=angles)
            hidden[row] = (states[0] if isinstance(states, tuple) else states).cpu()
        save_file(moments.means(tokens.numel()), work / moments_file(index))
        layer.to("meta")
    (work / FACTS).write_text(json.dumps(facts_of(weights, tokens)))


def facts_of(weights: Weights, tokens: torch.Tensor) -> dict[str, Any]:
    """What was measured: of which model, and over which tokens."""
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    model = files_fingerprint(weights.folder)
    return {"model": model, "length": tokens.shape[1], "tokens": digest}


class Moments:
    """Sums over what one layer's attention reads, and over its queries and keys."""

    def __init__(self, layer: Any, shape: Shape) -> None:
        self.sums: dict[str, Any] = {"covariance": 0.0, "queries": 0.0, "keys": 0.0}
        attention = layer.self_attn
        layer.input_layernorm.register_forward_hook(self._product)
        last = "norm" if shape.norms else "proj"
        for name, heads in (("queries", shape.heads), ("keys", shape.kv_heads)):
            module = getattr(attention, f"{name[0]}_{last}")
            module.register_forward_hook(self._squares(name, heads, shape.dim))

    def means(self, tokens: int) -> dict[str, torch.Tensor]:
        """The sums divided by the number of tokens, in float32."""
        return {n: (s / tokens).float().cpu().contiguous() for n, s in self.sums.items()}

    def _product(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        rows = output.flatten(0, -2).float()
        self.sums["covariance"] += (rows.T @ rows).double()

    def _squares(self, name: str, heads: int, dim: int) -> Any:
        def add(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            squares = output.reshape(-1, heads, dim).double().square()
            self.sums[name] += squares.sum(dim=0)

        return add


# ---- the decomposition ----------------------------------------------------------------


@dataclass(frozen=True)
class Basis:
    """Directions of a layer's keys and values, the most important first.

    Attributes:
        energies: The squared singular values (2 * keys,), each layer's in its own unit.
        directions: Orthonormal columns (2 * keys, 2 * keys) in the space of scaled outputs.
        scales: What keys and values are multiplied by in that space (2 * keys,).
    """

    energies: torch.Tensor
    directions: torch.Tensor
    scales: torch.Tensor


def basis(outputs: torch.Tensor, moment: torch.Tensor, shape: Shape, settings: Settings) -> Basis:
    """The SVD of ``outputs`` (2 * keys, hidden), keys above values, in the metric of their inputs.

    With S the root of the covariance, a latent's down-projection is W_a = S^-1 U_r Sigma_r in CARE,
    where S W = U Sigma V^T. That is W V_r. So the eigenvectors of W^T S^2 W are all that is needed,
    and S is never inverted.
    """
    weights = outputs.double()
    if settings.metric == "covariance":
        values, vectors = torch.linalg.eigh(moment.double())
        root = values.clamp(min=0).sqrt()
        root = (1 - settings.shrinkage) * root + settings.shrinkage * root.mean()
        weights = weights @ (vectors * root)
    gram = weights @ weights.T
    scales = _scales(gram.diagonal(), shape)
    gram = scales[:, None] * gram * scales
    if settings.apart:
        gram[: shape.keys, shape.keys :] = gram[shape.keys :, : shape.keys] = 0
    energies, directions = torch.linalg.eigh(gram)
    return Basis(energies.flip(0).clamp(min=0), directions.flip(1), scales)


def _scales(energies: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Factors (2 * keys,) that give each head of keys the same energy, and values that of all keys.

    Keys are normed head by head after they are expanded, so a head's size says nothing.
    """
    keys = energies[: shape.keys].view(shape.kv_heads, shape.dim).sum(dim=1).rsqrt()
    values = (shape.kv_heads / energies[shape.keys :].sum()).sqrt()
    return torch.cat([keys.repeat_interleave(shape.dim), values.expand(shape.keys)])


def shared_ranks(energies: Sequence[torch.Tensor], settings: Settings, most: int) -> list[int]:
    """The ranks of all layers under one budget, the next to the layer to which it is worth most.

    A step's worth is what it removes of the energy that the layer still lacks (``residual``, CARE's
    equation 1), or of the layer's whole energy (``total``).
    """
    step = settings.multiple
    ranks = [step] * len(energies)
    tails = [torch.cat([e.flip(0).cumsum(0).flip(0), e.new_zeros(1)]).tolist() for e in energies]

    def worth(layer: int) -> float:
        rank, tail = ranks[layer], tails[layer]
        if rank + step > most:
            return -1.0
        whole = tail[rank] if settings.ranks == "residual" else tail[0]
        return (tail[rank] - tail[rank + step]) / whole if whole > 0 else 0.0

    for _ in range(sum(ranks), min(settings.rank, most) * len(ranks) - step + 1, step):
        best = max(range(len(ranks)), key=worth)
        if worth(best) < 0:
            break
        ranks[best] += step
    return ranks


# ---- the rotary key -------------------------------------------------------------------


def mean_cosines(shape: Shape, length: int) -> torch.Tensor:
    """The mean cosine (D / 2,) of each pair's angle between two tokens, in float64.

    Nearer tokens count more: an octave of distances counts as much as the next one, but for the
    sequence's end. Attention looks at near ones more often, and equal weights chose worse pairs.
    """
    distances = torch.arange(length, dtype=torch.float64)
    shares = (length - distances) / (1 + distances)
    angles = distances[:, None] * torch.tensor(shape.frequencies, dtype=torch.float64)
    return (shares[:, None] * angles.cos()).sum(dim=0) / shares.sum()


def chosen_slots(
    moments: dict[str, torch.Tensor], shape: Shape, rotary: int, length: int
) -> list[int]:
    """The pairs that the rotary key takes: those without whose rotation scores would change most.

    A pair is head * D / 2 + its place. Its part in a score is |q| |k| in size, and turned by an
    angle a it changes by a square of 2 (1 - cos a) times that of its size.
    """
    half = shape.dim // 2
    energy = {
        name: moments[name].double().unflatten(1, (2, half)).sum(dim=1)
        for name in ("queries", "keys")
    }
    queries = energy["queries"].view(shape.kv_heads, -1, half).sum(dim=1)
    changed = queries * energy["keys"] * (1 - mean_cosines(shape, length))
    return sorted(changed.flatten().topk(rotary // 2).indices.tolist())


# ---- the new checkpoint ---------------------------------------------------------------


def converted_layer(
    old: dict[str, torch.Tensor], found: Basis, rank: int, slots: Sequence[int], shape: Shape
) -> dict[str, torch.Tensor]:
    """The tensors of one layer's latent attention, of its ``self_attn`` tensors; all in float64."""
    half = shape.dim // 2
    query, key, value = (old[f"{n}_proj.weight"].double() for n in "qkv")
    ones = query.new_ones(shape.dim)
    query_norm, key_norm = (old[f"{n}_norm.weight"].double() if shape.norms else ones for n in "qk")
    heads = torch.tensor([slot // half for slot in slots] * 2)
    places = torch.tensor([slot % half for slot in slots])
    places = torch.cat([places, places + half])
    # Rotary queries: of each head, its group's pairs. What a norm multiplies by is in the weights.
    by_head = query.view(shape.heads, shape.dim, -1)
    groups = torch.arange(shape.heads) // (shape.heads // shape.kv_heads)
    mine = (groups[:, None] == heads)[..., None]
    turned = torch.where(mine, by_head[:, places] * query_norm[places, None], 0)
    rotary = key.view(shape.kv_heads, shape.dim, -1)[heads, places] * key_norm[places, None]
    plain = key_norm.repeat(shape.kv_heads, 1)
    plain[heads, places] = 0
    scaled = torch.cat([key, value]) * found.scales[:, None]
    directions = found.directions[:, :rank].double()
    up = directions / found.scales[:, None]
    return {
        "q_proj.weight": torch.cat([by_head, turned], dim=1).flatten(0, 1),
        "q_norm.weight": query_norm[None],
        "kv_a_proj_with_mqa.weight": torch.cat([directions.T @ scaled, rotary]),
        "k_b_proj.weight": up[: shape.keys],
        "v_b_proj.weight": up[shape.keys :],
        "k_norm.weight": plain,
        "o_proj.weight": old["o_proj.weight"].double(),
    }


def convert(folder: Path, work: Path, out: Path, settings: Settings) -> dict[str, Any]:
    """Write the converted model, from what :func:`calibrate` left; returns its config.

    One layer is in memory at a time, twice: ranks that layers share out need all singular values.
    It is written to a folder beside ``out``, which takes that name once it is whole.

    Raises:
        OSError: ``out`` exists.
        UnsupportedModelError: The model cannot be converted.
        ValueError: Settings do not suit the model, or the checkpoint lacks tensors.
    """
    config, weights = AutoConfig.from_pretrained(folder), Weights(folder)
    shape, layers = shape_of(config), range(config.num_hidden_layers)
    check_settings(settings, shape)
    weights.check(config)
    length = json.loads((work / FACTS).read_text())["length"]
    partial = out.with_name(f"{out.name}.writing")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    writer = Writer(weights, partial)
    energies, scales, slots = [], [], []
    for index in layers:
        moments, attention = load_file(work / moments_file(index)), writer.attention(index)
        outputs = torch.cat([attention["k_proj.weight"], attention["v_proj.weight"]])
        found = basis(outputs, moments["covariance"], shape, settings)
        energies.append(found.energies)
        scales.append(found.scales)
        slots.append(chosen_slots(moments, shape, settings.rotary, length))
        save_file({"directions": found.directions.float().contiguous()}, partial / f"basis-{index}")
    ranks = [min(settings.rank, shape.full_rank)] * len(layers)
    if settings.ranks != "fixed":
        ranks = shared_ranks(energies, settings, shape.full_rank)
    for index in layers:
        path = partial / f"basis-{index}"
        found = Basis(energies[index], load_file(path)["directions"].double(), scales[index])
        path.unlink()
        new = converted_layer(writer.attention(index), found, ranks[index], slots[index], shape)
        writer.layer(index, new)
    writer.rest(len(layers))
    written = new_config(config, shape, settings, ranks, slots)
    written["original"] = files_fingerprint(folder)
    (partial / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    for path in beside_weights(folder):
        if path.name != "config.json":
            shutil.copy(path, partial)
    partial.rename(out)
    return written


def check_settings(settings: Settings, shape: Shape) -> None:
    """Refuse (ValueError) settings that make no model of this shape."""
    if settings.rotary % 2 or not 2 <= settings.rotary <= shape.keys:
        raise ValueError(
            f"--rotary is {settings.rotary}; give an even number from 2 to {shape.keys}, the width "
            "of this model's keys"
        )
    if settings.rank < 1:
        raise ValueError(f"--rank is {settings.rank}; give 1 to {shape.full_rank}, the full rank")
    most = min(settings.rank, shape.full_rank)
    if settings.ranks != "fixed" and not 1 <= settings.multiple <= most:
        raise ValueError(
            f"--multiple is {settings.multiple}, and layers have {most} ranks on average; give 1 "
            f"to {most}"
        )
    if not 0 <= settings.shrinkage <= 1:
        raise ValueError(f"--shrinkage is {settings.shrinkage}; give a number from 0 to 1")


def new_config(
    config: Any,
    shape: Shape,
    settings: Settings,
    ranks: Sequence[int],
    slots: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """The converted model's ``config.json``, which both mlx-lm and transformers read."""
    old = config.to_dict()
    rope = old.get("rope_parameters") or old
    return {
        "architectures": ["ConvertedMLAForCausalLM"],
        "model_type": MODEL_TYPE,
        "converted_from": config.model_type,
        **{name: old[name] for name in KEPT if name in old},
        "head_dim": shape.dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "rope_theta": rope["rope_theta"],
        "torch_dtype": str(config.dtype or "bfloat16").removeprefix("torch."),
        "kv_lora_ranks": list(ranks),
        "qk_rope_head_dim": settings.rotary,
        "qk_norm": shape.norms,
        "rotary_frequencies": list(shape.frequencies),
        "rotary_slots": [list(layer) for layer in slots],
    }


class Writer:
    """A sharded checkpoint, written a layer at a time."""

    def __init__(self, weights: Weights, out: Path) -> None:
        self.weights, self.out = weights, out
        self.names: dict[str, str] = {}
        self.size = 0

    def attention(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of a layer's attention, as it was."""
        return self.weights.under(f"model.layers.{index}.self_attn.")

    def layer(self, index: int, attention: dict[str, torch.Tensor]) -> None:
        """One layer: its new attention in the old one's dtype, and all else as it was."""
        prefix = f"model.layers.{index}."
        kept = self.weights.under(prefix)
        dtype = kept["self_attn.o_proj.weight"].dtype
        kept = {n: t for n, t in kept.items() if not n.startswith("self_attn.")}
        new = {f"self_attn.{n}": t.to(dtype).contiguous() for n, t in attention.items()}
        self._write(f"model-layer-{index:05}.safetensors", prefix, kept | new)

    def rest(self, layers: int) -> None:
        """What belongs to no layer, and the index of all."""
        inner = tuple(f"model.layers.{index}." for index in range(layers))
        rest = {n: self.weights[n] for n in self.weights.files if not n.startswith(inner)}
        self._write("model-rest.safetensors", "", rest)
        index = {"metadata": {"total_size": self.size}, "weight_map": self.names}
        (self.out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _write(self, file: str, prefix: str, tensors: dict[str, torch.Tensor]) -> None:
        named = {prefix + name: tensor for name, tensor in tensors.items()}
        save_file(named, self.out / file, metadata={"format": "pt"})
        self.names |= dict.fromkeys(named, file)
        self.size += sum(t.numel() * t.element_size() for t in named.values())


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a Hub id")
    parser.add_argument("out", type=Path, help="the folder of the converted model; must not exist")
    parser.add_argument("--data", nargs="+", required=True, help="JSONL files or Hub datasets")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--work", type=Path, help="default: OUT.calibration")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    known = Settings()
    for name in ("rank", "rotary", "multiple"):
        parser.add_argument(f"--{name}", type=int, default=getattr(known, name))
    parser.add_argument("--ranks", default=known.ranks, choices=("fixed", "residual", "total"))
    parser.add_argument("--metric", default=known.metric, choices=("covariance", "weights"))
    parser.add_argument("--shrinkage", type=float, default=known.shrinkage)
    parser.add_argument("--apart", action="store_true", help="no latent for both keys and values")
    return parser.parse_args()


@told
def main() -> None:
    given = parsed()
    check_above_0({"sequences": given.sequences, "length": given.length})
    check_device(given.device)
    check_free(given.out)
    settings = Settings(**{name: getattr(given, name) for name in Settings.__annotations__})
    folder = model_folder(given.model)
    config = AutoConfig.from_pretrained(folder)
    shape = shape_of(config)
    check_settings(settings, shape)
    work = given.work or given.out.with_name(given.out.name + ".calibration")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    if work.resolve() in (
        given.out.resolve(),
        given.out.with_name(f"{given.out.name}.writing").resolve(),
    ):
        raise ValueError(f"--work is {work}, where the model is written; give another folder")
    with alone(given.out, wait=0), alone(work, wait=0):
        check_free(given.out)  # again: another run may have ended meanwhile
        measured(config, folder, work, given)
        written = convert(folder, work, given.out, settings)
    print(f"{given.out}: latents of {written['kv_lora_ranks']}, rotary keys of {given.rotary}")
    if given.rank > shape.full_rank:
        print(f"--rank {given.rank} is more than the full rank of this model, {shape.full_rank}")


def measured(config: Any, folder: Path, work: Path, given: argparse.Namespace) -> None:
    """Calibrate, unless ``work`` holds what this command would measure.

    Raises:
        ValueError: It holds something else.
    """
    weights, tokenizer = Weights(folder), tokenizer_of(folder)
    weights.check(config)
    tokens = packed(read_records(given.data), tokenizer, given.sequences, given.length)
    if not (work / FACTS).exists():
        calibrate(config, weights, tokens, work, given.device)
    elif json.loads((work / FACTS).read_text()) != facts_of(weights, tokens):
        raise ValueError(
            f"{work} was measured with another model or other tokens, or by an older version; give "
            "the same model, --data, --sequences and --length, or another --work"
        )


if __name__ == "__main__":
    main()
