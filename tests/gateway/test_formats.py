# ruff: noqa: RUF001 - markers have letters that only look like ASCII
"""Which format a checkpoint has: by its chat template, or by names."""

from pathlib import Path

import pytest
from slipstream_gateway.errors import ApiError
from slipstream_gateway.parsing.choice import read_choice
from slipstream_gateway.parsing.detect import choose, detect
from slipstream_gateway.parsing.format import AddedTokens
from slipstream_gateway.parsing.formats import CALLS, REASONING, TOOL_ALIASES

NO_TOKENS = AddedTokens()
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{'<tool_call>\\n' }} ... <think> </think>", "hermes+qwen3"),
        ("<tool_call>", "hermes"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>{k}</arg_key>", "glm45"),
        ("'<｜tool▁calls▁begin｜>' '```json' '</think>'", "deepseek_v3+qwen3"),
        ("'<｜tool▁calls▁begin｜>' '</think>'", "deepseek_v31+qwen3"),
        ("｜DSML｜ </think>", "deepseek_v32+qwen3"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("[TOOL_CALLS][THINK]", "mistral+mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai"),
        ("<|python_tag|>", "llama3_json"),
        ("[func_name1(a=1)] <|header_start|>", "llama4_pythonic"),
        ("[func_name1(a=1)]", "pythonic"),
        ("<seed:tool_call> <function= <parameter= <seed:think>", "seed_oss+seed_oss"),
        ("<minimax:tool_call> </think>", "minimax_m2+qwen3"),
        ('in the format {"name": function name, "parameters": dictionary of', "llama3_json"),
        ('[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]', "xlam"),
        ("'<TOOLCALL>[' '</think>'", "nemotron_json+qwen3"),
        ("<tool_call></tool_call> as\n<tool_calls>[", "apriel"),
        ("]<]minimax[>[<tool_call> </think>", "qwen3"),  # no form that is known
        ("'<function=' + name </function> <|python_tag|>", None),
        ("'<function=' + name </function> <|python_tag|> </think>", "qwen3"),
        ("</think>", "qwen3"),
    ],
)
def test_a_template_says_which_format(template, name):
    found = detect(template)
    assert (found and found.name) == name
    assert choose(template, NO_TOKENS).format.name == (name or "none")


def test_a_template_without_markers_has_none():
    assert detect("{{ messages }}") is None
    assert detect(None) is None
    assert choose(None, NO_TOKENS).format.name == "none"


def test_names_override_what_the_template_says():
    template = "<tool_call> </think>"
    assert choose(template, NO_TOKENS, "llama3_json").format.name == "llama3_json+qwen3"
    assert choose(template, NO_TOKENS, "none").format.name == "qwen3"
    assert choose(template, NO_TOKENS, "auto", "none").format.name == "hermes"
    assert choose(template, NO_TOKENS, "openai").format.name == "openai"
    harmony = "<|channel|><|message|>"
    assert choose(harmony, NO_TOKENS, "hermes").format.name == "hermes"
    assert choose(harmony, NO_TOKENS, "openai", "auto").format.name == "openai"


@pytest.mark.parametrize("alias", TOOL_ALIASES)
def test_aliases_lead_somewhere(alias):
    assert TOOL_ALIASES[alias] in {*CALLS, "openai", "hf"}


def test_unknown_names_are_refused_with_those_that_are_known():
    with pytest.raises(ApiError, match=r"tool parser 'x' is not known, but .*hermes"):
        choose(None, NO_TOKENS, "x")
    with pytest.raises(ApiError, match=r"reasoning parser 'x' is not known, but .*qwen3"):
        choose(None, NO_TOKENS, "auto", "x")


def test_what_a_request_says_of_tools():
    assert read_choice().mode == "none"
    assert read_choice(TOOLS).mode == "auto"
    assert read_choice(TOOLS, "none").allowed == ()
    assert [tool.name for tool in read_choice(TOOLS, "required").allowed] == ["f", "g"]
    named = read_choice(TOOLS, {"type": "function", "function": {"name": "g"}}, False)
    assert (named.mode, [tool.name for tool in named.allowed]) == ("named", ["g"])
    assert not named.is_parallel
    allowed = {"mode": "required", "tools": [{"type": "function", "name": "g"}]}
    given = {"type": "allowed_tools", "allowed_tools": allowed}
    assert [tool.name for tool in read_choice(TOOLS, given).allowed] == ["g"]


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (None, "required", "tool_choice is required, but tools is empty"),
        ([], "required", "tool_choice is required, but tools is empty"),
        (TOOLS, {"type": "function", "function": {"name": "h"}}, "names 'h', but the tools are"),
        (None, {"type": "function", "function": {"name": "h"}}, "names 'h', but the tools are"),
        (TOOLS, "any", "tool_choice is 'any', not"),
        (TOOLS, 5, "tool_choice is 5"),
        (TOOLS, {"type": "function"}, "names no function"),
        ({"a": 1}, None, "tools is"),
        ([5], None, r"tools\[0\] is 5"),
        ([{"type": "web_search"}], None, r"tools\[0\].type is 'web_search', only function"),
        ([{"type": "function"}], None, "names no function"),
        ([TOOLS[0], TOOLS[0]], None, r"tools\[1\].function.name is 'f', which another tool has"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": 1}}],
            None,
            "parameters is 1, not a JSON schema",
        ),
        (
            [{"type": "function", "function": {"name": "f", "strict": "x"}}],
            None,
            "strict is 'x'",
        ),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}, "mode is 'x'"),
        (
            TOOLS,
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            "not a list of functions",
        ),
    ],
)
def test_bad_tools_are_refused_by_name(tools, choice, words):
    with pytest.raises(ApiError, match=words) as caught:
        read_choice(tools, choice)
    assert caught.value.status == 400
    assert caught.value.param


def test_parallel_tool_calls_is_a_flag():
    with pytest.raises(ApiError, match="parallel_tool_calls is 5"):
        read_choice(TOOLS, None, 5)


def test_the_page_names_every_format_and_alias():
    page = (Path(__file__).parents[2] / "docs/tools.md").read_text()
    table = page.split("## Formats", 1)[1].split("## What is read", 1)[0]
    for name in (*CALLS, *TOOL_ALIASES, *set(TOOL_ALIASES.values()), *REASONING):
        assert f"`{name}`" in table or name == "gpt_oss", name
