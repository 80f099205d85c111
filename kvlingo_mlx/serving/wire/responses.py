"""OpenAI's responses."""

import functools
import time
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kvlingo_mlx.serving.messages import Delta, Failure, GenerationRequest, Message, Usage
from kvlingo_mlx.serving.wire import oddities, openai_error
from kvlingo_mlx.serving.wire.answers import Gathered, extension, frame, logprobs_of, new_id
from kvlingo_mlx.serving.wire.chat import StreamOptions, tops
from kvlingo_mlx.serving.wire.forms import conversation
from kvlingo_mlx.serving.wire.requests import Api, Body, Conversing, Positive, Tops
from kvlingo_mlx.serving.wire.tools import CUSTOM, FUNCTION, Toolbox, searched, tools_in
from kvlingo_mlx.tokenization.chat_messages import kind_of

# A response's error has codes of its own.
CODES = {
    "invalid": "invalid_prompt",
    "too_long": "context_length_exceeded",
    "busy": "rate_limit_exceeded",
}
NAMES = {"reasoning": "reasoning_text", "message": "output_text"}
LOGPROBS = "message.output_text.logprobs"

# ---- requests -----------------------------------------------------------------------------------


class _TextSetting(Body):
    rules = oddities.TEXT_SETTING
    format: Any = None


def _in_items(found: Any) -> Any:
    return [{"role": "user", "content": found}] if isinstance(found, str) else found


