"""Checks that a translator computes on this machine what it computed when it was made."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import numpy as np

from kvlingo_mlx.embedded.bundled import spelled
from kvlingo_mlx.engine.fill import take_over
from kvlingo_mlx.engine.guarding import divergence
from kvlingo_mlx.engine.hybrid import Native
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.evaluation.continuation import comparer
from kvlingo_mlx.format import translator_folder
from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import Map, maps_of, state_maps_of
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading import grading
from kvlingo_mlx.loading.grading import (
    GRADES,
    GUARD,
    Agreement,
    MeasuredConversation,
    Receipt,
    cuts,
    receipt_of,
)
from kvlingo_mlx.loading.translators import store
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.hidden import recorded
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import finished
from kvlingo_mlx.tokenization.samples import HeldOut, Sample
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from kvlingo_mlx.translators.state_maps import StateMapped

Ends = tuple[LanguageModel, LanguageModel, Translator]  # the source, the target, the translator


def devices() -> list[mx.Device]:
    """The CPU, and the default device if it is another one."""
    return list({str(d): d for d in (mx.Device(mx.cpu), mx.default_device())}.values())


def map_error(config: TranslatorConfig, weights: Weights, device: mx.Device) -> float:
    """The largest relative error of a map on its probe: MLX on ``device`` against float64 NumPy.

    Token t of the states holds the probe of target layer t's maps, so all maps run together.
    """
    with mx.stream(device):
        translator = build(config, weights).in_full()
        found = translator(_probe_states(config)).states(len(config.target.layers))
        mapped = [_probed(m) for m in translator.of_states]
        mx.eval(found.arrays, mapped)
    probes = translator_folder.selftest(config, weights)
    errors = []
    for m in maps_of(config):
        ours = [np.array(found.side(side)[m.layer][0, m.layer]) for side in m.writes]
        errors.append(_relative_error(np.concatenate(ours), _expected(m, config, weights, probes)))
    for each, state in zip(state_maps_of(config), mapped, strict=True):
        errors.append(_relative_error(np.array(state), probes[f"{each.name}.probe_out"]))
    return max(errors)


def _probed(m: StateMapped) -> mx.array:
    """A map of states applied to its probe; (heads, value dim)."""
    values, keys, query = translator_folder.state_probe(m.map)
    kept = {
        layer: mx.array(np.tile(np.outer(v, k).astype(np.float32), (1, max(m.map.heads) + 1, 1, 1)))
        for layer, v, k in zip(m.map.reads, values, keys, strict=True)
    }
    return (m(kept) @ mx.array(query.astype(np.float32)))[0]


def _probe_states(config: TranslatorConfig) -> KVStates:
    """States that hold the probe of each map."""
    tokens, layers = len(config.target.layers), config.source.layers
    arrays = {
        side: [np.zeros((1, tokens, layer.width(side)), np.float32) for layer in layers]
        for side in SIDES
    }
    for m in maps_of(config):
        values, begin = translator_folder.probe(m.inputs), 0
        for side, s in m.reads:
            copies = 1 if m.heads is None else layers[s].kv_heads
            width = layers[s].width(side) // copies
            arrays[side][s][0, m.layer] = np.tile(values[begin : begin + width], copies)
            begin += width
    keys, values_ = (tuple(map(mx.array, arrays[side])) for side in SIDES)
    return KVStates(keys, values_, config.capture, 0, {})


def _expected(
    m: Map, config: TranslatorConfig, weights: Weights, probes: dict[str, np.ndarray]
) -> np.ndarray:
    """A map's output on its probe; the format's own probes leave out a linear map's bias."""
    out, bias = probes[f"{m.name}.{config.spec.probe}"].reshape(-1), f"{m.name}.bias"
    left_out = config.spec.folds and bias in weights.arrays
    return out + weights.as_float32(bias) if left_out else out


def _relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    one, other = found.astype(np.float64), expected.astype(np.float64)
    return float(np.linalg.norm(one - other) / max(float(np.linalg.norm(other)), 1e-30))


def agreement(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    native_layers: int = 0,
    *,
    own: HeldOut | None = None,
) -> Agreement | None:
    """The quality of the target's continuations of the bundled conversations.

    The caches are translated above the first ``native_layers``, which the target reads itself: as
    many as the receipt was measured with, whatever `tune` has chosen since. ``own`` are samples of
    the user's data, measured besides. None if no bundled conversation fits both contexts.
    """
    measure = partial(_measured, (source, target, translator), native_layers)
    return grading.agreement(source, target, native_layers, measure, own)


