"""Parameters to tensors by the declaration: nothing changed on the way, the rest refused."""

import math

import numpy as np
import pytest
from fixtures.client.triton import inputs_of
from hypothesis import given
from hypothesis import strategies as st
from slipstream_client.codec import ENSEMBLE, GENERATING, TENSORRT_LLM, VLLM, request_of, to_array
from slipstream_client.results import Chunk, join
from slipstream_contract.declarations import Tensor
from slipstream_contract.errors import Code, ContractError

RANGES = {"INT32": (-(2**31), 2**31 - 1), "UINT64": (0, 2**64 - 1), "UINT8": (0, 255)}
GIVEN = {"STRING": "a", "BOOL": True, "FP32": 0.5, "FP16": 0.5}


@pytest.mark.parametrize("dtype", RANGES)
@given(value=st.one_of(st.integers(), st.integers(-300, 300), st.integers(2**63, 2**64)))
def test_an_integer_arrives_as_it_is_or_is_refused(dtype, value):
    low, high = RANGES[dtype]
    tensor = Tensor("name", dtype, (1,))
    if low <= value <= high:
        assert to_array(tensor, value).tolist() == [value]
    else:
        with pytest.raises(ContractError, match=f"name is .*which is no {dtype}"):
            to_array(tensor, value)


@given(value=st.floats())
def test_a_float_arrives_rounded_once_or_is_refused(value):
    tensor = Tensor("name", "FP32", (1,))
    if math.isfinite(value) and abs(value) > 3.5e38:
        with pytest.raises(ContractError, match="no FP32"):
            to_array(tensor, value)
    elif math.isnan(value) or abs(value) < 3.4e38 or math.isinf(value):
        expected = np.array([value]).astype(np.float32)
        assert np.array_equal(to_array(tensor, value), expected, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("INT32", 1.5),
        ("INT32", 1.0),
        ("INT32", True),
        ("INT32", "5"),
        ("INT32", [[1], [2, 3]]),
        ("INT32", 2**70),
        ("FP32", "hot"),
        ("FP32", True),
        ("BOOL", 1),
        ("BOOL", "false"),
        ("STRING", 5),
        ("STRING", ["a", 5]),
        ("STRING", "\ud83d"),
    ],
)
def test_what_is_not_of_the_type_is_refused_by_name(dtype, value):
    with pytest.raises(ContractError, match=r"^INVALID_ARGUMENT: name ") as caught:
        to_array(Tensor("name", dtype, (1,)), value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("model", GENERATING)
def test_every_input_of_a_model_can_be_sent(model):
    declared = GENERATING[model]
    prompt = [1, 2] if model == TENSORRT_LLM else "text"
    for tensor in declared.inputs:
        value = GIVEN.get(tensor.dtype, 1)
        if -1 in tensor.dims or len(tensor.dims) > 1:
            value = [value]
        request = request_of(model, prompt, {tensor.name: value}, "id")
        array = inputs_of(request)[tensor.name]
        assert array.ndim == 1 + (declared.max_batch_size > 0)
        sent = next(t for t in request.inputs if t.name == tensor.name)
        assert sent.datatype == ("BYTES" if tensor.dtype == "STRING" else tensor.dtype)


def test_word_lists_keep_their_two_rows():
    rows = [[5, 6], [2, -1]]
    request = request_of("tensorrt_llm", [1], {"stop_words_list": rows}, "id")
    assert inputs_of(request)["stop_words_list"].tolist() == [rows]


def test_none_means_not_given():
    request = request_of("ensemble", "a", {"max_tokens": 1, "seed": None}, "id")
    assert "seed" not in inputs_of(request)


def test_an_empty_list_of_words_is_sent_as_such():
    request = request_of("ensemble", "a", {"max_tokens": 1, "stop_words": []}, "id")
    assert inputs_of(request)["stop_words"].shape == (1, 0)


def test_a_wrong_name_is_refused_with_the_right_one():
    with pytest.raises(ContractError, match="no input 'temprature'; do you mean temperature"):
        request_of("ensemble", "a", {"temprature": 1.0}, "id")
    with pytest.raises(ContractError, match="no input 'xyzzy'; it has text_input, "):
        request_of("ensemble", "a", {"xyzzy": 1}, "id")


@pytest.mark.parametrize("model", ["preprocessing", "chat_postprocessing", ""])
def test_a_model_that_does_not_generate_is_refused(model):
    with pytest.raises(ContractError, match="ensemble, ") as caught:
        request_of(model, "a", {}, "id")
    assert caught.value.code is Code.NOT_FOUND


def test_prompts_must_fit_the_model():
    with pytest.raises(ContractError, match="takes token ids"):
        request_of(TENSORRT_LLM, "text", {}, "id")
    for model in (ENSEMBLE, VLLM):
        with pytest.raises(ContractError, match="takes text"):
            request_of(model, [1, 2], {}, "id")
    with pytest.raises(ContractError, match="input_ids"):
        request_of(TENSORRT_LLM, [1, 2**31], {}, "id")


@given(
    st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3), st.integers(0, 2)), max_size=20),
)
def test_join_keeps_order_and_counts(pieces):
    chunks = [Chunk(text, index, num_output_tokens=count) for index, text, count in pieces]
    completion = join(chunks)
    indices = sorted({index for index, _, _ in pieces}) or [0]
    assert len(completion.texts) == len(indices)
    for place, index in enumerate(indices):
        own = [(text, count) for i, text, count in pieces if i == index]
        assert completion.texts[place] == "".join(text for text, _ in own)
        if own:
            assert completion.num_output_tokens[place] == sum(count for _, count in own)


@pytest.mark.parametrize("model", [ENSEMBLE, VLLM, TENSORRT_LLM])
def test_urgency_is_said_of_the_request_and_not_to_the_model(model):
    prompt = [1] if model == TENSORRT_LLM else "a"
    request = request_of(model, prompt, {"max_tokens": 1, "timeout_ms": 90, "priority": 0}, "")
    plain = request_of(model, prompt, {"max_tokens": 1, "timeout_ms": None}, "")
    sent = {name: value.int64_param for name, value in request.parameters.items()}
    assert sent == {"timeout_ms": 90, "request_priority": 0}
    assert not plain.parameters
    assert request.raw_input_contents == plain.raw_input_contents
    for value in ("soon", 2**70, -1):
        with pytest.raises(ContractError, match="timeout_ms is "):
            request_of(model, prompt, {"max_tokens": 1, "timeout_ms": value}, "")


@pytest.mark.parametrize("role", GENERATING)
def test_a_model_of_a_deployment_with_a_name_is_asked_as_one_without(role):
    prompt = [1, 2] if role == TENSORRT_LLM else "a"
    name = "chat" if role == ENSEMBLE else f"chat_{role}"
    plain = request_of(role, prompt, {"max_tokens": 3}, "id")
    named = request_of(name, prompt, {"max_tokens": 3}, "id")
    assert (plain.model_name, named.model_name) == (role, name)
    named.model_name = role
    assert named == plain
