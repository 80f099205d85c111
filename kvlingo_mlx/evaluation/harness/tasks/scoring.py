"""Scoring functions named in task files: QuAC's F1, and none where a judge scores later."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any


def quac_f1(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The word F1 against the best matching reference."""
    return {"f1": max(word_f1(results[0], text) for text in document["references"])}


def judged_later(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """No score, since a judge scores the answer later."""
    return {}


def word_f1(answer: str, reference: str) -> float:
    """The F1 of two texts as bags of words, ignoring case, punctuation and articles."""
    found, wanted = _words(answer), _words(reference)
    shared = sum((Counter(found) & Counter(wanted)).values())
    if not found or not wanted:
        return float(found == wanted)
    return 2 * shared / (len(found) + len(wanted))


def _words(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()
