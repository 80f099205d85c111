"""The sections on the server: beside mlx-lm's, recall through it, and its faults."""

from __future__ import annotations

from rendering.records import records, source, table


def served() -> str:
    """What a switch, a prompt and an answer take, beside mlx_lm.server."""
    parts = []
    for record in records("serving"):
        config, results = record["config"], dict(record["results"])
        idle, rates = results.pop("idle_bytes"), results.pop("rates")["ratios"]
        rows = []
        for length, found in results.items():
            chat, text = found["switches"], found["steps"]
            rows.append([
                length, f"{text['ratios']['first, ours less 20 ms / step']:.2f}",
                f"{text['ratios']['first, theirs / ours']:.1f}",
                f"{chat['ratios']['switch, theirs / ours']:.1f}",
                f"{chat['ratios']['switch, ours / same, ours']:.2f}",
                f"{chat['ratios']['same, ours / theirs']:.2f}",
                f"{chat['ratios']['prompt, ours / theirs']:.2f}",
            ])  # fmt: skip
        together = ", ".join(f"{name} {value:.3f}" for name, value in rates.items())
        parts += [
            f"Two random models of {config['geometry']}'s widths, {config['layers']} layers, "
            f"{config['precision']}:\n",
            table(["tokens", "(bare switch - 20 ms) / step", "bare: theirs / ours",
                   "switch: theirs / ours", "switch / same model", "same model: ours / theirs",
                   "prompt: ours / theirs"], rows),
            f"Decoding, tokens a second: {together}. Memory when idle, ours with both models and "
            f"both translators over theirs, a process a model: "
            f"{idle['ours'] / idle['theirs']:.2f}.\n",
            source(record),
        ]  # fmt: skip
    if not parts:
        return ""
    return "\n".join([
        "## The server beside mlx-lm's\n",
        "Seconds to the first token of a stream, as ratios within one run. `bare switch`: another\n"
        "model goes on with a text that was written by the first; `switch`, `same model`: a short\n"
        "question in a chat to the other model, and to the same one; `prompt`: a long prompt that\n"
        "nobody has read. mlx_lm.server reads a conversation again when the model changes.\n",
        *parts,
    ])  # fmt: skip


def recalls() -> str:
    """Twenty turns through the server, the model changing with every turn."""
    found = records("serving_recall")
    if not found:
        return ""
    record = found[-1]
    results = dict(record["results"])
    same, turns = results.pop("answers as the library's")
    rows = [
        [name, f"{result['recall']:.2f}",
         *(f"{share:.2f}" for share in result["first five, last five"]),
         "" if result["read a turn after the first"] is None
         else f"{result['read a turn after the first']:.0f}"]
        for name, result in results.items()
    ]  # fmt: skip
    config = record["config"]
    return "\n".join([
        "## Recall through the server\n",
        f"{config['dialogues']} dialogues of {config['turns']} turns, {config['pair']} in turn. "
        f"{same} of {turns} answers are the library's, letter for letter.\n",
        table(["way", "recall", "first five turns", "last five", "tokens read a turn"], rows),
        source(record),
    ])  # fmt: skip


def faults() -> str:
    """Fuzzed bodies, a soak, kills."""
    rows, sources = [], []
    for record in records("serving_faults"):
        for name, found in record["results"].items():
            rows.append([name, "; ".join(_told(found))])
        sources.append(source(record))
    if not rows:
        return ""
    return "\n".join([
        "## The server and faults\n",
        "`benchmarks/serving_faults.py` says what each run does and how answers are judged.\n",
        table(["run", "what came of it"], rows), *sources,
    ])  # fmt: skip


def _told(found: dict) -> list[str]:
    """Every number of a run, by its name."""
    told = []
    for name, value in found.items():
        inner = value.items() if isinstance(value, dict) else [(None, value)]
        for key, number in inner:
            shown = f"{number:.4g}" if isinstance(number, float) else str(number)
            told.append(f"{name if key is None else key} {shown}".replace("_", " "))
    return told
