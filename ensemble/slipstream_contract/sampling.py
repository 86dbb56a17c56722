"""Parameters that choose tokens: one struct, made from any schema, for the engine as is.

Each field is a line of the table of `fields`: what the schemas ask for, what the engine checks,
what the kernel reads and what docs/limits.md says comes from it.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from slipstream_contract import limits
from slipstream_contract.beams import Beams, unserved_values
from slipstream_contract.drafts import Drafts, check_drafts
from slipstream_contract.errors import ContractError, clip
from slipstream_contract.fields import BOTH, ENGINE, MODEL, SERVER, Asked, Bounds, Field, Row
from slipstream_contract.fields import check_fields as _check_fields
from slipstream_contract.fields import table as _table
from slipstream_contract.filters import Filters, check_mirostat
from slipstream_contract.guide import (
    MAX_CHOICES,
    MAX_GUIDE_BYTES,
    MAX_GUIDE_NESTING,
    Guide,
    check_guide,
)
from slipstream_contract.log_probs import MAX_LOG_PROBS, WHOLE, LogProbs, check_log_probs

_COUNT = Bounds(1, limits.INT32_MAX)
_SHARE = Bounds(0, 1)
_PENALTY = Bounds(-limits.MAX_PENALTY, limits.MAX_PENALTY)
_VLLM_PENALTY = Asked(bounds=Bounds(-limits.VLLM_MAX_PENALTY, limits.VLLM_MAX_PENALTY))
_VLLM_SEED = Bounds(-limits.INT64_MAX - 1, limits.INT64_MAX)

VLLM_MAX_TOKENS = 16


class SamplingParams(
    Filters, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Sampling parameters, normalised and validated. Defaults mean "no effect".

    Greedy decoding is `temperature == 0`. The engine checks token ids against its vocabulary.
    """

    max_tokens: Annotated[
        int,
        Field(
            "tokens to generate at most",
            _COUNT,
            vllm=Asked(default=VLLM_MAX_TOKENS),
            is_option=True,
        ),
    ]
    min_tokens: Annotated[
        int,
        Field(
            "tokens before which no end counts",
            Bounds(0, limits.INT32_MAX),
            trtllm=Asked(most="`max_tokens`", refused_by=MODEL),
            vllm=Asked(most="`max_tokens`", refused_by=MODEL),
            is_option=True,
        ),
    ] = 0
    n: Annotated[
        int,
        Field(
            "answers to one prompt",
            Bounds(1, limits.MAX_SEQUENCES),
            trtllm=Asked("num_return_sequences"),
        ),
    ] = 1
    temperature: Annotated[
        float,
        Field(
            "0 is greedy", Bounds(0, limits.MAX_TEMPERATURE), device="temperature", is_option=True
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Field(
            "sample from so many of the likeliest tokens; 0: from all",
            Bounds(0, limits.INT32_MAX),
            vllm=Asked(bounds=Bounds(-1, limits.INT32_MAX)),
            device="top_k",
            is_filter=True,
            is_option=True,
        ),
    ] = 0
    top_p: Annotated[
        float,
        Field(
            "sample from the likeliest tokens that have so much of the probability together",
            Bounds(0, 1, is_open=True),
            trtllm=Asked(default=0.0, bounds=_SHARE),
            device="top_p",
            is_filter=True,
            is_option=True,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Field(
            "sample from tokens that are so likely beside the likeliest",
            _SHARE,
            device="min_p",
            is_filter=True,
        ),
    ] = 0.0
    # Counts prompt and output, as transformers and TensorRT-LLM have it.
    repetition_penalty: Annotated[
        float,
        Field(
            "divide the logits of tokens that prompt or output have by it; 1: no effect",
            Bounds(1 / limits.MAX_PENALTY, limits.MAX_PENALTY),
            device="repetition",
            is_option=True,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Field(
            "taken from the logits of tokens that the output has",
            _PENALTY,
            vllm=_VLLM_PENALTY,
            device="presence",
            is_option=True,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Field(
            "taken from a token's logit for each time that the output has it",
            _PENALTY,
            vllm=_VLLM_PENALTY,
            device="frequency",
            is_option=True,
        ),
    ] = 0.0
    # None: a random one per request; sequence i of n samples with (seed, i).
    seed: Annotated[
        int | None,
        Field(
            "the same seed samples the same tokens",
            Bounds(0, limits.UINT64_MAX),
            trtllm=Asked(refused_by=SERVER),
            vllm=Asked(bounds=_VLLM_SEED),
            is_option=True,
        ),
    ] = None
    end_ids: tuple[int, ...] = ()  # end the sequence and are not part of the output
    # Matched on bytes, across token borders.
    stop_words: Annotated[
        tuple[bytes, ...],
        Field(
            "end the output where it has one of them",
            rows=(
                Row("`stop_words`, `stop`: words", 0, limits.MAX_WORDS, BOTH),
                Row("... bytes of a word", 1, limits.MAX_WORD_BYTES, MODEL),
                Row("... bytes of all", 0, limits.MAX_STOP_BYTES, BOTH),
            ),
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[int, ...],
        Field(
            "end the output with one of them",
            rows=(Row("`stop_token_ids`: ids", 0, limits.MAX_WORDS, BOTH),),
        ),
    ] = ()
    # The stop word stays in the output (TensorRT-LLM), or not (vLLM).
    include_stop: Annotated[
        bool,
        Field(
            "leave the stop word in the output",
            trtllm=None,
            vllm=Asked("include_stop_str_in_output", default=False),
        ),
    ] = True
    bad_words: Annotated[
        tuple[tuple[int, ...], ...],
        Field(
            "never generate these tokens in a row",
            rows=(
                Row("`bad_words`: words", 0, limits.MAX_WORDS, BOTH),
                Row("... bytes of a bad word", 1, limits.MAX_WORD_BYTES, MODEL),
                Row("... bytes of all bad words", 0, limits.MAX_LIST_BYTES, MODEL),
                Row("... tokens of a bad word", 1, limits.MAX_WORD_TOKENS, BOTH),
            ),
        ),
    ] = ()
    # Of prompt and output, as transformers and TensorRT-LLM have it.
    no_repeat_ngram_size: Annotated[
        int,
        Field(
            "never have so many tokens in a row twice; 0: no effect",
            Bounds(0, limits.MAX_NGRAM),
            trtllm=None,
            rows=(Row("`no_repeat_ngram_size`, or 2^30", 0, limits.MAX_NGRAM, BOTH),),
        ),
    ] = 0
    allowed_token_ids: Annotated[
        tuple[int, ...],
        Field(
            "ban all tokens but these",
            rows=(Row("`allowed_token_ids`: ids", 1, limits.MAX_ALLOWED_IDS, BOTH),),
        ),
    ] = ()
    # A token that goes on with a repeat of m >= allowed_length tokens loses m * b^(m - allowed).
    dry_multiplier: Annotated[
        float,
        Field(
            "taken from the logit of a token that goes on with a repeat; 0: no effect",
            Bounds(0, limits.MAX_PENALTY),
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        Field("factor of it for each token more that is repeated", Bounds(1, limits.MAX_PENALTY)),
    ] = 1.75
    dry_allowed_length: Annotated[int, Field("tokens that may be repeated", _COUNT)] = 2
    dry_penalty_last_n: Annotated[
        int,
        Field(
            f"last tokens in which repeats count; -1: the last {limits.MAX_DRY_TOKENS}",
            Bounds(-1, limits.MAX_DRY_TOKENS),
        ),
    ] = 64
    dry_sequence_breakers: Annotated[
        tuple[bytes, ...],
        Field(
            "no repeat goes on over these words",
            rows=(
                Row("`dry_sequence_breakers`: words", 0, limits.MAX_BREAKERS, BOTH),
                Row("... bytes of a breaker", 1, limits.MAX_BREAKER_BYTES, BOTH),
            ),
        ),
    ] = (b"\n", b":", b'"', b"*")
    thinking_token_budget: Annotated[
        int | None,
        Field("tokens after which thinking is made to end", Bounds(0, limits.INT32_MAX)),
    ] = None
    # Name and arguments in JSON of each.
    logits_processors: Annotated[
        tuple[tuple[str, str], ...],
        Field(
            "logits processors of the server's, by name",
            rows=(
                Row("`logits_processors`: names", 0, limits.MAX_PROCESSORS, BOTH),
                Row("... bytes of the arguments of one", 0, limits.MAX_PROCESSOR_BYTES, BOTH),
            ),
        ),
    ] = ()
    bias: Annotated[
        tuple[tuple[int, float], ...],  # token id, what is added to its logit
        Field(
            "add to logits",
            rows=(
                Row("`embedding_bias_words`: words", 0, limits.MAX_WORDS, MODEL),
                Row("... bytes of a bias word", 0, limits.MAX_WORD_BYTES, MODEL),
                Row("... bytes of all bias words", 0, limits.MAX_LIST_BYTES, MODEL),
                Row(
                    "`embedding_bias_weights`, `embedding_bias`",
                    -limits.MAX_BIAS,
                    limits.MAX_BIAS,
                    MODEL,
                ),
                Row("biased tokens", 0, limits.MAX_BIASED_TOKENS, BOTH),
                Row(
                    "`logit_bias` of `vllm_model`",
                    -limits.VLLM_MAX_BIAS,
                    limits.VLLM_MAX_BIAS,
                    MODEL,
                ),
            ),
        ),
    ] = ()
    # What penalties are: `vllm`: before the temperature, presence and frequency of the output;
    # `trtllm`: after `penalty_temperature`, of prompt and output.
    order: Annotated[
        Literal["vllm", "trtllm"], Field("order of operations", trtllm=None, vllm=None)
    ] = "vllm"
    penalty_temperature: Annotated[
        float,
        Field(
            "temperature before the penalties of order `trtllm`",
            Bounds(0, limits.MAX_TEMPERATURE, is_open=True),
            trtllm=None,
            vllm=None,
        ),
    ] = 1.0
    log_probs: Annotated[
        bool,  # of the sampled tokens
        Field(
            "log probs of the tokens",
            trtllm=Asked("return_log_probs"),
            vllm=None,
        ),
    ] = False
    values: Annotated[
        LogProbs | None,
        Field(
            "log probs of likely tokens, and logits",
            trtllm=None,
            vllm=None,
            rows=(
                Row("`logprobs`, `prompt_logprobs`; -1: all", WHOLE, MAX_LOG_PROBS, BOTH),
                Row("... bytes of logits, or of all log probs", 0, "`max_logits_bytes`", ENGINE),
            ),
        ),
    ] = None
    # `n` of `best_of` samples are returned, those of the highest sum of log probs; None: all `n`.
    best_of: Annotated[
        int | None,
        Field(
            "samples of which the best are returned",
            Bounds(1, limits.MAX_SEQUENCES),
            trtllm=None,
        ),
    ] = None
    beams: Beams | None = None  # a beam search, of which `n` beams are returned
    drafts: Drafts | None = None  # guesses of the next tokens; None: what the engine does by itself
    guide: Annotated[
        Guide | None,
        Field(
            "what the output must be: JSON of a schema, a text of an expression or of a grammar",
            trtllm=None,
            vllm=None,
            rows=(
                Row(
                    "`guided_decoding_guide`, `structured_outputs`: bytes", 1, MAX_GUIDE_BYTES, BOTH
                ),
                Row("... levels of JSON", 0, MAX_GUIDE_NESTING, BOTH),
                Row("... choices", 1, MAX_CHOICES, BOTH),
            ),
        ),
    ] = None


FIELDS = _table(SamplingParams)
FILTERS = tuple(name for name, entry in FIELDS.items() if entry.field.is_filter)


def normalised(values: dict[str, Any], most_tokens: int | None) -> dict[str, Any]:
    """Apply the rules that all schemas share to values that are in bounds.

    `most_tokens` is a second bound on the output. Raises ContractError.
    """
    if most_tokens is not None:
        values["max_tokens"] = min(values["max_tokens"], most_tokens)
    least, most = values["min_tokens"], values["max_tokens"]
    if least > most:
        message = f"min_tokens is {least}, above the most tokens asked for, {most}"
        raise ContractError(message)
    if values["temperature"] < limits.GREEDY_BELOW:
        values["temperature"] = 0.0
    values["top_n_sigma"] = max(0.0, values["top_n_sigma"])
    check_mirostat(values["mirostat"])
    return values


def greedy(values: dict[str, Any]) -> dict[str, Any]:
    """Make the values those of greedy decoding, for which filters have no effect."""
    return values | {"temperature": 0.0} | {name: FIELDS[name].default for name in FILTERS}


def check_sampling(sampling: SamplingParams) -> None:
    """Check a struct that another process made, as a bad one could harm other requests.

    Raises ContractError. A vocabulary is the engine's to know: ids are not looked at.
    """
    _check_fields(sampling)
    if sampling.beams is not None:
        _check_fields(sampling.beams)
        if sampling.values is not None:
            raise ContractError("beams and values: a search has log probs of its tokens alone")
    if sampling.drafts is not None:
        _check_fields(sampling.drafts)
        check_drafts(sampling.drafts, sampling.beams is not None)
    check_mirostat(sampling.mirostat)
    values = sampling.values if sampling.mirostat else None
    if values is not None and (unserved_values(values) or values.mode != "processed_logprobs"):
        raise ContractError("mirostat and values: it has processed log probs of its tokens alone")
    limits.check_count("stop_token_ids", len(sampling.stop_token_ids), limits.MAX_WORDS, "ids")
    limits.check_word_bytes("stop_words", sampling.stop_words, limits.MAX_STOP_BYTES)
    limits.check_words("bad_words", sampling.bad_words, limits.MAX_BAN_FORMS)
    _check_filled("stop_words", sampling.stop_words)
    _check_filled("bad_words", sampling.bad_words)
    check_edits(sampling)
    if sampling.guide is not None:
        check_guide("guide", sampling.guide)
    limits.check_count("bias", len(sampling.bias), limits.MAX_BIASED_TOKENS, "tokens")
    if sampling.values is not None:
        check_log_probs(sampling.values)
    for token_id, weight in sampling.bias:
        if not math.isfinite(weight):
            raise ContractError(f"bias of token {clip(token_id)} is {weight}, not a finite number")


def check_edits(sampling: SamplingParams) -> None:
    """Check the sizes of the lists that edit logits. Raises ContractError."""
    limits.check_count(
        "allowed_token_ids", len(sampling.allowed_token_ids), limits.MAX_ALLOWED_IDS, "token ids"
    )
    name, most = "dry_sequence_breakers", limits.MAX_BREAKER_BYTES
    limits.check_count(name, len(sampling.dry_sequence_breakers), limits.MAX_BREAKERS, "words")
    _check_filled(name, sampling.dry_sequence_breakers)
    for index, word in enumerate(sampling.dry_sequence_breakers):
        limits.check_count(f"{name}[{index}]", len(word), most, "bytes")
    name = "logits_processors"
    limits.check_count(name, len(sampling.logits_processors), limits.MAX_PROCESSORS, "names")
    for processor, arguments in sampling.logits_processors:
        size = len(arguments.encode(errors="replace"))
        limits.check_count(f"{name}.{processor[:64]}", size, limits.MAX_PROCESSOR_BYTES, "bytes")


def _check_filled(field: str, words: Iterable[bytes | tuple[int, ...]]) -> None:
    for index, word in enumerate(words):
        if not word:
            raise ContractError(f"{field}[{index}] is empty")
