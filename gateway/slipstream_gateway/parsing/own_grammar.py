"""The grammar of calls in a checkpoint's own form, from the data of its `response_template`.

A call is the region's opening with what it captures, its content, and its close. Which part of them
is the name and which the arguments, `transform` says. Before a grammar is served, a call of each
tool is made in the same way and read by the template's own parser: where that does not find it, or
where an expression cannot be turned round, the request is refused with the reason.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import regex
from slipstream_contract.errors import clip
from slipstream_contract.guide import Guide

from slipstream_gateway.answer import Answer
from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.arguments import is_enforced, object_schema, tag_arguments
from slipstream_gateway.parsing.choice import Tool, ToolChoice
from slipstream_gateway.parsing.contents import PLACE
from slipstream_gateway.parsing.format import AddedTokens, Tags
from slipstream_gateway.parsing.lark import EMPTY, TEXT, Lark
from slipstream_gateway.parsing.marked import MarkedJson
from slipstream_gateway.parsing.patterns import Piece, UnsayableError, pieces_of, said
from slipstream_gateway.parsing.regions import RegionParser, RegionPlan
from slipstream_gateway.parsing.template import Edge, Region
from slipstream_gateway.parsing.values import dump

_Said = tuple[str, str]
"""An expression, and an example of it."""

_ID = '/"[0-9A-Za-z]{9}"/', '"abcdefghi"'


@dataclass(frozen=True, slots=True)
class Places:
    """Where a template's `transform` looks for the parts of a call.

    Attributes:
        name, arguments: paths; the first key of a path is `content`, or a group of the opening.
        others: all further paths.
    """

    name: tuple[str, ...]
    arguments: tuple[str, ...]
    others: tuple[tuple[str, ...], ...] = ()


def places_of(region: Region) -> Places:
    """Return where the parts of a region's calls are. Raises UnsayableError."""
    shape = "{content}" if region.transform is None else region.transform
    function = shape.get("function", shape) if isinstance(shape, Mapping) else shape
    if isinstance(function, Mapping):
        name, arguments = function.get("name"), function.get("arguments")
        name, arguments = _path(name), _path(arguments or function.get("parameters"))
    else:
        inner = _path(function)
        name = inner and (*inner, "name")
        arguments = inner and (*inner, "arguments")
    if not name or not arguments:
        raise UnsayableError("its transform has no place for the name and the arguments")
    known = (name, arguments)
    others = [path for path in _paths(shape) if all(one[: len(path)] != path for one in known)]
    places = [name, arguments, *others]
    if region.is_each:  # an item's keys are looked up beside the captures
        groups = _groups(region)
        places = [path if path[0] in groups else ("content", *path) for path in places]
    return Places(places[0], places[1], tuple(places[2:]))


def _path(place: object) -> tuple[str, ...]:
    found = PLACE.fullmatch(place) if isinstance(place, str) else None
    return tuple(found[1].split(".")) if found else ()


def _paths(shape: object) -> Iterator[tuple[str, ...]]:
    if isinstance(shape, Mapping | list):
        for value in shape.values() if isinstance(shape, Mapping) else shape:
            yield from _paths(value)
    elif path := _path(shape):
        yield path


def _groups(region: Region) -> frozenset[str]:
    return frozenset(region.opening.pattern.groupindex) if region.opening else frozenset()


