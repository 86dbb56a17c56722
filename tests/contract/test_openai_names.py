"""OpenAI's names among the request parameters: mapped, without effect, or refused with a hint."""

import json
from typing import Any

import numpy as np
import pytest
from fixtures.contract.asking import inputs_of
from slipstream_contract.errors import ContractError
from slipstream_contract.openai_names import WITHOUT_EFFECT
from slipstream_contract.schemas.trtllm import llm_request, text_request
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_contract.tensors import MODELS


def of_text(parameters: dict[str, object], max_tokens: int = 2000) -> Any:
    inputs = inputs_of(MODELS["tensorrt_llm_bls"], text_input="a", max_tokens=max_tokens)
    return text_request(inputs, parameters).sampling


def of_tokens(parameters: dict[str, object], max_tokens: int = 2000) -> Any:
    prompt = {"input_ids": np.array([1], np.int32)}
    rest = inputs_of(MODELS["tensorrt_llm"], input_lengths=1, request_output_len=max_tokens)
    return llm_request(prompt | rest, parameters).sampling


def of_vllm(parameters: dict[str, object], max_tokens: int = 2000) -> Any:
    given = {"max_tokens": max_tokens} | parameters
    return vllm_request(inputs_of(MODELS["vllm_model"], text_input="a"), given).sampling


def of_vllm_json(parameters: dict[str, object], max_tokens: int = 2000) -> Any:
    text = json.dumps({"max_tokens": max_tokens} | parameters)
    inputs = inputs_of(MODELS["vllm_model"], text_input="a", sampling_parameters=text)
    return vllm_request(inputs, {}).sampling


EVERY = pytest.mark.parametrize("ask", [of_text, of_tokens, of_vllm, of_vllm_json])


@EVERY
def test_of_two_bounds_on_the_output_the_smaller_holds(ask: Any) -> None:
    assert ask({"max_completion_tokens": 12}).max_tokens == 12
    assert ask({"max_completion_tokens": "12"}, max_tokens=5).max_tokens == 5
    for wrong in (0, -1, 1.5, "many", 2**31):
        with pytest.raises(ContractError, match="max_completion_tokens is"):
            ask({"max_completion_tokens": wrong})
    with pytest.raises(ContractError, match="min_tokens is 9, above the most tokens asked for, 8"):
        ask({"max_completion_tokens": 8, "min_tokens": 9})


def test_vllm_needs_no_other_bound() -> None:
    inputs = inputs_of(MODELS["vllm_model"], text_input="a")
    assert vllm_request(inputs, {"max_completion_tokens": 33}).sampling.max_tokens == 33


@EVERY
def test_n_is_the_number_of_answers(ask: Any) -> None:
    assert ask({"n": 3, "temperature": 0.5}).n == 3


@EVERY
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_names_without_effect(ask: Any, name: str) -> None:
    served = WITHOUT_EFFECT[name]
    for value in served or ("gpt-4o", ""):
        assert ask({name: value}) == ask({})
    if served is not None:
        with pytest.raises(ContractError, match=f"^INVALID_ARGUMENT: {name} is not supported yet"):
            ask({name: True})


def test_names_without_effect_stand_beside_the_sampling_parameters() -> None:
    inputs = inputs_of(MODELS["vllm_model"], text_input="a", sampling_parameters='{"top_k": 3}')
    assert vllm_request(inputs, {"user": "u-1"}).sampling.top_k == 3
    with pytest.raises(ContractError, match="'max_completion_tokens' beside sampling_parameters"):
        vllm_request(inputs, {"max_completion_tokens": 3})


def test_triton_parameters_in_json_are_no_sampling_parameters() -> None:
    with pytest.raises(ContractError, match="unknown request parameter 'id'"):
        of_vllm_json({"id": "7"})


@EVERY
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_completion_token", "max_completion_tokens"),
        ("max_complettion_tokens", "max_completion_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("repetition_penalti", "repetition_penalty"),
        ("ignore_eso", "ignore_eos"),
        ("mni_p", "min_p"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(ask: Any, name: str, meant: str) -> None:
    with pytest.raises(ContractError, match=f"'{name}'; do you mean {meant}\\?$"):
        ask({name: 5})


@pytest.mark.parametrize("ask", [of_text, of_tokens])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("logprobs", "return_log_probs"),
        ("timeout_msec", "timeout_ms"),
        ("cache_slat", "cache_salt"),
        ("request_prio", "request_priority"),
    ],
)
def test_a_name_of_another_contract_is_refused_with_the_one_of_this(
    ask: Any, name: str, meant: str
) -> None:
    with pytest.raises(ContractError, match=f"'{name}'; do you mean {meant}\\?$"):
        ask({name: 5})


def test_a_stop_word_sent_as_stop_is_told_from_a_cancel() -> None:
    with pytest.raises(ContractError, match=r"stop words go into stop_words\) is '\\n', neither"):
        of_tokens({"stop": "\n"})
    with pytest.raises(ContractError, match="'stop'; do you mean stop_words"):
        of_text({"stop": "\n"})
