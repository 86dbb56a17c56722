"""Fields of request bodies, as one table: served, without effect, or refused, and why.

The handlers read it, the OpenAPI file and the table of docs/openai.md are made from it. Sampling
parameters are lines of the contract's own table.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from slipstream_contract import limits
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.fields import Bounds
from slipstream_contract.sampling import FIELDS as SAMPLING
from slipstream_contract.schemas.vllm import known_names, refused_names

from slipstream_gateway import value_schemas as values
from slipstream_gateway.errors import ApiError

CHAT, COMPLETION = "chat", "completion"
BOTH = f"{CHAT}, {COMPLETION}"


class Use(StrEnum):
    """The way in which a field counts."""

    SERVED = "served"
    HARMLESS = "no effect"  # and none that a client could miss
    REFUSED = "refused"  # unless it has its neutral value


class Field(NamedTuple):
    """A field of a body."""

    name: str
    help: str
    schema: Mapping[str, Any] = {}  # JSON schema; empty: anything
    at: str = BOTH
    use: Use = Use.SERVED
    neutral: tuple[object, ...] = (None,)  # of a refused one: values that ask for nothing


_FLAG, _TEXT, _OBJECT = values.FLAG, values.TEXT, values.OBJECT

_OWN = (
    Field("model", "the model, a name of `/v1/models`; without it the only one", _TEXT),
    Field(
        "messages",
        "the conversation; roles system, developer, user, assistant, tool; content is a text or "
        "parts of type `text`",
        values.listed(values.MESSAGE, 1),
        CHAT,
    ),
    Field(
        "prompt",
        "a text, a list of texts, token ids, or a list of these",
        values.PROMPT,
        COMPLETION,
    ),
    Field("stream", "server-sent events as tokens come", _FLAG),
    Field(
        "stream_options",
        "`include_usage`: a last chunk with the usage; `continuous_usage_stats`: in every chunk",
        values.STREAM_OPTIONS,
    ),
    Field(
        "max_tokens",
        "tokens of an answer, at most; in a chat the rest of the context, in a completion 16",
        values.whole(0),
    ),
    Field(
        "max_completion_tokens",
        "the same; beside `max_tokens` the smaller one holds",
        values.whole(1),
    ),
    Field("logprobs", "log probs of the answer's tokens: true, or in a completion how many", {}),
    Field("top_logprobs", "likeliest tokens at each place, 0 to 20", values.TOP, CHAT),
    Field("prompt_logprobs", "the same of the prompt's tokens; not with `stream`", values.TOP),
    Field("echo", "the prompt before a completion, or the last message before its answer", _FLAG),
    Field(
        "best_of", "samples of which the best `n` are answered; not with `stream`", values.whole(1)
    ),
    Field(
        "response_format",
        "`text`, `json_object`, `json_schema`, or `structural_tag`; the answer always matches",
        values.RESPONSE_FORMAT,
    ),
    Field(
        "structured_outputs",
        "a guide in vLLM's words: json, regex, choice, grammar",
        values.STRUCTURED,
    ),
    Field("tools", "functions that the model may call", values.TOOLS, CHAT),
    Field("tool_choice", "none, auto, required, or one function", values.TOOL_CHOICE, CHAT),
    Field("parallel_tool_calls", "false: at most one call", _FLAG, CHAT),
    Field("stop", "words that end an answer and are not part of it", values.WORDS),
    Field("stop_token_ids", "token ids that end an answer", values.IDS),
    Field("ignore_eos", "go on after the end of a text", _FLAG),
    Field(
        "skip_special_tokens", "false: special tokens are in the text, which is not parsed", _FLAG
    ),
    Field("bad_words", "words that never come", values.WORDS),
    Field("logit_bias", "token id -> what is added to its logit, -100 to 100", values.BIAS),
    Field("logprobs_mode", "raw or processed log probs or logits", values.MODE),
    Field("use_beam_search", "the best `n` of `best_of` beams", _FLAG),
    Field("length_penalty", "of beams", {"type": "number"}),
    Field("early_stopping", "of beams", values.EARLY_STOPPING),
    Field(
        "add_special_tokens",
        "tokens that the tokenizer adds; in a chat the template has them",
        _FLAG,
    ),
    Field("add_generation_prompt", "false: the template does not open an answer", _FLAG, CHAT),
    Field("continue_final_message", "the answer goes on with the last message", _FLAG, CHAT),
    Field("documents", "for templates that know documents", {"type": "array"}, CHAT),
    Field(
        "chat_template",
        "a template in the request, in Jinja: refused unless the server allows it",
        _TEXT,
        CHAT,
    ),
    Field("chat_template_kwargs", "the template's own variables", _OBJECT, CHAT),
    Field(
        "reasoning_effort", "the template's variable; `none` also sets enable_thinking", _TEXT, CHAT
    ),
    Field("include_reasoning", "false: the answer has no reasoning", _FLAG, CHAT),
    Field(
        "truncate_prompt_tokens",
        "keep so many tokens of the prompt; -1: what fits",
        values.TRUNCATED,
    ),
    Field(
        "truncation_side",
        "`left`: cut at the start; `right`: at the end",
        {"enum": ["left", "right"]},
    ),
    Field("return_token_ids", "token ids beside the texts", _FLAG),
    Field("return_tokens_as_token_ids", "log probs name tokens as `token_id:N`", _FLAG),
    Field(
        "request_id",
        "part of the answer's id, and in the request log",
        {**values.WORD, "maxLength": values.MAX_ID},
    ),
    Field(
        "priority",
        "0 is admitted first, 9 last; 5 without it",
        values.whole(0, limits.LOWEST_PRIORITY),
    ),
    Field(
        "timeout_ms",
        "time after which the request is ended",
        values.whole(1, limits.MAX_TIMEOUT_MS),
    ),
    Field("cache_salt", "only requests with the same salt share cached prompts", _TEXT),
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
    Field("modalities", "only text is served", {}, CHAT, Use.REFUSED, (None, ["text"])),
    *(
        Field(name, text, {}, CHAT, Use.REFUSED, neutral)
        for name, text, neutral in (
            ("audio", "only text is served", (None,)),
            ("web_search_options", "nothing is searched", (None,)),
            ("functions", "`tools` has taken its place", (None, [])),
            ("function_call", "`tool_choice` has taken its place", (None, "none")),
            ("mm_processor_kwargs", "only text is served", (None, {})),
            ("media_io_kwargs", "only text is served", (None, {})),
        )
    ),
    Field("suffix", "no model here fills in", {}, COMPLETION, Use.REFUSED, (None, "")),
    Field(
        "prompt_embeds", "prompts are text or token ids", {}, COMPLETION, Use.REFUSED, (None, [])
    ),
    *(
        Field(name, text, {}, BOTH, Use.REFUSED)
        for name, text in (
            ("kv_transfer_params", "an engine keeps its cache"),
            ("logprob_token_ids", "`logprobs` has the likeliest tokens"),
            ("vllm_xargs", "there are none"),
        )
    ),
)


def _contract_schema(bounds: Bounds | None, kind: type) -> Mapping[str, Any]:
    if kind is bool:
        return _FLAG
    schema: dict[str, Any] = {"type": "integer" if kind is int else "number"}
    if kind not in (int, float):
        return {}
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
            schema = _contract_schema(asked.bounds, entry.kind)
            fields.append(Field(asked.name, entry.field.help, schema))
    described = own | {field.name for field in fields}
    refused = refused_names()
    for name in sorted(known_names() - described - refused.keys()):
        fields.append(
            Field(
                name, "as of `vllm_model` ([sampling](sampling.md))", values.CONTRACT.get(name, {})
            )
        )
    for name in sorted(refused.keys() - described):
        why = "no engine here has it, or it is started with it"
        fields.append(Field(name, why, use=Use.REFUSED, neutral=refused[name]))
    return fields


TABLE: Mapping[str, Field] = {field.name: field for field in (*_OWN, *_sampling())}


def check_body(body: Mapping[str, Any], at: str) -> list[str]:
    """Refuse fields by the table; return the names of those that have no effect, or are not there.

    Raises ApiError, and ContractError for a flag that is neither true nor false.
    """
    ignored = []
    for name, value in body.items():
        field = TABLE.get(name)
        if field is None:
            ignored.append(name)
        elif at not in field.at:
            if value is not None:
                other = "chat completions" if at == COMPLETION else "completions"
                raise ApiError(400, f"{name} is a field of {other}, not served here", name)
        elif field.use is Use.REFUSED and value not in field.neutral:
            message = f"{name} is {clip(value)}, which is not served: {field.help}"
            raise ApiError(400, message, name, "unsupported_parameter")
        elif field.use is Use.HARMLESS and value is not None:
            ignored.append(name)
        elif field.schema is _FLAG:
            read_flag(body, name)
    return ignored


def markdown() -> str:
    """Return the table of the documents: field, where, what happens to it, and how."""
    lines = ["| field | of | | what it does, or why not |", "|---|---|---|---|"]
    for field in TABLE.values():
        of = {BOTH: "both", CHAT: "chat", COMPLETION: "completion"}[field.at]
        kind = {Use.SERVED: "works", Use.HARMLESS: "no effect", Use.REFUSED: "400"}[field.use]
        lines.append(f"| `{field.name}` | {of} | {kind} | {field.help} |")
    return "\n".join(lines) + "\n"


def read_flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return true or false; a null is the default. Raises ContractError."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ContractError(f"{name} is {clip(value)}, neither true nor false")
    return value


def read_text(body: Mapping[str, Any], name: str, allowed: Collection[str] = ()) -> str | None:
    """Return a text, one of those `allowed` if there are any; None without it.

    Raises ContractError.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or (allowed and value not in allowed):
        wanted = f"one of {', '.join(allowed)}" if allowed else "a text"
        raise ContractError(f"{name} is {clip(value)}, not {wanted}")
    return value


def read_whole(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """Return a whole number within bounds; None without it. Raises ContractError."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ContractError(f"{name} is {clip(value)}, not a whole number from {low} to {high}")
    return value


def read_object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object, empty without it. Raises ContractError."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ContractError(f"{name} is {clip(value)}, not an object")
    return value
