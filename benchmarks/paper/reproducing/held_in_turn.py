"""Figures of conversations in which two models take turns."""

from __future__ import annotations

from benchmarks.paper.evaluation import turn_records, turn_scores, turns
from benchmarks.paper.reproducing import tiny_data
from benchmarks.paper.reproducing.entries import Entry
from benchmarks.paper.reproducing.judging import judge_of
from benchmarks.paper.reproducing.results import Line, Result
from benchmarks.paper.reproducing.trained import Wanted, trained
from benchmarks.paper.reproducing.work import Work
from kvlingo_mlx.evaluation.journal import Responses
from kvlingo_mlx.loading.models import load_pair

TASKS = {"coqa": "coqa_last_turn"}  # the tasks whose tiny records have the turns
TINY_DEPTH = 3
CONVERSATIONS = 256  # of CoQA and QuAC; MultiChallenge has 273


def make(entry: Entry, work: Work) -> Result:
    """Scores by turn of every way to take over, in both orders."""
    (pair,), (name,) = entry.pairs, tuple(entry.what)
    models = load_pair(*work.models.pair(pair))
    known = turn_records.PUBLISHED[name].benchmark
    judge = judge_of(work)
    if known.score is None and judge is None:
        raise ValueError(f"a model judges the answers of {name}; add --judge MODEL")
    folders = [
        str(trained(work, pair, Wanted(*ends, entry.who[0], seed)))
        for seed in work.seeds(entry.seeds)
        for ends in (pair, pair[::-1])
    ]
    named = {entry.who[0]: turns.directed(folders, models)}
    file = work.benchmarks.get("data", {}).get(name)
    if file is None and work.tiny:
        file = tiny_data.written(work)[TASKS.get(name, name)]
    depth = TINY_DEPTH if work.tiny and known.score is not None else None
    limit = work.size.items or (CONVERSATIONS if known.score is not None else None)
    talks, short = turn_records.read_talks(name, file, depth=depth, limit=limit)
    manner = turns.Manner(max_tokens=work.size.answer or known.max_tokens)
    ends = turns.names_of(models)
    ways, notes = turns.ways_of(ends, named, turns.CONTROLS, manner)
    fitting, _ = turn_scores.that_fit(ends, talks, manner)
    left = short + len(talks) - len(fitting)
    if left:
        notes.append(f"{left} conversations are too short, or do not fit, and are left out")
    held = turn_scores.Held(ends, fitting, ways, manner, Responses(work.responses))
    work.heard.progress(f"holding {len(fitting)} conversations of {name}")
    outcomes = turn_scores.evaluate(known, held, judge=judge if known.score is None else None)
    lines = [
        Line(
            (outcome.task, group), tuple(outcome.tables[w.name][group][known.metric] for w in ways)
        )
        for outcome in outcomes
        for group in next(iter(outcome.tables.values()))
    ]
    said = [note for outcome in outcomes for note in outcome.notes]
    columns = tuple(way.name for way in ways)
    return Result(("order", "turn"), columns, tuple(lines), (*notes, *said))
