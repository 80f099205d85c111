"""The section on reading behind a translation."""

from __future__ import annotations

import numpy as np

from rendering.records import records, source, table


def healing() -> str:
    """Quality after healing, over twenty turns, and what it costs an answer."""
    latest = {(r["config"]["what"], r["config"]["pair"]): r for r in records("healing")}
    if not latest:
        return ""
    parts = [
        "## Reading behind a translation\n",
        "The prompt is translated, the first question answered from that, then the target\n"
        "reads the prompt itself (and its answer again, or not), and answers five more.\n"
        "Teacher-forced; KL to the target's own cache, in nats a token.\n",
    ]
    for kind, told in (
        ("quality", _quality),
        ("tokens", _tokens),
        ("turns", _turns),
        ("cost", _cost),
    ):
        for (what, pair), record in latest.items():
            if what == kind:
                parts += [*told(pair, record), source(record)]
    return "\n".join(parts)


def _quality(pair: str, record: dict) -> list[str]:
    rows = [
        [name, f"{row['recall'][0]:.2f}", f"{row['kl'][0]:.4f}",
         f"{row['recall_later']:.3f} ± {row['recall_later_se']:.3f}",
         f"{max(0.0, row['kl_later']):.5f} ± {row['kl_later_se']:.5f}"]
        for name, row in record["results"].items()
    ]  # fmt: skip
    columns = ["condition", "first question", "KL", "questions 2 to 6", "KL"]
    title = f"### {pair.replace(':', ' to ')}, {record['config']['dialogues']} dialogues\n"
    return [title, table(columns, rows)]


def _tokens(pair: str, record: dict) -> list[str]:
    rows = [
        [name, *(f"{r['kl']:.4f} ({r['same']:.2f})" for r in row.values())]
        for name, row in record["results"].items()
    ]
    columns = ["condition", "token 1", "token 10", "token 100", "the next 20"]
    title = (
        f"### Over an answer, {pair.replace(':', ' to ')}, {record['config']['dialogues']} "
        "dialogues\n\nFour prompt tokens are read for each token of the answer. KL (share of\n"
        "equal first choices) to the target's own cache.\n"
    )
    return [title, table(columns, rows)]


def _turns(pair: str, record: dict) -> list[str]:
    parts = [
        f"### Twenty turns, {pair.replace(':', ' and ')} in turns\n\n"
        "The facts stand in the first message, each is asked about once. Healed after every\n"
        "answer: both models. Hits by turns.\n"
    ]
    for order, ways in record["results"].items():
        by = {name: np.mean(each, axis=0) for name, each in ways.items()}
        rows = [
            [name, f"{b[:10].mean():.3f}", f"{b[10:].mean():.3f}", f"{b[9]:.2f}", f"{b[-1]:.2f}"]
            for name, b in by.items()
        ]
        parts.append(table([order, "turns 1 to 10", "11 to 20", "turn 10", "turn 20"], rows))
    return parts


def _cost(pair: str, record: dict) -> list[str]:
    config = record["config"]
    each = {
        name: {key: float(np.median([run[key] for run in runs])) for key in runs[0]}
        for name, runs in record["results"].items()
    }
    rows = [
        [name, f"{each['none']['token_s'] / row['token_s']:.2f}", f"{row['tokens']:.0f}",
         f"{row['read']:.0f}", f"{1e3 * row['longest_chunk_s']:.0f} ms"]
        for name, row in each.items()
    ]  # fmt: skip
    return [
        f"### The share of its speed that an answer keeps, {pair.replace(':', ' to ')}\n\n"
        f"A prompt of {config['tokens']:,} tokens, {config['answer']} answered, medians of "
        f"{config['trials']}, in turns. The share is over the tokens during which the prompt\n"
        "is read; then the answer has its whole speed.\n",
        table(["share asked for", "share kept", "tokens meanwhile", "read", "longest chunk"], rows),
    ]
