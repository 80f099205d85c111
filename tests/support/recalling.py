"""Prompts of the embedded models' facts, what is asked of them in lm-eval, and what is written."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.generate import stream_generate

from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.evaluation import conditions
from kvlingo_mlx.models.language_model import LanguageModel

NAMES = "tiny-qwen3-s", "tiny-qwen3-l"
TALKS = list(dialogues.held_out(16, seed=3))
MOST = 24
Makers = dict[str, conditions.CacheMaker]


def prompt(model: LanguageModel, talk: dialogues.Dialogue, thinking: bool = False) -> str:
    return model.tokenizer.apply_chat_template(
        list(talk.messages), tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )


def asked(
    contexts: Sequence[str], until: Any = (), most: int = MOST, task: str = "dialogues"
) -> list[Any]:
    from lm_eval.api.instance import Instance

    options = {"until": list(until), "max_gen_toks": most}
    return [Instance("generate_until", {}, (context, options), 0, metadata=(task, index, 1))
            for index, context in enumerate(contexts)]  # fmt: skip


def alone(model: LanguageModel, tokens: Sequence[int], cache: list, most: int = MOST) -> str:
    """What mlx-lm's own loop writes from a cache of all tokens but the last."""
    written = stream_generate(
        model.model, model.tokenizer, list(tokens[-1:]), max_tokens=most, prompt_cache=cache
    )
    return model.tokenizer.decode([r.token for r in written if r.finish_reason != "stop"])


def recalled(answers: Sequence[str]) -> float:
    return sum(t.asked[0].value in a for t, a in zip(TALKS, answers, strict=True)) / len(TALKS)


def same(ours: Sequence[str], theirs: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
