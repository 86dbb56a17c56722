"""Requests in TensorRT-LLM's tensors: defaults, older names, refusals by name, and nothing else."""

import math
import re

import numpy as np
import pytest
from fixtures.contract.asking import (
    Vocabulary,
    array_of,
    inputs_of,
    near_requests,
    served_or_refused,
    strings,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slipstream_contract import limits
from slipstream_contract.errors import Code, ContractError
from slipstream_contract.request import GenerateRequest
from slipstream_contract.schemas.trtllm import llm_request, text_request
from slipstream_contract.tensors import MODELS, TO_LLM
from slipstream_contract.urgency import Urgency

TEXT, LLM = MODELS["tensorrt_llm_bls"], MODELS["tensorrt_llm"]
TO_LLM_NAMES = TO_LLM | {"max_tokens": "request_output_len"}


def ask_text(parameters=(), **values) -> GenerateRequest:
    asked = {"text_input": "def f(", "max_tokens": 8} | values
    return text_request(inputs_of(TEXT, **asked), dict(parameters))


def ask_llm(parameters=(), vocab=None, end_ids=(), **values) -> GenerateRequest:
    asked = {"input_ids": [1, 2, 3], "input_lengths": 3, "request_output_len": 8} | values
    return llm_request(inputs_of(LLM, **asked), dict(parameters), vocab, end_ids=end_ids)


def ask_both(**values):
    """The sampling parameters of a request to either model, which must agree."""
    text = ask_text(**values).encoded(())
    llm = ask_llm(**{TO_LLM_NAMES.get(name, name): value for name, value in values.items()})
    assert llm.sampling == text
    return text


# --- defaults and rules ---------------------------------------------------------------------------


def test_a_bare_request_is_greedy_and_echoes():
    request = ask_text()
    assert request.text == "def f("
    assert not request.options.is_streaming
    assert request.options.echo
    sampling = request.encoded([7, 9])
    assert sampling.max_tokens == 8
    assert sampling.temperature == 0
    assert sampling.end_ids == (7, 9)
    assert sampling.include_stop
    assert sampling.n == 1
    assert sampling.seed is None
    assert not sampling.log_probs


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (0.0, 0, 1.0)),
        ({"top_k": 0, "top_p": 0.0}, (0.0, 0, 1.0)),
        ({"temperature": 0.5}, (0.0, 0, 1.0)),
        ({"top_k": 1, "top_p": 0.0}, (0.0, 0, 1.0)),
        ({"top_k": 5, "top_p": 0.0}, (1.0, 5, 1.0)),
        ({"top_k": 5}, (1.0, 5, 1.0)),
        ({"top_k": 5, "top_p": 0.5, "temperature": 2.0}, (2.0, 5, 0.5)),
        ({"top_k": 0, "top_p": 0.5}, (1.0, 0, 0.5)),
        ({"top_p": 1.0}, (1.0, 0, 1.0)),
        ({"top_k": 5, "temperature": 0.0}, (0.0, 0, 1.0)),
        ({"top_k": 5, "temperature": 1e-7}, (0.0, 0, 1.0)),
    ],
)
def test_what_top_k_top_p_and_temperature_mean(asked, expected):
    sampling = ask_both(**asked)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected


@pytest.mark.parametrize(
    ("asked", "heat"),
    [
        ({}, 1.0),
        ({"temperature": 0.0}, 1.0),
        ({"temperature": 0.5, "top_k": 1}, 0.5),
        ({"temperature": 0.5, "top_k": 5}, 0.5),
        ({"temperature": 0.5, "beam_width": 2}, 0.5),
    ],
)
def test_the_order_is_tensorrt_llms_at_the_temperature_asked_for(asked, heat):
    """Also where it is greedy, and the temperature of sampling is 0."""
    sampling = ask_both(**asked)
    assert (sampling.order, sampling.penalty_temperature) == ("trtllm", heat)


