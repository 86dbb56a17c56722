"""Read a checkpoint's own `response_template`: its fields, how each opens, closes and is read.

The form is transformers' (version 1). An answer is a sequence of regions: one that no opening is
declared for, the implicit one, and others from their opening to their close. What the prompt has of
the answer, behind the last `start_anchor`, is read first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex
from slipstream_contract.errors import clip

from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.contents import CONTENTS

_REASONING = ("thinking", "reasoning", "reasoning_content")
_TEXT, _CALLS = "content", "tool_calls"
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats"),
    *("join", "optional", "transform", "transform_each"),
}


@dataclass(frozen=True, slots=True)
class Edge:
    """What opens or closes a region.

    Attributes:
        pattern: of the library `regex`.
        is_final: whether a match that ends with the text read so far cannot grow.
        running: the pattern while more may come. It does not match at the very end, where `$`
            would hide that something longer has started.
    """

    pattern: Any
    is_final: bool
    running: Any


@dataclass(frozen=True, slots=True)
class Region:
    """A field: where its text goes, and how it is read."""

    name: str
    opening: Edge | None
    close: Edge | None
    content: str
    args: Mapping[str, Any] = field(default_factory=dict)
    join: str = ""
    transform: Any = None
    is_each: bool = False
    repeats: bool = False

    @property
    def is_reasoning(self) -> bool:
        """Whether its text is reasoning."""
        return self.name in _REASONING

    @property
    def has_calls(self) -> bool:
        """Whether its text is tool calls."""
        return self.name == _CALLS

    @property
    def strips(self) -> bool:
        """Whether blanks at either end of its text go."""
        return bool(self.args.get("strip", True))


@dataclass(frozen=True, slots=True)
class Template:
    """A `response_template`."""

    regions: tuple[Region, ...]
    anchor: Any
    written: str  # all its texts, in which special tokens may be named

    @property
    def implicit(self) -> Region | None:
        """The region without an opening."""
        return next((each for each in self.regions if each.opening is None), None)

    @property
    def has_calls(self) -> bool:
        """Whether answers may have calls."""
        return any(each.has_calls for each in self.regions)

    def names(self, text: str) -> bool:
        """Return whether a special token stands in it, as it is or as an expression."""
        return any(each in self.written for each in (text, regex.escape(text), _escaped(text)))

    def behind_anchor(self, prompt: str) -> str:
        """Return what a prompt has of the answer; nothing if it has no anchor."""
        end = len(prompt)
        for found in self.anchor.finditer(prompt):
            end = found.end()
        return prompt[end:]


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("[", r"\[").replace("]", r"\]")


def load_template(spec: object) -> Template:
    """Return a checkpoint's template. Raises ApiError naming what is not served."""
    if not isinstance(spec, Mapping):
        raise _wrong("", f"{clip(spec)}, not an object")
    if spec.get("version", 1) != 1:
        raise _wrong(".version", f"{clip(spec['version'])}, only 1 is served")
    for key in set(spec) - _KEYS:
        raise _wrong(f".{key}", "not known")
    fields = spec.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise _wrong(".fields", f"{clip(fields)}, not an object of fields")
    regions = tuple(_region(name, value) for name, value in fields.items())
    if sum(each.opening is None for each in regions) > 1:
        raise _wrong(".fields", "of several fields without an opening")
    anchor = _edge(spec, "start_anchor", "start_anchor_pattern", "")
    if anchor is None:
        raise _wrong("", "without a start_anchor")
    return Template(regions, anchor.pattern, "\n".join(_texts(spec)))


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value
    is_group = isinstance(value, Mapping | list)
    return [text for each in inner for text in _texts(each)] if is_group else []  # type: ignore


def _region(name: str, spec: object) -> Region:
    where = f".fields.{name}"
    if name not in (*_REASONING, _TEXT, _CALLS):
        raise _wrong(where, f"not one of {', '.join((*_REASONING, _TEXT, _CALLS))}")
    if not isinstance(spec, Mapping):
        raise _wrong(where, f"{clip(spec)}, not an object")
    for key in set(spec) - _FIELD_KEYS:
        raise _wrong(f"{where}.{key}", "not known")
    content = spec.get("content", "text")
    if content not in CONTENTS or (name != _CALLS and content != "text"):
        raise _wrong(f"{where}.content", f"{clip(content)}, which is not served there")
    args = spec.get("content_args") or {}
    if not isinstance(args, Mapping):
        raise _wrong(f"{where}.content_args", f"{clip(args)}, not an object")
    return Region(
        name,
        _edge(spec, "open", "open_pattern", where),
        _edge(spec, "close", "close_pattern", where),
        content,
        args,
        spec.get("join") or "",
        spec.get("transform"),
        bool(spec.get("transform_each")),
        bool(spec.get("repeats")),
    )


def _edge(spec: Mapping[str, Any], literal: str, pattern: str, where: str) -> Edge | None:
    if literal in spec and pattern in spec:
        raise _wrong(f"{where}.{literal}", f"given beside {pattern}")
    if literal in spec:
        texts = [spec[literal]] if isinstance(spec[literal], str) else spec[literal]
        if not isinstance(texts, Sequence) or not texts or not all(map(_is_text, texts)):
            raise _wrong(f"{where}.{literal}", f"{clip(spec[literal])}, not a text or texts")
        ordered = sorted(set(texts), key=lambda text: (-len(text), text))
        grows = any(one != other and one.startswith(other) for one in texts for other in texts)
        compiled = regex.compile("|".join(map(regex.escape, ordered)), regex.DOTALL)
        return Edge(compiled, not grows, compiled)
    if pattern in spec:
        try:
            compiled = regex.compile(spec[pattern], regex.DOTALL)
            running = regex.compile(f"(?=.)(?:{spec[pattern]})", regex.DOTALL)
            return Edge(compiled, False, running)
        except (regex.error, TypeError) as error:
            raise _wrong(f"{where}.{pattern}", f"{clip(spec[pattern])}: {error}") from None
    return None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _wrong(where: str, problem: str) -> ApiError:
    return ApiError(400, f"response_template{where} is {problem}", "response_template")
