"""What a task file calls to score an answer: QuAC's F1; or nothing, where a judge will."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any


def quac_f1(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Word F1 against the reference that fits best."""
    return {"f1": max(word_f1(results[0], text) for text in document["references"])}


def judged_later(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """No score yet."""
    return {}


def word_f1(answer: str, reference: str) -> float:
    """F1 of two texts as bags of words, without case, punctuation and articles."""
    found, wanted = _words(answer), _words(reference)
    shared = sum((Counter(found) & Counter(wanted)).values())
    if not found or not wanted:
        return float(found == wanted)
    return 2 * shared / (len(found) + len(wanted))


def _words(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()
