# ruff: noqa: RUF001 - markers have letters that only look like ASCII
"""The formats by their names, which are those that users of vLLM know."""

from dataclasses import replace

from slipstream_gateway.parsing.format import (
    Calls,
    Channels,
    Envelope,
    Header,
    Pythonic,
    Reasoning,
    Tags,
    numbered_id,
    short_id,
)

_NAME = r"(?P<name>[^\s<>\[\]{}\"'\ud800-\udfff]{1,256})"
_THINK = Reasoning("<think>", "</think>")
_DSML = "｜DSML｜"
_FUNCTION_TAGS = Tags(
    name_ends=(">",),
    key_open="<parameter=",
    key_ends={">": None},
    value_close="</parameter>",
    has_newlines=True,
)
_QWEN_XML = Calls(
    style=_FUNCTION_TAGS,
    section_open="<tool_call>",
    section_close="</tool_call>",
    open="<function=",
    close="</function>",
    in_reasoning=True,
    between="\n",
    has_one_section=False,
)


def _deepseek(style: Header, between: str = "") -> Calls:
    return Calls(
        style,
        between=between,
        section_open="<｜tool▁calls▁begin｜>",
        section_close="<｜tool▁calls▁end｜>",
        open="<｜tool▁call▁begin｜>",
        close="<｜tool▁call▁end｜>",
    )


def _invoke(mark: str, key_ends: dict[str, str | None]) -> Tags:
    return Tags(('">',), f'<{mark}parameter name="', key_ends, f"</{mark}parameter>")


CALLS: dict[str, Calls] = {
    "hermes": Calls(Envelope(), "<tool_call>", "</tool_call>", lead="\n", trail="\n", between="\n"),
    "qwen3_coder": _QWEN_XML,
    "seed_oss": replace(
        _QWEN_XML,
        style=replace(_FUNCTION_TAGS, has_newlines=False),
        section_open="<seed:tool_call>",
        section_close="</seed:tool_call>",
    ),
    "minimax_m2": Calls(
        _invoke("", {'">': None}),
        section_open="<minimax:tool_call>",
        section_close="</minimax:tool_call>",
        open='<invoke name="',
        close="</invoke>",
        between="\n",
    ),
    "llama3_json": Calls(
        Envelope(("parameters", "arguments"), separator=";"),
        open="<|python_tag|>",
        start="{",
        between="; ",
    ),
    "xlam": Calls(Envelope(is_list=True), start="[", between=", "),
    "apriel": Calls(Envelope(is_list=True), "<tool_calls>", "</tool_calls>", between=", "),
    "nemotron_json": Calls(
        Envelope(is_list=True), "<TOOLCALL>", "</TOOLCALL>", in_reasoning=True, between=", "
    ),
    "pythonic": Calls(Pythonic(), start="[", between=", "),
    "llama4_pythonic": Calls(
        Pythonic(), open="<|python_start|>", close="<|python_end|>", start="[", between=", "
    ),
    "olmo3": Calls(
        Pythonic(is_list=False),
        open="<function_calls>",
        close="</function_calls>",
        lead="\n",
        trail="\n",
        between="\n",
    ),
    "lfm2": Calls(Pythonic(), open="<|tool_call_start|>", close="<|tool_call_end|>", between=", "),
    "mistral": Calls(
        Header(
            rf"\s*{_NAME}\s*(?:@1\s*(?P<id>\w{{1,64}})\s*)?(?:@0)?\s*",
            "{name}[ARGS]",
            ("[ARGS]", "[CALL_ID]"),
            can_list=True,
        ),
        open="[TOOL_CALLS]",
        in_reasoning=True,
        make_id=short_id,
    ),
    "deepseek_v3": _deepseek(
        Header(
            rf"[^<\s]*@0{_NAME}\s*```json\s*",
            "function<｜tool▁sep｜>{name}\n```json\n",
            ("<｜tool▁sep｜>",),
            fence="```",
        ),
        between="\n",
    ),
    "deepseek_v31": _deepseek(
        Header(rf"\s*{_NAME}\s*@0\s*", "{name}<｜tool▁sep｜>", ("<｜tool▁sep｜>",))
    ),
    "deepseek_v32": Calls(
        _invoke(_DSML, {'" string="true">': "string", '" string="false">': "", '">': None}),
        section_open=f"<{_DSML}function_calls>",
        section_close=f"</{_DSML}function_calls>",
        open=f'<{_DSML}invoke name="',
        close=f"</{_DSML}invoke>",
        between="\n",
    ),
    "glm45": Calls(
        Tags(
            name_ends=("\n", "<arg_key>", "</tool_call>"),
            key_open="<arg_key>",
            key_ends={"</arg_key>": None},
            value_open="<arg_value>",
            value_close="</arg_value>",
        ),
        open="<tool_call>",
        close="</tool_call>",
        in_reasoning=True,
        between="\n",
    ),
    "kimi_k2": Calls(
        Header(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>{}:\ud800-\udfff]{1,256}):\d{1,9})\s*@0\s*",
            "functions.{name}:{id}<|tool_call_argument_begin|>",
            ("<|tool_call_argument_begin|>",),
        ),
        section_open="<|tool_calls_section_begin|>",
        section_close="<|tool_calls_section_end|>",
        open="<|tool_call_begin|>",
        close="<|tool_call_end|>",
        in_reasoning=True,
        make_id=numbered_id,
    ),
}
"""How calls are written, by name; Harmony has `CHANNELS` instead."""

REASONING: dict[str, Reasoning] = {
    "qwen3": _THINK,
    "seed_oss": Reasoning("<seed:think>", "</seed:think>"),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
}
"""The markers of reasoning, by name."""

CHANNELS = Channels()
HARMONY = "openai"
RESPONSE_TEMPLATE = "hf"

TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "deepseekv3": "deepseek_v3",
    "deepseek_r1": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "glm": "glm45",
    "glm47": "glm45",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "harmony": HARMONY,
    "gpt-oss": HARMONY,
    "gpt_oss": HARMONY,
    "response_template": RESPONSE_TEMPLATE,
}
REASONING_ALIASES = {
    "deepseek_r1": "qwen3",
    "deepseek_v3": "qwen3",
    "deepseek_v31": "qwen3",
    "deepseek-r1": "qwen3",
    "deepseek-v3": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "kimi_k2": "qwen3",
    "minimax_m2": "qwen3",
    "nemotron_v3": "qwen3",
    "step3p5": "qwen3",
    "olmo3": "qwen3",
    "think": "qwen3",
    "openai_gptoss": HARMONY,
    "gpt-oss": HARMONY,
    "harmony": HARMONY,
    "response_template": RESPONSE_TEMPLATE,
}
