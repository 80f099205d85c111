"""What requests of several APIs have in common: sampling, tools, and what is our own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvlingo_mlx.serving.messages import MOST, GenerationRequest, Message, Sampling
from kvlingo_mlx.serving.wire.forms import choice_of, schema_of, tools_of
from kvlingo_mlx.serving.wire.reading import Body, Name, RequestBody


def _to_list(found: Any) -> Any:
    return ([found] if found else []) if isinstance(found, str) else found


def _template(found: Any) -> Any:
    if isinstance(found, dict) and (own := sorted(found.keys() & set(_TEMPLATE_OWN))):
        raise PydanticCustomError("template", "{name} is set by the server", {"name": own[0]})
    return found


_TEMPLATE_OWN = """
    messages conversation tools documents chat_template add_generation_prompt tokenize padding
    continue_final_message truncation max_length return_tensors return_dict tokenizer_kwargs
    return_assistant_tokens_mask
""".split()
Positive = Annotated[int, Field(ge=1, le=MOST)]
Stop = Annotated[list[Name], BeforeValidator(_to_list)]
Tops = Annotated[int, Field(ge=-1, le=20)]  # -1 is mlx-lm's "none"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Extension(Body):
    """``kvlingo``: what only this server has."""

    strategy: Literal["translate", "reread"] | None = None  # None: as the server's policy says
    pin: bool = False  # whether the conversation stays in memory


class Sampled(Sampling, RequestBody):
    """What requests of all APIs have in common."""

    model: Name
    stream: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_template)] = None
    kvlingo: Extension = Extension()

    def request(self, **own: Any) -> GenerationRequest:
        """The request for the engine, of which the API gives the rest."""
        sampling = {name: getattr(self, name) for name in Sampling.model_fields}
        return GenerationRequest(
            model=self.model,
            sampling=Sampling.model_construct(**sampling),
            strategy=self.kvlingo.strategy,
            pin=self.kvlingo.pin,
            **own,
        )


class Conversing(Sampled):
    """What requests that give a whole conversation have in common."""

    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def conversation(self) -> tuple[Message, ...]:
        """The messages in the form of OpenAI's chat."""
        raise NotImplementedError

    def converse(
        self, form: tuple[str, Any], effort: str | None, template: dict[str, Any], **own: Any
    ) -> GenerationRequest:
        """The request for the engine.

        Args:
            form: What the answer must be, after the name of its field.
            effort: How much the model reasons.
            template: Arguments of the chat template, which those that the client gives override.
            own: What else there is of the request.
        """
        tools = tools_of(self.tools or [])
        effort_is = {"reasoning_effort": effort} if effort else {}
        thinks = {"enable_thinking": False} if effort == "none" else {}
        return self.request(
            messages=self.conversation(),
            tools=tools,
            tool_choice=choice_of(self.tool_choice, tools),
            schema=schema_of(form[1], form[0]),
            template={**effort_is, **thinks, **template, **(self.chat_template_kwargs or {})},
            **{"parallel_tool_calls": self.parallel_tool_calls is not False, **own},
        )
