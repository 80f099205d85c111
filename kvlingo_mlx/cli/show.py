"""kvlingo-mlx show: the facts of a translator or a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlingo_mlx.cli.command import HOLD_IN_BITS, VerbOptions, verb
from kvlingo_mlx.cli.output import Worded, facts, keep
from kvlingo_mlx.options import BITS, option

if TYPE_CHECKING:
    from kvlingo_mlx.format.geometry import LayerGeometry
    from kvlingo_mlx.format.tensor_file import Weights
    from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
    from kvlingo_mlx.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class ShowOptions(VerbOptions):
    path_or_hub_id: str = option(
        ..., "A translator's or model's folder or Hub id, or a name in `list`.", word=True
    )
    quantize: int | None = option(None, HOLD_IN_BITS, kind=BITS)


@verb(ShowOptions)
def command(options: ShowOptions) -> None:
    """Show a translator's or a model's facts."""
    from kvlingo_mlx.errors import KVLingoError
    from kvlingo_mlx.format.translator_folder import CONFIG_FILE, OUR_FILES
    from kvlingo_mlx.loading.hub import resolve
    from kvlingo_mlx.loading.models import load
    from kvlingo_mlx.loading.translators import by_name

    name, quantize = options.path_or_hub_id, options.quantize
    folder, _ = resolve(by_name(name), None, [*OUR_FILES, "config.json"], KVLingoError)
    kind, more = "show_translator", dict[str, Any]()
    if (folder / CONFIG_FILE).exists() or not (folder / "config.json").exists():
        rows = _translator_facts(folder, quantize)
    elif quantize is not None:
        raise ValueError(f"--quantize is for translators, and {name} is a model")
    else:
        model = load(name, lazy=True)
        kind, more = "show_model", model.geometry.facts  # all that the fingerprint hashes
        rows = _model_facts(model)
    keep(options.json_file, kind, {"name": name}, {**facts(rows), **more})


def _translator_facts(folder: Path, quantize: int | None) -> dict[str, Any]:
    from kvlingo_mlx.format import translator_folder
    from kvlingo_mlx.format.maps import flops_of
    from kvlingo_mlx.format.translator_config import unfoldable
    from kvlingo_mlx.loading.grading import said_of

    config, weights = translator_folder.read(folder)
    known = {role: config.fitted_on(role) for role in ("source", "target")}
    fitted = [f"{role} in {precision}" for role, precision in known.items() if precision]
    folded = unfoldable(config)
    sizes = {name: array.size for name, array in weights.arrays.items()}
    parameters, mflop = sum(sizes.values()), flops_of(sizes.items()) / 1e6
    return {
        "source": _spec_line(config.source),
        "target": _spec_line(config.target),
        "kind": config.form,
        "capture": config.capture,
        "source layers per target layer": Worded(config.nu, config.nu_told),
        "keys read": _reads(config.assignment.keys),
        "values read": _reads(config.assignment.values),
        "parameters": Worded(parameters, f"{parameters:,} in {weights.dtype}"),
        "MFLOP per token": Worded(mflop, f"{mflop:.3g}"),
        **({} if quantize is None else _quantised_facts(config, weights, quantize)),
        "tokenizers": "one" if config.alignment is None else f"two, {config.alignment}",
        "can be folded": Worded(folded is None, "yes" if folded is None else f"no: {folded}"),
        "grade": said_of(config),
        "digest": translator_folder.digest(config, weights),
        **({"fitted on": ", ".join(fitted)} if fitted else {}),
        **_rest(config),
    }


def _rest(config: TranslatorConfig) -> dict[str, Any]:
    """Its provenance; what the rows above say in words, only a record holds."""
    from kvlingo_mlx.format.translator_config import OF_MODELS
    from kvlingo_mlx.loading.grading import receipt_of

    rest = {name: fact for name, fact in config.provenance.items() if name not in OF_MODELS}
    if rest.get("ridge") == 0:
        rest["ridge"] = Worded(rest["ridge"], "none")
    if (receipt := receipt_of(config)) is not None:
        usual = "" if receipt.guard is None else f"; a guard takes {receipt.guard} for usual"
        text = f"same first choice at {receipt.top1:.4f} of the tokens{usual}"
        rest["receipt"] = Worded(rest["receipt"], text)
    return rest


def _quantised_facts(config: TranslatorConfig, weights: Weights, bits: int) -> dict[str, Any]:
    from kvlingo_mlx.translators import build
    from kvlingo_mlx.translators.quantised import GROUP, kept

    rows: dict[str, Any] = {}
    for form, width in (("as it is", None), (f"{bits} bits", bits)):
        size = build(config, weights, quantize=width).nbytes
        rows[f"in memory, {form}"] = Worded(size, f"{size / 1e6:.3g} MB")
    if names := kept(weights):
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        why = f"rows of no multiple of {GROUP} numbers"
        rows["not quantised"] = f"{len(names)} matrices, {why}: {listed}"
    return rows


def _spec_line(spec: ModelSpec) -> str:
    return f"{spec.name} ({spec.model_type}, {len(spec.layers)} layers, {_heads(spec.layers[0])})"


def _heads(layer: LayerGeometry) -> str:
    if layer.attention == "latent":
        return f"latents of {layer.value_dim}, rotary keys of {layer.key_dim}"
    if layer.recurrence is not None:
        return f"a recurrence over {layer.key_dim} and {layer.value_dim} numbers"
    return f"{layer.kv_heads} KV heads of {layer.key_dim}"


def _reads(layers: tuple[tuple[int, ...], ...]) -> Worded:
    return Worded(layers, " ".join("+".join(map(str, sources)) for sources in layers))


def _model_facts(model: LanguageModel) -> dict[str, Any]:
    from kvlingo_mlx.caches import bytes_per_token

    geometry = model.geometry
    layer = geometry.layers[0]
    return {
        "model": model.name,
        "model_type": geometry.model_type,
        "cache layers": len(geometry.layers),
        "first layer": f"{_heads(layer)}, {layer.attention}",
        "weights": model.precision,
        "cache dtype": str(model.cache_dtype).rsplit(".", 1)[-1],
        "cache bytes per token": bytes_per_token(model),
        **_recurrent_facts(model),
        "context": model.context_length,
        "geometry": geometry.fingerprint,
        "norms": model.norms_fingerprint,
        "tokenizer": model.tokenizer_fingerprint,
    }


def _recurrent_facts(model: LanguageModel) -> dict[str, Any]:
    """How many layers of a hybrid keep a state, and what all states weigh."""
    from kvlingo_mlx.caches import state_bytes

    rules = Counter(g.attention for g in model.geometry.layers if g.recurrence is not None)
    if not rules:
        return {}
    text = ", ".join(f"{count} by {rule}" for rule, count in rules.items())
    return {"recurrent layers": Worded(dict(rules), text), "state bytes": state_bytes(model)}