def test_min_p_is_a_parameter_and_asks_for_sampling():
    for request in (ask_text({"min_p": 0.25}).sampling, ask_llm({"min_p": "0.25"}).sampling):
        assert (request.temperature, request.min_p) == (1.0, 0.25)
    with pytest.raises(ContractError, match=r"min_p is 1\.5, not a finite number from 0 to 1"):
        ask_text({"min_p": 1.5})


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("random_seed", "seed", 2**64 - 1),
        ("min_length", "min_tokens", 3),
        ("return_kv_cache_reuse_stats", "return_perf_metrics", True),
    ],
)
def test_older_names(old, new, value):
    assert ask_text(**{old: value}) == ask_text(**{new: value}) != ask_text()
    assert ask_llm(**{old: value}) == ask_llm(**{new: value}) != ask_llm()
    assert ask_llm({old: value}) == ask_llm({new: value}) == ask_llm(**{new: value})
    with pytest.raises(ContractError, match=f"{new} and {old}|{old} and {new}"):
        ask_text(**{old: value, new: value})


@given(
    st.integers(1, 2**31 - 1),
    st.floats(0, 100, width=32),
    st.integers(0, 2**64 - 1),
    st.floats(-50, 50, width=32),
    st.integers(1, limits.MAX_SEQUENCES),
)
def test_what_is_accepted_arrives(max_tokens, temperature, seed, penalty, n):
    sampling = ask_both(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=0.5,
        seed=seed,
        presence_penalty=penalty,
        frequency_penalty=-penalty,
        repetition_penalty=1.25,
        num_return_sequences=n,
        return_log_probs=True,
    )
    assert sampling.max_tokens == max_tokens
    assert sampling.temperature == (temperature if temperature >= 1e-5 else 0)
    assert sampling.seed == seed
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (penalty, -penalty)
    assert sampling.repetition_penalty == 1.25
    assert sampling.n == n
    assert sampling.log_probs


def test_parameters_stand_for_inputs_under_either_name():
    expected = ask_llm(runtime_top_k=4, streaming=True).sampling
    assert ask_llm({"top_k": 4, "stream": True}).sampling == expected
    assert ask_llm({"runtime_top_k": "4", "streaming": "true"}).sampling == expected
    assert ask_text({"top_k": 4, "stream": True}).options.is_streaming


def test_nvidias_client_says_whether_it_streams_twice():
    """Its `Streaming` stands beside the tensor; beside `stop`, which cancels, it stands alone."""
    for flag in (True, False):
        assert ask_llm({"Streaming": flag}) == ask_llm(streaming=flag)
        assert ask_llm({"Streaming": flag}, streaming=flag) == ask_llm(streaming=flag)
        assert ask_text({"Streaming": flag}, stream=flag) == ask_text(stream=flag)
        assert ask_llm({"Streaming": flag}, stop=True).is_stop
        with pytest.raises(ContractError, match=f"Streaming is {flag}, but streaming .*{not flag}"):
            ask_llm({"Streaming": flag}, streaming=not flag)
    with pytest.raises(ContractError, match="Streaming is 'maybe', neither true nor false"):
        ask_text({"Streaming": "maybe"})


def test_whether_special_tokens_are_added_is_said_by_the_request_or_the_model():
    assert ask_text().add_special_tokens is None
    for value in (True, False):
        assert ask_text(add_special_tokens=value).add_special_tokens is value
        assert ask_text({"add_special_tokens": str(value)}).add_special_tokens is value
    with pytest.raises(ContractError, match="add_special_tokens is 'maybe', neither true nor fal"):
        ask_text({"add_special_tokens": "maybe"})
    with pytest.raises(ContractError, match="unknown request parameter 'add_special_tokens'"):
        ask_llm({"add_special_tokens": False})  # it takes token ids


def test_the_beginning_of_a_name_is_a_better_hint_than_a_likeness():
    with pytest.raises(ContractError, match="'stop'; do you mean stop_words"):
        ask_text({"stop": "a"})


def test_parameters_of_the_server_are_not_ours():
    harmless = {"id": "7", "sequence_id": 5, "X-Tenant": "a", "triton_final": True}
    assert ask_text(harmless) == ask_text()
    assert ask_llm(harmless | {"request_type": "context_and_generation"}) == ask_llm()


