"""Responses without a model."""

from mlx_lm.generate import GenerationResponse as MLXResponse

from kvlingo_mlx.engine.responses import GenerationResponse


def response(text: str, reason: str | None) -> GenerationResponse:
    facts = dict.fromkeys(MLXResponse.__dataclass_fields__, 0)
    return GenerationResponse(**facts | {"text": text, "finish_reason": reason})
