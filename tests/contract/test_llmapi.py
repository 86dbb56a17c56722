"""Requests in the tensors of NVIDIA's LLM-API model: its defaults, its names, its refusals."""

import numpy as np
import pytest
from fixtures.contract.asking import inputs_of, near_requests, served_or_refused, strings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slipstream_contract.errors import ContractError
from slipstream_contract.request import GenerateRequest
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.schemas.llmapi import llmapi_request
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_contract.tensors import LLMAPI, MODELS

# As NVIDIA publishes it, in another notation than the declaration's.
PUBLISHED_IN = {
    ("STRING", (-1,)): "text_input image_url sampling_param_stop",
    ("STRING", (1,)): "lora_name lora_path lora_ckpt_source",
    ("BOOL", (1,)): (
        "streaming sampling_param_exclude_input_from_output sampling_param_return_perf_metrics "
        "return_finish_reason return_stop_reason return_cumulative_logprob stop"
    ),
    ("INT32", (1,)): "sampling_param_best_of sampling_param_top_k sampling_param_max_tokens",
    ("FP32", (1,)): (
        "sampling_param_temperature sampling_param_top_p sampling_param_frequency_penalty "
        "sampling_param_presence_penalty"
    ),
    ("UINT64", (1,)): "sampling_param_seed lora_id",
}
NEWER_IN = {("STRING", (1,)): "sampling_param_logits_post_processor_name"}
PUBLISHED_OUT = {
    ("STRING", (-1,)): "text_output finish_reason stop_reason",
    ("FP32", (-1,)): "cumulative_logprob kv_cache_hit_rate",
    ("INT32", (-1,)): (
        "kv_cache_reused_block kv_cache_missed_block kv_cache_alloc_new_blocks "
        "kv_cache_alloc_total_blocks"
    ),
    ("INT64", (1,)): (
        "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns"
    ),
    ("FP32", (1,)): "acceptance_rate",
    ("INT32", (1,)): "total_accepted_draft_tokens total_draft_tokens",
}


def ask(parameters=(), **inputs) -> GenerateRequest:
    asked = {"text_input": "hi"} | {
        name
        if name in LLMAPI.inputs_by_name and name != "stop_words"
        else f"sampling_param_{name}": value
        for name, value in inputs.items()
    }
    return llmapi_request(inputs_of(LLMAPI, **asked), dict(parameters))


def listed(*groups) -> set:
    return {
        (name, *kind) for group in groups for kind, names in group.items() for name in names.split()
    }


def test_the_tensors_are_those_that_nvidia_publishes() -> None:
    assert {(t.name, t.dtype, t.dims) for t in LLMAPI.inputs} == listed(PUBLISHED_IN, NEWER_IN)
    assert {(t.name, t.dtype, t.dims) for t in LLMAPI.outputs} == listed(PUBLISHED_OUT)
    assert [t.name for t in LLMAPI.inputs if not t.is_optional] == ["text_input"]
    assert (LLMAPI.max_batch_size, LLMAPI.is_decoupled, LLMAPI.num_instances) == (0, False, 1)


def test_defaults_are_32_greedy_tokens_after_the_prompt() -> None:
    request = ask()
    assert request.sampling == SamplingParams(max_tokens=32, temperature=0, include_stop=False)
    options = request.options
    assert (options.echo, options.is_streaming, options.skip_special_tokens) == (True, False, None)
    assert not any((options.finish_reason, options.stop_reason, options.cumulative_log_prob))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"temperature": 0.5}, (0.5, 0, 1.0)),
        ({"top_p": 0.5}, (1.0, 0, 0.5)),
        ({"top_k": 7}, (1.0, 7, 1.0)),
        ({"top_k": 0, "top_p": 1.0, "temperature": 0.75}, (0.75, 0, 1.0)),
        ({"top_p": 0.0, "temperature": 0.75}, (0, 0, 1.0)),
        ({"top_k": 1, "temperature": 0.75}, (0, 0, 1.0)),
        ({"temperature": 0.0, "top_k": 9}, (0, 0, 1.0)),
        ({"parameters": {"min_p": "0.5"}}, (1.0, 0, 1.0)),
    ],
)
def test_decoding_is_greedy_unless_something_asks_to_sample(inputs, expected) -> None:
    sampling = ask(**inputs).sampling
    assert (sampling.temperature, sampling.top_k, pytest.approx(sampling.top_p)) == expected


def test_everything_that_is_served() -> None:
    request = ask(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        frequency_penalty=-0.5,
        presence_penalty=0.5,
        max_tokens=9,
        sampling_param_stop=["a", "", "é"],
        seed=2**64 - 1,
        best_of=1,
        exclude_input_from_output=True,
        return_perf_metrics=True,
        return_finish_reason=True,
        return_stop_reason=True,
        return_cumulative_logprob=True,
        streaming=True,
    )
    sampling = request.sampling
    assert sampling.stop_words == (b"a", "é".encode())
    assert (sampling.seed, sampling.max_tokens, sampling.log_probs) == (2**64 - 1, 9, True)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    options = request.options
    assert (options.is_streaming, options.echo, options.perf_metrics) == (True, False, True)
    assert options.finish_reason
    assert options.stop_reason
    assert request.encoded([8]).end_ids == (8,)


