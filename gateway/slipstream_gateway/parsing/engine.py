"""Parse answers as they come: one parser for all formats, which are data.

What it cannot read as a call is text exactly as written. Once a call's name is out the call stays;
what then does not belong to it is text.
"""

from collections.abc import Mapping
from typing import Any

from slipstream_gateway.parsing.deltas import Surfaces
from slipstream_gateway.parsing.format import (
    Calls,
    Envelope,
    Header,
    Pythonic,
    Reasoning,
    Tags,
)
from slipstream_gateway.parsing.reader import Step, Stops
from slipstream_gateway.parsing.stepped import SteppedParser
from slipstream_gateway.parsing.styles import Body, envelopes, headed, pythonic, tagged


class Plan:
    """A format bound to a vocabulary: what one parser after another uses."""

    def __init__(
        self, calls: Calls | None, reasoning: Reasoning | None, special_ids: Mapping[str, int]
    ) -> None:
        markers = set() if calls is None else calls.markers()
        if reasoning is not None:
            markers |= {reasoning.open, reasoning.close}
        self.surfaces = Surfaces(markers, special_ids)
        of = self.surfaces.of
        self.calls = None if calls is None else calls.mapped(of)
        self.reasoning = reasoning and Reasoning(of(reasoning.open), of(reasoning.close))
        around = () if self.calls is None else self._around(self.calls)
        thinks = () if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        self.stops = Stops([*thinks[:1], *around])
        is_inside = self.calls is not None and self.calls.in_reasoning
        self.reasoning_stops = Stops([*thinks[1:], *(around if is_inside else ())])
        self.body = None if self.calls is None else Body(self.calls)

    @staticmethod
    def _around(calls: Calls) -> tuple[str, ...]:
        return calls.section_open, calls.open, calls.close, calls.section_close


class AnswerParser(SteppedParser):
    """Reads one answer; see `slipstream_gateway.answer.Parser`."""

    def __init__(self, plan: Plan, tools: Mapping[str, Any], is_thinking: bool) -> None:
        """Stand before the first token.

        Args:
            plan: the format.
            tools: name -> JSON schema of the arguments.
            is_thinking: whether the prompt opened the reasoning.
        """
        make_id = None if plan.calls is None else plan.calls.make_id
        super().__init__(plan.surfaces, make_id or (lambda name, index: ""))
        self._plan = plan
        self._tools = tools
        self._is_thinking = is_thinking and plan.reasoning is not None
        self._sink = self._out.reasoning if self._is_thinking else self._out.text
        self._sink.skips_newlines = self._is_thinking
        self._awaited: set[str] = set()  # closings of calls that have started
        self._steps = self._run()

    def _run(self) -> Step[None]:
        reader, plan = self._reader, self._plan
        yield  # for the first text
        while True:
            if self._sink is self._out.text and self._sink.is_empty and plan.calls is not None:
                yield from self._at_start(plan.calls.start)
            stops = plan.reasoning_stops if self._is_thinking else plan.stops
            stop = yield from reader.upto(stops, self._sink.write)
            if not stop:
                break
            yield from self._at(stop)
        if self._sink.is_after_call:
            self._sink.drop()
        self._sink.flush()

    def _at_start(self, start: str) -> Step[None]:
        """Read calls by which an answer starts without markers."""
        if not start:
            return
        self._reader.record()
        next_one = yield from self._reader.spaces()
        self._sink.write(self._reader.recorded())
        if next_one == start:
            yield from self._call("", self._tools)

    def _at(self, stop: str) -> Step[None]:
        """Read on from a marker, which is next."""
        reader, reasoning, calls = self._reader, self._plan.reasoning, self._plan.calls
        if reasoning is not None and stop == reasoning.open and not self._is_thinking:
            self._open_reasoning(stop)
        elif reasoning is not None and stop == reasoning.close and self._is_thinking:
            reader.skip(len(stop))
            self._sink.drop()
            self._is_thinking, self._sink = False, self._out.text
            self._sink.skips_newlines = True
        elif calls is not None and stop == calls.open:
            yield from self._call(stop, None)
        elif calls is not None and stop == calls.section_open:
            reader.skip(len(stop))
            self._sink.hold(self._surfaces.written(stop))
        else:
            reader.skip(len(stop))
            if stop in self._awaited:
                self._awaited.discard(stop)
                self._sink.drop()
            else:
                self._sink.write(stop)

    def _open_reasoning(self, stop: str) -> None:
        """Start to think, where the marker means that: before all text, or as a special token."""
        self._reader.skip(len(stop))
        if not self._sink.is_empty and self._surfaces.written(stop) == stop:
            self._sink.write(stop)
            return
        self._sink.drop()
        self._is_thinking, self._sink = True, self._out.reasoning
        self._sink.skips_newlines = True

    def _call(self, opening: str, known: Mapping[str, Any] | None) -> Step[None]:
        """Read a call, or several of one opening; what is none is text."""
        reader, body = self._reader, self._plan.body
        assert body is not None, "a marker of calls without calls"
        reader.record()
        reader.skip(len(opening))
        writer = CallWriter(self, known)
        style = body.calls.style
        match style:
            case Envelope():
                yield from envelopes(reader, body, writer, style.is_list)
            case Header():
                yield from headed(reader, body, writer)
            case Tags():
                yield from tagged(reader, body, writer)
            case Pythonic():
                yield from pythonic(reader, body, writer)
        rest = reader.recorded()
        if rest:
            self._sink.write(self._surfaces.written(rest))


class CallWriter:
    """What a style writes of its calls."""

    def __init__(self, parser: AnswerParser, known: Mapping[str, Any] | None) -> None:
        self._parser = parser
        self._known = known

    @property
    def needs_all(self) -> bool:
        """Whether only a name of a tool with its arguments is a call, as no marker says so."""
        return self._known is not None

    def is_call(self, name: str) -> bool:
        """Return whether a name can be that of a call."""
        return self._known is None or name in self._known

    def schema(self, name: str) -> Any:
        """Return the schema of a tool's arguments; None if there is none."""
        return self._parser._tools.get(name)

    def start(self, name: str, call_id: str | None = None) -> None:
        """Start a call: what was read so far belongs to it."""
        own = self._parser
        own._reader.recorded()
        own._sink.drop()
        own._sink.is_after_call = True
        calls = own._plan.calls
        assert calls is not None, "a call without calls"
        own._awaited = {calls.close, calls.section_close} - {""}
        own._out.start_call(name, call_id)

    def write(self, fragment: str) -> None:
        """Add to the arguments of the call."""
        self._parser._out.arguments(fragment)
