"""Scoring functions named in task files: word F1 in its forms, and none where a judge scores."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

# Scripts without spaces between words, of which each character counts as a word.
UNSPACED = re.compile("([\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")


def quac_f1(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The word F1 against the best matching reference."""
    return {"f1": best_f1(results[0], document["references"])}


def squad_f1(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The word F1 against the best matching answer of a record of SQuAD."""
    return {"f1": max(word_f1(results[0], text) for text in document["answers"]["text"])}


def coqa_f1(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """CoQA's F1, and whether the answer contains one of the references."""
    answer, references = results[0], document["references"]
    words = f" {' '.join(_words(answer))} "
    held = any(f" {' '.join(_words(text))} " in words for text in references if _words(text))
    return {"f1": one_left_out(answer, references), "gold_in_answer": float(held)}


def xquad_f1(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The token F1 against the best matching reference, in any language."""
    answer = _tokens(results[0])
    return {"f1": max(_f1(answer, _tokens(text)) for text in document["references"])}


def judged_later(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """No score, since a judge scores the answer later."""
    return {}


def best_f1(answer: str, references: Sequence[str]) -> float:
    """The word F1 against the best matching reference."""
    return max(word_f1(answer, reference) for reference in references)


def one_left_out(answer: str, references: Sequence[str]) -> float:
    """CoQA's F1: the mean over leaving out one reference of the best against the others.

    So a person's answer and a model's are compared with as many.
    """
    others = ([*references[:i], *references[i + 1 :]] for i in range(len(references)))
    return sum(best_f1(answer, left or references) for left in others) / len(references)


def word_f1(answer: str, reference: str) -> float:
    """The F1 of two texts as bags of words, ignoring case, punctuation and articles."""
    return _f1(_words(answer), _words(reference))


def _f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    shared = sum((Counter(found) & Counter(wanted)).values())
    if not found or not wanted:
        return float(found == wanted)
    return 2 * shared / (len(found) + len(wanted))


def _words(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _tokens(text: str) -> list[str]:
    """Words, and single characters of scripts without spaces; punctuation is any script's."""
    bare = "".join(c for c in text.lower() if not unicodedata.category(c).startswith("P"))
    return _words(UNSPACED.sub(r" \1 ", bare))