class OwnCalls:
    """The calls of a region."""

    def __init__(self, lark: Lark, region: Region, choice: ToolChoice, is_forced: bool) -> None:
        """Read the region. Raises UnsayableError."""
        if region.opening is None:
            raise UnsayableError("its calls have no opening")
        self._lark = lark
        self._region = region
        self._places = places_of(region)
        self._is_forced = is_forced
        self._tools = choice.allowed
        self.is_single = choice.mode == "named" or not choice.is_parallel
        self._openings = ways_of(region.opening, frozenset(self._places.name[:1]))
        self._has_group = self._places.name[0] != "content"
        if self._has_group and region.is_each:
            raise UnsayableError("one name is that of all calls of its list")
        self._close = ("", "") if region.close is None else said(lark, ways_of(region.close)[0], {})
        args = region.args
        kinds: dict[str, Callable[[Tool], _Said]] = {"json": self._json, "xml-inline": self._tagged}
        if region.content not in kinds:
            raise UnsayableError(f"its content is {region.content}")
        if region.content == "json" and (args.get("unquoted_keys") or args.get("string_delims")):
            self._marked = MarkedJson(lark, args)
            kinds["json"] = self._in_marks
        self._content = kinds[region.content]

    @property
    def has_close(self) -> bool:
        """Whether a text ends a region of calls."""
        return bool(self._close[1])

    @property
    def repeats(self) -> bool:
        """Whether an answer may have several regions of calls."""
        return self._region.repeats and self._region.close is not None and not self.is_single

    def calls(self) -> str:
        """Return the expression of a region of calls."""
        return self._lark.any_of(self._region_after(way) for way in self._openings)

    def triggered(self) -> list[tuple[str, str]]:
        """Return the texts that start an opening, and what must follow. Raises UnsayableError."""
        found = []
        for way in self._openings:
            pieces = way[1:] if way and way[0].text is None and not way[0].group else way
            if not pieces or pieces[0].text is None:
                raise UnsayableError("its opening starts with no fixed text")
            found.append((pieces[0].text, self._region_after(pieces[1:])))
        return found

    def examples(self) -> Iterator[tuple[Tool, str]]:
        """Return a call of each tool for each opening, without arguments."""
        for tool in self._tools:
            for way in self._openings:
                opening = said(self._lark, way, self._given(tool))[1]
                yield tool, opening + self._around(self._content(tool)[1]) + self._close[1]

    def _given(self, tool: Tool) -> dict[str, str]:
        return {self._places.name[0]: tool.name} if self._has_group else {}

    def _region_after(self, way: list[Piece]) -> str:
        """Return what follows an opening of which the rest is given."""
        lark, bodies = self._lark, [(tool, self._content(tool)[0]) for tool in self._tools]
        if self._has_group:
            joined = [
                lark.joined([said(lark, way, self._given(tool))[0], body]) for tool, body in bodies
            ]
            return lark.rule(lark.joined([lark.any_of(joined), self._close[0]]))
        one = lark.any_of(body for _, body in bodies)
        if self._region.is_each:
            more = "" if self.is_single else f'(", " {one})*'
            one = lark.joined(['"["', one, more, '"]"'])
        return lark.rule(lark.joined([said(lark, way, {})[0], one, self._close[0]]))

    def _around(self, example: str) -> str:
        return f"[{example}]" if self._region.is_each else example

    # --- contents --------------------------------------------------------------------------------

    def _is_enforced(self, tool: Tool) -> bool:
        return is_enforced(tool, self._is_forced)

    def _json(self, tool: Tool) -> _Said:
        return self._skeleton(
            tool, (self._lark.json(object_schema(tool, self._is_forced)), "{}"), dump, dump
        )

    def _in_marks(self, tool: Tool) -> _Said:
        marked = self._marked
        arguments = marked.arguments(tool, self._is_enforced(tool))
        return self._skeleton(tool, (arguments, "{}"), marked.key, marked.text)

    def _skeleton(
        self,
        tool: Tool,
        arguments: _Said,
        key: Callable[[str], str],
        text: Callable[[str], str],
    ) -> _Said:
        """Return an object with name and arguments at their places."""
        places = self._places
        leaves: dict[tuple[str, ...], _Said | str] = {}
        if not self._has_group:
            leaves[places.name[1:]] = text(tool.name)
        if places.arguments[0] != "content":
            raise UnsayableError("the arguments are no part of its content")
        leaves[places.arguments[1:]] = arguments
        for path in places.others:
            if path[0] == "content" and path[1:]:
                leaves[path[1:]] = _ID
        expressions, examples = [], []
        for part in _written(leaves, key):
            expressions.append(self._lark.say(part) if isinstance(part, str) else part[0])
            examples.append(part if isinstance(part, str) else part[1])
        return self._lark.joined(expressions), "".join(examples)

    def _tagged(self, tool: Tool) -> _Said:
        if self._places.arguments != ("content",) or not self._has_group:
            raise UnsayableError("its tags are not the arguments alone")
        style = tags_of(self._region.args)
        for name in (tool.parameters or {}).get("properties") or {}:
            tag = f"{style.key_open}{name}{[*style.key_ends][-1]}{style.value_close}"
            if regex.fullmatch(self._region.args["tag_pattern"], tag, regex.DOTALL) is None:
                raise UnsayableError(f"its tag_pattern has no argument {clip(name)}")
        inner = tag_arguments(self._lark, style, tool, self._is_enforced(tool))
        return self._lark.joined([inner, self._lark.say("\n")]), "\n"