def test_what_is_said_of_the_handling_is_in_the_request():
    said = {"timeout": 5, "priority": 1, "cache_salt": "a"}
    for request in (ask_text(said), ask_llm(said)):
        assert request.urgency == Urgency(timeout_ns=5000, priority=1)
        assert request.cache_salt == "a"
    for wrong in ({"timeout_ms": 0}, {"priority": 10}, {"cache_salt": 5}):
        with pytest.raises(ContractError, match=f"{next(iter(wrong))} is "):
            ask_text(wrong)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temprature": 0.5}, "unknown request parameter 'temprature'; do you mean temperature"),
        ({"top-k": 5}, "'top-k'; do you mean top_k"),
        ({"stop_word": "a"}, "'stop_word'; do you mean stop_words"),
        ({"tenant": 5}, "unknown request parameter 'tenant'"),
        ({"lora_task_id": -1}, "lora_task_id is -1"),
        ({"prompt_vocab_size": 4}, "prompt_vocab_size is given without prompt_embedding_table$"),
        ({"return_context_logits": "maybe"}, "return_context_logits is 'maybe'"),
        ({"stop_words": "a"}, "stop_words .* must be a tensor"),
        ({"request_type": "context_only"}, "context_only is not supported yet"),
        ({"request_type": 7}, "request_type is 7, not context_and_generation"),
        ({"max_tokens": 5}, "max_tokens, twice"),
        ({"seed": -1}, "seed is -1, not a whole number from 0 to 18446744073709551615"),
        ({"seed": 1.5}, "seed is 1.5, not a whole number"),
        ({"top_p": "high"}, "top_p is 'high', not a number"),
        ({"stream": 2}, "stream is 2, neither true nor false"),
        ({"ignore_eos": "maybe"}, "ignore_eos is 'maybe'"),
    ],
)
def test_parameters_that_are_refused(parameters, message):
    with pytest.raises(ContractError, match=message) as caught:
        ask_text(parameters)
    assert caught.value.code is Code.INVALID_ARGUMENT


# --- refusals -------------------------------------------------------------------------------------

