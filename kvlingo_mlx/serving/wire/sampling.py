"""Fields that the requests of all APIs have: how tokens are chosen, and what is our own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvlingo_mlx.serving.messages import Sampling
from kvlingo_mlx.serving.wire import BadRequest
from kvlingo_mlx.serving.wire.reading import MOST, Body, Name, shown


def _to_list(found: Any) -> Any:
    if isinstance(found, str):
        return [found] if found else []
    if found is None or isinstance(found, list):
        return found
    raise PydanticCustomError("expected", "a text or a list of texts")


def _seed(found: Any) -> Any:
    """Negative seeds are taken too: the same bits without a sign."""
    return found % 2**64 if type(found) is int else found


Count = Annotated[int, Field(ge=0, le=MOST)]
Positive = Annotated[int, Field(ge=1, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]
Stop = Annotated[list[Name], BeforeValidator(_to_list)]
Penalty = Annotated[float, Field(ge=-1e4, le=1e4)]
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
    """``kvlingo``: what only this server has.

    Attributes:
        strategy: How to get at what another model has read; None for the server's policy.
        pin: Whether the conversation stays in memory as long as the server runs.
    """

    strategy: Literal["translate", "reread"] | None = None
    pin: bool = False


class Sampled(Body):
    """The fields of a request by which tokens are chosen, under the names of mlx-lm's server."""

    temperature: Annotated[float, Field(ge=0, le=1e4)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=1e4)] | None = None
    repetition_context_size: Count | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: Count | None = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: Count | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-1e9, le=1e9)]] | None = None
    seed: Annotated[int | None, BeforeValidator(_seed)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_template)] = None
    kvlingo: Extension | None = None

    def sampling(self) -> Sampling:
        """How tokens are chosen; what was not given is as mlx-lm's server has it."""
        names = Sampling.__dataclass_fields__.keys() - {"logit_bias"}
        given = {name: getattr(self, name) for name in names}
        bias = {_token(text): value for text, value in (self.logit_bias or {}).items()}
        return Sampling(**{k: v for k, v in given.items() if v is not None}, logit_bias=bias)

    def for_server(self) -> dict[str, Any]:
        """The arguments of an Ask that every API fills alike."""
        own = self.kvlingo or Extension()
        return {"sampling": self.sampling(), "strategy": own.strategy, "pin": own.pin}


def _token(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text[:12]) <= MOST and len(text) < 12:
        return int(text)
    raise BadRequest(
        f'Found {shown(text)} as a key of logit_bias; expected a token\'s id, such as "42". '
        "Texts have no bias, since one text may be several tokens.",
        "logit_bias",
    )


def template(effort: str | None, given: dict[str, Any] | None) -> dict[str, Any]:
    """The template's arguments for this effort of reasoning; those that are given win."""
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        found["enable_thinking"] = False
    return found | (given or {})
