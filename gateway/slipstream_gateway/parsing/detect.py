# ruff: noqa: RUF001 - markers have letters that only look like ASCII
"""Find a checkpoint's format of answers: by its chat template, or by the operator's names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.answers import Answers, format_of, template_format
from slipstream_gateway.parsing.format import AddedTokens, Calls, Format, Reasoning
from slipstream_gateway.parsing.formats import (
    CALLS,
    HARMONY,
    REASONING,
    REASONING_ALIASES,
    RESPONSE_TEMPLATE,
    TOOL_ALIASES,
)

AUTO, NONE = "auto", "none"

_Marks = tuple[tuple[tuple[str, ...], str | None], ...]
_CALLS: _Marks = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<arg_key>",), "glm45"),
    (("<seed:tool_call>",), "seed_oss"),
    (("]<]minimax[>[",), None),  # MiniMax M3: no form that is known, nor one of those below
    (("'<function='", "</function>"), None),  # Functionary 3.1, likewise
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<tool_calls>[",), "apriel"),
    (("<TOOLCALL>[",), "nemotron_json"),
    (("<tool_call>",), "hermes"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("[func_name", "<|header_start|>"), "llama4_pythonic"),
    (("[func_name",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary',), "llama3_json"),
    (('[{"name": "tool_call_name"',), "xlam"),
)
"""What a template holds -> how calls are written; the first that fits."""

_REASONING: _Marks = (
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("</think>",), "qwen3"),
)


class Tokenizer(Protocol):
    """A tokenizer of the library `tokenizers`."""

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        """Return id -> added token."""


def added_tokens(tokenizer: Tokenizer) -> AddedTokens:
    """Return the added tokens of a tokenizer: the special ones are not in an answer's text."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    visible = {token.content: token_id for token_id, token in added.items() if not token.special}
    return AddedTokens(special, visible)


def read_response_template(checkpoint: Path) -> object:
    """Return the `response_template` of a checkpoint's tokenizer; None without one."""
    path = checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    return config.get("response_template") if isinstance(config, dict) else None


def detect(chat_template: str | None) -> Format | None:
    """Return the format that a chat template renders; None: no format that is known."""
    calls = _first(_CALLS, chat_template or "")
    thoughts = None if calls == HARMONY else _first(_REASONING, chat_template or "")
    return format_of(calls, thoughts) if calls or thoughts else None


def _first(table: _Marks, text: str) -> str | None:
    return next((name for texts, name in table if all(each in text for each in texts)), None)


def choose(
    chat_template: str | None,
    added: AddedTokens,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    response_template: object = None,
) -> Answers:
    """Return the format of a checkpoint.

    Args:
        chat_template: its source; the one for tools where there are several.
        added: the vocabulary's added tokens; see `added_tokens`.
        tool_parser, reasoning_parser: names; `auto`: what the template says, `none`: none.
        response_template: the checkpoint's own, from `tokenizer_config.json`; it is read where the
            chat template's calls are of no known format, or `hf` is a parser's name.

    Raises ApiError naming the parsers that are known.
    """
    found = detect(chat_template)
    names = {
        TOOL_ALIASES.get(tool_parser, tool_parser),
        REASONING_ALIASES.get(reasoning_parser, reasoning_parser),
    }
    has_known = found is not None and (found.calls is not None or found.channels is not None)
    if RESPONSE_TEMPLATE in names or (response_template and names == {AUTO} and not has_known):
        if response_template is None:
            raise ApiError(400, "parser hf: the checkpoint has no response_template")
        return Answers(template_format(response_template), added)
    if found is not None and found.channels is not None:
        named = {tool_parser, reasoning_parser}
        if named <= {AUTO} or named == {AUTO, HARMONY}:
            return Answers(found, added)
        found = None
    given = format_of(_named(tool_parser), _named(reasoning_parser))
    if given.channels is not None or found is None:
        return Answers(given, added)
    calls = found.calls if tool_parser == AUTO else given.calls
    reasoning = found.reasoning if reasoning_parser == AUTO else given.reasoning
    return Answers(Format(_name(calls, reasoning), calls, reasoning), added)


def _name(calls: Calls | None, reasoning: Reasoning | None) -> str:
    names = [name for name, each in CALLS.items() if each is calls]
    names += [name for name, each in REASONING.items() if each is reasoning]
    return "+".join(names) or NONE


def _named(name: str) -> str | None:
    return None if name in (AUTO, NONE) else name
