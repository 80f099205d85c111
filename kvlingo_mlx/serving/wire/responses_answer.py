"""OpenAI's responses: what answers say."""

from __future__ import annotations

import time
from typing import Any

from kvlingo_mlx.serving.messages import Delta, Failure, Finished, GenerationRequest, Usage
from kvlingo_mlx.serving.wire import extension, frame, openai_logprobs
from kvlingo_mlx.serving.wire.answers import Gathered, new_id

# A response's error has codes of its own.
_CODES = {
    "invalid": "invalid_prompt",
    "too_long": "context_length_exceeded",
    "busy": "rate_limit_exceeded",
}
_NAMES = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponsesAnswer(Gathered):
    """An answer in items: reasoning, a message, calls, in the order in which they come.

    Args:
        ask: What was asked.
        echoed: What the response repeats of its request.
    """

    def __init__(self, ask: GenerationRequest, echoed: dict[str, Any]) -> None:
        super().__init__(ask, "resp_")
        self.echoed = echoed
        self.items: list[dict[str, Any]] = []
        self.open = False
        self.number = -1
        self.created_sent = False

    # ---- frames -----------------------------------------------------------------------------

    def begin(self) -> list[str]:
        return [] if self.created_sent else self._create()

    def piece(self, piece: Delta) -> list[str]:
        frames: list[str] = []
        if piece.reasoning:
            frames += self._grow("reasoning", piece.reasoning, None)
        if piece.content or (self.wants_logprobs and piece.logprobs and not piece.reasoning):
            frames += self._grow("message", piece.content, piece)
        for call in piece.tool_calls:
            frames += self._call(dict(call))
        return frames

    def end(self, ended: Finished) -> list[str]:
        frames = self._close("incomplete" if ended.reason == "length" else "completed")
        whole = self.body()
        return [*frames, self._event(f"response.{whole['status']}", response=whole)]

    def fail(self, failed: Failure) -> list[str]:
        frames = [*([] if self.created_sent else self._create()), *self._close("incomplete")]
        error = {"code": _CODES.get(failed.kind, "server_error"), "message": failed.message}
        response = self._response("failed") | {"error": error}
        return [*frames, self._event("response.failed", response=response)]

    def keep_alive(self) -> str:
        """The response so far: clients of this API do not count comments."""
        if not self.created_sent:
            return "".join(self._create())
        return self._event("response.in_progress", response=self._response("in_progress"))

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        cut = self.reason == "length"
        done = {"usage": _usage(self.usage), "completed_at": int(time.time())}
        if cut:
            done["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._response("incomplete" if cut else "completed") | done

    # ---- what they are made of ---------------------------------------------------------------

    def _create(self) -> list[str]:
        self.created_sent = True
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

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
            **self.echoed,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _grow(self, kind: str, text: str, piece: Delta | None) -> list[str]:
        """More reasoning or text, in the open item if that is of its kind."""
        frames: list[str] = []
        if not self.open or self.items[-1]["type"] != kind:
            frames += self._start(kind)
        part = self.items[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "message":
            logprobs = piece.logprobs if piece and self.wants_logprobs else ()
            more["logprobs"] = openai_logprobs([*logprobs])
            part["logprobs"] += more["logprobs"]
        name = f"response.{_NAMES[kind]}.delta"
        return [*frames, self._event(name, **self._place(), content_index=0, delta=text, **more)]

    def _start(self, kind: str) -> list[str]:
        """Close what is open; begin an item of reasoning, or a message, with its one part."""
        part: dict[str, Any] = {"type": _NAMES[kind], "text": ""}
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "reasoning":
            item |= {"id": new_id("rs_"), "summary": [], "encrypted_content": None}
        else:
            item |= {"id": new_id("msg_"), "role": "assistant"}
            part |= {"annotations": [], "logprobs": []}
        frames = self._add(item)
        added = self._event(
            "response.content_part.added", **self._place(), content_index=0, part=part
        )
        item["content"].append(part)
        return [*frames, added]

    def _add(self, item: dict[str, Any]) -> list[str]:
        frames = self._close("completed")
        self.items.append(item)
        self.open = True
        index = len(self.items) - 1
        return [*frames, self._event("response.output_item.added", output_index=index, item=item)]

    def _call(self, call: dict[str, Any]) -> list[str]:
        text, name = call["function"]["arguments"], call["function"]["name"]
        item = {"type": "function_call", "id": new_id("fc_"), "call_id": call["id"]}
        frames = self._add(item | {"name": name, "arguments": "", "status": "in_progress"})
        kind = "response.function_call_arguments"
        frames.append(self._event(f"{kind}.delta", **self._place(), delta=text))
        self.items[-1]["arguments"] = text
        frames.append(self._event(f"{kind}.done", **self._place(), name=name, arguments=text))
        return frames + self._close("completed")

    def _close(self, status: str) -> list[str]:
        """The ends of the open item, if there is one."""
        if not self.open:
            return []
        self.open = False
        item = self.items[-1]
        item["status"] = status
        frames: list[str] = []
        if item["type"] != "function_call":
            part = item["content"][0]
            place = {**self._place(), "content_index": 0}
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            name = f"response.{_NAMES[item['type']]}.done"
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
