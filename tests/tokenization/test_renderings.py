"""What two models' renderings of one conversation share, and what the target prefills."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvlingo_mlx.tokenization.alignment import NO_END, TokenAlignment
from kvlingo_mlx.tokenization.renderings import (
    Rendering,
    alignments,
    chat,
    content_spans,
    plain,
    written,
)
from tests.support import ROOT
from tests.support.languages import TEXTS, byte_level, sentencepiece
from tests.support.two_tokenizers import MISTRAL_TEMPLATE

ZOO = (ROOT / "tools" / "chat_template.jinja").read_text()
QWEN = (
    "{%- for m in messages -%}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
)
# Mistral's puts the system message into the last question; this trims.
GEMMA = (
    "{{- '<bos>' -}}{%- for m in messages -%}"
    "{{- '<start_of_turn>' + m.role + '\\n' + m.content | trim + '<end_of_turn>\\n' -}}"
    "{%- endfor -%}{{- '<start_of_turn>model\\n' -}}"
)
# Tells tool results by how a message begins, as Qwen3's does.
FUSSY = (
    "{%- for m in messages -%}"
    "{{- '[tool]' if m.content.startswith('<tool>') else '[text]' -}}"
    "{{- m.content -}}{%- endfor -%}"
)
TEMPLATES = {"zoo": ZOO, "qwen": QWEN, "mistral": MISTRAL_TEMPLATE, "gemma": GEMMA, "fussy": FUSSY}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": "  Das Brot ist gut.\n"},
    {"role": "user", "content": "user"},
]
Render = Callable[[Any], str]


def render(name: str) -> Render:
    environment = ImmutableSandboxedEnvironment()
    template = environment.from_string(TEMPLATES[name])
    return lambda messages: template.render(messages=messages)


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return sentencepiece() if kind == "sentencepiece" else byte_level()


Stretch = tuple[int, int, TokenAlignment | None]  # target tokens, and what stands for them


def plan(source: Rendering, target: Rendering, stop: int | None = None) -> list[Stretch]:
    """The aligned stretches and those between, with what must hold for all."""
    count = len(target.ids)
    stop, found, done = count if stop is None else stop, list[Stretch](), 0
    for alignment in alignments(source, target, stop):
        start, end = alignment.target
        assert done <= start < end <= stop  # every token once, in order
        assert said(source, *alignment.source) == said(target, start, end)
        found += [(done, start, None)] if done < start else []
        found.append((start, end, alignment))
        done = end
    return [*found, *([(done, count, None)] if done < count else [])]


def said(rendering: Rendering, start: int, stop: int) -> str:
    """The text of some tokens that begin and end where tokens do."""
    bounds = [0, *rendering.ends.tolist()]
    assert NO_END not in (bounds[start], bounds[stop])
    return rendering.text[bounds[start] : bounds[stop]]


def translated(source: Rendering, target: Rendering) -> list[str]:
    """The texts that are translated, in the target's order."""
    return [said(source, *a.source) for _, _, a in plan(source, target) if a]


@pytest.mark.parametrize(("name", "expected"), [
    ("qwen", [(1, "Be brief."), (3, "user"), (5, "Das Brot ist gut."), (7, "user")]),
    ("gemma", [(1, "Be brief."), (3, "user"), (5, "Das Brot ist gut."), (7, "user")]),
    ("mistral", [(5, "Be brief."), (1, "user"), (3, "Das Brot ist gut."), (7, "user")]),
])  # fmt: skip
def test_contents_are_found_by_message(name: str, expected: list[tuple[int, str]]) -> None:
    """``expected``: each content, and its place among boilerplate and contents in turn."""
    text, spans = content_spans(render(name), TALK)
    assert text == render(name)(TALK)
    assert [text[a:b] for a, b in spans] == [content for _, content in expected]
    order = sorted(spans)
    assert [2 * order.index(span) + 1 for span in spans] == [place for place, _ in expected]
    assert "user" in text[: spans[1][0]] or name == "mistral"  # the role looks like the content


def test_a_stripped_trace_is_left_out_and_the_answer_is_not() -> None:
    talk = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo."},
        {"role": "user", "content": "Ah."},
    ]
    text, spans = content_spans(render("zoo"), talk)
    assert "Hm." not in text
    assert [span and text[slice(*span)] for span in spans] == ["Why?", None, "So.", "Ah."]
    text, spans = content_spans(render("qwen"), talk)
    assert [text[slice(*span)] for span in spans] == ["Why?", "Hm.", "So.", "Ah."]
    source, target = chat(tokenizer("a"), render("qwen"), talk), None
    target = chat(tokenizer("sentencepiece"), render("zoo"), talk)
    assert "Hm" not in "".join(translated(source, target))


