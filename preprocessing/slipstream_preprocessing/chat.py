"""Render a checkpoint's chat template as transformers does, in a sandbox.

Templates come with the checkpoint, never with a request.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from slipstream_contract.errors import Code, ContractError, clip
from slipstream_contract.tokenizer_config import TokenizerConfig

Message = Mapping[str, Any]


class ChatTemplate:
    """The templates of a checkpoint: `default`, and optionally `tool_use` for chats with tools."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """Compile the templates. `variables`, such as `bos_token`, are defined in all of them.

        Raises ContractError (UNSUPPORTED) for a source that is no template.
        """
        environment = _environment()
        self._sources = dict(sources)
        self._variables = dict(variables)
        self._templates: dict[str, Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except (TemplateError, ArithmeticError, ValueError, RecursionError) as error:
                message = f"chat template {name!r}: {error}"
                raise ContractError(message, Code.UNSUPPORTED) from None

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """Read `chat_template.jinja`, else `tokenizer_config.json`; both may have no template."""
        config = TokenizerConfig.load(directory)
        variables = {role: token.content for role, token in config.roles.items()}
        sources = _sources(directory, config.chat_template)
        try:
            return cls(sources, variables)
        except ContractError as error:
            raise ContractError(f"{directory}: {error.message}", error.code) from None

    def with_source(self, source: str) -> "ChatTemplate":
        """Return one template in the place of all, with the same variables.

        Raises ContractError for a source that is no template.
        """
        return ChatTemplate({"default": source}, self._variables)

    @property
    def variables(self) -> dict[str, str]:
        """What is defined in all templates, such as `bos_token`."""
        return dict(self._variables)

    def source(self, name: str) -> str | None:
        """Return a template as it is written; None: there is none of that name."""
        return self._sources.get(name)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render the prompt of a conversation; `variables` are the template's own.

        Raises ContractError if the template refuses the conversation (INVALID_ARGUMENT) or
        the checkpoint has no template (UNSUPPORTED).
        """
        if not messages:
            raise ContractError("messages is empty")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ContractError(f"messages[{index}] has no role: {clip(message)}")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise ContractError("the checkpoint has no chat template", Code.UNSUPPORTED)
        try:
            return template.render(
                {
                    **self._variables,
                    **variables,
                    "messages": [_normalised(message) for message in messages],
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is code: it may divide by zero
            raise ContractError(f"messages: the chat template says: {error}") from None


def _normalised(message: Message) -> dict[str, Any]:
    """Return a message without None fields, with its reasoning under both names in use."""
    given = {name: value for name, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((given[name] for name in names if name in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _sources(directory: Path, configured: Any) -> dict[str, str]:
    """Return template name -> source; files win over the configuration, as in transformers."""
    single = directory / "chat_template.jinja"
    others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if single.exists() or others:
        found = {path.stem: _read(path) for path in others}
        if single.exists():
            found["default"] = _read(single)
        return found
    value = configured or {}
    try:
        if isinstance(value, list):
            value = {entry["name"]: entry["template"] for entry in value}
        named = {"default": value} if isinstance(value, str) else dict(value)
    except (TypeError, ValueError, LookupError):
        named = {"default": None}
    if not all(isinstance(text, str) for text in (*named, *named.values())):
        raise ContractError(
            f"{directory / 'tokenizer_config.json'}: chat_template is {clip(configured)}, neither "
            "a text nor a list of objects with name and template",
            Code.UNSUPPORTED,
        )
    return named


def _read(path: Path) -> str:
    """Return the text of a template's file. Raises ContractError (UNSUPPORTED) for another."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ContractError(f"{path}: {error}", Code.UNSUPPORTED) from None


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks assistant text for training; renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON: Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
