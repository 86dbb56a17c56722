"""The table of docs/limits.md: every bound is tried where the table says that it is checked."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.contract.asking import inputs_of
from slipstream_contract import limits
from slipstream_contract.beams import Beams
from slipstream_contract.drafts import Drafts
from slipstream_contract.errors import ContractError
from slipstream_contract.filters import Filters
from slipstream_contract.guide import Guide, GuideKind
from slipstream_contract.limits import INT32_MAX
from slipstream_contract.limits_page import ROWS, page
from slipstream_contract.log_probs import LogProbs
from slipstream_contract.retention import Retention, TokenRange, check_retention, split_salt
from slipstream_contract.sampling import SamplingParams, check_sampling
from slipstream_contract.schemas.trtllm import llm_request, text_request
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_contract.tensors import MODELS
from slipstream_contract.urgency import split_urgency
from slipstream_contract.vocab import TokenBytes
from slipstream_contract.words import pack_word_list
from slipstream_postprocessing.detokenize import detokenize_batch

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
TABLE = {row.field: row[1:] for row in ROWS}
SIZE = re.compile("bytes|: |biased|^\\.\\.\\.|TOKENS")
CONFIGURED = {
    "prompt, tokens",
    "token ids",
    "requests that wait",
    "tokens that wait",
    "... bytes of logits, or of all log probs",
}
"""Bounds of a checkpoint or a configuration: tests/engine and tests/stages hold them."""


def text(**values: Any) -> Any:
    given = {"text_input": "a", "max_tokens": INT32_MAX} | values
    return text_request(inputs_of(MODELS["tensorrt_llm_bls"], **given), {})


def tokens(**values: Any) -> Any:
    given = {"input_ids": [1], "input_lengths": 1, "request_output_len": 9} | values
    extra = {name: array for name, array in given.items() if isinstance(array, np.ndarray)}
    plain = {name: value for name, value in given.items() if name not in extra}
    return llm_request(inputs_of(MODELS["tensorrt_llm"], **plain) | extra, {})


def vllm(**values: Any) -> Any:
    asked = {"max_tokens": INT32_MAX} | values
    inputs = inputs_of(MODELS["vllm_model"], text_input="a", sampling_parameters=json.dumps(asked))
    return vllm_request(inputs, {})


def parameter(name: str) -> Callable[[Any], Any]:
    return lambda value: split_urgency({name: value})


def engine(**values: Any) -> Any:
    return check_sampling(SamplingParams(**{"max_tokens": INT32_MAX} | values))


def of_filter(name: str) -> list[Callable[[Any], Any]]:
    """Asked in JSON, as a request parameter, and of the engine."""
    old = inputs_of(MODELS["tensorrt_llm_bls"], text_input="a", max_tokens=9)
    return [
        lambda v: vllm(**{name: v}),
        lambda v: text_request(old, {name: v}),
        lambda v: engine(**{name: v}),
    ]


def both(field: str, own: str = "") -> list[Callable[[Any], Any]]:
    """Asked with the tensors of a text, and of the engine."""
    return [lambda v: text(**{field: v}), lambda v: engine(**{own or field: v})]


def guided(kind: str, made: Callable[[int], str]) -> list[Callable[[Any], Any]]:
    """Asked with a guide of a size, of a model and of the engine."""
    asked = {"guided_decoding_guide_type": kind}
    return [
        lambda v: text(**asked, guided_decoding_guide=made(v)),
        lambda v: engine(guide=Guide(GuideKind(kind), made(v))),
    ]


def lookahead(**values: Any) -> Any:
    names = ("window_size", "ngram_size", "verification_set_size")
    return tokens(**{f"lookahead_{name}": values.get(name, 4) for name in names})


def retained(*columns: Any) -> Any:
    names = ("starts", "ends", "priorities", "durations_ms")
    given = zip(names, columns, strict=False)
    return tokens(**{f"retention_token_range_{name}": list(column) for name, column in given})


def words(count: int, size: int = 1) -> list[str]:
    return ["w" * size] * count


def filled(total: int) -> list[str]:
    """Words of so many bytes together, none of them too long."""
    return ["w" * 4096] * (total // 4096) + ["w" * (total % 4096)] * bool(total % 4096)


# Row of the table -> how a value is asked for, of each who must refuse what is out of bounds.
PROBES: dict[str, list[Callable[[Any], Any]]] = {
    "request id, bytes": [lambda v: limits.check_request_id("i" * v)],
    "`max_tokens`": both("max_tokens"),
    "`min_tokens`": [lambda v: text(min_tokens=v), lambda v: vllm(min_tokens=v)],
    "`num_return_sequences`, `n`": [
        *both("num_return_sequences", "n"),
        lambda v: vllm(n=v),
    ],
    "`temperature`": [*both("temperature"), lambda v: vllm(temperature=v)],
    "`top_k`": both("top_k"),
    "`top_k` of `vllm_model`": [lambda v: vllm(top_k=v)],
    "`top_p`": [lambda v: text(top_p=v), lambda v: tokens(runtime_top_p=v)],
    "`top_p` of `vllm_model`": [lambda v: vllm(top_p=v), lambda v: engine(top_p=v)],
    "`min_p`": [lambda v: vllm(min_p=v), lambda v: engine(min_p=v)],
    **{f"`{name}`": of_filter(name) for name in Filters.__struct_fields__},
    "`repetition_penalty`": [*both("repetition_penalty"), lambda v: vllm(repetition_penalty=v)],
    "`dry_multiplier`": [lambda v: vllm(dry_multiplier=v), lambda v: engine(dry_multiplier=v)],
    "`dry_base`": [lambda v: vllm(dry_base=v), lambda v: engine(dry_base=v)],
    "`dry_allowed_length`": [
        lambda v: vllm(dry_allowed_length=v),
        lambda v: engine(dry_allowed_length=v),
    ],
    "`dry_penalty_last_n`": [
        lambda v: vllm(dry_penalty_last_n=v),
        lambda v: engine(dry_penalty_last_n=v),
    ],
    "`dry_sequence_breakers`: words": [
        lambda v: text(dry_sequence_breakers=words(v)),
        lambda v: vllm(dry_sequence_breakers=words(v)),
        lambda v: engine(dry_sequence_breakers=(b"w",) * v),
    ],
    "... bytes of a breaker": [
        lambda v: text(dry_sequence_breakers=words(1, v)),
        lambda v: vllm(dry_sequence_breakers=words(1, v)),
        lambda v: engine(dry_sequence_breakers=(b"w" * v,)),
    ],
    "`allowed_token_ids`: ids": [
        lambda v: tokens(allowed_token_ids=[1] * v),
        lambda v: vllm(allowed_token_ids=[1] * v),
        lambda v: engine(allowed_token_ids=(1,) * v),
    ],
    "`thinking_token_budget`": [
        lambda v: vllm(thinking_token_budget=v),
        lambda v: engine(thinking_token_budget=v),
    ],
    "`logits_processors`: names": [
        lambda v: vllm(logits_processors={f"p{i}": {} for i in range(v)}),
        lambda v: engine(logits_processors=(("p", "{}"),) * v),
    ],
    "... bytes of the arguments of one": [
        lambda v: vllm(logits_processors={"p": {"": "w" * (v - 8)}} if v else {}),
        lambda v: engine(logits_processors=(("p", "w" * v),)),
    ],
    "`no_repeat_ngram_size`, or 2^30": both("no_repeat_ngram_size"),
    "`no_repeat_ngram_size` of `vllm_model`": [lambda v: vllm(no_repeat_ngram_size=v)],
    **{f"`{name}`": both(name) for name in ("presence_penalty", "frequency_penalty")},
    "`presence_penalty` of `vllm_model`": [lambda v: vllm(presence_penalty=v)],
    "`frequency_penalty` of `vllm_model`": [lambda v: vllm(frequency_penalty=v)],
    "`seed` of `vllm_model`": [lambda v: vllm(seed=v)],
    "`guided_decoding_guide`, `structured_outputs`: bytes": guided("regex", lambda v: "a" * v),
    "... levels of JSON": guided("json_schema", lambda v: '{"a":' * v + "1" + "}" * v),
    "... choices": [
        lambda v: vllm(structured_outputs={"choice": ["a"] * v}),
        lambda v: engine(guide=Guide(GuideKind.CHOICE, json.dumps(["a"] * v))),
    ],
    "`stop_words`, `stop`: words": [
        lambda v: text(stop_words=words(v)),
        lambda v: vllm(stop=words(v)),
        lambda v: engine(stop_words=(b"w",) * v),
    ],
    "... bytes of a word": [
        lambda v: text(stop_words=words(1, v)),
        lambda v: vllm(stop=words(1, v)),
    ],
    "... bytes of all": [
        lambda v: text(stop_words=filled(v)),
        lambda v: vllm(stop=filled(v)),
        lambda v: engine(stop_words=tuple(w.encode() for w in filled(v))),
    ],
    "`stop_token_ids`: ids": [
        lambda v: vllm(stop_token_ids=[1] * v),
        lambda v: engine(stop_token_ids=(1,) * v),
    ],
    "`bad_words`: words": [
        lambda v: text(bad_words=words(v)),
        lambda v: vllm(bad_words=words(v)),
        # The engine allows for the two forms that vllm_model has of each.
        lambda v: engine(bad_words=((1,),) * (2 * v)),
    ],
    "... bytes of a bad word": [
        lambda v: text(bad_words=words(1, v)),
        lambda v: vllm(bad_words=words(1, v)),
    ],
    "... bytes of all bad words": [
        lambda v: text(bad_words=filled(v)),
        lambda v: vllm(bad_words=filled(v)),
    ],
    "... tokens of a bad word": [
        lambda v: tokens(bad_words_list=pack_word_list([[1] * v])),
        lambda v: engine(bad_words=((1,) * v,)),
    ],
    "`embedding_bias_words`: words": [
        lambda v: text(embedding_bias_words=words(v), embedding_bias_weights=[0.0] * v)
    ],
    "... bytes of a bias word": [
        lambda v: text(embedding_bias_words=words(1, v), embedding_bias_weights=[0.0])
    ],
    "... bytes of all bias words": [
        lambda v: text(
            embedding_bias_words=filled(v), embedding_bias_weights=[0.0] * len(filled(v))
        )
    ],
    "`embedding_bias_weights`, `embedding_bias`": [
        lambda v: tokens(embedding_bias=[float(v)]),
        lambda v: text(embedding_bias_words="w", embedding_bias_weights=float(v)),
    ],
    "biased tokens": [
        lambda v: tokens(embedding_bias=[1.0] * v),
        lambda v: vllm(logit_bias={str(i): 1 for i in range(v)}),
        lambda v: engine(bias=((1, 1.0),) * v),
    ],
    "`logit_bias` of `vllm_model`": [lambda v: vllm(logit_bias={"5": v})],
    "`logprobs`, `prompt_logprobs`; -1: all": [
        lambda v: vllm(logprobs=v),
        lambda v: vllm(prompt_logprobs=v),
        lambda v: engine(values=LogProbs(top=v)),
        lambda v: engine(values=LogProbs(prompt=v)),
    ],
    "`best_of` of `vllm_model`": [lambda v: vllm(best_of=v), lambda v: engine(best_of=v)],
    "`beam_width`": [lambda v: text(beam_width=v), lambda v: engine(beams=Beams(width=v))],
    "`length_penalty`": [
        lambda v: text(beam_width=2, length_penalty=v),
        lambda v: tokens(beam_width=2, len_penalty=v),
        lambda v: vllm(n=2, use_beam_search=True, length_penalty=v),
        lambda v: engine(beams=Beams(width=2, length_penalty=v)),
    ],
    "`beam_search_diversity_rate`": [
        lambda v: tokens(beam_width=2, beam_search_diversity_rate=v),
        lambda v: engine(beams=Beams(width=2, diversity_rate=v)),
    ],
    "`draft_input_ids`: ids": [
        lambda v: tokens(draft_input_ids=[1] * v),
        lambda v: engine(drafts=Drafts(token_ids=(1,) * v)),
    ],
    "`num_draft_tokens`": [
        lambda v: text(num_draft_tokens=v),
        lambda v: engine(drafts=Drafts(most=v)),
    ],
    "`lookahead_window_size`": [lambda v: lookahead(window_size=v)],
    "`lookahead_ngram_size`": [lambda v: lookahead(ngram_size=v)],
    "`lookahead_verification_set_size`": [lambda v: lookahead(verification_set_size=v)],
    "`sampling_parameters`, bytes": [
        lambda v: vllm_request(
            inputs_of(
                MODELS["vllm_model"], text_input="a", sampling_parameters="{}" + " " * (v - 2)
            ),
            {},
        )
    ],
    "`priority`, `request_priority`": [parameter("priority"), parameter("request_priority")],
    "`timeout_ms`": [parameter("timeout_ms")],
    "`timeout`, microseconds": [parameter("timeout")],
    "`cache_salt`, bytes": [lambda v: split_salt({"cache_salt": "s" * v})],
    "`retention_token_range_starts`: ranges": [
        lambda v: retained(range(v), range(1, v + 1), [1] * v),
        lambda v: check_retention(Retention(tuple(TokenRange(i, i + 1, 1) for i in range(v)))),
    ],
    "`retention_token_range_priorities`, `retention_decode_priority`": [
        lambda v: retained([0], [1], [v]),
        lambda v: tokens(retention_decode_priority=v),
        lambda v: check_retention(Retention((TokenRange(0, 1, v),), v)),
    ],
    "`..._durations_ms`, `retention_decode_duration_ms`": [
        lambda v: retained([0], [1], [1], [v]),
        lambda v: tokens(retention_decode_duration_ms=v),
        lambda v: check_retention(Retention((TokenRange(0, 1, 1, v),), 1, v)),
    ],
    "`TOKENS_BATCH`, token ids": [
        lambda v: detokenize_batch(
            TokenBytes.load(CHECKPOINT), np.zeros((1, 1, v), np.int32), np.zeros((1, 1), np.int32)
        )
    ],
}


def refused(ask: Callable[[Any], Any], value: Any) -> bool:
    try:
        ask(value)
    except ContractError as error:
        return len(error.message) < 400
    except OverflowError:  # the tensor cannot say it
        return True
    return False


@pytest.mark.parametrize("field", PROBES)
def test_a_bound_holds_where_the_table_says(field: str) -> None:
    least, most, _ = TABLE[field]
    for ask in PROBES[field]:
        for bound, sign in ((least, -1), (most, 1)):
            if isinstance(bound, str):
                continue
            if sign < 0 and SIZE.search(field):
                continue  # nothing is shorter than the shortest
            step = 1 if isinstance(bound, int) else abs(bound) * 1e-3
            assert not refused(ask, bound), f"{field}: {bound}"
            assert refused(ask, bound + sign * step), f"{field}: {bound + sign * step}"
        if isinstance(least, float):
            assert refused(ask, math.nan)


def test_a_top_p_of_vllm_must_be_above_0() -> None:
    assert refused(PROBES["`top_p` of `vllm_model`"][0], 0)
    assert not refused(PROBES["`top_p` of `vllm_model`"][0], 1e-6)


def test_every_row_has_who_refuses_it() -> None:
    by_server = {field for field, (*_, place) in TABLE.items() if place == "server"}
    assert set(TABLE) == set(PROBES) | CONFIGURED | by_server
    assert by_server == {"prompts in a request", "`seed`"}
    assert MODELS["ensemble"].max_batch_size == TABLE["prompts in a request"][1]


def test_the_docs_show_the_table() -> None:
    shown = re.search(
        r"<!-- limits: [^>]*-->\n(.*?)\n<!--", (ROOT / "docs" / "limits.md").read_text(), re.S
    )
    assert shown is not None
    assert shown[1] == page(), "put `make limits` into docs/limits.md, between its marks"
