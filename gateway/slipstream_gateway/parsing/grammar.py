"""The grammar that an answer with tools must follow, in its model's own format.

Where a call must come (`required`, or a named function), the grammar is that of calls, from the
answer's first token on, or from the end of the reasoning. Where one may come (`auto`) and a tool is
strict, or a second one may not, text is free until it has the opening of a call, from which on the
grammar holds. Where the text of an answer is JSON of a schema, an answer is calls or that JSON.
"""

from collections.abc import Callable
from typing import Any

from slipstream_contract.guide import Guide

from slipstream_gateway.parsing.arguments import (
    is_enforced,
    object_schema,
    python_arguments,
    tag_arguments,
)
from slipstream_gateway.parsing.choice import Tool, ToolChoice
from slipstream_gateway.parsing.format import (
    AddedTokens,
    Calls,
    Channels,
    Envelope,
    Format,
    Header,
    Pythonic,
    Reasoning,
    Tags,
)
from slipstream_gateway.parsing.lark import TEXT, Lark, quoted
from slipstream_gateway.parsing.values import dump

_BLANKS = r"/[ \t\r\n]{1,8}/"


def guide_of(
    form: Format,
    added: AddedTokens,
    choice: ToolChoice,
    is_thinking: bool,
    answer: Any,
) -> Guide | None:
    """Return the guide of a request's answers; None: any answer will do.

    Args:
        form: the format, which has calls.
        added: the vocabulary's added tokens.
        choice: the request's tools.
        is_thinking: whether the prompt opened the reasoning. The grammar holds from the first token
            on and lets the reasoning pass, so that it does not matter what the engine knows of it.
        answer: the JSON schema of an answer without calls; None: it is any text.

    Raises ApiError for a strict schema that the format cannot hold.
    """
    if not choice.is_guided and (answer is None or not choice.allowed):
        return None
    is_forced = choice.must_call
    lark = Lark(added)
    if form.channels is not None:
        return lark.guide(_in_channels(lark, form.channels, choice, is_forced, answer))
    assert form.calls is not None, "a format without calls has no grammar"
    writer = _Writer(lark, form.calls, choice, is_forced)
    if is_forced:
        body = writer.forced()
    elif answer is not None:
        body = f"({writer.forced()} | {lark.json(answer)})"
    else:
        body = writer.triggered()
    return lark.guide(f"{_reasoning(lark, form.reasoning, is_thinking)} {body}")


def _reasoning(lark: Lark, reasoning: Reasoning | None, is_thinking: bool) -> str:
    """Return the expression of reasoning that the grammar has to let pass, and of blanks."""
    if reasoning is None:
        return f"({_BLANKS})?"
    end = lark.until(reasoning.close)
    if is_thinking:
        return f"{end} ({_BLANKS})?"
    return f"(({_BLANKS})? {lark.say(reasoning.open)} {end})? ({_BLANKS})?"


