"""Gather messages of a chat: what one turn of the assistant said may come as several items."""

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


class Turns:
    """Messages of a chat completion, made from items in their order.

    Reasoning, text and calls of the assistant that follow each other become one message; leading
    system texts become one message, as most templates take only one.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def system(self, text: str) -> None:
        """Add a text of the system; those before any other message are joined by a blank line."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, texts: Sequence[str]) -> None:
        """Add a message of the user, of one or more parts."""
        self.messages.append({"role": "user", "content": _content(texts)})

    def tool(self, call_id: str, texts: Sequence[str]) -> None:
        """Add the result of a call."""
        message = {"role": "tool", "tool_call_id": call_id, "content": _content(texts)}
        self.messages.append(message)

    def assistant(self, texts: Sequence[str]) -> None:
        """Add text of the assistant, to a turn that has only reasoned so far, or as a new one."""
        turn = self._open()
        if turn is None or turn["content"] is not None or "tool_calls" in turn:
            turn = self._start()
        turn["content"] = _content(texts)

    def reasoning(self, text: str) -> None:
        """Add reasoning of the assistant; it stands before the text and the calls of its turn."""
        turn = self._open()
        if turn is None or turn["content"] is not None or "tool_calls" in turn:
            turn = self._start()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call to the turn of the assistant; `arguments`: JSON."""
        turn = self._open() or self._start()
        function = {"name": name, "arguments": arguments}
        calls = turn.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _open(self) -> Message | None:
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == "assistant" else None

    def _start(self) -> Message:
        self.messages.append({"role": "assistant", "content": None})
        return self.messages[-1]


def _content(texts: Sequence[str]) -> str | list[Message]:
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]