def test_altered_contents_are_left_to_the_target() -> None:
    def loud(messages: Any) -> str:
        return "".join(f"<{m['content'].upper()}>" for m in messages)

    talk = [{"role": "user", "content": "Brot"}, {"role": "user", "content": "OK"}]
    text, spans = content_spans(loud, talk)
    assert spans[0] is None and text[slice(*spans[1])] == "OK"
    marked = [{"role": "user", "content": "a\ufdd00\ufdd1b"}]
    assert content_spans(render("qwen"), marked)[1] == (None,)


short = st.sampled_from([
    "user", "a", "<|im_end|>", "assistant\n", " [INST] hi [/INST]", "\n\nNo.\n", "Yes. ", "", " ",
    "<think>\nHm.\n</think>\n\nSo.", "👩‍👩‍👧", "e\u0301", "שלום", "早上六点", "[tool]",
])  # fmt: skip
excerpts = st.builds(lambda text, n: text[n : n + 40], st.sampled_from(list(TEXTS.values())),
                     st.integers(0, 100))  # fmt: skip
contents = st.one_of(short, excerpts)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(contents, min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(list(TEMPLATES)),
    st.sampled_from(list(TEMPLATES)),
)
def test_every_target_token_has_one_origin(
    said_: list[str], system: bool, ours: str, theirs: str
) -> None:
    roles = [*(["system"] if system else []), *itertools.islice(
        itertools.cycle(["user", "assistant"]), len(said_))]  # fmt: skip
    talk = [{"role": r, "content": c} for r, c in zip(roles, said_, strict=False)]
    source = chat(tokenizer("byte-level"), render(ours), talk)
    target = chat(tokenizer("sentencepiece"), render(theirs), talk)
    for a, b in ((source, target), (target, source)):
        plan(a, b)
        plan(a, b, len(b.ids) - 1)
        bodies = {text[slice(*span)] for text, span in zip(
            itertools.repeat(b.text), b.contents, strict=False) if span}  # fmt: skip
        assert all(any(t in body for body in bodies) for t in translated(a, b))
    same = plan(source, chat(tokenizer("byte-level"), render(ours), talk))
    ((_, _, alignment),) = same
    assert alignment is not None
    assert (alignment.groups[:, :2] == alignment.groups[:, 2:]).all()


def test_the_last_token_is_left_to_the_target() -> None:
    text = TEXTS["de"]
    source, target = (plain(tokenizer(kind), text) for kind in ("byte-level", "sentencepiece"))
    count = len(target.ids)
    bos, body = plan(source, target)
    assert bos == (0, 1, None)  # <s> is the target's own
    assert body[2] is not None and body[2].source == (0, len(source.ids))
    *_, body, last = plan(source, target, count - 1)
    assert body[2] is not None and last[1:] == (count, None)
    same, end = plan(source, source, len(source.ids) - 1), len(source.ids)
    assert [(a, b, c is None) for a, b, c in same] == [(0, end - 1, False), (end - 1, end, True)]


def test_renderings_of_different_messages_are_refused() -> None:
    source, target = (
        chat(tokenizer("byte-level"), render("qwen"), talk) for talk in (TALK, TALK[1:])
    )
    with pytest.raises(ValueError, match=r"different messages \(4 contents and 3\)"):
        alignments(source, target, 3)


def test_tokenizers_of_transformers_and_mlx_lm() -> None:
    backend = byte_level()
    bare = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    text = "<|im_start|>user\n" + TEXTS["vi"]
    expected = plain(backend, text)
    for each in (bare, TokenizerWrapper(bare)):
        found = plain(each, text)
        assert found.ids.tolist() == each.encode(text) == expected.ids.tolist()
        assert (found.ends == expected.ends).all()
    backend.enable_truncation(8)
    backend.enable_padding(length=500)
    assert len(plain(backend, text).ids) == len(expected.ids)


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        def encode(self, text: str) -> list[int]:
            return []

    with pytest.raises(ValueError, match="Slow gives no character offsets"):
        plain(Slow(), "text")


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("name", TEXTS)
def test_tokens_that_a_model_chose(kind: str, name: str) -> None:
    """Decoded one by one they end where the tokenizer says; spelled otherwise, somewhere too."""
    text, used = TEXTS[name], tokenizer(kind)
    encoding = used.encode(text, add_special_tokens=False)
    spelled, ends = written(used, encoding.ids)
    assert spelled == text == used.decode(encoding.ids, skip_special_tokens=False)
    known = chat(used, lambda _: text, []).ends
    assert (ends[1:] == known[1:]).all()  # a mark for no space may be the first
    # One character at a time, as no tokenizer would.
    ids = [i for part in text for i in used.encode(part, add_special_tokens=False).ids]
    spelled, ends = written(used, ids)
    assert spelled == used.decode(ids, skip_special_tokens=False)
    assert ends[-1] == len(spelled) and (np.diff(ends[ends != NO_END]) >= 0).all()