class _Writer:
    """Calls of one format."""

    def __init__(self, lark: Lark, calls: Calls, choice: ToolChoice, is_forced: bool) -> None:
        self._lark = lark
        self._calls = calls
        self._is_forced = is_forced
        self._is_single = choice.mode == "named" or not choice.is_parallel
        style = calls.style
        bodies: dict[type, Callable[[Tool], str]] = {
            Envelope: self._envelope,
            Header: self._header,
            Tags: self._tags,
            Pythonic: self._pythonic,
        }
        self._is_list = isinstance(style, Header) and style.can_list and not self._has_head(style)
        write = self._envelope if self._is_list else bodies[type(style)]
        self._body = lark.any_of(lark.rule(write(tool)) for tool in choice.allowed)

    def _has_head(self, style: Header) -> bool:
        return self._lark.is_token(style.markers[0])

    # --- answers ---------------------------------------------------------------------------------

    def forced(self) -> str:
        """Return calls and nothing else."""
        if self._shares_opening():
            return self._lark.rule(f"{self._lark.say(self._opening())} {self._after_opening()}")
        if not self._calls.section_open:
            return self._repeated(self._one())
        return self._section() if self._calls.has_one_section else self._repeated(self._section())

    def triggered(self) -> str:
        """Return free text with calls in it, or calls by which the answer starts."""
        if self._calls.start:
            free = self._lark.rule(rf"/[^ \t\r\n\{self._calls.start}](.|\n)*/")
            return f"({self.forced()} | {free})?"
        ways = [f"{self._lark.until(opening)} {rest}" for opening, rest in self._rests() if opening]
        one, text = self._lark.any_of(ways), self._lark.rule(TEXT)
        return f"({one} | {text})" if self._is_single else f"({one})* {text}"

    def _rests(self) -> list[tuple[str, str]]:
        """Return what opens calls in a text, and what must follow it."""
        calls = self._calls
        if self._shares_opening():
            return [(calls.open, self._after_opening())]
        body = self._lark.rule(f"{self._inner()} {self._lark.say(calls.close)}")
        if not calls.section_open:
            return [(calls.open, body)]
        return [(calls.section_open, self._after_section()), (calls.open, body)]

    # --- around calls ----------------------------------------------------------------------------

    def _shares_opening(self) -> bool:
        """Return whether one opening has all calls: lists, and calls without markers."""
        style = self._calls.style
        has_list = isinstance(style, Pythonic) or (isinstance(style, Envelope) and style.is_list)
        return self._is_list or has_list or not self._calls.close

    def _opening(self) -> str:
        """Return what opens calls where nothing else may come."""
        return "" if self._calls.start else self._calls.open

    def _after_opening(self) -> str:
        calls, style = self._calls, self._calls.style
        if isinstance(style, Header) and not self._is_list:  # each call has the opening
            more = self._lark.rule(f"{self._lark.say(calls.open)} {self._body}")
            return self._body if self._is_single else f"{self._body} ({more})*"
        is_list = self._is_list or (isinstance(style, Envelope | Pythonic) and style.is_list)
        several = self._repeated(self._body)
        inner = f'"[" {several} "]"' if is_list else several
        close = "" if calls.start else calls.close
        around = [self._lark.say(calls.lead), inner, self._lark.say(calls.trail + close)]
        return self._lark.rule(self._lark.joined(around))

    def _inner(self) -> str:
        calls = self._calls
        parts = [self._lark.say(calls.lead), self._body, self._lark.say(calls.trail)]
        return self._lark.joined(parts)

    def _one(self) -> str:
        """Return a call with its own markers."""
        calls = self._calls
        parts = [self._lark.say(calls.open), self._inner(), self._lark.say(calls.close)]
        return self._lark.rule(self._lark.joined(parts))

    def _section(self) -> str:
        opening = self._lark.say(self._calls.section_open)
        return self._lark.rule(f"{opening} {self._after_section()}")

    def _after_section(self) -> str:
        calls, lark = self._calls, self._lark
        edge = lark.say("\n") if isinstance(calls.style, Tags) else ""
        inner = self._repeated(self._one()) if calls.has_one_section else self._one()
        return lark.rule(lark.joined([edge, inner, edge, lark.say(calls.section_close)]))

    def _repeated(self, one: str) -> str:
        if self._is_single:
            return one
        between = self._calls.between
        if isinstance(self._calls.style, Header) and self._is_list:
            between = ", "
        more = self._lark.joined([self._lark.say(between), one])
        return self._lark.rule(f"{one} ({more})*")

    # --- bodies ----------------------------------------------------------------------------------

    def _envelope(self, tool: Tool) -> str:
        style = self._calls.style
        key = style.argument_keys[0] if isinstance(style, Envelope) else "arguments"
        head = f'{{"name": {dump(tool.name)}, "{key}": '
        return f'{self._lark.say(head)} {self._json(tool)} "}}"'

    def _json(self, tool: Tool) -> str:
        return self._lark.json(object_schema(tool, self._is_forced))

    def _header(self, tool: Tool) -> str:
        style = self._calls.style
        assert isinstance(style, Header)
        before, number, after = style.example.replace("{name}", tool.name).partition("{id}")
        parts = [self._lark.say(before)]
        if number:
            parts += ["/[0-9]{1,3}/", self._lark.say(after)]
        fence = f"\n{style.fence}" if style.fence else ""
        return self._lark.joined([*parts, self._json(tool), self._lark.say(fence)])

    def _tags(self, tool: Tool) -> str:
        style = self._calls.style
        assert isinstance(style, Tags)
        end = style.name_ends[0]
        head = tool.name if end == "\n" else tool.name + end
        inner = tag_arguments(self._lark, style, tool, is_enforced(tool, self._is_forced))
        return self._lark.joined([self._lark.say(head), inner, self._lark.say("\n")])

    def _pythonic(self, tool: Tool) -> str:
        inner = python_arguments(self._lark, tool, is_enforced(tool, self._is_forced))
        return f'{quoted(tool.name + "(")} {inner} ")"'


def _in_channels(
    lark: Lark, channels: Channels, choice: ToolChoice, is_forced: bool, answer: Any
) -> str:
    """Return messages of reasoning, and of comment where no call must come, then the last one."""
    calls = []
    for tool in choice.allowed:
        head = (
            f"{channels.channel}commentary to=functions.{tool.name} {channels.constrain}json"
            f"{channels.message}"
        )
        calls.append(lark.rule(f"{lark.say(head)} {lark.json(object_schema(tool, is_forced))}"))
    comments = () if is_forced or answer is not None else ("commentary",)
    passing = [
        f"{lark.say(channels.channel + name + channels.message)} {lark.until(channels.ends[0])} "
        f"{lark.say(channels.start + 'assistant')}"
        for name in (*channels.reasoning, *comments)
    ]
    last = calls
    if not is_forced:
        final = lark.say(f"{channels.channel}final{channels.message}")
        text = lark.rule(TEXT) if answer is None else lark.json(answer)
        last = [*calls, f"{final} {text}"]
    return f"({lark.any_of(passing)})* {lark.any_of(last)}"