def _measured(
    ends: Ends, native_layers: int, sample: Sample, value: tuple[int, ...] | None
) -> MeasuredConversation:
    """One conversation, of which the source reads the prefix once for all that is measured."""
    source, target, translator = ends
    make = conditions.translated(*ends, native_layers)
    reading = None
    if sample.aligned is None:
        reading = _read(source, sample.prefix[:-1])
        if native_layers < len(target.attentions) and not translator.config.state_maps:
            plan_of = partial(conditions.plan_of, *ends, part=Native(native_layers))
            make = lambda prefix: take_over(plan_of(prefix), [reading[0]]).cache  # noqa: E731
    compare = comparer(target, sample)
    ways = [compare(way) for way in (make, None, conditions.hidden(target))]
    same = ways[0].best == ways[1].best
    watched = reading is not None and value is not None
    return MeasuredConversation(
        [float(way.kl.mean()) for way in ways],
        int(same.sum()),
        same.size,
        [spelled(way.best.tolist(), sample, value) for way in ways] if value else (),
        usual(*ends, sample.prefix, native_layers, reading) if watched else (),
    )


def _read(source: LanguageModel, tokens: Sequence[int]) -> tuple[KVStates, mx.array]:
    """What a source writes of some tokens, and its final hidden states (1, T, width)."""
    with recorded(source) as hidden:
        (states,) = capture.prefill(source, tokens, len(tokens))
        mx.eval(hidden)
    return states, hidden[0]


def usual(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    tokens: Sequence[int],
    native_layers: int = 0,
    reading: tuple[KVStates, mx.array] | None = None,
) -> list[float]:
    """How far two models lie apart over the last tokens of a prompt, as a guard measures it.

    The prompt is also measured where it is cut short, since a guard meets all kinds of ends.
    ``reading`` is what the source wrote of all tokens but the last, if it has read them.
    """
    states, hidden = reading or _read(source, tokens[:-1])
    found, native, heard = [], Native(native_layers), list[mx.array]()
    for stop in cuts(len(tokens) - 1):
        begun = stop - GUARD
        span = states.part(0, begun)
        if translator.config.state_maps:  # after a longer text they are others
            (span,) = capture.prefill(source, tokens[:begun], begun, kept=True)
        prefix = list(tokens[: begun + 1])
        line = take_over(Plan(source, target, prefix, translator, native), [span])
        finished(line.read(tokens[begun:stop], GUARD, heard.append))
        found.append(divergence((source, hidden[0, begun:stop]), (target, heard.pop())))
    return found


def receipt(
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    native_layers: int = 0,
    own: HeldOut | None = None,
) -> dict[str, Any] | None:
    """The receipt that goes into a new translator's provenance, of :func:`agreement`."""
    found = agreement(source, target, translator, native_layers, own=own)
    return None if found is None else found.to_json(str(target.cache_dtype).rsplit(".", 1)[-1])


def verdict(found: Receipt, receipt: Receipt | None) -> tuple[bool, str]:
    """Whether a translator measured as ``found`` is sound, and one line that says why.

    The KL may differ from that of its maker's ``receipt`` by a fifth or by 0.01 nats, whichever is
    more.
    """
    allowed = 0.0 if receipt is None else max(0.2 * receipt.kl, 0.01)
    if receipt is not None and not abs(found.kl - receipt.kl) <= allowed:
        return False, (
            f"differs from its receipt: KL {found.kl:.4f}, expected {receipt.kl:.4f} within "
            f"{allowed:.4f}; are the models those, in the precision, that it was trained with?"
        )
    if found.grade == GRADES[-1]:
        return True, f"{found}"
    if receipt is None:
        return True, f"{found}; it had no receipt to compare"
    return True, f"as its receipt says; {found}"


def keep_receipt(
    folder: Path, config: TranslatorConfig, weights: Weights, found: Agreement
) -> bool:
    """Write a measurement into a stored translator without a receipt; whether it was written.

    Only the user's own store is written to. A receipt that is there stays: it says what the
    translator's maker measured. If it is of a version that did not measure what a guard compares,
    this is added.
    """
    there = receipt_of(config)
    if folder.parent != store():
        return False
    if there is None:
        kept = {**found.receipt.to_json(), "tokens": found.tokens}
    elif there.guard is None and found.receipt.guard is not None:
        kept = {**config.provenance["receipt"], "guard": asdict(found.receipt.guard)}
    else:
        return False
    config = replace(config, provenance={**config.provenance, "receipt": kept})
    translator_folder.write(folder, config, weights, overwrite=True)
    return True
