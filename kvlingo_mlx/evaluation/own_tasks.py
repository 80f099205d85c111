"""Our own tasks, made for a pair of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import probes
from kvlingo_mlx.evaluation.probes import Task
from kvlingo_mlx.loading.pairing import check_tokenizers
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.samples import other_tokenizer, read_jsonl

LENGTHS = (4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class TaskOptions:
    """The options of our tasks.

    Attributes:
        limit: The most items of a task; for needles, of each variant and length.
        seed: The seed of generated items.
        data: A JSONL file for ``continuation``; None uses generated dialogues.
        window: Cut the file's texts into windows of so many tokens of prefix and of continuation.
        lengths: The lengths of haystacks in tokens; None uses those of ``LENGTHS`` that fit.
        needles, style, haystack, max_tokens, thinking: The ``variants``, ``style``, ``text``,
            ``max_tokens`` and ``thinking`` of :func:`.probes.find_needles`.
    """

    limit: int = 64
    seed: int = 0
    data: str | None = None
    window: tuple[int, int] | None = None
    needles: Sequence[str] = ()
    lengths: Sequence[int] | None = None
    style: str = "magic"
    haystack: str | None = None
    max_tokens: int = 128
    thinking: bool = False


def make(name: str, source: LanguageModel, target: LanguageModel, asked: TaskOptions) -> Task:
    """The task ``continuation``, ``recall`` or ``needles``, with prompts that fit both contexts.

    Raises:
        ValueError: The data hold no usable item, or a haystack does not fit.
    """
    context = min(source.context_length, target.context_length)
    if name == "continuation":
        if asked.data:
            records = read_jsonl(asked.data)
        else:
            talks = dialogues.held_out(asked.limit, seed=asked.seed)
            records = [{"messages": talk.conversation()} for talk in talks]
        if asked.window is not None:
            check_tokenizers(source, target, "window cuts by one tokenizer; leave it out")
            return probes.windows(target, records, asked.limit, asked.window, context)
        other = other_tokenizer(source.tokenizer, target.tokenizer)
        return probes.continuation(target, records, asked.limit, context, other)
    if name == "recall":
        return probes.recall(target, asked.limit, asked.seed, source)
    return probes.find_needles(
        target,
        asked.needles,
        lengths_within(asked.lengths, context - asked.max_tokens),
        asked.limit,
        seed=asked.seed,
        style=asked.style,
        text=asked.haystack,
        max_tokens=asked.max_tokens,
        thinking=asked.thinking,
        source=source,
    )


def lengths_within(lengths: Sequence[int] | None, room: int) -> Sequence[int]:
    """The lengths of haystacks that leave room for an answer.

    Raises:
        ValueError: A length that is asked for does not.
    """
    if lengths is None:
        return [length for length in LENGTHS if length <= room] or [room]
    for length in lengths:
        if not 1 <= length <= room:
            raise ValueError(
                f"--lengths holds {length}; give numbers of tokens from 1 to {room}, which is what "
                "the shorter of the two contexts leaves for a prompt"
            )
    return lengths
