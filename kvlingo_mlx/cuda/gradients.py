"""One conversation's part in a step, as in ``training.on_mlx.gradients``.

Translated keys and values enter the target as leaves of the graph, whose gradients each layer's map
then receives.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import kl_div, log_softmax, nll_loss
from transformers import DynamicCache

from kvlingo_mlx.cuda.attention import attended
from kvlingo_mlx.cuda.model import States, TorchModel
from kvlingo_mlx.cuda.translator import TorchTranslator
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix
from kvlingo_mlx.tokenization.samples import Sample
from kvlingo_mlx.training.objectives import BLOCK, Loss, Objective
from kvlingo_mlx.training.runtime import Attended, PairReading, continued, matched_positions

Entry = tuple[torch.Tensor, torch.Tensor]  # one layer's keys and values in the cache's form
Head = Callable[[torch.Tensor], torch.Tensor]  # hidden states (B, width) to logits (B, vocabulary)


@torch.no_grad()
def read(
    source: TorchModel, target: TorchModel, sample: Sample, capture: str, native_layers: int = 0,
    *, attends: bool = False,
) -> PairReading:  # fmt: skip
    """Read a conversation with both models (about 80 % of a step's work).

    Without a continuation this is what a hand-over reads (one tokenizer): there is no teacher.
    With ``attends`` also what its attention is matched by.
    """
    tokens, num_read = (*sample.prefix, *sample.continuation[:-1]), len(sample.prefix) - 1
    tokens = tokens if sample.continuation else tokens[:-1]
    teacher, own = torch.empty(0), list[list[Attended]]()
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(target.tapped(None if attends else native_layers))
        if attends:
            places = matched_positions(len(tokens), sample.aligned)
            own = stack.enter_context(attended(target, places))
        if sample.continuation or native_layers:
            teacher = target.hidden(tokens)[num_read:].clone()
    own_states = target.states_of(taken, target.family.points[0], native_layers)
    native = own_states.map(lambda array: array[:num_read].clone())
    if not attends or sample.aligned is not None:
        whole = states = _source_states(source, target, sample, capture)
    else:
        whole = source.states(tokens, capture).map(lambda a: a.to(target.device, target.dtype))
        states = whole.map(lambda a: a[:num_read])
    both = (whole, target.states_of(taken, capture)) if attends else None
    return PairReading(sample, states, native, teacher, both, own)


def _source_states(source: TorchModel, target: TorchModel, sample: Sample, capture: str) -> States:
    """The states to translate: of ``prefix[:-1]``, or of the shared tokens of two tokenizers."""
    if len(sample.prefix) < 2 or (sample.aligned is not None and not sample.num_translated):
        return States((), ())
    if sample.aligned is None:
        states = source.states(sample.prefix[:-1], capture)
    else:
        states = translated_rows(source, sample.aligned, capture)
    return states.map(lambda array: array.to(target.device, target.dtype))


@torch.no_grad()
def paired_states(
    source: TorchModel, target: TorchModel, sample: Sample, capture: str
) -> tuple[States, States]:
    """The source's and the target's states of a whole prefix, row by row."""
    aligned = sample.aligned
    if aligned is None:
        return source.states(sample.prefix, capture), target.states(sample.prefix, capture)
    own = target.states(aligned.target_ids[:-1], capture)
    return translated_rows(source, aligned, capture), own.map(lambda a: _means(a, aligned))


def translated_rows(source: TorchModel, aligned: AlignedPrefix, capture: str) -> States:
    """The source's states of the translated tokens; the sample must have at least one."""
    rows = torch.tensor(aligned.rows)
    states = source.states(aligned.source_ids[: aligned.num_read], capture)
    return states.map(lambda array: array[rows.to(array.device)])


def _means(array: torch.Tensor, aligned: AlignedPrefix) -> torch.Tensor:
    """The mean of (T, d) over each entry's group of tokens: (S, d), in float32 or wider."""
    dtype = torch.promote_types(array.dtype, torch.float32)
    entries, tokens = (torch.tensor(side, device=array.device) for side in aligned.pairs)
    counts = torch.tensor(aligned.groups[:, 1] - aligned.groups[:, 0], device=array.device)
    sums = torch.zeros(len(aligned.rows), array.shape[1], dtype=dtype, device=array.device)
    return sums.index_add_(0, entries, array[tokens].to(dtype)) / counts[:, None]


def conversation_loss(
    target: TorchModel,
    translator: TorchTranslator,
    reading: PairReading,
    objective: Objective,
    *,
    scale: float = 0.0,
) -> Loss:
    """See :meth:`kvlingo_mlx.training.runtime.Pair.loss`; the target runs the last prefix token."""
    sample, learns = reading.sample, scale != 0.0
    starts, first = _starts(target, reading), len(reading.native.keys)
    own = entries(target, translator, reading)
    own, above = own[:first], own[first:]
    leaves = [
        (keys.detach().requires_grad_(learns), values.detach().requires_grad_(learns))
        for keys, values in above
    ]
    del above
    cache = target.cache([*own, *leaves], len(sample.prefix) - 1)
    with torch.set_grad_enabled(learns):
        student = _student(target, sample, cache)
    teacher, labels = reading.teacher, sample.continuation
    loss = loss_of(objective, target.logits, student, teacher, labels, with_gradient=learns)
    if loss.gradient is not None and leaves:
        student.backward(loss.gradient * scale)
        for t, leaf in enumerate(leaves, start=first):
            outputs = _entry(target, translator, reading, t, starts[t])
            torch.autograd.backward(outputs, [side.grad for side in leaf])
            for side in leaf:
                side.grad = None
    return loss


@torch.no_grad()
def entries(target: TorchModel, translator: TorchTranslator, reading: PairReading) -> list[Entry]:
    """The cache entries of every layer: the native layers' own, then translated ones."""
    starts, native, found = _starts(target, reading), reading.native, []
    for t, start in enumerate(starts):
        if t < len(native.keys):
            sides = native.keys[t][start:], native.values[t][start:]
            found.append(target.entry(t, *sides, target.family.points[0], start))
        else:
            found.append(_entry(target, translator, reading, t, start))
    return found


def _starts(target: TorchModel, reading: PairReading) -> Sequence[int]:
    """Each layer's first position: those before a layer's window are not translated."""
    num_read = len(reading.sample.prefix) - 1
    return target.geometry.first_kept(num_read) if reading.states.keys else []


def _entry(
    target: TorchModel, translator: TorchTranslator, reading: PairReading, layer: int, start: int
) -> Entry:
    """A translated layer's cache entries from position ``start`` on."""
    keys, values = translator.layer(layer, reading.states, rows=slice(start, None))
    aligned = reading.sample.aligned
    at = start if aligned is None else torch.tensor(aligned.positions, device=keys.device)
    return target.entry(layer, keys, values, translator.config.capture, at)


def _student(target: TorchModel, sample: Sample, cache: DynamicCache) -> torch.Tensor:
    """The hidden states (M, width) that predict the continuation."""
    if sample.aligned is None:
        return target.hidden((sample.prefix[-1], *sample.continuation[:-1]), cache)
    tokens, positions, visible = continued(sample)
    more = {
        "position_ids": torch.tensor(positions, device=target.device)[None],
        "attention_mask": torch.tensor(visible, device=target.device)[None, None],
    }
    return target.hidden(tokens, cache, **more)[len(sample.aligned.own) :]


def loss_of(
    objective: Objective,
    head: Head,
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: Sequence[int],
    *,
    with_gradient: bool = True,
) -> Loss:
    """The objective of one continuation, and its gradient in the student's hidden states.

    ``student`` (M, width) are final hidden states that predict the M tokens of ``labels``, and
    ``teacher`` the same ones from the native cache; the model's ``head`` turns them into logits.
    """
    value = kl_total = 0.0
    agreed, best, gradients = 0, list[int](), list[torch.Tensor]()
    targets = torch.tensor(list(labels), device=student.device)
    for start in range(0, len(targets), BLOCK):
        span = slice(start, start + BLOCK)
        hidden = student[span].detach().requires_grad_(with_gradient)
        with torch.no_grad():
            native = log_softmax(head(teacher[span]), dim=-1)
        with torch.set_grad_enabled(with_gradient):
            own = log_softmax(head(hidden), dim=-1)
            kl = kl_div(own, native, reduction="sum", log_target=True) / len(targets)
            ce = nll_loss(own, targets[span], reduction="sum") / len(targets)
            loss = objective.kl * kl + objective.ce * ce
        if with_gradient:
            gradients += torch.autograd.grad(loss, hidden)
        else:
            first = own.argmax(dim=-1)
            agreed += int((first == native.argmax(dim=-1)).sum())
            best += first.tolist()
        value, kl_total = value + loss.item(), kl_total + kl.item()
    gradient = torch.cat(gradients) if with_gradient else None
    return Loss(value, kl_total, gradient, agreed, tuple(best))
