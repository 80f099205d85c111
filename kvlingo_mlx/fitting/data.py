"""What a fit reads: as many samples, from all over the data, as its maps can use."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.embedded.bundled import receipt_rows
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.capture import prefill
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.phases import phase, spelled
from kvlingo_mlx.stage1.bilinear import STATES
from kvlingo_mlx.stage1.closed_form import READ, solving_seconds, unknowns
from kvlingo_mlx.stage1.norms import ATTENTION_NORMS
from kvlingo_mlx.stage1.passes import ClosedForm
from kvlingo_mlx.tokenization.chat_messages import checked_record
from kvlingo_mlx.tokenization.records import JsonLines, Skipped, open_lines
from kvlingo_mlx.tokenization.samples import JUDGES, HeldOut, Sample, other_tokenizer, to_samples

Record = Mapping[str, Any] | Sample
Records = JsonLines | Sequence[Record]
MANY = 16 * JUDGES  # records, from which on some are kept from fitting
PIECE = 64  # tokens by which the pace of reading is measured


def records_of(samples: Iterable[Record] | str | os.PathLike[str]) -> Records:
    """The records of a file, of which only the places of lines are kept, or of anything else."""
    if isinstance(samples, str | os.PathLike):
        return open_lines(Path(samples))
    return list(samples)


@dataclass(frozen=True)
class Chosen:
    """The samples to fit on, in the order of the data."""

    samples: Sequence[Sample]
    tokens: int  # their rows, on which maps are fitted
    records: int  # that were looked at
    of: int  # all records
    name: str  # what messages call the data
    own: HeldOut | None  # a few others, which the receipt measures; None of few records
    skipped: Skipped  # those of the records that cannot be read, or rendered
    models: Sequence[LanguageModel]  # source and target


def chosen(
    records: Records,
    models: Sequence[LanguageModel],
    config: TranslatorConfig,
    norm: str,
    tokens: int | None,
) -> Chosen:
    """Samples of ``tokens`` rows or a little more: all of fewer, else drawn from all over the data.

    A file may be sorted, so its head is not taken. The draw is the same in each process. ``models``
    are source and target; ``tokens`` None is :data:`READ` for each unknown.

    Raises:
        ValueError: There is no record, or none of those that were drawn can be used.
    """
    wanted = READ * unknowns(config) if tokens is None else tokens
    texts = STATES if config.state_maps and tokens is None else 0
    target, context = models[1], min(model.context_length for model in models)
    other = other_tokenizer(models[0].tokenizer, target.tokenizer)
    name = Path(records.name).name if isinstance(records, JsonLines) else "the data"
    apart = JUDGES if len(records) >= MANY else 0
    kept: list[Record] = []
    own: list[Sample] = []
    found: dict[int, Sample] = {}
    rows, looked, skipped = 0, 0, Skipped()
    with phase("choosing samples", wanted) as step:
        for number in np.random.default_rng(0).permutation(len(records)).tolist():
            record, looked = None, looked + 1
            with skipped.those_of(ValueError):
                record = _read(records, number)
                looked -= record is None
            samples = [] if record is None or record in kept else [record]
            made = to_samples(samples, target.tokenizer, context, other, number + 1, skipped)
            for sample in made:
                if len(own) < apart and (short := HeldOut.of(name, [sample]).samples):
                    own += short
                    kept += samples
                elif sample.num_translated and (sample.continuation or norm not in ATTENTION_NORMS):
                    found[number] = sample
                    rows += sample.num_translated
            step(min(rows, wanted))
            if rows >= wanted and len(found) >= texts:
                break
    if skipped and not found:
        raise ValueError(f"no record of {name} can be used; {skipped}")
    if not looked:
        raise ValueError('the data hold no records; give {"messages": [...]} or {"text": ...}')
    held = HeldOut(name, tuple(own)) if own else None
    picked = [found[n] for n in sorted(found)]
    return Chosen(picked, rows, looked, len(records), name, held, skipped, models)


def _read(records: Records, number: int) -> Record | None:
    """A record; None for a blank line."""
    if not isinstance(records, JsonLines):
        return records[number]
    record, where = records.read(number)
    return None if record is None else checked_record(record, where)


def outlook(form: ClosedForm, read: Chosen) -> str:
    """What a fit reads, and about how long all of it takes: reading, solving, the receipt."""
    source, target = read.models
    context, widest = min(source.context_length, target.context_length), unknowns(form.config)
    other = other_tokenizer(source.tokenizer, target.tokenizer)
    judged = () if read.own is None else read.own.samples
    rows = read.tokens * form.passes + receipt_rows(target.tokenizer, context, other)
    rows += sum(len(sample.prefix) + len(sample.continuation) for sample in judged)
    seconds = pace(read.models, read.samples[0]) * rows + solving_seconds(form.config)
    return (
        f"fits maps of {widest:,} inputs on {read.tokens:,} tokens, "
        f"{read.tokens / widest:,.0f} for each, from {len(read.samples):,} of {read.of:,} "
        f"records of {read.name}: about {spelled(seconds / form.group.size)} on this machine"
    )


def pace(models: Sequence[LanguageModel], sample: Sample) -> float:
    """The seconds that a token takes to be read by both models, measured on a short piece.

    It is read twice, since the first time warms up.
    """
    pieces = (sample.source_prefix or sample.prefix)[:PIECE], sample.prefix[:PIECE]
    took = 0.0
    for _ in range(2):
        began = time.monotonic()
        for model, piece in zip(models, pieces, strict=True):
            for _ in prefill(model, piece):
                pass
        took = time.monotonic() - began
    return took / max(map(len, pieces))
