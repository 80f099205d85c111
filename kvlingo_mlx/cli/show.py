"""kvlingo-mlx show: what a translator or a model is."""

from __future__ import annotations

import typer

from kvlingo_mlx.cli.output import facts


def command(
    path_or_hub_id: str = typer.Argument(..., help="A translator or model folder, or a Hub id."),
) -> None:
    """Show a translator's or a model's facts."""
    from kvlingo_mlx.checkpoint import CONFIG_FILE, OUR_FILES
    from kvlingo_mlx.errors import MissingTranslatorError
    from kvlingo_mlx.hub import resolve

    files = [*OUR_FILES, "config.json"]
    folder, _ = resolve(path_or_hub_id, None, files, MissingTranslatorError)
    if (folder / "config.json").exists() and not (folder / CONFIG_FILE).exists():
        _show_model(path_or_hub_id)
    else:
        _show_translator(path_or_hub_id)


def _show_translator(name: str) -> None:
    from kvlingo_mlx.loading import load_translator

    translator = load_translator(name)
    config = translator.config
    facts(
        {
            "source": _spec_line(config.source),
            "target": _spec_line(config.target),
            "kind": f"{config.kind}, {'head-mixing' if config.head_mixing else 'head-wise'}",
            "capture": config.capture,
            "source layers per target layer": config.nu,
            "keys read": _assignment_line(config.assignment.keys),
            "values read": _assignment_line(config.assignment.values),
            "parameters": f"{translator.num_parameters:,} in {translator.dtype}",
            "MFLOP per token": f"{translator.flops_per_token / 1e6:.3g}",
            "can be folded": "yes" if config.capture == "post_rope" else "no: not post-RoPE",
            **config.provenance,
        }
    )


def _spec_line(spec) -> str:
    layer = spec.layers[0]
    return (
        f"{spec.name} ({spec.model_type}, {len(spec.layers)} layers, "
        f"{layer.kv_heads} KV heads of {layer.key_dim})"
    )


def _assignment_line(layers: tuple[tuple[int, ...], ...]) -> str:
    return " ".join("+".join(map(str, sources)) for sources in layers)


def _show_model(name: str) -> None:
    from kvlingo_mlx.loading import load

    model = load(name, lazy=True)
    geometry = model.geometry
    layer = geometry.layers[0]
    facts(
        {
            "model": model.name,
            "model_type": geometry.model_type,
            "cache layers": len(geometry.layers),
            "first layer": f"{layer.kv_heads} KV heads of {layer.key_dim}, {layer.attention}",
            "cache dtype": model.cache_dtype,
            "cache bytes per token": geometry.bytes_per_token(model.cache_dtype.size),
            "context": model.context_length,
            "geometry": geometry.fingerprint,
            "norms": model.norms_fingerprint,
            "tokenizer": model.tokenizer_fingerprint,
        }
    )
