"""Read answers by a checkpoint's `response_template`, as they come.

Text and reasoning go out as they come, but for what may become an edge. Calls go out when their
region closes; one that cannot be read is text as written.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import regex

from slipstream_gateway.answer import Delta
from slipstream_gateway.parsing.contents import CONTENTS, calls_of, shaped
from slipstream_gateway.parsing.deltas import Deltas
from slipstream_gateway.parsing.format import AddedTokens, random_id
from slipstream_gateway.parsing.template import Edge, Region, Template

_Found = tuple[int, int, Region | None, Any]
"""Start and end of an edge, the region that it opens (None: it closes one), and its match."""


class RegionPlan:
    """A template bound to a vocabulary."""

    def __init__(self, template: Template, added: AddedTokens) -> None:
        self.template = template
        self._shown = {
            token_id: text for text, token_id in added.special.items() if template.names(text)
        }

    def read(self, token_id: int, text: str) -> str:
        """Return the text of a token; special ones that the template names have theirs."""
        return text or self._shown.get(token_id, "")


class RegionParser:
    """Reads one answer; see `slipstream_gateway.answer.Parser`."""

    def __init__(
        self,
        plan: RegionPlan,
        prompt: str,
        tools: Mapping[str, Any],
        has_calls: bool,
        has_guide: bool = False,
    ) -> None:
        """Stand behind a rendered prompt; without `has_calls`, calls are text.

        Where a guide holds, calls are whole: an end before that is one of their texts.
        """
        self._has_guide = has_guide
        self._plan = plan
        self._tools = tools
        self._has_calls = has_calls
        self._out = Deltas(random_id)
        self._buffer = ""
        self._region = plan.template.implicit
        self._seen: set[str] = set()  # fields that had text before: `join` goes between
        self._open(self._region, None)
        self._buffer = plan.template.behind_anchor(prompt)
        self._process(False)
        self._out = Deltas(random_id)  # what the prompt has is no answer

    @property
    def region(self) -> Region | None:
        """The region that is open."""
        return self._region

    def feed(self, token_ids: Sequence[int], texts: Sequence[str]) -> list[Delta]:
        """Return what the new tokens add."""
        self._buffer += "".join(map(self._plan.read, token_ids, texts))
        self._process(False)
        return self._out.take()

    def finish(self) -> list[Delta]:
        """Return what was held back, at the end of the answer."""
        self._process(True)
        self._close(None)
        return self._out.take()

    def _process(self, is_over: bool) -> None:
        at = 0
        while True:
            found, hold = self._scan(at, is_over)
            if found is None:
                self._take(self._buffer[at:hold])
                self._buffer = self._buffer[hold:]
                return
            start, end, region, match = found
            self._take(self._buffer[at:start])
            at = end
            if start < len(self._buffer) and self._is_within_call(region):
                at = max(end, start + 1)
                self._take(self._buffer[start:at])
                continue
            had_text = self._has_text
            self._close(match if region is None else None)
            self._open(region or self._plan.template.implicit, match if region else None)
            if region is None and start == end and not had_text:  # nothing moved
                self._take(self._buffer[at:])
                self._buffer = ""
                return

    def _edges(self) -> list[tuple[Edge, Region | None]]:
        region, implicit = self._region, self._plan.template.implicit
        if region is not None and region is not implicit:
            return [(region.close, None)] if region.close is not None else []
        edges: list[tuple[Edge, Region | None]] = [
            (each.opening, each) for each in self._plan.template.regions if each.opening is not None
        ]
        if implicit is not None and implicit.close is not None:
            edges.append((implicit.close, None))
        return edges

    def _scan(self, at: int, is_over: bool) -> tuple[_Found | None, int]:
        """Return the first edge that is certain, and up to where the text before it is."""
        best: tuple[tuple[int, int, bool, str], _Found] | None = None
        hold = len(self._buffer)
        for edge, region in self._edges():
            pattern = edge.pattern if is_over else edge.running
            found = pattern.search(self._buffer, at, partial=not is_over)
            if found is None:
                continue
            start, end = found.span()
            is_last = end == len(self._buffer)
            if not is_over and (found.partial or (is_last and (not edge.is_final or start == end))):
                hold = min(hold, start)
                continue
            name = self._region.name if region is None and self._region else ""
            key = (start, start - end, region is None, region.name if region else name)
            if best is None or key < best[0]:
                best = key, (start, end, region, found)
        if best is None or (best[0][0] >= hold and not is_over):
            return None, hold
        return best[1], hold

    # --- regions -----------------------------------------------------------------------------

    def _open(self, region: Region | None, match: Any) -> None:
        self._region = region
        self._pieces: list[str] = [] if match is None else [match[0]]  # of calls, as written
        self._captures = {} if match is None else match.groupdict()
        self._body: list[str] = []
        self._blanks = ""
        self._has_text = self._has_written = False

    def _take(self, text: str) -> None:
        """Take text of the region that is open."""
        region = self._region
        if not text or region is None:
            return
        self._has_text = True
        if region.has_calls and self._has_calls:
            self._body.append(text)
            return
        if region.has_calls and not self._has_written:
            text = "".join(self._pieces) + text
        self._write(region, text)

    def _write(self, region: Region, text: str) -> None:
        sink = self._out.reasoning if region.is_reasoning else self._out.text
        if region.strips and not region.has_calls:
            text = self._blanks + text if self._has_written else text.lstrip()
            body = text.rstrip()
            text, self._blanks = body, text[len(body) :]
        if not text:
            return
        if not self._has_written and region.name in self._seen:
            text = region.join + text
        self._has_written = True
        self._seen.add(region.name)
        sink.hold(text)
        sink.flush()

    def _close(self, match: Any) -> None:
        region = self._region
        if region is None or not region.has_calls:
            return
        closing = "" if match is None else match[0]
        if not self._has_calls:
            if self._has_text or self._pieces:
                rest = "" if self._has_written else "".join(self._pieces)
                self._write(region, rest + closing)
            return
        if not self._has_text and not self._pieces:
            return
        calls = self._read(region)
        if calls is None:
            self._write(region, "".join(self._pieces) + "".join(self._body) + closing)
            return
        for name, arguments, call_id in calls:
            self._out.start_call(name, call_id)
            self._out.arguments(arguments)

    def _read(self, region: Region) -> list[tuple[str, str, str | None]] | None:
        """Return the calls of the region that is open; None: they cannot be read."""
        captures = {key: value for key, value in self._captures.items() if value is not None}
        try:
            value = CONTENTS[region.content]("".join(self._body), region.args)
            shape = shaped(value, captures, region.transform, region.is_each)
            return calls_of(shape, self._tools)
        except (ValueError, LookupError, TypeError, AttributeError):
            return None

    def _is_within_call(self, opened: Region | None) -> bool:
        """Return whether the end that was found lies within a call that a guide will end."""
        region = self._region
        if not self._has_guide or opened is not None or region is None or not region.has_calls:
            return False
        pattern = region.args.get("tag_pattern") if region.content == "xml-inline" else None
        if pattern is not None:
            rest = regex.sub(pattern, "", "".join(self._body), flags=regex.DOTALL)
            return bool(rest.strip())
        return self._read(region) is None