BAD_VALUES = [
    ("max_tokens", 0, "0, not a whole number from 1 to 2147483647"),
    ("max_tokens", -5, "-5, not"),
    ("temperature", -0.5, r"-0.5, not a finite number from 0 to 1e\+06"),
    ("temperature", math.nan, "nan"),
    ("temperature", math.inf, "inf"),
    ("top_p", -0.25, "-0.25, not a finite number from 0 to 1"),
    ("top_p", 1.1, "1.1, not"),
    ("top_p", math.nan, "nan"),
    ("top_k", -1, "-1, not a whole number from 0"),
    ("repetition_penalty", 0.0, "0, not a finite number from 0.001"),
    ("repetition_penalty", -1.0, "-1, not"),
    ("presence_penalty", math.nan, "nan"),
    ("frequency_penalty", math.inf, "inf"),
    ("min_tokens", -1, "-1, not a whole number from 0"),
    ("min_tokens", 9, "9, above the most tokens asked for, 8"),
    ("num_return_sequences", 0, "0, not a whole number from 1"),
    ("num_return_sequences", 1000, "1000, not"),
    ("end_id", -2, "-2, not a whole number from -1"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_VALUES)
def test_values_out_of_bounds_are_refused_by_name(name, value, message):
    with pytest.raises(ContractError, match=f"^INVALID_ARGUMENT: {name} is {message}"):
        ask_text(**{name: value})
    inner = TO_LLM_NAMES.get(name, name)
    with pytest.raises(ContractError, match=rf"{name}\)? is {message}"):
        ask_llm(**{inner: value})


@pytest.mark.parametrize("model", [TEXT, LLM], ids=lambda model: model.name)
def test_later_work_is_accepted_at_its_neutral_values_alone(model):
    ask = ask_text if model is TEXT else ask_llm
    later = [tensor for tensor in model.inputs if tensor.neutral is not None]
    assert later
    for tensor in later:
        shape = tuple(max(dim, 0) for dim in tensor.dims)
        base = {"text_input": "a", "max_tokens": 1}
        if model is LLM:
            base = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1}
        arrays = inputs_of(model, **base)
        request = text_request if model is TEXT else llm_request
        for value in tensor.neutral:
            filled = np.broadcast_to(array_of(tensor, value), [max(1, d) for d in tensor.dims])
            request(arrays | {tensor.name: filled}, {})
        if -1 in tensor.dims:
            empty = np.empty(shape, filled.dtype) if tensor.neutral else None
            empty = array_of(tensor).reshape(shape) if empty is None else empty
            request(arrays | {tensor.name: empty}, {})
        other = array_of(tensor, "x" if tensor.dtype == "STRING" else 7)
        set_ = np.broadcast_to(other, [max(1, dim) for dim in tensor.dims])
        with pytest.raises(ContractError) as caught:
            request(arrays | {tensor.name: set_}, {})
        told = str(caught.value)
        assert re.match(rf"INVALID_ARGUMENT: {tensor.name}( \(\w+\))? is not supported yet: ", told)
        assert tensor.name != "len_penalty" or "length_penalty" in told
    assert ask()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"max_tokens": np.array([1.0], np.float32)}, "max_tokens has type 'float32', not INT32"),
        ({"max_tokens": np.array([1], np.int64)}, "max_tokens has type 'int64', not INT32"),
        ({"max_tokens": np.array([[1]], np.int32)}, r"max_tokens has shape \[1, 1\], not \[1\]"),
        ({"max_tokens": np.array([1, 2], np.int32)}, r"max_tokens has shape \[2\]"),
        ({"max_tokens": np.array([], np.int32)}, r"max_tokens has shape \[0\]"),
        ({"text_input": np.array([1], np.int32)}, "text_input has type 'int32', not STRING"),
        ({"text_input": strings("a", "b")}, r"text_input has shape \[2\]"),
        ({"text_input": strings("")}, "text_input is empty"),
        ({"text_input": strings(b"ab\xff")}, "text_input is not valid UTF-8 at byte 2"),
        ({"stop_words": strings("a", "b").reshape(1, 2)}, r"stop_words has shape \[1, 2\]"),
        ({"stop_words": np.array([1], object)}, r"stop_words\[0\] is 1, not a text"),
        ({"stop_words": strings("a", b"\xff")}, r"stop_words\[1\] is not valid UTF-8"),
        ({"stop_words": strings(*"x" * 5000)}, "stop_words has 5000 words, at most 1024"),
        ({"bad_words": strings("x" * 5000)}, "bad_words has a word of 5000 bytes, at most 4096"),
        ({"embedding_bias_words": strings("a")}, "embedding_bias_weights has 0 values for 1"),
        (
            {
                "embedding_bias_words": strings("a"),
                "embedding_bias_weights": np.array([np.nan], np.float32),
            },
            r"embedding_bias_weights\[0\] is nan, not a finite number from -1000 to 1000",
        ),
        ({"text_inputs": strings("a")}, "'text_inputs' is not an input"),
    ],
)
def test_misshapen_inputs_are_refused(inputs, message):
    arrays = inputs_of(TEXT, text_input="a", max_tokens=1) | inputs
    with pytest.raises(ContractError, match=message):
        text_request(arrays, {})


@pytest.mark.parametrize("missing", ["input_ids", "input_lengths", "request_output_len"])
def test_what_a_request_must_have(missing):
    arrays = inputs_of(LLM, input_ids=[1], input_lengths=1, request_output_len=1)
    del arrays[missing]
    with pytest.raises(ContractError, match=rf"{missing}.* is missing"):
        llm_request(arrays, {})


# --- texts and words ------------------------------------------------------------------------------


@given(st.text(min_size=1))
def test_every_text_arrives_nul_characters_included(text):
    assert ask_text(text_input=text).text == text


def test_empty_words_are_left_out():
    request = ask_text(stop_words=["", "\n", ""], bad_words=[""], text_input="a\0b")
    assert request.sampling.stop_words == (b"\n",)
    assert request.words.bad == ()
    assert request.text == "a\0b"


