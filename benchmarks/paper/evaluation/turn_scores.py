"""Benchmarks of conversations that two models answer in turn: held in both orders, and scored."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np

from benchmarks.paper.evaluation.judge import Ask, judge_answers
from benchmarks.paper.evaluation.turns import Manner, Models, Talk, Way, answers
from kvlingo_mlx.evaluation.compare import Outcome, Scored, tabulated
from kvlingo_mlx.evaluation.journal import Responses, key_of
from kvlingo_mlx.evaluation.lineup import identity_of
from kvlingo_mlx.models.prompts import encode

DEPTHS = 2  # turns of a bin, where conversations are told apart by their depth


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark's conversations are held and scored.

    Attributes:
        name: Its name in tables.
        metric: The score's name.
        score: The score of an answer, given its references; None where a judge scores the last one.
        max_tokens: The most tokens of an answer, as in the paper.
    """

    name: str
    metric: str
    score: Callable[[str, Sequence[str]], float] | None
    max_tokens: int

    def group(self, talk: Talk, asked: int) -> str:
        """Where an answer counts: its turn or, for the last one alone, the conversation's depth."""
        if self.score is not None:
            return f"turn {asked + 1}"
        low = (len(talk.turns) - 1) // DEPTHS * DEPTHS + 1
        return f"turns {low}-{low + DEPTHS - 1}"


def that_fit(
    models: Models, talks: Sequence[Talk], manner: Manner
) -> tuple[list[Talk], dict[str, int]]:
    """The conversations that fit both contexts, and by name how many tokens their messages take.

    Raises:
        ValueError: None fits.
    """
    context = min(model.context_length for model in models.values())
    model = next(iter(models.values()))
    lengths = {}
    for talk in talks:
        whole = [replace(t, written=t.written or "") for t in talk.turns]
        messages = replace(talk, turns=tuple(whole)).messages(len(whole))[:-1]
        lengths[talk.name] = len(encode(model, messages, enable_thinking=manner.thinking))
    most = {talk.name: len(talk.asked) * manner.max_tokens for talk in talks}
    fitting = [talk for talk in talks if lengths[talk.name] + most[talk.name] <= context]
    if not fitting:
        shortest = min(lengths[talk.name] + most[talk.name] for talk in talks)
        raise ValueError(
            f"no conversation fits a context of {context} tokens: the shortest one takes "
            f"{shortest} with its answers of up to {manner.max_tokens}; give shorter ones, or "
            "fewer --max-tokens"
        )
    return fitting, lengths


@dataclass(frozen=True)
class Held:
    """A benchmark's conversations, with who holds them and how.

    Attributes:
        models: The two models by name.
        talks: The conversations, in order; their names differ.
        ways: Ways with different names.
        manner: How every answer is given.
        responses: Keeps the answers of every conversation.
    """

    models: Models
    talks: Sequence[Talk]
    ways: Sequence[Way]
    manner: Manner
    responses: Responses = field(default_factory=Responses)

    def orders(self) -> list[tuple[str, ...]]:
        """Who answers the first turn, and who the second."""
        return list(itertools.permutations(self.models))

    @property
    def runs(self) -> int:
        """The number of conversations that are held, over all orders, ways and seeds."""
        return len(self.orders()) * len(self.talks) * sum(len(way.seeds) for way in self.ways)

    def said(
        self, order: Sequence[str], progress: Callable[[], None] = lambda: None
    ) -> dict[str, list[list[list[str]]]]:
        """The answers by way, seed and conversation; those that are kept are not given again."""
        wanted, keys = (dict[str, Callable[[], list[str]]](), dict[str, list[list[str]]]())
        for way in self.ways:
            keys[way.name] = []
            for seed in range(len(way.seeds)):
                own = [self._key(way, seed, talk, order) for talk in self.talks]
                for key, talk in zip(own, self.talks, strict=True):
                    wanted[key] = partial(answers, self.models, way, talk, order, self.manner, seed)
                keys[way.name].append(own)
        for _ in self.responses.fill(wanted):
            progress()
        return {
            way: [[self.responses[key] for key in seed] for seed in seeds]
            for way, seeds in keys.items()
        }

    def _key(self, way: Way, seed: int, talk: Talk, order: Sequence[str]) -> str:
        """The key under which a conversation's answers are kept."""
        who = [self.models[n] for n in (order if way.alone is None else [way.alone])]
        what = [[turn.messages, turn.bare if way.hidden else (), turn.written]
                for turn in talk.turns]  # fmt: skip
        facts = way.identity(seed), [identity_of(model) for model in who], asdict(self.manner)
        return key_of("turns", *facts, what)