def test_request_parameters_are_vllms_or_stand_for_a_tensor() -> None:
    assert ask({"max_tokens": "5", "Streaming": False}).sampling.max_tokens == 5
    assert ask({"sampling_param_max_tokens": 5}) == ask(max_tokens=5)
    assert ask({"Streaming": True}).options.is_streaming
    assert ask({"max_completion_tokens": 4}).sampling.max_tokens == 4
    assert ask({"stop": "end"}) == ask(sampling_param_stop="end")
    assert ask({"add_special_tokens": "false"}).add_special_tokens is False
    own = {"min_tokens": "2", "repetition_penalty": 1.5, "ignore_eos": True, "temperature": 0}
    theirs = vllm_request(
        inputs_of(MODELS["vllm_model"], text_input="hi"), own | {"max_tokens": 32}
    )
    assert ask(own).sampling == theirs.sampling
    assert ask(own).words == theirs.words
    urgent = ask({"timeout_ms": 5, "cache_salt": "a"})
    assert (urgent.urgency.timeout_ns, urgent.cache_salt) == (5_000_000, "a")


def test_stop_cancels_and_nothing_else_counts() -> None:
    assert ask(text_input="", stop=True).is_stop
    assert ask(text_input="", stop=True, max_tokens=-1).is_stop
    assert not ask(stop=False).is_stop


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": ""}, "text_input is empty"),
        ({"text_input": ["a", "b"]}, "text_input has 2 texts, not 1"),
        ({"text_input": []}, "text_input has 0 texts, not 1"),
        ({"top_p": 1.1}, r"sampling_param_top_p is 1\.1, not a number above 0"),
        ({"top_p": float("nan")}, "sampling_param_top_p is nan"),
        ({"top_k": -1}, "sampling_param_top_k is -1, not a whole number from 0"),
        ({"temperature": -1.0}, "sampling_param_temperature is -1, not"),
        ({"temperature": float("inf"), "top_k": 1}, "sampling_param_temperature is inf"),
        ({"max_tokens": 0}, "sampling_param_max_tokens is 0, not a whole number from 1"),
        ({"presence_penalty": 2.5}, r"sampling_param_presence_penalty is 2\.5, not a finite"),
        ({"sampling_param_stop": ["x"] * 5000}, "sampling_param_stop has 5000 words, at most 1024"),
        ({"sampling_param_stop": ["x" * 4096] * 5}, "sampling_param_stop has 20480 bytes"),
        ({"lora_id": 3}, "lora_id is not supported yet"),
        ({"lora_path": "a"}, "lora_path is not supported yet"),
        ({"image_url": "http://a/b.png"}, "image_url is not supported yet"),
        (
            {"logits_post_processor_name": "mine"},
            "sampling_param_logits_post_processor_name is not supported yet",
        ),
        ({"parameters": {"temprature": 1}}, "unknown request parameter 'temprature'"),
        ({"parameters": {"lookahead_config": "{}"}}, "lookahead_config is '{}': a request cannot"),
        ({"parameters": {"logprobs": 1}}, "logprobs has no output in this contract"),
        ({"parameters": {"top_k": 4}, "top_k": 3}, "sampling_param_top_k and top_k are given"),
        (
            {"parameters": {"stop": "a"}, "sampling_param_stop": "b"},
            "sampling_param_stop and stop are given but mean the same",
        ),
    ],
)
def test_refusals(inputs, message) -> None:
    with pytest.raises(ContractError, match=message):
        ask(**inputs)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(near_requests(LLMAPI, "text_input"))
def test_whatever_comes_is_served_or_refused_by_name(drawn) -> None:
    inputs, parameters = drawn
    served_or_refused(llmapi_request, inputs, parameters)


@given(st.binary(max_size=6))
def test_a_text_that_is_no_utf8_is_refused(raw) -> None:
    outcome = served_or_refused(llmapi_request, {"text_input": strings(raw)}, {})
    text = raw.decode(errors="replace")
    if raw and text.encode() == raw:
        assert outcome.prompt == text
    else:
        assert "text_input" in str(outcome)


def test_a_scalar_has_no_dimension_or_one() -> None:
    given = {"text_input": strings("hi"), "sampling_param_max_tokens": np.array(5, np.int32)}
    assert llmapi_request(given, {}).sampling.max_tokens == 5
    with pytest.raises(ContractError, match=r"sampling_param_max_tokens has shape \[2\], not \[1"):
        ask(max_tokens=[1, 2])