def test_words_become_sampling_parameters():
    request = ask_text(
        bad_words=["x", "yz"],
        embedding_bias_words=["a", "ab"],
        embedding_bias_weights=[2.0, -0.5],
        stop_words=["é"],
    )
    sampling = request.encoded([7], [[5], [6, 7]], [[10, 10], [10, 11]])
    assert sampling.bad_words == ((5,), (6, 7))
    assert sampling.bias == ((10, 1.5), (11, -0.5))
    assert sampling.stop_words == ("é".encode(),)


def test_bias_that_is_not_used():
    for unused in ({"embedding_bias_words": [""]}, {"embedding_bias_weights": [0.0]}):
        assert ask_text(**unused) == ask_text()


def test_end_ids():
    assert ask_text(end_id=-1).encoded([7, 9]).end_ids == ()
    assert ask_text(end_id=9).encoded([7, 9]).end_ids == (7, 9)
    assert ask_text(end_id=5).encoded([7, 9]).end_ids == (5,)
    assert ask_text({"ignore_eos": True}).encoded([7, 9]).end_ids == ()
    # The token model ends nothing by itself: preprocessing says where a text ends.
    assert ask_llm(end_ids=[7, 9]).sampling.end_ids == ()
    assert ask_llm(end_ids=[7, 9], end_id=7).sampling.end_ids == (7, 9)
    assert ask_llm(end_id=7).sampling.end_ids == (7,)
    assert ask_llm(end_id=-1, end_ids=[7]).sampling.end_ids == ()


# --- tokens ---------------------------------------------------------------------------------------


def test_padding_behind_the_prompt_is_cut():
    assert ask_llm(input_ids=[4, 5, 0, 0], input_lengths=2).token_ids.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_lengths": 0}, "input_lengths is 0, not a whole number from 1 to 3"),
        ({"input_lengths": 4}, "input_lengths is 4, not a whole number from 1 to 3"),
        ({"input_ids": [1, -2, 3]}, r"input_ids\[1\] is -2, not a token id from 0"),
    ],
)
def test_prompts_that_are_none(values, message):
    with pytest.raises(ContractError, match=message):
        ask_llm(**values)


def test_stop_needs_nothing_else():
    assert ask_llm(stop=True, request_output_len=0, input_ids=[]).is_stop
    assert not ask_llm(stop=False).is_stop


def test_elements_of_a_batch_of_scalars():
    """What indexing an array [B] gives."""
    arrays = inputs_of(LLM, input_ids=[1, 2], request_output_len=4)
    request = llm_request(arrays | {"input_lengths": np.int32(2)}, {})
    assert request.token_ids.tolist() == [1, 2]


# --- anything -------------------------------------------------------------------------------------


def test_a_prompt_beyond_the_context_is_refused_by_its_length():
    arrays = {"input_ids": np.full(9, -1, np.int32), "request_output_len": np.int32(1)}
    with pytest.raises(ContractError, match=r"9 tokens long: .* the context of 9 tokens"):
        llm_request(arrays | {"input_lengths": np.int32(9)}, {}, max_model_len=9)
    with pytest.raises(ContractError, match=r"input_ids\[0\] is -1"):  # the next thing looked at
        llm_request(arrays | {"input_lengths": np.int32(8)}, {}, max_model_len=9)


slow = settings(max_examples=300, suppress_health_check=list(HealthCheck))


@slow
@given(near_requests(TEXT, "text_input", "max_tokens"))
def test_any_text_request_is_one_or_an_error(asked):
    outcome = served_or_refused(text_request, *asked)
    if isinstance(outcome, GenerateRequest):
        assert outcome.text
        assert outcome.sampling.max_tokens >= 1
        assert math.isfinite(outcome.sampling.temperature)


@slow
@given(near_requests(LLM, "input_ids", "input_lengths", "request_output_len"))
def test_any_token_request_is_one_or_an_error(asked):
    outcome = served_or_refused(llm_request, *asked, vocab=Vocabulary())
    if isinstance(outcome, GenerateRequest):
        assert outcome.is_stop or min(outcome.token_ids) >= 0