def evaluate(
    benchmark: Benchmark,
    held: Held,
    *,
    judge: Callable[[], Ask] | None = None,
    prompts: Mapping[str, str] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Hold all conversations in both orders and score them turn by turn.

    Args:
        benchmark: How they are scored.
        held: The conversations.
        judge: Makes the judge of the last answers; called once all answers are there.
        prompts: As for :func:`.harness.judge.judge_answers`.
        progress: Called after each conversation.

    Returns:
        One outcome for each order: a group for each turn (for each depth, if the last answer alone
        is judged) and the mean of each conversation, with errors over conversations.
    """
    said = {order: held.said(order, progress) for order in held.orders()}
    ask = judge() if judge is not None else None
    _, lengths = that_fit(held.models, held.talks, held.manner)
    outcomes = []
    for order, by_way in said.items():
        items, notes = {}, []
        for way, seeds in by_way.items():
            scores = [_scores(benchmark, held.talks, given, ask, prompts) for given in seeds]
            items[way] = _scored(benchmark, held.talks, scores)
            if failed := sum(not found for seed in scores for talk in seed for found in talk):
                notes.append(
                    f"{benchmark.name}, {order[0]} first, {way}: {failed} of the judge's replies "
                    "are no verdict and do not count"
                )
        tables = {way: tabulated((benchmark.metric,), found) for way, found in items.items()}
        length = statistics.median_low(lengths.values())
        outcomes.append(
            Outcome(f"{benchmark.name}, {order[0]} first", (benchmark.metric,), len(held.talks),
                    length, tables, items, tuple(notes))
        )  # fmt: skip
    return outcomes


Found = list[list[dict[str, float]]]  # by conversation and asked turn; empty without a verdict


def _scores(
    benchmark: Benchmark,
    talks: Sequence[Talk],
    given: Sequence[Sequence[str]],
    ask: Ask | None,
    prompts: Mapping[str, str] | None,
) -> Found:
    """The scores of one way's answers in one order and seed."""
    pairs = list(zip(talks, given, strict=True))
    metric = benchmark.metric
    if (score := benchmark.score) is not None:
        return [
            [
                {metric: score(answer, turn.references)}
                for turn, answer in zip(talk.asked, said, strict=True)
            ]
            for talk, said in pairs
        ]
    items = [
        {"id": talk.name, "answer": said[-1], "to_judge": dict(talk.judge or {}), "scores": {}}
        for talk, said in pairs
    ]
    assert ask is not None, f"{benchmark.name} is scored by a judge"
    judged = judge_answers({"tasks": {benchmark.name: {"items": items}}}, ask, prompts=prompts)
    verdicts = [item["scores"][metric] for item in judged["tasks"][benchmark.name]["items"]]
    return [[{} if verdict is None else {metric: verdict}] for verdict in verdicts]


def _scored(benchmark: Benchmark, talks: Sequence[Talk], seeds: Sequence[Found]) -> list[Scored]:
    """Each answer's scores as means over the seeds, where all have one, by depth."""
    scored = []
    for talk, *same in sorted(zip(talks, *seeds, strict=True), key=lambda row: len(row[0].turns)):
        for asked, found in enumerate(zip(*same, strict=True)):
            whole = found if all(found) else [{}]
            means = {name: float(np.mean([one[name] for one in whole])) for name in whole[0]}
            scored.append(Scored(talk.name, benchmark.group(talk, asked), talk.name, means))
    return scored
