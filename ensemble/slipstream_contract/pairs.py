"""Pairs of features that one request cannot have together, as data: both names, and why not.

A schema calls `check_pairs` with the whole request. The table of docs/decoding.md is `page()`, and
tests/features pairs every feature with every other: those here must be refused by both names, all
others must be served.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from slipstream_contract.beams import unserved_values
from slipstream_contract.errors import ContractError
from slipstream_contract.request import GenerateRequest
from slipstream_contract.sampling import FIELDS, FILTERS

Contract = Literal["trtllm", "vllm", "llmapi", "openai"]
_MODELS: Mapping[Contract, str] = {
    "trtllm": "`ensemble`, `tensorrt_llm_bls`, `tensorrt_llm`",
    "vllm": "`vllm_model`",
    "llmapi": "`llmapi_model`",
    "openai": "`/v1`",
}
_ALL: tuple[Contract, ...] = ("trtllm", "vllm", "llmapi", "openai")

_DRAFTS = "num_draft_tokens, lookahead_ngram_size"


class Asked(NamedTuple):
    """A feature: its name in the docs, and what a request says of it; empty: it does not ask."""

    shown: str
    words: Callable[[GenerateRequest], str]


class Pair(NamedTuple):
    """Two features, by their keys in `FEATURES`, that the contracts refuse together."""

    first: str
    second: str
    reason: str
    contracts: tuple[Contract, ...] = _ALL


def _answers(request: GenerateRequest) -> str:
    n = request.sampling.n
    return f"n is {n}" if n > 1 and not _is_search(request) else ""


def _is_search(request: GenerateRequest) -> bool:
    return getattr(request.sampling, "beams", None) is not None


def _search(request: GenerateRequest) -> str:
    beams = request.sampling.beams
    if beams is None:
        return ""
    is_old = request.sampling.order == "trtllm"
    return f"beam_width is {beams.width}" if is_old else "use_beam_search is true"


def _filters(request: GenerateRequest) -> str:
    """Name what leaves tokens out of sampling; vLLM's temperature is there to sample alone."""
    sampling = request.sampling
    for name in FILTERS:
        value, neutral = getattr(sampling, name), FIELDS[name].default
        if value != neutral and (name, value) != ("top_k", 1):
            return f"{name} is {value:g}"
    is_heated = sampling.order == "vllm" and sampling.temperature not in (0.0, 1.0)
    return f"temperature is {sampling.temperature:g}" if is_heated else ""


def _mirostat(request: GenerateRequest) -> str:
    mirostat = request.sampling.mirostat
    return f"mirostat is {mirostat}" if mirostat else ""


def _other_filters(request: GenerateRequest) -> str:
    sampling = request.sampling
    for name in FILTERS:
        value = getattr(sampling, name)
        if name != "mirostat" and value != FIELDS[name].default:
            return f"{name} is {value:g}"
    return ""


def _values(request: GenerateRequest) -> str:
    values = request.sampling.values
    return "" if values is None else unserved_values(values)


def _raw_values(request: GenerateRequest) -> str:
    values = request.sampling.values
    is_raw = values is not None and values.mode != "processed_logprobs"
    return "log probs are asked for, and logprobs_mode is not processed_logprobs" if is_raw else ""


def _drafts(request: GenerateRequest) -> str:
    drafts = request.sampling.drafts
    if drafts is None:
        return ""
    count = len(drafts.token_ids)
    return f"draft_input_ids has {count} ids" if count else f"drafts are asked for ({_DRAFTS})"


FEATURES: Mapping[str, Asked] = {
    "n": Asked("several answers (`n`)", _answers),
    "best_of": Asked(
        "the best of several samples (`best_of` above `n`)",
        lambda request: (
            f"best_of is {request.sampling.best_of}" if request.sampling.best_of else ""
        ),
    ),
    "greedy": Asked(
        "greedy decoding (`temperature` 0)",
        lambda request: "temperature is 0" if request.sampling.temperature == 0 else "",
    ),
    "stream": Asked(
        "streaming (`stream`)",
        lambda request: "stream is true" if request.options.is_streaming else "",
    ),
    "beams": Asked("a beam search (`beam_width`, `use_beam_search`)", _search),
    "filters": Asked(
        "sampling (`top_k` above 1, `top_p` below 1, any other "
        "[filter](sampling.md#filters); in vLLM's words a `temperature` other than 0 and 1)",
        _filters,
    ),
    "mirostat": Asked("`mirostat`", _mirostat),
    "cuts": Asked("any other [filter](sampling.md#filters)", _other_filters),
    "drafts": Asked(
        "drafts (`draft_input_ids`, `num_draft_tokens`, `lookahead_ngram_size`)", _drafts
    ),
    "values": Asked(
        "log probs of other tokens, and logits (`logprobs` above 0, `prompt_logprobs`, "
        "`logprobs_mode`, `return_context_logits`, `return_generation_logits`)",
        _values,
    ),
    "raw_values": Asked(
        "log probs (`return_logprobs`, `return_cumulative_logprob`, `logprobs`) that are not "
        "those of `logprobs_mode` `processed_logprobs`",
        _raw_values,
    ),
    "echo": Asked(
        "the prompt before the output (`exclude_input_in_output` false)",
        lambda request: "exclude_input_in_output is false" if request.options.echo else "",
    ),
}

PAIRS = (
    Pair("n", "greedy", "greedy decoding has one answer", ("vllm", "llmapi")),
    Pair("best_of", "greedy", "greedy decoding has one answer", ("vllm", "llmapi")),
    Pair(
        "best_of",
        "stream",
        "the best are known when all have ended",
        ("vllm", "llmapi", "openai"),
    ),
    Pair("stream", "echo", "a stream has new text only", ("vllm",)),
    Pair("beams", "filters", "beams are not sampled, so nothing can be left out"),
    Pair("mirostat", "cuts", "mirostat leaves tokens out by itself"),
    Pair("mirostat", "values", "mirostat has processed log probs of its own tokens alone"),
    Pair(
        "mirostat",
        "raw_values",
        "mirostat has processed log probs of its own tokens alone",
        ("vllm", "llmapi", "openai"),
    ),
    Pair("beams", "values", "a search has processed log probs of its own tokens alone"),
    Pair(
        "beams",
        "drafts",
        "the next tokens of a beam depend on all beams, so that there is nothing to verify",
        ("trtllm",),
    ),
)


def check_pairs(request: GenerateRequest, contract: Contract) -> None:
    """Raise ContractError if the request has two features that exclude each other, naming both.

    `contract` is the one that the request is written in.
    """
    for pair in PAIRS:
        if contract in pair.contracts:
            first = FEATURES[pair.first].words(request)
            second = first and FEATURES[pair.second].words(request)
            if second:
                raise ContractError(f"{first} and {second}: {pair.reason}")


def page() -> str:
    """Return the table of docs/decoding.md in Markdown."""
    lines = ["| not together | because | at |", "|---|---|---|"]
    for first, second, reason, contracts in PAIRS:
        both = f"{FEATURES[first].shown} and {FEATURES[second].shown}"
        named = ", ".join(_MODELS[each] for each in contracts)
        models = "every model" if contracts == _ALL else named
        lines.append(f"| {both} | {reason} | {models} |")
    return "\n".join(lines)