def _written(
    leaves: Mapping[tuple[str, ...], _Said | str], key: Callable[[str], str]
) -> Iterator[_Said | str]:
    """Return the parts of an object whose leaves are given. Raises UnsayableError."""
    if () in leaves:
        if len(leaves) > 1:
            raise UnsayableError("a place of its transform lies within another")
        yield leaves[()]
        return
    groups: dict[str, dict[tuple[str, ...], _Said | str]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(path[0], {})[path[1:]] = leaf
    before = "{"
    for name, inner in groups.items():
        yield f"{before}{key(name)}: "
        yield from _written(inner, key)
        before = ", "
    yield "}"


def tags_of(args: Mapping[str, Any]) -> Tags:
    """Return the tags of a `tag_pattern`. Raises UnsayableError."""
    pattern, reader = args.get("tag_pattern"), args.get("value_parser")
    if not isinstance(pattern, str) or "(?P<value>.*?)" not in pattern:
        raise UnsayableError("its tag_pattern has no group value of any text, (?P<value>.*?)")
    if reader is not None and reader.get("name", "text") != "text":
        raise UnsayableError(f"its value_parser is {clip(reader.get('name'))}")
    way = pieces_of(pattern, frozenset(("key", "value")))[0]
    order = [piece.group for piece in way if piece.group]
    if order != ["key", "value"]:
        raise UnsayableError("its tag_pattern has not a key, then a value")
    texts, has_blanks = ["", "", ""], False
    part = 0
    for piece in way:
        if piece.group:
            part += 1
        elif piece.text is not None:
            texts[part] += piece.text
        elif piece.example:
            raise UnsayableError("its tag_pattern has more than texts, blanks, key and value")
        else:
            has_blanks = has_blanks or part == 1
    if not all(texts):
        raise UnsayableError("its tag_pattern has no text around key and value")
    return Tags((), texts[0], {texts[1]: None}, texts[2], has_newlines=has_blanks, is_matched=True)


def ways_of(edge: Edge, groups: frozenset[str] = frozenset()) -> list[list[Piece]]:
    """Return the ways to write an edge; never none. Raises UnsayableError."""
    return pieces_of(edge.pattern.pattern, groups)


def refusal(choice: ToolChoice, problem: str) -> ApiError:
    """Return the error for a template whose calls no grammar can hold."""
    field = "tool_choice" if choice.must_call else "tools"
    return ApiError(
        400,
        f"{field}: calls that must come, one alone, or by a strict schema, are not served for this "
        f"model, whose response_template describes its calls: {problem}",
        field,
    )


def own_guide(
    plan: RegionPlan, added: AddedTokens, choice: ToolChoice, prompt: str, answer: Any
) -> Guide | None:
    """Return the guide of a request's answers in a template's form; None: any answer will do.

    Arguments: see `grammar.guide_of`. Raises ApiError for what the form cannot be held to.
    """
    if not choice.is_guided and (answer is None or not choice.allowed):
        return None
    lark = Lark(added, reads_letters=True)
    template = plan.template
    try:
        found = [each for each in template.regions if each.has_calls]
        own = OwnCalls(lark, found[0], choice, choice.must_call)
        implicit = template.implicit
        if implicit is not None and (implicit.is_reasoning or implicit.has_calls):
            raise UnsayableError("what has no opening is not the text")
        blanks = _BLANKS if implicit is None or implicit.strips else ""
        more = own.calls()
        forced = lark.joined([more, f"({lark.joined([blanks, more])})*" if own.repeats else ""])
        if choice.must_call:
            body = forced
        elif answer is not None:
            if implicit is None:
                raise UnsayableError("its text has an opening")
            body = f"({forced} | {lark.json(answer)})"
        else:
            body = _in_text(lark, own)
        passing = _passing(lark, plan, prompt, blanks)
        _check_examples(plan, choice, own)
    except UnsayableError as error:
        raise refusal(choice, str(error)) from None
    return lark.guide(lark.joined([passing, body]))


_BLANKS = r"(/[ \t\r\n]{1,8}/)?"


def _in_text(lark: Lark, own: OwnCalls) -> str:
    ways = [f"{lark.until(opening)} {rest}" for opening, rest in own.triggered()]
    one, text = lark.any_of(ways), lark.rule(TEXT)
    if own.repeats:
        return f"({one})* {text}"
    # What follows a call that is the last one may not open another.
    return f"({one} {_blanks_at_end(own)} | {text})"


def _blanks_at_end(own: OwnCalls) -> str:
    """Return what may follow the only call: blanks, if it has an end."""
    return _BLANKS if own.has_close else EMPTY


def _passing(lark: Lark, plan: RegionPlan, prompt: str, blanks: str) -> str:
    """Return the expression of the reasoning that may come first. Raises UnsayableError."""
    template = plan.template
    opened = RegionParser(plan, prompt, {}, True).region
    first = ""
    if opened is not None and opened is not template.implicit:
        if not opened.is_reasoning or opened.close is None:
            raise UnsayableError(f"the prompt opens {opened.name}")
        first = _up_to(lark, opened.close)
    ways = []
    for region in template.regions:
        if region.is_reasoning and region.opening is not None and region.close is not None:
            opening = lark.any_of(said(lark, way, {})[0] for way in ways_of(region.opening))
            ways.append(f"{opening} {_up_to(lark, region.close)}")
    thoughts = f"({blanks} {lark.any_of(ways)})?" if ways else ""
    return lark.joined([first, thoughts, blanks])


def _up_to(lark: Lark, close: Edge) -> str:
    ways = []
    for way in ways_of(close):
        pieces = way[1:] if way and way[0].text is None else way
        if not pieces or pieces[0].text is None:
            raise UnsayableError("its reasoning has no fixed end")
        ways.append(lark.joined([lark.until(pieces[0].text), said(lark, pieces[1:], {})[0]]))
    return lark.any_of(ways)


def _check_examples(plan: RegionPlan, choice: ToolChoice, own: OwnCalls) -> None:
    """Read a call of each tool. Raises UnsayableError for one that is not found."""
    for tool, text in own.examples():
        parser = RegionParser(plan, "", choice.schemas, True, True)
        answer = Answer()
        answer.add(parser.feed([-1], [text]))
        answer.add(parser.finish())
        found = [(call.name, call.arguments) for call in answer.calls]
        if found != [(tool.name, "{}")] or answer.text:
            raise UnsayableError(f"a call of {clip(tool.name)} made as it says is not read as one")
