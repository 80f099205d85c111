"""An answer's responses: mlx-lm's, with the tokens and times of a hand-over."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlingo_mlx.backend import mx

from mlx_lm.generate import GenerationResponse as MLXResponse

from kvlingo_mlx.caches.validation import first_bad
from kvlingo_mlx.embedded import EXAMPLE, is_embedded
from kvlingo_mlx.embedded.dialogues import states_a_fact
from kvlingo_mlx.engine.calls import ToolCall
from kvlingo_mlx.engine.guarding import Guarded
from kvlingo_mlx.engine.sampling import LogitsProcessor
from kvlingo_mlx.errors import KVLingoError
from kvlingo_mlx.loading.notes import tell
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.remote.stream import Received
from kvlingo_mlx.threads import working


@dataclass
class GenerationResponse(MLXResponse):
    """mlx-lm's response, with the parts of its text and the times and tokens of a hand-over.

    ``text`` is all that was written, marks included. ``content``, ``reasoning`` and ``tool_calls``
    are the parts that came with this response; those of all responses joined are the whole answer.
    Text that may still be part of a mark or of a stop text comes with a later response.

    Attributes:
        content: Text for the user.
        reasoning: Text between the tokenizer's think marks.
        tool_calls: Complete tool calls in OpenAI's form. A call that cannot be parsed is content.
        stop_text: The stop text that ended the answer, with its last response; else None.
        cached_tokens: Prompt tokens that the decode model's cache held from before: its own, and
            those that were translated for an earlier answer. With ``translated_tokens`` and
            ``read_tokens`` they are all ``prompt_tokens`` (which, where another model began the
            answer, include that model's).
        translated_tokens: Prompt tokens that were translated for this answer.
        ahead_tokens: Those of them that were translated before it was asked for: in a conversation
            that is eager, after the answers that other models wrote.
        read_tokens: Prompt tokens that the decode model read itself, the last one included.
        native_layers: Cache layers in which the decode model also read the translated tokens.
        prefill_s: Seconds the prefill model took for the prompt; or the decode model, where it read
            the prompt itself (0 if it also has a draft model, since mlx-lm then reports no time).
        translate_s: Seconds the translation took, cache write included.
        native_s: Seconds the decode model took for the part of the prompt that it read itself,
            without the last token.
        ttft_s: Seconds from the call (models loaded) to the first token in hand.
        strategy: How the prompt was read: ``accelerator``, ``native`` or ``folded``; ``switch``
            in a conversation, whose own ``last_switch`` tells more.
        translator: The folder of the translator that was used, "made in this process" if it has
            none; None where nothing was translated. In a conversation there can be several.
        translator_digest: A sha256 of what the translator computes (``Translator.digest``).
        guarded: What the guard found, if one was asked for.
        received: What came over the network, if the prefill model is on another machine; its
            ``prefill_s`` is then the time that was waited for it.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_text: str | None = None
    cached_tokens: int = 0
    translated_tokens: int = 0
    ahead_tokens: int = 0
    read_tokens: int = 0
    native_layers: int = 0
    prefill_s: float = 0.0
    translate_s: float = 0.0
    native_s: float = 0.0
    ttft_s: float = 0.0
    strategy: str = "switch"
    translator: str | None = None
    translator_digest: str | None = None
    guarded: Guarded | None = None
    received: Received | None = None


@dataclass
class Heard:
    """An answer as it comes, and at its end a warning if it gives the user nothing."""

    model: LanguageModel  # the model that answers
    prompt: Callable[[], str]  # returns the text of the prompt, up to the header of the answer
    chat: bool  # whether a chat template rendered the prompt
    said: bool = False
    thought: bool = False
    marks: set[int] = field(default_factory=set)
    last: GenerationResponse | None = None

    def take(self, response: GenerationResponse) -> None:
        """Note the next response."""
        self.said |= bool(response.content.strip() or response.tool_calls)
        self.thought |= bool(response.reasoning.strip())
        self.marks.add(int(response.token))
        self.last = response

    def tell(self) -> None:
        """Warn (KVLingoWarning) of an answer that is empty, a guess, or full of marks."""
        if self.last is None:
            return
        tokenizer = self.model.tokenizer
        if told := self._nothing() or self._marked(tokenizer):
            tell(None, f"{self.model.name} {told}")
        if is_embedded(self.model.path) and not states_a_fact(self.prompt()):
            tell(
                f"guesses of {self.model.name}",
                f"{self.model.name} can only repeat facts that the prompt states; try {EXAMPLE!r}",
            )

    def _nothing(self) -> str:
        """The warning about an answer without content."""
        assert self.last is not None
        if self.said:
            return ""
        ended, off = self.last.finish_reason, "enable_thinking=False (--no-thinking)"
        if ended == "length":
            more = f"give more max_tokens (--max-tokens){f', or {off}' if self.chat else ''}"
            told = f"was cut while it was reasoning and has not answered yet; {more}"
            return told if self.thought else ""
        end = getattr(self.model.tokenizer, "think_end", None)
        thinks = self.chat and end is not None and not self.prompt().rstrip().endswith(end)
        advice = f"give {off}" if thinks else "ask in other words"
        where = "by itself"
        if self.last.stop_text:
            where = f"at the stop text {self.last.stop_text!r}"
            advice = "give another stop (--stop)"
        after = " after its reasoning" if self.thought else ""
        return f"ended its answer{after} {where} (finish reason {ended}) without a word; {advice}"

    def _marked(self, tokenizer: Any) -> str:
        """The warning about an answer that goes on with the marks of turns."""
        if self.chat or not tokenizer.has_chat_template:
            return ""
        known = getattr(tokenizer, "added_tokens_decoder", {})
        marks = {i for i, token in known.items() if token.special} - set(tokenizer.eos_token_ids)
        template = getattr(tokenizer, "chat_template", None)
        found = [known[i].content for i in sorted(marks & self.marks)]
        if isinstance(template, str):  # the end of a document, say, is none of its marks
            found = [mark for mark in found if mark in template]
        if not found or any(mark in self.prompt() for mark in found):
            return ""
        return (
            f"wrote {found[0]}, a mark of its chat template: a text is taken as it is; give "
            "messages, [{'role': 'user', 'content': ...}]"
        )


def check_numbers(
    response: MLXResponse,
    source: LanguageModel,
    target: LanguageModel,
    cache: Sequence[Any],
    *,
    processed: bool = False,
) -> None:
    """Raise an error if the first prediction is NaN: decoding would go on with token 0.

    ``cache`` is the cache behind the prediction; only then is it searched for the first NaN or Inf.
    ``processed`` says whether there are logits processors, which may be the cause.

    Raises:
        ValueError: It is NaN, the cache is sound, and there are logits processors.
        KVLingoError: It is NaN.
    """
    with working():
        if not mx.isnan(response.logprobs).any().item():
            return
        place = first_bad(cache, target)
    if processed and not place:
        raise ValueError(
            "the first prediction is not a number, and the cache behind it is sound: one of "
            "logits_processors returns NaN, or rules out every token (-inf everywhere), so leave a "
            f"token to choose; or the weights of {target.name} are damaged"
        )
    raise KVLingoError(
        f"the first prediction of {target.name} is not a number: its weights are damaged, or "
        f"what was translated for it from {source.name} overflows"
        + (f" (NaN or Inf first in {place})" if place else "")
    )


def with_prefix(
    processors: list[LogitsProcessor] | None, prefix: Sequence[int]
) -> list[LogitsProcessor] | None:
    """Logits processors that see the whole prompt, though mlx-lm gets only the last token."""
    if not processors or not prefix:
        return processors
    head = mx.array(list(prefix))

    def whole(processor: LogitsProcessor) -> LogitsProcessor:
        return lambda tokens, logits: processor(mx.concatenate([head, tokens]), logits)

    return list(map(whole, processors))


def joined(responses: Iterable[GenerationResponse], verbose: bool) -> str:
    """The text of an answer; ``verbose`` prints it as it comes, and the times at the end."""
    text, response = "", None
    for response in responses:
        text += response.text
        if verbose:
            sys.stdout.write(response.text)
            sys.stdout.flush()
    if verbose and response is not None:
        sys.stdout.write(f"\n{'=' * 10}\n{summary(response)}\n")
    return text


# How a prompt was read, in the words of people.
SHOWN = {
    "accelerator": "read by the source and translated",
    "native": "read by the target",
    "folded": "read by the source, whose cache is decoded from",
    "switch": "read by the source before and translated",
}


def summary(response: GenerationResponse) -> str:
    """The times and rates of a finished generation, as lines, without phases that took no time."""
    phases = {
        "prefill": response.prefill_s,
        "the target's own part": response.native_s,
        "translation": response.translate_s,
    }
    spent = ", ".join(f"{name} {s:.3f} s" for name, s in phases.items() if s >= 0.0005)
    digest = response.translator_digest
    used = "" if digest is None else f"Translator: {response.translator} (sha256 {digest[:12]})\n"
    layers = response.native_layers
    native = f", but {layers} first layer{'s'[: layers != 1]} by the target" if layers else ""
    received = "" if response.received is None else f"Received: {response.received}\n"
    guarded = "" if response.guarded is None else f"Both models compared: {response.guarded}\n"
    cut = " (cut at the limit)" if response.finish_reason == "length" else ""
    return (
        f"Prompt: {response.prompt_tokens} tokens, {SHOWN[response.strategy]}{native}; "
        f"first token after {response.ttft_s:.3f} s{spent and f' ({spent})'}\n"
        f"{used}{received}{guarded}Generation: {response.generation_tokens} tokens{cut}, "
        f"{response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB"
    )
