"""Stage 1 on the device: run both models, sum moments, solve every map in closed form.

The ranks of ``mlx.launch`` share the samples and the maps.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvlingo_mlx.arguments import checked
from kvlingo_mlx.errors import KVLingoError, KVLingoWarning
from kvlingo_mlx.evaluation.verification import receipt
from kvlingo_mlx.fitting.data import Record, chosen, outlook, records_of
from kvlingo_mlx.fitting.rows import DeviceRows
from kvlingo_mlx.format.assignment import Assignment
from kvlingo_mlx.format.config_reading import check_mapped, parse_assignment
from kvlingo_mlx.format.fingerprints import facts_of_models
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.group import Group
from kvlingo_mlx.loading.models import load_pair
from kvlingo_mlx.loading.pairing import check_positions
from kvlingo_mlx.machines import facts_of_work, here
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.stage1.closed_form import METHODS, shortage
from kvlingo_mlx.stage1.config import config_of_pair
from kvlingo_mlx.stage1.norms import norm_named
from kvlingo_mlx.stage1.passes import MEMORY, ClosedForm
from kvlingo_mlx.tokenization.samples import HeldOut
from kvlingo_mlx.translators import build
from kvlingo_mlx.translators.base import Translator
from kvlingo_mlx.version import __version__


@checked
def fit(
    source: LanguageModel | str,
    target: LanguageModel | str,
    samples: Iterable[Record] | str | os.PathLike[str],
    *,
    capture: str | None = None,
    norm: str = "frobenius",
    assignment: Assignment | str | None = None,
    nu: int = 1,
    head_mixing: bool = True,
    state_maps: bool = False,
    ridge: float | None = None,
    memory: int = MEMORY,
    tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Translator:
    """Fit a translator in closed form (section "Training the translator", equation (3.2)).

    In a program that ``mlx.launch`` started, each rank reads its share of the samples, and all
    return the same translator; save it on the first one.

    Args:
        source: The model whose cache will be translated.
        target: The model that will decode from the translation.
        samples: Records {"messages": [...]} or {"text": ...}, or ``Sample`` objects; or the path of
            a JSONL file of such records.
        capture: The point where keys are read and written: pre_norm, post_norm, post_rope, or
            latent (MLA). None is pre_norm, or latent for models that cache latents.
        norm: frobenius, sink_2 to sink_32, attention_mass (or attention) or
            attention_fisher.
        assignment: The source layers of each target layer, or the method to choose them:
            relative_depth (None; layer to layer for equal depth and nu = 1), r2 or greedy. The
            last two weigh all tokens alike under the attention norms.
        nu: The number of source layers that each target layer reads.
        head_mixing: False for block-diagonal maps, one block per head.
        state_maps: Map recurrent states, head by head, by one product from each side, and not what
            goes into them (docs/guides/linear-attention.md): much cheaper, between models of one
            recurrence alone.
        ridge: The ridge of each map, as a share of its inputs' mean square. None chooses one by
            generalised cross-validation, which matters where data are few; 0 is none, as in the
            paper.
        memory: Most bytes of moments in memory at once; where they would take more, the samples
            are read several times, for some layers at a time.
        tokens: How many to read, in samples from all over the data; data that hold fewer are read
            to their end. None is 64 for each unknown of the largest map. Of 128 records or more a
            few are not fitted on; the receipt measures these, too.
        progress: Called with (samples done, number of samples), over all passes.
        say: Called once, before anything is fitted, with a line that says what is read, and about
            how long it takes on this machine.

    Raises:
        ValueError: An argument is bad, no sample is usable, or there are fewer tokens than a map
            has unknowns (its input width: ``nu`` source layers; head-wise, one head).
        IncompatibleTranslatorError: The layers have no counterpart, no translator connects models
            of these kinds, or they have two tokenizers and are captured after RoPE.
        UnsupportedModelError: There are two tokenizers, and the target's cache must hold one entry
            per token.
        MalformedTranslatorError: An ``Assignment`` does not fit these models.
        KVLingoError: The ranks have other versions, models, samples or arguments than one another.

    Warns:
        KVLingoWarning: The data have few tokens for the unknowns; it says how many suffice. Some
            records cannot be used; it says how many, and why the first.
    """
    source, target = load_pair(source, target)
    norm, method = norm_named(norm), assignment if isinstance(assignment, str) else None
    form = {"nu": nu, "capture": capture, "head_mixing": head_mixing, "state_maps": state_maps}
    config = _config(source, target, assignment, form)
    group = here()
    read = chosen(records_of(samples), (source, target), config, norm, tokens)
    every, total = list(enumerate(read.samples)), len(read.samples)
    asked = {"data": every, "options": (config.to_json(), norm, method, nu, memory, ridge)}
    group.agree(lambda: facts_of_work((source, target), asked))
    work = ClosedForm(
        config,
        DeviceRows(source, target),
        lambda: (s if group.owns(n) else None for n, s in every),
        norm,
        method,
        nu,
        memory,
        ridge,
        group,
        total,
    )
    work.progress = progress or work.progress
    if group.leads and read.samples:
        say(outlook(work, read))
    work.run()
    short = shortage(config, work.used, work.tokens, work.lowest)
    for told in (short, str(read.skipped) if read.skipped else "") if group.leads else ():
        if told:
            warnings.warn(told, KVLingoWarning, stacklevel=2)
    fitted = build(work.config, Weights.from_float32(work.weights, "float32"))
    provenance = {
        "stage": 1,
        "norm": norm,
        "assignment": method or ("explicit" if assignment else "relative_depth"),
        **work.facts(),
        "records": read.records,
        "kvlingo_mlx": __version__,
        "mlx": version("mlx"),
        "date": time.strftime("%Y-%m-%d"),
        **facts_of_models({"source": source, "target": target}),
        **_receipt((source, target, fitted), read.own, group),
    }
    return replace(fitted, config=replace(work.config, provenance=provenance))


def _config(
    source: LanguageModel,
    target: LanguageModel,
    assignment: Assignment | str | None,
    form: Mapping[str, Any],
) -> TranslatorConfig:
    """The checked config of the translator to be fitted."""
    layers = None
    if isinstance(assignment, Assignment):
        ends = source.spec(), target.spec()
        layers = parse_assignment(Path("assignment"), assignment.to_json(), *ends)
    elif assignment not in (None, "relative_depth", *METHODS):
        known = f"relative_depth, {' or '.join(METHODS)}, or an Assignment"
        raise ValueError(f"assignment is {assignment!r}; it must be {known}")
    if source.tokenizer_fingerprint != target.tokenizer_fingerprint:
        check_positions(target)
    config = config_of_pair(source, target, assignment=layers, **form)
    check_mapped(Path("assignment"), config)
    return config


def _receipt(
    models: tuple[LanguageModel, LanguageModel, Translator], own: HeldOut | None, group: Group
) -> dict[str, Any]:
    """The translator's receipt, if these models can read the bundled conversations.

    Beside it the number of records that nothing was fitted on. Every process measures it, and
    finds the same.
    """
    kept = {} if own is None else {"held_out": len(own.samples)}
    try:
        found = receipt(*models, own=own)
        return kept if found is None else {**kept, "receipt": found}
    except (KVLingoError, ValueError) as problem:
        if group.leads:
            warnings.warn(f"the fit leaves no receipt: {problem}", KVLingoWarning, stacklevel=3)
        return kept
