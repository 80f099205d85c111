"""What a step of training takes in memory, from the models' shapes.

The terms are those of docs/guides/train-a-pair.md. Their factors were measured on this package by
``benchmarks/training_memory.py``, on a CPU and dense models.
"""

import math
from collections.abc import Iterator

from kvlingo_mlx.backend import mx, on_gpu

from kvlingo_mlx.caches import memory
from kvlingo_mlx.caches.memory import cache_bytes, weights_bytes
from kvlingo_mlx.format.maps import first_readers, maps_of, shapes_of, state_maps_of
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.models.delta_rule import CHUNK
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.training.on_mlx import gradients
from kvlingo_mlx.training.on_mlx.losses import LOGITS
from kvlingo_mlx.training.plan import TrainingPlan

PLAN = TrainingPlan()
SHORTEST = 64  # tokens: the shortest prefix that is proposed
FLOAT = 4  # bytes of the numbers of translators and logits
HEADS = "num_attention_heads"
MLP = 6  # arrays as wide as the MLP that a pass without gradient has at once
BACKWARD = 2.15  # as many of these has a layer's backward pass
SCORES = 4.5  # arrays of attention scores that a layer's backward pass has at once
HEAD = 9.9  # arrays of a block's logits that the loss has at once
# Arrays of a recurrence's rows, keys and values (``_steps``) that are there at once.
RUN = {"gated_delta": 11.5, "mamba2": 3.4}  # in a pass without gradient
RUN_BACK = 12.0  # in a layer's backward pass, beside what else it has
RUN_MAPS = {"gated_delta": 10.5, "mamba2": 5.0}  # where maps learn from a segment
MAMBA = 256  # tokens of a chunk in mlx-lm's Mamba-2
MAPS = 4  # arrays of a layer's keys and values that the gradients of its maps take


def check(
    source: LanguageModel,
    target: LanguageModel,
    config: TranslatorConfig,
    lengths: tuple[int, int],
    rates: int,
    plan: TrainingPlan,
) -> str:
    """What :func:`needs` tells, for users.

    Raises:
        NotEnoughMemoryError: There is less; the message says what would fit.
    """
    prefix, answer = lengths

    def parts(prefix: int) -> dict[str, int]:
        return needs(source, target, config, prefix, answer, rates, plan)

    found, there = parts(prefix), memory.free()
    weights = next(iter(found.values()))
    held = min(mx.get_active_memory(), weights)
    halves = (prefix >> n for n in range(1, prefix.bit_length()) if prefix >> n >= SHORTEST)
    fits = (n for n in halves if there is None or sum(parts(n).values()) <= there + held)
    most = next(fits, None)
    # `pair` chooses lengths by itself, so the verb that takes them is named.
    shorter = "shorter lengths (--max-prefix, --max-continuation) or fewer --lr"
    instead = shorter if most is None else f"--max-prefix {most}"
    memory.check(found, held, f"{memory.FEWER_BITS} `train` with {instead}")
    size = memory.size_of(sum(found.values()))
    return f"training takes at most about {size} ({memory.listed(found)})"


def needs(
    source: LanguageModel,
    target: LanguageModel,
    config: TranslatorConfig,
    prefix: int,
    answer: int,
    rates: int = 1,
    plan: TrainingPlan = PLAN,
) -> dict[str, int]:
    """The bytes that training takes at most, by purpose.

    ``prefix`` and ``answer`` are the tokens of the longest prefix and continuation; each of
    ``rates`` learning rates has a translator of its own. ``plan`` tells what else it takes: an
    MLP's hidden units, white coordinates, which have matrices and inputs of their own, attention
    that is matched, for which the target reads a text in one pass, and conversations that are kept.
    """
    matches, reads = plan.matching > 0, plan.recipe.reads
    models = sum({id(model): weights_bytes(model) for model in (source, target)}.values())
    # Tensors, two moments of AdamW, and gradients.
    numbers = 4 * _numbers(config, plan.hidden)
    if plan.recipe.whitened:
        first, tokens = set(first_readers(config).values()), prefix + answer
        whitened = [m for m in maps_of(config) if m.name in first]  # their matrices and inputs
        numbers += sum((m.heads or 1) * m.inputs * (m.inputs + tokens) for m in whitened)
    translators = rates * FLOAT * numbers
    lengths, kept = (prefix, answer), config.state_maps
    reading = _reading(source, target, *lengths, kept=kept, matches=matches)
    most = max(*reading, _learning(source, target, *lengths, kept=kept))
    found = {
        "weights of both models": models,
        f"{rates} translator{'s'[: rates > 1]} in training": translators,
        f"a conversation of {prefix:,} + {answer:,} tokens": int(most),
    }
    if reads:
        bytes_kept = reads * kept_bytes(source, target, prefix + answer, matches)
        found[f"{reads:,} such conversations that are learned from in turn"] = bytes_kept
    return found


