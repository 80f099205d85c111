"""Hand-over between two tokenizers (section "Cross-tokenizer cache translation").

Each model renders the prompt by its own template. The source's tokens are translated chunk by
chunk, one cache entry each. The target then prefills all tokens between them in one pass.
"""

from collections.abc import Callable
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx import caches
from kvlingo_mlx.caches.between import prefill_between
from kvlingo_mlx.caches.entries import pin
from kvlingo_mlx.engine.line import Source
from kvlingo_mlx.engine.plan import Plan
from kvlingo_mlx.models.states import KVStates
from kvlingo_mlx.threads import working
from kvlingo_mlx.tokenization.aligned_prefix import AlignedPrefix


def filled_across(
    plan: Plan, aligned: AlignedPrefix, reader: Source, lap: Callable[[str], None]
) -> list[Any]:
    """Translate a source's states into the target's cache of a text without its last token.

    Args:
        plan: Names the two models, the translator and the target's tokens per prefill chunk.
        aligned: The tokens that are translated, and their places in the target's cache.
        reader: What the source writes of the text; each chunk is freed once it is translated.
        lap: Called with the name of each phase when the phase ends.

    Returns:
        Stock mlx-lm caches, evaluated. Their offset is the number of entries. A cache that does not
        have one entry per token cannot be trimmed into this prefix.
    """
    assert plan.translator is not None
    target, translator = plan.target, plan.translator
    positions = mx.array(aligned.positions + aligned.shift)
    cache = caches.allocate(target, aligned.num_entries)
    read = aligned.source_ids[: aligned.num_read]
    for states in reader.written(read, 0, plan.step_size, translator.config):
        lap("prefill")
        if not isinstance(states, KVStates):
            continue  # a chunk that was read, and nothing yet
        slots = aligned.between(states.start, states.end)
        if slots.start < slots.stop:
            rows = mx.array(aligned.rows[slots] - states.start)
            translated = translator(states.gathered(rows, slots.start))
            caches.write(cache, translated, target, positions[slots])
            del translated
        del states
        with working():
            mx.eval(caches.arrays(cache))
        lap("translate")
    ids = [aligned.target_ids[position] for position in aligned.own]
    places = (aligned.own + aligned.shift).tolist()
    visible = mx.array(aligned.visible)
    prefill_between(target, cache, ids, places, visible, plan.step_size)
    lap("native")
    return cache if aligned.is_identity else pin(cache)
