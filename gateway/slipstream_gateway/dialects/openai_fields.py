"""Fields of chat completions and completions, and what happens to each.

Sampling parameters are lines of the contract's own table.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from slipstream_contract import limits
from slipstream_contract.fields import Bounds
from slipstream_contract.sampling import FIELDS as SAMPLING
from slipstream_contract.schemas.vllm import known_names, refused_names

from slipstream_gateway import value_schemas as values
from slipstream_gateway.fields import Field, Table, Use

CHAT, COMPLETION = "chat", "completion"
_OTHER = {CHAT: "completions", COMPLETION: "chat completions"}

_TEXT = values.TEXT

_OWN = (
    Field("model", "the model, a name of `/v1/models`; without it the only one", schema=_TEXT),
    Field(
        "messages",
        "the conversation; roles system, developer, user, assistant, tool; content is a text or "
        "parts of type `text`",
        schema=values.listed(values.MESSAGE, 1),
        is_required=True,
        at=CHAT,
    ),
    Field(
        "prompt",
        "a text, a list of texts, token ids, or a list of these",
        schema=values.PROMPT,
        is_required=True,
        at=COMPLETION,
    ),
    Field("stream", "server-sent events as tokens come", bool),
    Field(
        "stream_options",
        "`include_usage`: a last chunk with the usage; `continuous_usage_stats`: in every chunk",
        schema=values.STREAM_OPTIONS,
        members=("include_usage", "continuous_usage_stats"),
    ),
    *(
        Field(
            "max_tokens",
            "tokens of an answer, at most; in a chat the rest of the context, in a completion 16",
            schema=values.whole(least),
            at=at,
        )
        for at, least in ((CHAT, 1), (COMPLETION, 0))  # 0 is for log probs of a prompt
    ),
    Field(
        "max_completion_tokens",
        "the same; beside `max_tokens` the smaller one holds",
        schema=values.whole(1),
    ),
    *(
        Field(
            "logprobs",
            "log probs of the answer's tokens: true, or in a completion how many",
            schema=schema,
            at=at,
        )
        for at, schema in ((CHAT, values.FLAG), (COMPLETION, values.TOP))
    ),
    Field("top_logprobs", "likeliest tokens at each place, 0 to 20", schema=values.TOP, at=CHAT),
    Field(
        "prompt_logprobs",
        "the same of the prompt's tokens; not with `stream`",
        schema=values.TOP,
    ),
    Field("echo", "the prompt before a completion, or the last message before its answer", bool),
    Field(
        "best_of",
        "samples of which the best `n` are answered; not with `stream`",
        schema=values.whole(1),
    ),
    Field(
        "response_format",
        "`text`, `json_object`, `json_schema`, or `structural_tag`; the answer always matches",
        schema=values.RESPONSE_FORMAT,
        members=("type", "json_schema", "structures", "triggers", "format"),  # of all types
    ),
    Field(
        "structured_outputs",
        "a guide in vLLM's words: json, regex, choice, grammar",
        schema=values.STRUCTURED,
    ),
    Field("tools", "functions that the model may call", schema=values.TOOLS, at=CHAT),
    Field(
        "tool_choice",
        "none, auto, required, or one function",
        schema=values.TOOL_CHOICE,
        at=CHAT,
    ),
    Field("parallel_tool_calls", "false: at most one call", bool, at=CHAT),
    Field("stop", "words that end an answer and are not part of it", schema=values.WORDS),
    Field("stop_token_ids", "token ids that end an answer", schema=values.IDS),
    Field("ignore_eos", "go on after the end of a text", bool),
    Field(
        "skip_special_tokens", "false: special tokens are in the text, which is not parsed", bool
    ),
    Field("bad_words", "words that never come", schema=values.WORDS),
    Field("logit_bias", "token id -> what is added to its logit, -100 to 100", schema=values.BIAS),
    Field("logprobs_mode", "raw or processed log probs or logits", schema=values.MODE),
    Field("use_beam_search", "the best `n` of `best_of` beams", bool),
    Field("length_penalty", "of beams", schema={"type": "number"}),
    Field("early_stopping", "of beams", schema=values.EARLY_STOPPING),
    Field(
        "add_special_tokens",
        "tokens that the tokenizer adds; in a chat the template has them",
        bool,
    ),
    Field("add_generation_prompt", "false: the template does not open an answer", bool, at=CHAT),
    Field("continue_final_message", "the answer goes on with the last message", bool, at=CHAT),
    Field("documents", "for templates that know documents", schema={"type": "array"}, at=CHAT),
    Field(
        "chat_template",
        "a template in the request, in Jinja: refused unless the server allows it",
        schema=_TEXT,
        at=CHAT,
    ),
    Field("chat_template_kwargs", "the template's own variables", dict[str, Any], at=CHAT),
    Field(
        "reasoning_effort",
        "the template's variable; `none` also sets enable_thinking",
        schema=_TEXT,
        at=CHAT,
    ),
    Field("include_reasoning", "false: the answer has no reasoning", bool, at=CHAT),
    Field(
        "truncate_prompt_tokens",
        "keep so many tokens of the prompt; -1: what fits",
        schema=values.TRUNCATED,
    ),
    Field(
        "truncation_side",
        "`left`: cut at the start; `right`: at the end",
        schema={"enum": ["left", "right"]},
    ),
    Field("return_token_ids", "token ids beside the texts", bool),
    Field("return_tokens_as_token_ids", "log probs name tokens as `token_id:N`", bool),
    Field(
        "request_id",
        "part of the answer's id, and in the request log",
        schema={**values.WORD, "maxLength": values.MAX_ID},
    ),
    Field(
        "priority",
        "0 is admitted first, 9 last; 5 without it",
        schema=values.whole(0, limits.LOWEST_PRIORITY),
    ),
    Field(
        "timeout_ms",
        "time after which the request is ended",
        schema=values.whole(1, limits.MAX_TIMEOUT_MS),
    ),
    Field("cache_salt", "only requests with the same salt share cached prompts", schema=_TEXT),
    *(
        Field(name, text, use=Use.HARMLESS)
        for name, text in (
            ("user", "an operator's business"),
            ("metadata", "nothing is stored"),
            ("store", "nothing is stored"),
            ("safety_identifier", "an operator's business"),
            ("prompt_cache_key", "prompts that begin alike share their cache anyway"),
            ("prompt_cache_retention", "the same"),
            ("service_tier", "there is one"),
            ("verbosity", "ask for it in a message"),
            ("prediction", "it only could make an answer faster"),
            ("session_id", "there is nothing to route to"),
            ("stream_interval", "tokens are joined when the client is slow"),
        )
    ),
    *(
        Field(name, text, use=Use.REFUSED, neutral=neutral, at=at)
        for name, text, neutral, at in (
            ("modalities", "only text is served", (["text"],), CHAT),
            ("audio", "only text is served", (), CHAT),
            ("web_search_options", "nothing is searched", (), CHAT),
            ("functions", "`tools` has taken its place", ([],), CHAT),
            ("function_call", "`tool_choice` has taken its place", ("none",), CHAT),
            ("mm_processor_kwargs", "only text is served", ({},), CHAT),
            ("media_io_kwargs", "only text is served", ({},), CHAT),
            ("suffix", "no model here fills in", ("",), COMPLETION),
            ("prompt_embeds", "prompts are text or token ids", ([],), COMPLETION),
            ("kv_transfer_params", "an engine keeps its cache", (), ""),
            ("logprob_token_ids", "`logprobs` has the likeliest tokens", (), ""),
            ("vllm_xargs", "there are none", (), ""),
        )
    ),
)


def _contract_schema(bounds: Bounds | None, kind: type) -> Mapping[str, Any]:
    if kind not in (int, float):
        return {}
    schema: dict[str, Any] = {"type": "integer" if kind is int else "number"}
    if bounds is not None:
        low = "exclusiveMinimum" if bounds.is_open else "minimum"
        schema |= {low: bounds.least, "maximum": bounds.most}
    return schema


def _sampling() -> list[Field]:
    """Return the contract's sampling parameters that the table above does not describe."""
    own = {field.name for field in _OWN}
    fields = []
    for entry in SAMPLING.values():
        asked = entry.asked("vllm")
        if asked is not None and asked.name not in own:
            kind = bool if entry.kind is bool else Any
            schema = _contract_schema(asked.bounds, entry.kind)
            fields.append(Field(asked.name, entry.field.help, kind, schema))
    described = own | {field.name for field in fields}
    refused = refused_names()
    for name in sorted(known_names() - described - refused.keys()):
        text = "as of `vllm_model` ([sampling](sampling.md))"
        fields.append(Field(name, text, schema=values.CONTRACT.get(name, {})))
    for name in sorted(refused.keys() - described):
        why = "no engine here has it, or it is started with it"
        neutral = tuple(value for value in refused[name] if value is not None)
        fields.append(Field(name, why, use=Use.REFUSED, neutral=neutral))
    return fields


