"""OpenAI's plain completions, with the fields of mlx-lm's server."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvlingo_mlx.serving.messages import MOST, Delta, Finished, GenerationRequest, TokenLogprob
from kvlingo_mlx.serving.wire import Answer, finite, openai_error, openai_usage
from kvlingo_mlx.serving.wire.chat import MLX_LM, OPENAI, OpenAIAnswer, OpenAIRequest, tops
from kvlingo_mlx.serving.wire.reading import Api, Rules, only
from kvlingo_mlx.serving.wire.sampling import Tops

_ONE = "a request gets one answer; send it again for another"


def _prompt(found: Any) -> Any:
    """The text or token ids of the one prompt."""
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str | list):
        found = found[0]
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found and all(_is_token(item) for item in found):
        return tuple(found)
    if isinstance(found, list) and len(found) > 1 and isinstance(found[0], str | list):
        raise PydanticCustomError("expected", "one prompt; send each in a request of its own")
    raise PydanticCustomError("expected", "a text, or a list of token ids, that is not empty")


def _is_token(item: Any) -> bool:
    return type(item) is int and 0 <= item <= MOST


def _wanted(found: Any) -> Any:
    """OpenAI's number of likeliest tokens, or mlx-lm's bool."""
    return (0 if found else None) if isinstance(found, bool) else found


class _Completion(OpenAIRequest):
    rules: ClassVar[Rules] = {
        **OPENAI,
        **MLX_LM,
        "best_of": only(_ONE, 1),
        "suffix": only("the models here write what follows; put it into the prompt"),
        "chat_template_kwargs": only("a plain completion has no template", {}),
    }
    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt)]
    echo: bool | None = None
    logprobs: Annotated[Annotated[int, Field(ge=0, le=20)] | None, BeforeValidator(_wanted)] = None
    top_logprobs: Tops | None = None

    def ask(self) -> GenerationRequest:
        top = self.top_logprobs if self.top_logprobs and self.top_logprobs > 0 else self.logprobs
        return GenerationRequest(
            model=self.model,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
            logprobs=tops(top is not None, top),
            echo=bool(self.echo),
            **self.for_engine(),
        )

    def answer(self, ask: GenerationRequest) -> Answer:
        return _Answer(ask, "cmpl-", self.counted)


class _Answer(OpenAIAnswer):
    object = chunk_object = "text_completion"

    def __init__(self, ask: GenerationRequest, prefix: str, counted: bool) -> None:
        super().__init__(ask, prefix, counted)
        self.text = ""

    def begin(self) -> list[str]:
        return []

    def piece(self, piece: Delta) -> list[str]:
        text = piece.reasoning + piece.content
        choice: dict[str, Any] = {"text": text}
        if self.wants_logprobs and piece.logprobs:
            choice["logprobs"] = _logprobs([*piece.logprobs], len(self.text))
        self.text += text
        return [self.chunk(choice)] if text or "logprobs" in choice else []

    def end(self, ended: Finished) -> list[str]:
        return self.last({"text": ""}, _reason(ended.reason))

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choice = {"index": 0, "text": self.text, "logprobs": None}
        if self.wants_logprobs:
            choice["logprobs"] = _logprobs(self.logprobs, 0)
        choice["finish_reason"] = _reason(self.reason)
        return self.whole(self.object, [choice]) | {"usage": openai_usage(self.usage)}


def _reason(reason: str) -> str:
    """Why a completion ended; it has no tool calls."""
    return "length" if reason == "length" else "stop"


def _logprobs(tokens: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """Log probabilities in lists, as this API has them; ``offset``: where the text begins."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [{text: finite(p) for text, _, p in token.top} for token in tokens],
        "text_offset": offsets,
    }


API = Api(("/v1/completions", "/completions"), _Completion, openai_error)
