"""Output items of a response: a message, reasoning or a function call, and their events."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from slipstream_gateway.answer import Call, Reasoning, Text, TokenLogProb
from slipstream_gateway.dialects.events import encode

Event = tuple[str, dict[str, Any]]
_LOWEST = -9999.0  # for minus infinity, which JSON cannot say


class Item:
    """An output item as it grows.

    Attributes:
        id: constant through all events; `index`: the place in the output.
        prefix: how the name and data of its delta events start, up to the sequence number.
    """

    kind = ""
    delta_event = ""

    def __init__(self, ident: str, index: int) -> None:
        self.id = ident
        self.index = index
        self.status = "in_progress"
        self._pieces: list[str] = []
        self._middle = b',"item_id":%b,"output_index":%d,' % (encode(ident), index)
        name = self.delta_event.encode()
        self.prefix = b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name)

    @property
    def text(self) -> str:
        """What came so far: text, reasoning or arguments."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def shape(self) -> dict[str, Any]:
        """Return the item itself, as far as it has come."""
        raise NotImplementedError

    def opening(self) -> Iterator[Event]:
        """Yield the events before its first delta."""
        yield "response.output_item.added", {"output_index": self.index, "item": self.shape()}

    def delta(self, text: str, log_probs: Sequence[TokenLogProb] = ()) -> bytes:
        """Add text, and return what follows the sequence number in its event."""
        raise NotImplementedError

    def closing(self) -> Iterator[Event]:
        """Yield the events after its last delta."""
        yield "response.output_item.done", {"output_index": self.index, "item": self.shape()}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}


class MessageItem(Item):
    """Text of the answer, with its log probs."""

    kind = "message"
    delta_event = "response.output_text.delta"

    def __init__(self, ident: str, index: int) -> None:
        super().__init__(ident, index)
        self._log_probs: list[dict[str, Any]] = []
        self._is_open = False

    def shape(self) -> dict[str, Any]:
        """Return the message, as far as it has come."""
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": [self._part()] if self._is_open else [],
        }

    def opening(self) -> Iterator[Event]:
        """Yield the events before the first text of the message."""
        yield from super().opening()
        self._is_open = True
        yield "response.content_part.added", {**self._place(), "part": self._part()}

    def delta(self, text: str, log_probs: Sequence[TokenLogProb] = ()) -> bytes:
        """Add text to the message, and return what follows the sequence number."""
        self._pieces.append(text)
        if not log_probs:
            return b'%b"content_index":0,"delta":%b,"logprobs":[]}\n\n' % (
                self._middle,
                encode(text),
            )
        shapes = [_log_prob(each) for each in log_probs]
        self._log_probs += shapes
        return b'%b"content_index":0,"delta":%b,"logprobs":%b}\n\n' % (
            self._middle,
            encode(text),
            encode(shapes),
        )

    def closing(self) -> Iterator[Event]:
        """Yield the events after the last text of the message."""
        done = {**self._place(), "text": self.text, "logprobs": self._log_probs}
        yield "response.output_text.done", done
        yield "response.content_part.done", {**self._place(), "part": self._part()}
        yield from super().closing()

    def _part(self) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self._log_probs,
        }


class ReasoningItem(Item):
    """Reasoning, whole: there are no summaries."""

    kind = "reasoning"
    delta_event = "response.reasoning_text.delta"

    def shape(self) -> dict[str, Any]:
        """Return the reasoning, as far as it has come."""
        parts = [self._part()] if self._pieces else []
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": parts,
        }

    def opening(self) -> Iterator[Event]:
        """Yield the events before the first text of the reasoning."""
        yield from super().opening()
        yield "response.content_part.added", {**self._place(), "part": self._part()}

    def delta(self, text: str, log_probs: Sequence[TokenLogProb] = ()) -> bytes:
        """Add text to the reasoning, and return what follows the sequence number."""
        self._pieces.append(text)
        return b'%b"content_index":0,"delta":%b}\n\n' % (self._middle, encode(text))

    def closing(self) -> Iterator[Event]:
        """Yield the events after the last text of the reasoning."""
        yield "response.reasoning_text.done", {**self._place(), "text": self.text}
        yield "response.content_part.done", {**self._place(), "part": self._part()}
        yield from super().closing()

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class CallItem(Item):
    """A function call; `call_id` is the one that the result of the call must name."""

    kind = "function_call"
    delta_event = "response.function_call_arguments.delta"

    def __init__(self, ident: str, index: int, call_id: str, name: str) -> None:
        super().__init__(ident, index)
        self.call_id = call_id
        self.name = name

    def shape(self) -> dict[str, Any]:
        """Return the call, as far as it has come."""
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }

    def delta(self, text: str, log_probs: Sequence[TokenLogProb] = ()) -> bytes:
        """Add text to the call, and return what follows the sequence number."""
        self._pieces.append(text)
        return b'%b"delta":%b}\n\n' % (self._middle, encode(text))

    def closing(self) -> Iterator[Event]:
        """Yield the events after the last text of the call."""
        done = {
            "item_id": self.id,
            "output_index": self.index,
            "name": self.name,
            "arguments": self.text,
        }
        yield "response.function_call_arguments.done", done
        yield from super().closing()


def item_of(part: Text | Reasoning | Call, ident: str, index: int) -> Item:
    """Return an empty item for a part of an answer; `ident`: the response's, without its prefix."""
    match part:
        case Text():
            return MessageItem(f"msg_{ident}{index:04x}", index)
        case Reasoning():
            return ReasoningItem(f"rs_{ident}{index:04x}", index)
        case Call():
            return CallItem(f"fc_{ident}{index:04x}", index, part.id, part.name)


def _log_prob(token: TokenLogProb) -> dict[str, Any]:
    return {
        **_one(token),
        "top_logprobs": [_one(each) for each in token.top],
    }


def _one(token: TokenLogProb) -> dict[str, Any]:
    log_prob = _LOWEST if math.isinf(token.log_prob) else token.log_prob
    return {"token": token.text, "logprob": log_prob, "bytes": list(token.data)}
