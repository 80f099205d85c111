"""The whole product on two embedded models: answers, recall and time from a translated cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvlingo_mlx.embedded import TRANSLATORS, dialogues, zoo
from kvlingo_mlx.embedded.dialogues import Dialogue
from kvlingo_mlx.engine.generation import generate
from kvlingo_mlx.evaluation import compare, lineup, probes
from kvlingo_mlx.evaluation.journal import Journal
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.loading.translators import resolve_translator
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.timing import bench
from kvlingo_mlx.timing.switching import interleaved, prompt_of
from kvlingo_mlx.translators.base import Translator

PROMPT = 512  # tokens of the prompt that is timed
SHOWN = 4  # dialogues whose answers are shown


@dataclass(frozen=True)
class Demonstration:
    """The results for one pair."""

    scores: dict[str, compare.Table]  # recall and KL by cache: native, translated, controls
    latency: bench.PhaseTimes  # the seconds of each phase of a switch with 512 prompt tokens
    # One row per dialogue: the question, the true value, and the answers from the native cache,
    # from the translated one, and without the dialogue.
    answers: list[list[str]]


def demonstrate(
    source_name: str, target_name: str, count: int, progress: Callable[[], None]
) -> Demonstration:
    """Compare a pair's embedded translator with native reading, over ``count`` dialogues."""
    source, target = load(zoo(source_name)), load(zoo(target_name))
    folder = TRANSLATORS / f"{source_name}--{target_name}"  # not the user's store
    translator = resolve_translator(folder, source, target)
    task = probes.recall(target, count, seed=1)
    line = lineup.line_up(source, target, {"translated": [translator]}, ("shuffled", "hidden"))
    found = compare.evaluate(target, [task], line, Journal(), lambda name: progress())
    scores = compare.outcome(task, found[task.name]).tables
    pair = bench.BenchPair(source, target, {"stored": translator})
    ways = bench.phases(pair, prompt_of(source, target, PROMPT, text=True))
    latency = bench.PhaseTimes(PROMPT, interleaved(ways, 3))
    talks = dialogues.held_out(SHOWN, seed=1)
    answers = [_answers(talk, source, target, translator) for talk in talks]
    return Demonstration(scores, latency, answers)


def _answers(
    talk: Dialogue, source: LanguageModel, target: LanguageModel, translator: Translator
) -> list[str]:
    """One row of answers, decoded greedily."""
    options: dict[str, Any] = {"max_tokens": 24, "enable_thinking": False}
    translated = generate(source, target, talk.messages, translator=translator, **options)
    native, alone = (
        generate(target, target, t, **options) for t in (talk.messages, talk.messages[-1:])
    )
    return [talk.questions[0], talk.asked[0].value, native, translated, alone]
