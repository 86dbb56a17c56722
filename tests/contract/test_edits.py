"""Lists and objects that edit logits: the same from tensors, from values and from JSON."""

import json
from typing import Any

import pytest
from fixtures.contract.asking import inputs_of
from slipstream_contract.errors import ContractError
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.schemas.llmapi import llmapi_request
from slipstream_contract.schemas.trtllm import llm_request, text_request
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_contract.tensors import LLMAPI, MODELS

ASKED = {
    "allowed_token_ids": [5, 6, 5],
    "dry_sequence_breakers": ["\n", "é"],
    "logits_processors": {"soft_length": {"start": 3}},
}


def text(**fields: Any) -> SamplingParams:
    inputs = inputs_of(MODELS["tensorrt_llm_bls"], text_input="a", max_tokens=9, **fields)
    return text_request(inputs, {}).sampling


def tokens(**fields: Any) -> SamplingParams:
    plain = {"input_ids": [1], "input_lengths": 1, "request_output_len": 9}
    return llm_request(inputs_of(MODELS["tensorrt_llm"], **plain, **fields), {}).sampling


def vllm(**fields: Any) -> SamplingParams:
    asked = json.dumps(fields)
    inputs = inputs_of(MODELS["vllm_model"], text_input="a", sampling_parameters=asked)
    return vllm_request(inputs, {}).sampling


def llmapi(**fields: Any) -> SamplingParams:
    return llmapi_request(inputs_of(LLMAPI, text_input=["a"]), fields).sampling


def check(sampling: SamplingParams) -> None:
    assert sampling.allowed_token_ids == (5, 6)
    assert sampling.dry_sequence_breakers == (b"\n", "é".encode())
    assert sampling.logits_processors == (("soft_length", '{"start": 3}'),)


def test_every_schema_reads_them() -> None:
    in_tensors = ASKED | {"logits_processors": json.dumps(ASKED["logits_processors"])}
    check(text(**in_tensors))
    check(tokens(**in_tensors))
    check(vllm(**ASKED))
    as_json = {name: json.dumps(value) for name, value in ASKED.items()}
    check(vllm(**as_json))
    check(llmapi(**as_json))


@pytest.mark.parametrize("ask", [text, tokens])
def test_lists_of_a_batch_are_padded(ask: Any) -> None:
    assert ask(allowed_token_ids=[5, -1, -1]).allowed_token_ids == (5,)
    assert ask(dry_sequence_breakers=["a", ""]).dry_sequence_breakers == (b"a",)
    assert ask(dry_sequence_breakers=[""]).dry_sequence_breakers == ()
    assert ask(logits_processors="").logits_processors == ()
    with pytest.raises(ContractError, match="allowed_token_ids is empty"):
        ask(allowed_token_ids=[-1])


@pytest.mark.parametrize("ask", [text, tokens])
def test_the_old_value_of_no_ngrams_is_none(ask: Any) -> None:
    assert ask(no_repeat_ngram_size=1 << 30).no_repeat_ngram_size == 0
    assert ask(no_repeat_ngram_size=64).no_repeat_ngram_size == 64
    with pytest.raises(ContractError, match=r"no_repeat_ngram_size is 65, .* from 0 to 64"):
        ask(no_repeat_ngram_size=65)


@pytest.mark.parametrize("ask", [text, tokens, vllm, llmapi])
def test_nothing_asked_is_no_effect(ask: Any) -> None:
    sampling = ask()
    assert (sampling.allowed_token_ids, sampling.logits_processors) == ((), ())
    assert (sampling.no_repeat_ngram_size, sampling.dry_multiplier) == (0, 0.0)
    assert sampling.dry_sequence_breakers == (b"\n", b":", b'"', b"*")
    assert sampling.thinking_token_budget is None


def test_what_asks_for_nothing_in_vllm_is_served() -> None:
    nothing = {"allowed_token_ids": None, "logits_processors": [], "thinking_token_budget": None}
    assert vllm(**nothing) == vllm(logits_processors={})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"allowed_token_ids": "[5"}, "allowed_token_ids is not JSON"),
        ({"allowed_token_ids": {}}, "allowed_token_ids is {}, not a list"),
        ({"dry_sequence_breakers": ["a", ""]}, r"dry_sequence_breakers\[1\] is empty"),
        ({"dry_sequence_breakers": "[" * 100_000}, "dry_sequence_breakers is nested too deeply"),
        ({"logits_processors": {"p": None}}, "logits_processors.p is None, not an object"),
        ({"logits_processors": ["p"]}, "logits_processors is .*, not an object of names"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractError, match=said):
        vllm(**fields)