class ResponsesRequest(Conversing):
    rules = oddities.RESPONSES
    input: Annotated[Annotated[list[Any], Field(min_length=1)], BeforeValidator(_in_items)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    metadata: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    text: _TextSetting | None = None
    top_logprobs: Tops | None = None
    include: list[str] | None = None

    @functools.cached_property
    def toolbox(self) -> Toolbox:
        """The tools, with those that items add or tell to have been found."""
        added, found = (
            [tools_in(item) for item in self.input if kind_of(item) == kind]
            for kind in ("additional_tools", "tool_search_output")
        )
        return Toolbox(self.tools or [], added, found)

    def conversation(self) -> tuple[Message, ...]:
        first = {"role": "system", "content": self.instructions}
        before = [first] if self.instructions else []
        items = [
            searched(item) if kind_of(item) == "tool_search_output" else item
            for item in self.input
            if kind_of(item) != "additional_tools"
        ]
        return (*before, *conversation(items, "input", apart=True))

    def ask(self) -> GenerationRequest:
        return self.converse(
            ("text.format", self.text.format if self.text else None),
            max_tokens=self.max_output_tokens,
            logprobs=tops(LOGPROBS in (self.include or []), self.top_logprobs),
        )

    def echoed(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        choice, form = self.tool_choice or "auto", self.text.format if self.text else None
        word = choice["type"] if isinstance(choice, dict) and [*choice] == ["type"] else choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": self.effort},
            "temperature": self.temperature,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": word,
            "tools": self.tools or [],
            "top_p": self.top_p,
        }


# ---- answers ------------------------------------------------------------------------------------


class ResponsesAnswer(Gathered):
    """An answer in items: reasoning, a message, calls, in the order in which they come."""

    prefix = "resp_"

    def __init__(self, request: ResponsesRequest) -> None:
        super().__init__(request)
        self.items: list[dict[str, Any]] = []
        self.open = False
        self.number = -1  # of the last event

    def begin(self) -> list[str]:
        if self.number >= 0:  # it was sent to keep the stream alive
            return []
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def piece(self, piece: Delta) -> list[str]:
        frames: list[str] = []
        if piece.reasoning:
            frames += self._grow("reasoning", piece.reasoning, {})
        logprobs = logprobs_of([*piece.logprobs]) if self.wants_logprobs else []
        if piece.content or (logprobs and not piece.reasoning):
            frames += self._grow("message", piece.content, {"logprobs": logprobs})
        for each in piece.tool_calls:
            frames += self._call_item(each["id"], **each["function"])
        return frames

    def end(self) -> list[str]:
        frames = self._close("incomplete" if self.reason == "length" else "completed")
        whole = self.body()
        return [*frames, self._event(f"response.{whole['status']}", response=whole)]

    def fail(self, failed: Failure) -> list[str]:
        frames = [*self.begin(), *self._close("incomplete")]
        error = {"code": CODES.get(failed.kind, "server_error"), "message": failed.message}
        response = self._response("failed") | {"error": error}
        return [*frames, self._event("response.failed", response=response)]

    def keep_alive(self) -> str:
        """The response so far: clients of this API do not count comments."""
        if frames := self.begin():
            return "".join(frames)
        return self._event("response.in_progress", response=self._response("in_progress"))

    def body(self) -> dict[str, Any]:
        cut = self.reason == "length"
        done: dict[str, Any] = {"usage": _usage(self.usage), "completed_at": int(time.time())}
        if cut:
            done["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._response("incomplete" if cut else "completed") | done

    # ---- what they are made of ---------------------------------------------------------------

    def _event(self, kind: str, **data: Any) -> str:
        self.number += 1
        return frame({"type": kind, "sequence_number": self.number, **data}, kind)

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": self.items,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self.request.echoed(),
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _grow(self, kind: str, text: str, more: dict[str, list[Any]]) -> list[str]:
        """More reasoning or text, in the open item if that is of its kind."""
        frames: list[str] = []
        if not self.open or self.items[-1]["type"] != kind:
            frames += self._start(kind)
        part = self.items[-1]["content"][0]
        part["text"] += text
        for name, values in more.items():
            part[name] += values
        name = f"response.{NAMES[kind]}.delta"
        return [*frames, self._event(name, **self._place(), content_index=0, delta=text, **more)]

    def _start(self, kind: str) -> list[str]:
        """Close what is open; begin an item of reasoning, or a message, with its one part."""
        part: dict[str, Any] = {"type": NAMES[kind], "text": ""}
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "reasoning":
            item |= {"id": new_id("rs_"), "summary": [], "encrypted_content": None}
        else:
            item |= {"id": new_id("msg_"), "role": "assistant"}
            part |= {"annotations": [], "logprobs": []}
        frames = self._add(item)
        place = {**self._place(), "content_index": 0}
        frames.append(self._event("response.content_part.added", **place, part=part))
        item["content"].append(part)
        return frames

    def _add(self, item: dict[str, Any]) -> list[str]:
        frames = self._close("completed")
        self.items.append(item)
        self.open = True
        index = len(self.items) - 1
        return [*frames, self._event("response.output_item.added", output_index=index, item=item)]

    def _call_item(self, identity: str, name: str, arguments: str) -> list[str]:
        called = self.toolbox.called(name)
        kind, told = called.kind, called.kind.arguments(arguments)
        named = {"name": called.name} if kind in (FUNCTION, CUSTOM) else {}
        space = {"namespace": called.namespace} if called.namespace and named else {}
        prefix = "".join(word[0] for word in kind.item.split("_"))
        item = {"type": kind.item, "id": new_id(f"{prefix}_"), "call_id": identity, **kind.more}
        item |= {**named, **space, kind.field: "" if named else told, "status": "in_progress"}
        frames = self._add(item)
        if named:
            event, place = f"response.{kind.item}_{kind.field}", self._place()
            frames.append(self._event(f"{event}.delta", **place, delta=told))
            self.items[-1][kind.field] = told
            done = {"name": called.name, kind.field: told} if kind is FUNCTION else {"input": told}
            frames.append(self._event(f"{event}.done", **place, **done))
        return frames + self._close("completed")

    def _close(self, status: str) -> list[str]:
        """The ends of the open item, if there is one."""
        if not self.open:
            return []
        self.open = False
        item = self.items[-1]
        item["status"] = status
        frames: list[str] = []
        if "content" in item:
            part = item["content"][0]
            place = {**self._place(), "content_index": 0}
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            name = f"response.{NAMES[item['type']]}.done"
            frames.append(self._event(name, **place, text=part["text"], **more))
            frames.append(self._event("response.content_part.done", **place, part=part))
        index = len(self.items) - 1
        return [*frames, self._event("response.output_item.done", output_index=index, item=item)]


def _usage(usage: Usage) -> dict[str, Any]:
    """Counts as this API has them."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "kvlingo": extension(usage),
    }


API = Api(
    ("/v1/responses", "/responses"), ResponsesRequest, ResponsesAnswer, openai_error,
    streamed=("too_long",),  # Codex
)  # fmt: skip