_ALL = (*_OWN, *_sampling())


def _table(at: str) -> Table:
    """Return the table of one endpoint; what only the other has is refused."""
    own = {field.name: field for field in _ALL if field.at in ("", at)}
    why = f"it is a field of {_OTHER[at]}"
    return Table(
        (own.get(each.name) or Field(each.name, why, use=Use.REFUSED) for each in _ALL),
        is_open=True,
    )


TABLES: Mapping[str, Table] = {at: _table(at) for at in (CHAT, COMPLETION)}

_SHARED = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "chat_template_kwargs",
    "priority",
    "cache_salt",
    "thinking_token_budget",
)
AS_IN_A_CHAT = "as in a chat completion"
EXTRAS: Mapping[str, Field] = {
    name: msgspec.structs.replace(TABLES[CHAT][name], help=AS_IN_A_CHAT) for name in _SHARED
}
"""Fields of a chat completion that the other dialects take under the same name."""


def markdown() -> str:
    """Return the table of the documents: field, where, what happens to it, and how."""
    lines = ["| field | of | | what it does, or why not |", "|---|---|---|---|"]
    places: dict[str, set[str]] = {}
    for field in _ALL:
        places.setdefault(field.name, set()).update({field.at} if field.at else TABLES)
    for name, found in places.items():
        field = TABLES[min(found)][name]
        of = "both" if len(found) > 1 else min(found)
        lines.append(f"| `{name}` | {of} | {field.mark()} | {field.help} |")
    return "\n".join(lines) + "\n"
