"""Hand-over between two tokenizers (section "Cross-tokenizer cache translation").

Each model renders the prompt by its own template. The source's tokens are translated as they
come, one entry each; the target then prefills all that lies between in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx import caches
from kvlingo_mlx.caches.between import prefill_between
from kvlingo_mlx.caches.entries import pin
from kvlingo_mlx.models import capture
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.prompts import Prompt, rendering
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import working
from kvlingo_mlx.tokenization.two_tokenizers import Handover
from kvlingo_mlx.translators.base import Translator


def plan(
    source: LanguageModel,
    target: LanguageModel,
    prompt: Prompt,
    enable_thinking: bool | None = None,
    **switches: Any,
) -> Handover:
    """A prompt as both models read it.

    Raises:
        ValueError: It is empty, or token ids; more than a model's context; or a model has no
            template for messages.
    """
    both = (rendering(model, prompt, enable_thinking, **switches) for model in (source, target))
    found = Handover.of(*both)
    source.check_tokens(found.source_ids)
    target.check_tokens(found.target_ids)
    return found


def take_over(
    spans: Iterable[KVStates],
    source: LanguageModel,
    target: LanguageModel,
    translator: Translator,
    handover: Handover,
    step_size: int = 2048,
    lap: Callable[[str], None] = lambda phase: None,
) -> list[Any]:
    """The target's cache of a text but for its last token, from what the source wrote of it.

    Args:
        spans: What the source wrote, in order; each is let go of once translated.
        source: Who wrote that.
        target: Whose cache is wanted.
        translator: Of this pair.
        handover: What is translated and where it goes.
        step_size: Tokens per chunk that the target prefills.
        lap: Is told of each phase that has ended.

    Returns:
        Stock mlx-lm caches, evaluated, their offset the number of entries; those whose entries are
        not one a token cannot be trimmed into.
    """
    positions = mx.array(handover.positions + handover.shift)
    cache = caches.allocate(target, handover.num_entries)
    for states in spans:
        lap("prefill")
        slots = handover.between(states.start, states.end)
        if slots.start < slots.stop:
            moved = capture.move(states, source, translator.config.capture)
            rows = mx.array(handover.rows[slots] - states.start)
            translated = translator(moved.gathered(rows, slots.start))
            caches.write(cache, translated, target, positions[slots])
            del moved, translated
        del states
        with working():
            mx.eval(caches.arrays(cache))
        lap("translate")
    ids = [handover.target_ids[position] for position in handover.own]
    places = (handover.own + handover.shift).tolist()
    visible = mx.array(handover.visible)
    prefill_between(target, cache, ids, places, visible, step_size)
    lap("native")
    return cache if handover.is_identity else pin(cache)
