"""Fields that the requests of all APIs have: how tokens are chosen, and what is our own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvlingo_mlx.serving.messages import MOST, Sampling
from kvlingo_mlx.serving.wire.reading import Body, Name, RequestBody


def _to_list(found: Any) -> Any:
    if isinstance(found, str):
        return [found] if found else []
    if found is None or isinstance(found, list):
        return found
    raise PydanticCustomError("expected", "a text or a list of texts")


Positive = Annotated[int, Field(ge=1, le=MOST)]
Stop = Annotated[list[Name], BeforeValidator(_to_list)]
Tops = Annotated[int, Field(ge=-1, le=20)]  # -1 is mlx-lm's "none"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_TEMPLATE_OWN = """
    messages conversation tools documents chat_template add_generation_prompt tokenize padding
    continue_final_message truncation max_length return_tensors return_dict tokenizer_kwargs
    return_assistant_tokens_mask
""".split()


def _template(found: Any) -> Any:
    if isinstance(found, dict) and (own := sorted(found.keys() & set(_TEMPLATE_OWN))):
        raise PydanticCustomError(
            "expected", "what is not set by the server, as {name} is", {"name": own[0]}
        )
    return found


class Extension(Body):
    """``kvlingo``: what only this server has."""

    strategy: Literal["translate", "reread"] | None = None  # None: as the server's policy says
    pin: bool = False  # whether the conversation stays in memory


class Sampled(Sampling, RequestBody):
    """The fields of a request by which tokens are chosen, and our own."""

    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_template)] = None
    kvlingo: Extension = Extension()

    def for_engine(self) -> dict[str, Any]:
        """The arguments of a request that every API fills alike."""
        chosen = {name: getattr(self, name) for name in Sampling.model_fields}
        own = self.kvlingo
        return {
            "sampling": Sampling.model_construct(**chosen),
            "strategy": own.strategy,
            "pin": own.pin,
        }


def template(effort: str | None, given: dict[str, Any] | None) -> dict[str, Any]:
    """The template's arguments for this effort of reasoning; those that are given win."""
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        found["enable_thinking"] = False
    return found | (given or {})
