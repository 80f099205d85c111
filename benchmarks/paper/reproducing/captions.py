"""Read what the captions of the paper's LaTeX say of their numbers into captions.jsonl.

python -m benchmarks.paper.reproducing.captions PAPER.tex
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.paper.reproducing.tables import BENCHMARKS

ROOT = Path(__file__).parents[3]
NUMBERS = {"three": 3, "zero": 0}
MEAN = r"(?i)(?:mean|averaged?)(?: scores?)? (?:of|over)"
LIKE = r"(?:follow|etrics as in|sets are those of|Everything as in|(?:seven|nine) benchmarks of)"


def floats(text: str) -> Iterator[tuple[str, str, str]]:
    """The kind, label and caption of every figure and table, the first of each label."""
    seen = set()
    for found in re.finditer(r"\\begin\{(figure|table)\*?\}.*?\\end\{\1\*?\}", text, re.S):
        label = re.search(r"\\label\{([^}]*)\}", found[0])[1]  # type: ignore[index]
        start = found[0].index(r"\caption{") + len(r"\caption{")
        depth, at = 1, start
        while depth:
            depth += (found[0][at] == "{") - (found[0][at] == "}")
            at += 1
        if label not in seen:
            yield found[1], label, plain(found[0][start : at - 1])
        seen.add(label)


def plain(caption: str) -> str:
    """A caption's words."""
    text = re.sub(r"\\ref\{([^}]*)\}", r"<\1>", caption)
    text = re.sub(r"\\(?:emph|textbf|underline|mbox|texttt|citet|citep)\b|[${}]|\\mathbf", "", text)
    text = re.sub(r"\{,\}|(?<=\d),(?=\d{3})", "", text.replace("~", " "))
    return re.sub(r"\s+", " ", text.replace("--", "-").replace("\\nu", "nu"))


def named(text: str) -> list[str]:
    """Our names of the benchmarks that a text names."""
    return sorted({name for word, name in BENCHMARKS.items() if word in text and word != "mean"})


def said(caption: str) -> dict[str, Any]:
    """The quantities that a caption states."""
    found: dict[str, Any] = {}
    # What it says of another table, of a model's switch, or of both modes in one word.
    caption = re.sub(r"<[^>]*>,?(?: which)? (?:reports|gives)[^.;]*|reasoning-on/off", "", caption)
    caption = re.sub(r"(?:both|and) reasoning (?:modes|on and off)",
                     "reasoning-off and reasoning-on", caption)  # fmt: skip
    if at := re.search(MEAN + r"([^.;:]*?(?:MMLU-Pro|RepLiQA)(?:(?!\. )[^;:])*)", caption):
        found["mean"] = named(at[1])
    for group, text in re.findall(r"(short, \w+|long)\s+averages ([^;]*)", caption, re.I):
        found.setdefault("means", {})[group.lower()] = named(text.split(". ")[0])
    if at := re.search(r"RULER (?:is recall averaged|pools|\(mean)? ?over (\d+k)-(\d+k)", caption):
        found["ruler"] = f"{at[1]}-{at[2]}"
    elif at := re.search(r"RULER (?:at|over) (\d+)k?(?:, |/)\d+k?(?: and |/)(\d+k)", caption):
        found["ruler"] = f"{at[1]}k-{at[2]}"
    elif re.search(r"recall averaged over 4k-32k|RULER's four", caption):
        found["ruler"] = "4k-32k"
    if re.search(r"over (?:its|the) (?:four dilution rungs|oracle, 8k, 16k and 32k)", caption):
        found["longmemeval"] = "oracle-32k"
    elif "oracle, 8k and 16k rungs" in caption:
        found["longmemeval"] = "oracle-16k"
    modes = [mode for mode in ("off", "on") if re.search(rf"(?i)reasoning[- ]{mode}\b", caption)]
    if at := re.search(r"(?i)reasoning-off,? except ([^,.]*)", caption):
        found["on"] = named(at[1])
    elif modes:
        found["modes"] = modes
    seeds = {int(n) for n in re.findall(r"seed[ -](\d\d)", caption)}
    if re.search(r"three seeds|three-seed|at three", caption):
        seeds |= {42, 43, 44}
    if seeds:
        found["seeds"] = sorted(seeds)
    for name, pattern in {
        "documents": r"(\d+) documents", "prefix": r"(\d+)-token prefix", "shots": r"(\w+)-shot",
        "continuation": r"(\d+)-token continuation", "tokens": r"at a (\d+)-token budget",
        "conversations": r"(\d+) frozen conversations", "questions": r"(\d+) questions per",
        "examples": r"(\d+) examples",
        "arc_challenge": r"(\d+) ARC-C", "mmlu_pro": r"(\d+) MMLU-Pro",
    }.items():  # fmt: skip
        if at := re.search(pattern, caption):
            found[name] = NUMBERS[at[1]] if at[1] in NUMBERS else int(at[1])
    for rubric, pattern in {
        "repliqa_facts": "graded fact coverage", "repliqa_all": "judged correctness over the whole",
        "repliqa": "judged accuracy on the answerable|and RepLiQA judged accuracy",
    }.items():  # fmt: skip
        if re.search(pattern, caption):
            found["rubric"] = rubric
    if at := re.search(r"post-k-norm keys over (\d+)k tokens", caption):
        found |= {"capture": "post_norm", "cka_tokens": int(at[1]) * 1024}
    if "minus the joint map's" in caption:
        found["signed"] = True
    if like := re.findall(LIKE + r"[^.<]*<([^>]*)>", caption):
        found["like"] = like[0]
    return found


if __name__ == "__main__":
    whole = Path(sys.argv[1]).read_text(encoding="utf-8")
    lines = [json.dumps({"kind": kind, "label": label, **said(caption)})
             for kind, label, caption in floats(whole)]  # fmt: skip
    (ROOT / "tests/paper/reproducing/captions.jsonl").write_text("\n".join(lines) + "\n")
