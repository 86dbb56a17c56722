"""A checkpoint's format of answers: which it is, its parsers and its guides."""

from dataclasses import replace
from typing import Any

from slipstream_contract.errors import clip
from slipstream_contract.guide import Guide

from slipstream_gateway.answer import Parser
from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.choice import ToolChoice
from slipstream_gateway.parsing.engine import AnswerParser, Plan
from slipstream_gateway.parsing.format import AddedTokens, Format
from slipstream_gateway.parsing.formats import (
    CALLS,
    CHANNELS,
    HARMONY,
    REASONING,
    REASONING_ALIASES,
    RESPONSE_TEMPLATE,
    TOOL_ALIASES,
)
from slipstream_gateway.parsing.grammar import guide_of
from slipstream_gateway.parsing.harmony import ChannelParser, ChannelPlan
from slipstream_gateway.parsing.own_grammar import own_guide
from slipstream_gateway.parsing.regions import RegionParser, RegionPlan
from slipstream_gateway.parsing.template import load_template


class Answers:
    """A format bound to a vocabulary."""

    def __init__(self, form: Format, added: AddedTokens) -> None:
        """Prepare the parsers."""
        self.format = form
        self._added = added
        channels = form.channels
        self._channels = None if channels is None else ChannelPlan(channels, added.special)
        template = form.template
        self._regions = None if template is None else RegionPlan(template, added)
        calls = form.calls
        self._with_calls = Plan(calls, form.reasoning, added.special)
        self._without_calls = Plan(None, form.reasoning, added.special)
        guided = calls and replace(calls, in_reasoning=False)  # where no grammar holds
        self._guided = Plan(guided, form.reasoning, added.special)

    def parser(
        self,
        choice: ToolChoice,
        prompt: str,
        is_thinking: bool | None = None,
        has_guide: bool = False,
    ) -> Parser:
        """Return a parser of one answer.

        Args:
            choice: the tools; without any that may be called, calls are text.
            prompt: the rendered prompt, or its end; it says whether the answer starts in reasoning.
            is_thinking: says that instead, where the prompt goes on with an answer's beginning.
            has_guide: whether a guide holds, which lets reasoning pass: no call in it is one.
        """
        if self._channels is not None:
            return ChannelParser(self._channels, prompt)
        if self._regions is not None:
            guided = choice.is_guided or has_guide
            return RegionParser(self._regions, prompt, choice.schemas, bool(choice.allowed), guided)
        if is_thinking is None:
            is_thinking = self._is_thinking(prompt)
        plan = self._guided if choice.is_guided or has_guide else self._with_calls
        if not choice.allowed:
            plan = self._without_calls
        return AnswerParser(plan, choice.schemas, is_thinking)

    def guide(
        self,
        choice: ToolChoice,
        prompt: str,
        is_thinking: bool | None = None,
        answer: Any = None,
    ) -> Guide | None:
        """Return what answers must be; None: the tools demand nothing. Arguments: see `parser`.

        `answer` is the JSON schema of an answer without calls, where it has one.

        Raises ApiError where a call must come and the format has none, or where a strict schema
        cannot be held to.
        """
        if not self.has_calls:
            if choice.must_call:
                raise ApiError(
                    400,
                    f"tool_choice is {choice.mode}, but this model's chat template has no tool "
                    "calls that are known: name its tool parser",
                    "tool_choice",
                )
            return None
        if self._regions is not None:
            return own_guide(self._regions, self._added, choice, prompt, answer)
        if is_thinking is None:
            is_thinking = self._is_thinking(prompt)
        return guide_of(self.format, self._added, choice, is_thinking, answer)

    @property
    def has_calls(self) -> bool:
        """Whether answers may have calls."""
        template = self.format.template
        is_own = template is not None and template.has_calls
        return is_own or self.format.calls is not None or self._channels is not None

    def _is_thinking(self, prompt: str) -> bool:
        reasoning = self.format.reasoning
        return reasoning is not None and reasoning.is_open(prompt)


def template_format(spec: object) -> Format:
    """Return the format of a checkpoint's `response_template`. Raises ApiError."""
    return Format(RESPONSE_TEMPLATE, template=load_template(spec))


def format_of(tool_parser: str | None, reasoning_parser: str | None) -> Format:
    """Return the format of two names; None: none. Raises ApiError naming those that are known."""
    calls = tool_parser and TOOL_ALIASES.get(tool_parser, tool_parser)
    thoughts = reasoning_parser and REASONING_ALIASES.get(reasoning_parser, reasoning_parser)
    if calls == HARMONY or thoughts == HARMONY:
        if calls not in (None, HARMONY) or thoughts not in (None, HARMONY):
            raise ApiError(400, f"parsers {clip(calls)} and {clip(thoughts)} do not go together")
        return Format(HARMONY, channels=CHANNELS)
    if RESPONSE_TEMPLATE in (calls, thoughts):  # that is the checkpoint's to say
        return Format(RESPONSE_TEMPLATE)
    if calls is not None and calls not in CALLS:
        known = ", ".join(sorted({*CALLS, *TOOL_ALIASES, HARMONY, RESPONSE_TEMPLATE}))
        raise ApiError(400, f"tool parser {clip(calls)} is not known, but {known}", "tool_parser")
    if thoughts is not None and thoughts not in REASONING:
        known = ", ".join(sorted({*REASONING, *REASONING_ALIASES, RESPONSE_TEMPLATE}))
        raise ApiError(
            400, f"reasoning parser {clip(thoughts)} is not known, but {known}", "reasoning_parser"
        )
    name = "+".join(each for each in (calls, thoughts) if each) or "none"
    return Format(name, CALLS[calls] if calls else None, REASONING[thoughts] if thoughts else None)
