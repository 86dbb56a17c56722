"""Read answers in channels: messages with headers, as gpt-oss writes them."""

import re
from collections.abc import Mapping

from slipstream_gateway.parsing.deltas import Surfaces
from slipstream_gateway.parsing.format import Channels, random_id
from slipstream_gateway.parsing.reader import Step, Stops
from slipstream_gateway.parsing.scan import json_value
from slipstream_gateway.parsing.stepped import SteppedParser

MAX_HEADER = 1024
"""Characters of a header: a longer one is text."""

_RECIPIENT = re.compile(r"\bto=([^\s<\ud800-\udfff]+)")
_FUNCTION = "functions."


class ChannelPlan:
    """The channels bound to a vocabulary: what one parser after another uses."""

    def __init__(self, channels: Channels, special_ids: Mapping[str, int]) -> None:
        self.written = channels
        self.surfaces = Surfaces(channels.markers(), special_ids)
        own = self.channels = channels.mapped(self.surfaces.of)
        self.header_stops = Stops([own.message, *own.ends])
        self.body_stops = Stops([own.start, own.channel, *own.ends])
        self.channel_name = re.compile(rf"{re.escape(own.channel)}\s*(\w+)")


class ChannelParser(SteppedParser):
    """Reads one answer; see `slipstream_gateway.answer.Parser`."""

    def __init__(self, plan: ChannelPlan, prompt: str) -> None:
        """Stand behind a rendered prompt, which ends in a header or in a message."""
        super().__init__(plan.surfaces, random_id)
        self._plan = plan
        start = prompt.rpartition(plan.written.start)[2] if plan.written.start in prompt else ""
        self._steps = self._run(start)

    def _run(self, start: str) -> Step[None]:
        """Read messages; `start` is what the prompt has of the first one."""
        plan, reader = self._plan, self._reader
        yield
        for marker in plan.written.markers():
            start = start.replace(marker, plan.surfaces.of(marker))
        is_between = plan.channels.message in start
        if is_between:
            yield from self._message(start.partition(plan.channels.message)[0])
            start = ""
        while (yield from reader.peek()):
            reader.record()
            head = yield from reader.head(plan.header_stops, MAX_HEADER)
            if head is None or head[1] != plan.channels.message:
                rest = reader.recorded()
                if head is not None and head[1]:
                    reader.skip(len(head[1]))
                if head is None or rest.strip() or not is_between:
                    self._out.text.write(plan.surfaces.written(rest))
                yield from self._text_body()
            else:
                reader.recorded()
                reader.skip(len(head[1]))
                yield from self._message(start + head[0])
            start, is_between = "", True
        self._out.text.flush()
        self._out.reasoning.flush()

    def _message(self, header: str) -> Step[None]:
        """Read a message behind its header."""
        reader, plan = self._reader, self._plan
        recipient = _RECIPIENT.search(header)
        named = plan.channel_name.search(header)
        sink = self._out.text
        if named is not None and named[1] in plan.channels.reasoning:
            sink = self._out.reasoning
        name = recipient[1] if recipient is not None else ""
        if name.startswith(_FUNCTION) and len(name) > len(_FUNCTION):
            reader.record()
            if (yield from reader.spaces()) == "{":
                reader.recorded()
                self._out.text.drop()
                self._out.start_call(name.removeprefix(_FUNCTION), None)
                yield from json_value(reader, self._out.arguments)
                yield from reader.spaces()
                sink = self._out.text
            else:
                sink.write(reader.recorded())
        stop = yield from reader.upto(plan.body_stops, sink.write)
        self._close(stop)

    def _text_body(self) -> Step[None]:
        """Read text that no header came before."""
        stop = yield from self._reader.upto(self._plan.body_stops, self._out.text.write)
        self._close(stop)

    def _close(self, stop: str) -> None:
        if stop in self._plan.channels.ends:
            self._reader.skip(len(stop))
