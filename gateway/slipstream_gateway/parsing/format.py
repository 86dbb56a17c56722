"""What a format of answers is: data, by which one engine reads every family's answers.

An answer is text with calls in it, and perhaps reasoning before or between:

    reasoning.open thoughts reasoning.close  text
    section_open  open BODY close  open BODY close  section_close  text

A body is in one of four styles, which say where name and arguments are.
"""

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from slipstream_gateway.parsing.reader import SPACES
from slipstream_gateway.parsing.template import Template


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """A vocabulary's added tokens, text -> id: those that a text lacks, and those that it shows."""

    special: Mapping[str, int] = field(default_factory=dict)
    visible: Mapping[str, int] = field(default_factory=dict)

    def get(self, text: str) -> int | None:
        """Return the id of a token of either kind."""
        found = self.special.get(text)
        return self.visible.get(text) if found is None else found


@dataclass(frozen=True, slots=True)
class Envelope:
    """A JSON object with name and arguments: `{"name": "f", "arguments": {}}`."""

    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    separator: str = ""  # between objects of one opening
    is_list: bool = False  # the objects may be those of a JSON list


@dataclass(frozen=True, slots=True)
class Header:
    """A head with the name, then JSON: `functions.f:0<args>{}`.

    Attributes:
        pattern: an expression for all between the call's opening and the first brace, with the
            groups `name` and perhaps `id`; `@0`, `@1` stand for `markers`.
        markers: what is in the head.
        example: the head as a model writes it, with `{name}` and perhaps `{id}`.
        fence: what may stand between arguments and closing.
        can_list: whether a JSON list of envelopes may stand there instead, as older models write.
    """

    pattern: str
    example: str
    markers: tuple[str, ...] = ()
    fence: str = ""
    can_list: bool = False


@dataclass(frozen=True, slots=True)
class Tags:
    """A name, then each argument between tags: `f><parameter=a>1</parameter>`.

    Attributes:
        name_ends: what ends the name; those that are blank or start an argument are not part of it.
        key_open, key_ends, value_open, value_close: around key and value. An end of a key that is
            mapped to a type decides the value's; None leaves it to the schema.
        has_newlines: whether a newline at either end of a value is not part of it.
        is_matched: whether an expression finds the tags, as a `response_template` has it: a value
            ends where its end first stands, blanks around it go, and one of no declared type is a
            text.
    """

    name_ends: tuple[str, ...]
    key_open: str
    key_ends: Mapping[str, str | None]
    value_close: str
    value_open: str = ""
    has_newlines: bool = False
    is_matched: bool = False


@dataclass(frozen=True, slots=True)
class Pythonic:
    """Calls as Python writes them: `[f(a=1), g()]`, or one a line without brackets."""

    is_list: bool = True


Style = Envelope | Header | Tags | Pythonic


def random_id(name: str, index: int) -> str:
    """Return an id as OpenAI's."""
    return f"call_{_random(24)}"


def short_id(name: str, index: int) -> str:
    """Return an id that Mistral's templates take: nine letters and digits."""
    return _random(9)


def numbered_id(name: str, index: int) -> str:
    """Return an id as Kimi's: function and number."""
    return f"functions.{name}:{index}"


def _random(size: int) -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(size))


@dataclass(frozen=True, slots=True)
class Calls:
    """How calls are written.

    Attributes:
        style: of a body.
        open, close: of a call; a call without `open` is found by how an answer starts.
        section_open, section_close: around calls; both may be absent.
        start: the character by which an answer that is nothing but calls starts, without markers;
            only names of the request's tools are calls there.
        in_reasoning: whether calls may stand in reasoning.
        lead, trail: what a model writes behind a call's opening, and before its closing.
        between: what it writes between two calls.
        has_one_section: whether all calls share a section; else each has its own.
        make_id: from name and number in the answer, where the answer has no id.
    """

    style: Style
    open: str = ""
    close: str = ""
    section_open: str = ""
    section_close: str = ""
    start: str = ""
    in_reasoning: bool = False
    lead: str = ""
    trail: str = ""
    between: str = ""
    has_one_section: bool = True
    make_id: Callable[[str, int], str] = random_id

    def mapped(self, surface: Callable[[str], str]) -> "Calls":
        """Return the same with other texts for its markers."""
        style = self.style
        if isinstance(style, Header):
            style = replace(style, markers=tuple(map(surface, style.markers)))
        elif isinstance(style, Tags):
            style = Tags(
                tuple(map(surface, style.name_ends)),
                surface(style.key_open),
                {surface(end): kind for end, kind in style.key_ends.items()},
                surface(style.value_close),
                surface(style.value_open),
                style.has_newlines,
            )
        return replace(
            self,
            style=style,
            open=surface(self.open),
            close=surface(self.close),
            section_open=surface(self.section_open),
            section_close=surface(self.section_close),
        )

    def markers(self) -> set[str]:
        """Return all its markers."""
        found: set[str] = set()

        def note(text: str) -> str:
            found.add(text)
            return text

        self.mapped(note)
        return found - {""} - set(SPACES)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers around reasoning."""

    open: str
    close: str

    def is_open(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends in reasoning: its last text opens it."""
        return prompt.rstrip(SPACES).endswith(self.open)


@dataclass(frozen=True, slots=True)
class Channels:
    """Harmony: messages, each with a header that says what it is.

    The header stands between `channel` (or `start`) and `message`, and names the channel, perhaps
    a recipient (`to=functions.f`), perhaps a type. `ends` end a message.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")
    reasoning: tuple[str, ...] = ("analysis",)

    def mapped(self, surface: Callable[[str], str]) -> "Channels":
        """Return the same with other texts for its markers."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        own = {k: surface(v) for k, v in own.items() if isinstance(v, str)}
        return replace(self, ends=tuple(map(surface, self.ends)), **own)

    def markers(self) -> set[str]:
        """Return all its markers."""
        return {self.start, self.channel, self.constrain, self.message, *self.ends}


@dataclass(frozen=True, slots=True)
class Format:
    """How a model writes its answers; `channels` or a `template` stand instead of the others."""

    name: str
    calls: Calls | None = None
    reasoning: Reasoning | None = None
    channels: Channels | None = None
    template: Template | None = None  # a checkpoint's own

    def markers(self) -> set[str]:
        """Return the markers, which may be special tokens."""
        own: set[str] = set()
        if self.calls is not None:
            own |= self.calls.markers()
        if self.reasoning is not None:
            own |= {self.reasoning.open, self.reasoning.close}
        if self.channels is not None:
            own |= self.channels.markers()
        return own