def kept_bytes(source: LanguageModel, target: LanguageModel, tokens: int, matches: bool) -> int:
    """The bytes of a conversation that is kept: queries take as much as the target's cache."""
    return cache_bytes(source, tokens) + (2 * cache_bytes(target, tokens) if matches else 0)


def _numbers(config: TranslatorConfig, hidden: int) -> int:
    shapes = [shapes_of(config, m, config.spec.tensors, hidden) for m in maps_of(config)]
    shapes += [dict(m.shapes) for m in state_maps_of(config)]
    return sum(math.prod(shape) for each in shapes for shape in each.values())


def _reading(
    source: LanguageModel, target: LanguageModel, prefix: int, answer: int, *, kept: bool,
    matches: bool,
) -> Iterator[float]:  # fmt: skip
    """The bytes beside weights while each model reads a conversation without gradient.

    ``kept`` says that recurrent states are kept, and not what goes into them.
    """
    inputs = 0 if kept else _inputs_bytes(source, prefix)
    for model, held in (
        (target, cache_bytes(target, prefix + answer)),
        (source, 2 * cache_bytes(source, prefix) + inputs),
    ):
        chunk = min(prefix, gradients.STEP)
        chunk = prefix + answer if matches and model is target else chunk
        # A GPU's attention writes no scores; a CPU writes those of a chunk and all before it.
        scores = 0 if on_gpu() else _fact(model, HEADS) * chunk * prefix
        rule, steps = _steps(model)
        run = FLOAT * chunk * RUN.get(rule, 0.0) * steps
        parts = model.cache_dtype.size * chunk * _wide(model), model.cache_dtype.size * scores
        if rule == "gated_delta":
            yield held + max(*parts, run)
        elif rule:  # mlx-lm's Mamba-2 reads as one graph, of which MLX works ahead
            yield held + max(parts) + run
        else:
            yield held + sum(parts)


def _learning(
    source: LanguageModel, target: LanguageModel, prefix: int, answer: int, *, kept: bool
) -> float:
    """The bytes beside weights and translators while the target learns from a conversation."""
    size, width = target.cache_dtype.size, _fact(target, "hidden_size")
    states = cache_bytes(source, prefix) + cache_bytes(target, prefix)
    states += 0 if kept else _inputs_bytes(source, prefix)
    between = (len(target.geometry.layers) + 4) * answer * width * size
    logits = HEAD * FLOAT * min(LOGITS, answer * target.geometry.embedding_rows)
    scores = SCORES * _fact(target, HEADS) * answer * (prefix + answer)
    layer = size * (BACKWARD * answer * _wide(target) + scores)
    by_token = [g for g in target.geometry.layers if not kept or g.recurrence is None]
    widest = max(each.width("keys") + each.width("values") for each in by_token)
    maps: float = MAPS * FLOAT * prefix * widest
    rule, steps = _steps(target)
    if rule:
        if not kept:  # maps of inputs learn from a segment of the prefix at a time
            segment = min(prefix, gradients.SEGMENT)
            maps = FLOAT * segment * (MAPS * widest + RUN_MAPS[rule] * steps)
        recurrent = size * BACKWARD * answer * _wide(target) + FLOAT * answer * RUN_BACK * steps
        layer = max(layer, recurrent)
    return states + between + max(logits, layer, maps)


def _inputs_bytes(model: LanguageModel, tokens: int) -> int:
    """The bytes of the inputs of a model's recurrences, which its cache does not keep."""
    if model.address is not None:
        return 0
    recurrent = (each for each in model.geometry.layers if each.recurrence is not None)
    widths = (each.width("keys") + each.width("values") for each in recurrent)
    return model.cache_dtype.size * tokens * sum(widths)


def _steps(model: LanguageModel) -> tuple[str, int]:
    """A model's recurrence with a state, and the numbers a token that it has several times.

    In chunks each head has a row as long as a chunk, beside its key and its value. The rule is
    empty and the number 0 where there is no such layer.
    """
    found = ("", 0)
    for layer in model.geometry.layers:
        if (each := layer.recurrence) is not None and each.key_dim:
            row = CHUNK if layer.attention == "gated_delta" else MAMBA
            numbers = each.value_heads * (row + each.key_dim + each.value_dim)
            found = max(found, (layer.attention, numbers), key=lambda pair: pair[1])
    return found


def _wide(model: LanguageModel) -> int:
    """The numbers a token that a layer's pass has at once."""
    experts = _fact(model, "num_experts_per_tok") * _fact(model, "moe_intermediate_size")
    inner = max(_fact(model, "intermediate_size"), experts)
    return MLP * inner + _fact(model, "hidden_size")


def _fact(model: LanguageModel, name: str) -> int:
    """The largest number of that name in a model's config; 0 where a family has another name."""
    found = model.facts.get(name) or 0
    return max(found) if isinstance(found, list) else int(found)
