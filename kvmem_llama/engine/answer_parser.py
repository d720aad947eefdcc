"""From what a model wrote to a message: content, reasoning and tool calls, whole or while it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..errors import EngineClosed
from ..native import chat_shim


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model asks for; in a delta, what was added to it."""

    id: str  # the model's own, or one that the parser made up
    name: str
    arguments: str  # JSON text; of a partial answer, its beginning
    index: int  # which call of the message


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """What the model wrote."""

    content: str
    reasoning_content: str
    tool_calls: tuple[ToolCall, ...]

    def to_dict(self) -> dict[str, Any]:
        """A message of OpenAI's API, as llama-server gives it: the content is never null."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                    "id": call.id,
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What a piece of the answer added to the message; one part is set."""

    content: str = ""
    reasoning_content: str = ""
    tool_call: ToolCall | None = None  # id and name in the first delta of a call only

    def to_dict(self) -> dict[str, Any]:
        """A "delta" of OpenAI's API."""
        delta: dict[str, Any] = {}
        if self.reasoning_content:
            delta["reasoning_content"] = self.reasoning_content
        if self.content:
            delta["content"] = self.content
        if self.tool_call is not None:
            call = self.tool_call
            part: dict[str, Any] = {"index": call.index}
            if call.id:
                part |= {"id": call.id, "type": "function"}
            function = {"name": call.name} if call.name else {}
            if call.arguments:
                function["arguments"] = call.arguments
            if function:
                part["function"] = function
            delta["tool_calls"] = [part]
        return delta


class AnswerParser:
    """Reads one answer. One thread at a time; a context manager."""

    def __init__(self, request: Mapping[str, object]) -> None:
        """request: of AppliedTemplate.open_parser."""
        self._shim = chat_shim.load()
        self._handle: Any = self._shim.open_parser(request)

    def parse(self, answer: str, *, is_partial: bool = False) -> ParsedMessage:
        """The message of a whole answer, or of its beginning; independent of `feed`, but for equal ids.

        Raises OutputMismatch if the answer does not have the template's form.
        """
        message = self._shim.parse(self._open(), answer, is_partial)
        calls = message.get("tool_calls", ())
        return ParsedMessage(
            content=message.get("content") or "",
            reasoning_content=message.get("reasoning_content", ""),
            tool_calls=tuple(_call(call, index) for index, call in enumerate(calls)),
        )

    def feed(self, piece: str, *, is_partial: bool = True) -> list[MessageDelta]:
        """Adds a piece of whole characters to the answer: what it adds to the message, often nothing.

        is_partial: more is to come.
        Raises OutputMismatch; the piece is not part of the answer then.
        """
        return [
            MessageDelta(
                content=delta.get("content", ""),
                reasoning_content=delta.get("reasoning_content", ""),
                tool_call=_call(delta["tool_calls"][0]) if "tool_calls" in delta else None,
            )
            for delta in self._shim.feed(self._open(), piece, is_partial)
        ]

    def close(self) -> None:
        """Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._shim.close_parser(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Any:
        if self._handle is None:
            raise EngineClosed("the parser of this answer is closed", hint="Open another one.")
        return self._handle


def _call(call: Mapping[str, Any], index: int = 0) -> ToolCall:
    function = call.get("function", {})
    return ToolCall(
        id=call.get("id", ""),
        name=function.get("name", ""),
        arguments=function.get("arguments", ""),
        index=call.get("index", index),
    )
