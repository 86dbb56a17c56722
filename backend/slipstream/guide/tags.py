"""Structural tags: free text, with tagged parts in it that follow a schema, as one Lark grammar.

Two forms come: the older one has `structures` (`begin`, `schema`, `end`) and the `triggers` by
which they are found in the text; the newer one a `format`, which is a tree of parts.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import regex_to_lark
from slipstream_contract.errors import clip

from slipstream.guide.interface import GuideError
from slipstream.guide.schema import prepare

_ANY = r"/(.|\n)*/"


def lark_of_tags(tag: Mapping[str, Any], options: Mapping[str, Any], is_closed: bool) -> str:
    """Return the grammar of a structural tag. Raises GuideError naming what is not served."""
    writer = _Writer(options, is_closed)
    given = set(tag) - {"type"}
    if tag.get("type", "structural_tag") != "structural_tag":
        raise GuideError(f"type is {clip(tag['type'])}, not structural_tag")
    if given == {"structures", "triggers"}:
        body = writer.triggered(_older(tag), "structural_tag")
    elif given == {"format"}:
        body = writer.of(tag["format"], "format", is_last=True)
    else:
        raise GuideError("a structural tag has either structures and triggers, or a format")
    return "\n".join(["%llguidance {}", f"start: {body}", *writer.rules]) + "\n"


def _older(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the older form as the part `triggered_tags` of the newer one."""
    structures = tag["structures"]
    if not isinstance(structures, list):
        raise GuideError(f"structures is {clip(structures)}, not a list")
    tags = [
        {
            "begin": _get(each, "begin", str, f"structures[{i}]"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
            "end": _get(each, "end", str, f"structures[{i}]"),
        }
        for i, each in enumerate(structures)
    ]
    return {"triggers": tag["triggers"], "tags": tags}


def _get(part: Any, key: str, kind: type, where: str) -> Any:
    value = part.get(key) if isinstance(part, dict) else None
    if not isinstance(value, kind):
        raise GuideError(f"{where}.{key} is {clip(value)}, not a {kind.__name__}")
    return value


class _Writer:
    """Rules of the grammar, collected while the tree of parts is walked."""

    def __init__(self, options: Mapping[str, Any], is_closed: bool) -> None:
        self.rules: list[str] = []
        self._options = options
        self._is_closed = is_closed
        self._forms: dict[str, Callable[[Any, str, bool], str]] = {
            "const_string": self._const,
            "json_schema": self._json,
            "regex": self._regex,
            "any_text": self._any,
            "sequence": self._sequence,
            "or": self._or,
            "optional": lambda part, where, last: self._repeat(part, where, "?"),
            "plus": lambda part, where, last: self._repeat(part, where, "+"),
            "star": lambda part, where, last: self._repeat(part, where, "*"),
            "tag": lambda part, where, last: self._tag(part, where),
            "triggered_tags": lambda part, where, last: self.triggered(part, where, last),
            "tags_with_separator": lambda part, where, last: self._separated(part, where),
        }

    def of(self, part: Any, where: str, is_last: bool = False) -> str:
        """Return the expression of a part. Raises GuideError."""
        form = _get(part, "type", str, where)
        if form not in self._forms:
            raise GuideError(f"{where}.type is {clip(form)}, not one of {', '.join(self._forms)}")
        return self._forms[form](part, where, is_last)

    def _rule(self, expression: str, is_lazy: bool = False) -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {expression}")
        return name

    def _const(self, part: Any, where: str, is_last: bool) -> str:
        return json.dumps(_get(part, "value", str, where))

    def _json(self, part: Any, where: str, is_last: bool) -> str:
        if part.get("style", "json") != "json":
            raise GuideError(f"{where}.style is {clip(part['style'])}, not json")
        schema = part.get("json_schema", {})
        if not isinstance(schema, dict | bool):
            raise GuideError(f"{where}.json_schema is {clip(schema)}, not a schema")
        made = prepare(schema, self._is_closed)
        made = made if isinstance(made, dict) else {"allOf": [made]}
        own = {key: value for key, value in self._options.items() if value is not None}
        return self._rule(f"%json {json.dumps({**made, 'x-guidance': own})}")

    def _regex(self, part: Any, where: str, is_last: bool) -> str:
        return f"/{regex_to_lark(_get(part, 'pattern', str, where), '')}/"

    def _any(self, part: Any, where: str, is_last: bool) -> str:
        if not is_last:
            raise GuideError(f"{where} is any_text, which is served at the end and inside a tag")
        return _ANY

    def _sequence(self, part: Any, where: str, is_last: bool) -> str:
        parts = _get(part, "elements", list, where)
        last = len(parts) - 1
        return self._rule(
            " ".join(
                self.of(each, f"{where}.elements[{i}]", is_last and i == last)
                for i, each in enumerate(parts)
            )
        )

    def _or(self, part: Any, where: str, is_last: bool) -> str:
        parts = _get(part, "elements", list, where)
        return self._rule(
            " | ".join(
                self.of(each, f"{where}.elements[{i}]", is_last) for i, each in enumerate(parts)
            )
        )

    def _repeat(self, part: Any, where: str, sign: str) -> str:
        return f"({self.of(_get(part, 'content', dict, where), f'{where}.content')}){sign}"

    def _tag(self, part: Any, where: str, skip: str = "") -> str:
        """Return a tag, without what its `begin` starts with and was read already."""
        begin = _get(part, "begin", str, where).removeprefix(skip)
        content = _get(part, "content", dict, where)
        end = _get(part, "end", str, where)
        if content.get("type") == "any_text" and end:
            return self._rule(
                f"{_literal(begin)} {self._rule(f'{_ANY} {json.dumps(end)}', is_lazy=True)}"
            )
        body = self.of(content, f"{where}.content", is_last=False)
        return self._rule(f"{_literal(begin)} {body} {_literal(end)}")

    def triggered(self, part: Any, where: str, is_last: bool = True) -> str:
        """Return free text with tags in it, each found by a trigger, up to the end."""
        if not is_last:
            raise GuideError(f"{where} is triggered_tags, which is served at the end")
        tags, triggers = _get(part, "tags", list, where), _get(part, "triggers", list, where)
        branches = []
        for i, tag in enumerate(tags):
            begin = _get(tag, "begin", str, f"{where}.tags[{i}]")
            fit = [each for each in triggers if isinstance(each, str) and begin.startswith(each)]
            if len(fit) != 1 or not fit[0]:
                raise GuideError(
                    f"{where}.tags[{i}].begin is {clip(begin)}, which starts with {len(fit)} of "
                    "the triggers, not with one"
                )
            head = self._rule(f"{_ANY} {json.dumps(fit[0])}", is_lazy=True)
            branches.append(f"{head} {self._tag(tag, f'{where}.tags[{i}]', fit[0])}")
        if not branches:
            raise GuideError(f"{where}.tags is empty")
        one = self._rule(" | ".join(branches))
        if part.get("stop_after_first"):
            return one if part.get("at_least_one") else f"({one} | {_ANY})"
        return f"({one}){'+' if part.get('at_least_one') else '*'} {_ANY}"

    def _separated(self, part: Any, where: str) -> str:
        tags = _get(part, "tags", list, where)
        separator = json.dumps(_get(part, "separator", str, where))
        one = self._rule(
            " | ".join(self._tag(each, f"{where}.tags[{i}]") for i, each in enumerate(tags))
        )
        several = one if part.get("stop_after_first") else f"{one} ({separator} {one})*"
        return f"({several})" if part.get("at_least_one") else f"({several})?"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
