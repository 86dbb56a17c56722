"""A checkpoint's format of answers: which it is, its parsers and its guides."""

from collections.abc import Mapping

from slipstream_contract.errors import clip

from slipstream_gateway.answer import Parser
from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.choice import ToolChoice
from slipstream_gateway.parsing.engine import AnswerParser, Plan
from slipstream_gateway.parsing.format import Format
from slipstream_gateway.parsing.formats import (
    CALLS,
    CHANNELS,
    HARMONY,
    REASONING,
    REASONING_ALIASES,
    TOOL_ALIASES,
)
from slipstream_gateway.parsing.harmony import ChannelParser, ChannelPlan


class Answers:
    """A format bound to a vocabulary."""

    def __init__(self, form: Format, special_ids: Mapping[str, int]) -> None:
        """Prepare the parsers; `special_ids`: text -> id of tokens whose text answers lack."""
        self.format = form
        self._special_ids = special_ids
        channels = form.channels
        self._channels = None if channels is None else ChannelPlan(channels, special_ids)
        self._with_calls = Plan(form.calls, form.reasoning, special_ids)
        self._without_calls = Plan(None, form.reasoning, special_ids)

    def parser(self, choice: ToolChoice, prompt: str, is_thinking: bool | None = None) -> Parser:
        """Return a parser of one answer.

        Args:
            choice: the tools; without any that may be called, calls are text.
            prompt: the rendered prompt, or its end; it says whether the answer starts in reasoning.
            is_thinking: says that instead, where the prompt goes on with an answer's beginning.
        """
        if self._channels is not None:
            return ChannelParser(self._channels, prompt)
        if is_thinking is None:
            reasoning = self.format.reasoning
            is_thinking = reasoning is not None and reasoning.is_open(prompt)
        plan = self._without_calls if choice.mode == "none" else self._with_calls
        return AnswerParser(plan, choice.schemas, is_thinking)


def format_of(tool_parser: str | None, reasoning_parser: str | None) -> Format:
    """Return the format of two names; None: none. Raises ApiError naming those that are known."""
    calls = tool_parser and TOOL_ALIASES.get(tool_parser, tool_parser)
    thoughts = reasoning_parser and REASONING_ALIASES.get(reasoning_parser, reasoning_parser)
    if calls == HARMONY or thoughts == HARMONY:
        if calls not in (None, HARMONY) or thoughts not in (None, HARMONY):
            raise ApiError(400, f"parsers {clip(calls)} and {clip(thoughts)} do not go together")
        return Format(HARMONY, channels=CHANNELS)
    if calls is not None and calls not in CALLS:
        known = ", ".join(sorted({*CALLS, *TOOL_ALIASES}))
        raise ApiError(400, f"tool parser {clip(calls)} is not known, but {known}", "tool_parser")
    if thoughts is not None and thoughts not in REASONING:
        known = ", ".join(sorted({*REASONING, *REASONING_ALIASES}))
        raise ApiError(
            400, f"reasoning parser {clip(thoughts)} is not known, but {known}", "reasoning_parser"
        )
    name = "+".join(each for each in (calls, thoughts) if each) or "none"
    return Format(name, CALLS[calls] if calls else None, REASONING[thoughts] if thoughts else None)
