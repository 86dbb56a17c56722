"""Requests in vLLM's tensors: its defaults, its casts, its refusals."""

import json
import math

import numpy as np
import pytest
from fixtures.contract.asking import inputs_of, near_requests, scalars, served_or_refused, strings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slipstream_contract.errors import ContractError
from slipstream_contract.log_probs import WHOLE, LogProbs
from slipstream_contract.request import GenerateRequest
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_contract.tensors import MODELS

VLLM = MODELS["vllm_model"]


def ask(sampling=None, parameters=(), **inputs) -> GenerateRequest:
    asked = {"text_input": "hi"} | inputs
    if sampling is not None:
        text = sampling if isinstance(sampling, str) else json.dumps(sampling)
        asked["sampling_parameters"] = text
    return vllm_request(inputs_of(VLLM, **asked), dict(parameters))


@pytest.mark.parametrize("sampling", [None, "", "{}", {}, {"temperature": None, "stop": None}])
def test_defaults(sampling):
    base = ask(sampling).sampling
    assert base.max_tokens == 16
    assert (base.temperature, base.top_k, base.top_p, base.min_p) == (1.0, 0, 1.0, 0.0)
    assert base.seed is None
    assert base.order == "vllm"
    assert not base.include_stop
    assert not base.log_probs


def test_everything_that_is_served():
    asked = {
        "n": 2,
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 3,
        "stop": ["a", "é"],
        "stop_token_ids": [5, 6],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "bad_words": ["x"],
        "logit_bias": {"4": 1.5, "3": -100},
        "logprobs": 0,
        "prompt_logprobs": 20,
        "logprobs_mode": "processed_logits",
    }
    request = ask(asked, return_logprobs=True)
    base = request.sampling
    for name in asked.keys() & set(type(base).__struct_fields__) - {"bad_words", "stop_token_ids"}:
        assert getattr(base, name) == asked[name]
    assert base.stop_words == (b"a", "é".encode())
    assert base.stop_token_ids == (5, 6)
    assert base.include_stop
    assert base.bias == ((3, -100.0), (4, 1.5))
    assert base.values == LogProbs(top=0, prompt=20, mode="processed_logits")
    assert request.words.bad == ("x", " x")
    assert request.options.skip_special_tokens is False
    assert request.encoded([8], [[1, 2]]).bad_words == ((1, 2),)
    assert request.encoded([8]).end_ids == (8,)
    assert ask({"ignore_eos": True}).encoded([8]).end_ids == ()


def test_request_parameters_are_cast():
    given = {"temperature": "0.5", "max_tokens": "7", "ignore_eos": "false", "stop": "end", "id": 1}
    request = ask(parameters=given)
    assert request.sampling.temperature == 0.5
    assert request.sampling.max_tokens == 7
    assert request.sampling.stop_words == (b"end",)
    assert request.words.end_id is None
    assert ask(parameters={"ignore_eos": "True"}).words.end_id == -1
    assert ask(parameters={"use_beam_search": "false", "best_of": "1"}) == ask()


def test_whether_special_tokens_are_added_is_said_by_an_input_or_a_parameter():
    name = "add_special_tokens"
    assert ask().add_special_tokens is None
    for value in (True, False):
        assert ask(add_special_tokens=value).add_special_tokens is value
        assert ask({"temperature": 0}, add_special_tokens=value).add_special_tokens is value
        assert ask({name: value}).add_special_tokens is value
        assert ask(parameters={name: str(value)}).add_special_tokens is value
    with pytest.raises(ContractError, match="given as an input and as a parameter"):
        ask({name: False}, add_special_tokens=False)


def test_echo_and_streams():
    assert ask().options.echo
    assert not ask(exclude_input_in_output=True).options.echo
    stream = ask(stream=True)
    assert stream.options.is_streaming
    assert not stream.options.echo
    with pytest.raises(ContractError, match="stream is true and exclude_input_in_output is false"):
        ask(stream=True, exclude_input_in_output=False)


def test_what_is_returned_makes_the_engine_compute_it():
    sampled = LogProbs(top=0)
    assert ask(return_cumulative_logprob=True).sampling.values == sampled
    assert ask(return_logprobs=True).sampling.values == sampled
    assert ask({"logprobs": -1}, return_logprobs=True).sampling.values == LogProbs(top=WHOLE)
    assert ask(return_finish_reason=True, return_num_output_tokens=True).sampling.values is None
    assert ask({"logprobs": 3}).sampling.values is None, "they are not sent"
    assert ask({"prompt_logprobs": 0}).sampling.values == LogProbs(prompt=0)


@pytest.mark.parametrize(("flag", "top"), [(False, 0), (True, 1)])
def test_the_flag_of_a_chat_is_a_number_of_log_probs(flag, top):
    """Triton's OpenAI frontend sends the `logprobs` of a chat on; vllm_backend casts it."""
    assert ask({"logprobs": flag}).sampling.values is None
    assert ask({"logprobs": flag}, return_logprobs=True).sampling.values == LogProbs(top=top)
    with pytest.raises(ContractError, match="prompt_logprobs is True, not a whole number"):
        ask({"prompt_logprobs": True})


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temprature": 1}, "unknown request parameter 'temprature'; do you mean temperature"),
        ({"top_p": 0}, "top_p is 0, not a number above 0"),
        ({"top_p": 1.1}, r"top_p is 1\.1"),
        ({"top_k": -2}, "top_k is -2, not a whole number from -1"),
        ({"temperature": -1}, "temperature is -1"),
        ('{"temperature": NaN}', "temperature is nan"),
        ('{"temperature": 1e999}', "temperature is inf"),
        ({"max_tokens": 0}, "max_tokens is 0, not a whole number from 1"),
        (
            {"max_tokens": 2**31},
            "max_tokens is 2147483648, not a whole number from 1 to 2147483647",
        ),
        ({"max_tokens": "many"}, "max_tokens is 'many', not a whole number"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"min_tokens": 20}, "min_tokens is 20, above the most tokens asked for, 16"),
        ({"presence_penalty": 2.5}, r"presence_penalty is 2\.5, not a finite number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"n": 0}, "n is 0"),
        ({"stop": ["a", ""]}, r"stop\[1\] is empty"),
        ({"bad_words": ""}, r"bad_words\[0\] is empty"),
        ('{"top_k": 5, "n": 1, "top_k": 6}', "sampling_parameters has 'top_k' twice"),
        ('{"logit_bias": {"5": 1, "5": 2}}', "sampling_parameters has '5' twice"),
        (f'{{"stop": "{"x" * 2**20}"}}', "sampling_parameters has 1048588 bytes, at most 1048576"),
        ({"stop": ["x" * 4096] * 5}, "stop has 20480 bytes, at most 16384"),
        ({"bad_words": ["x" * 4096] * 17}, "bad_words has 69632 bytes, at most 65536"),
        ({"n": 2, "temperature": 0}, "n is 2 and temperature is 0: greedy"),
        ({"stop": [1]}, r"stop\[0\] is 1, not a text"),
        ({"stop": {"a": 1}}, "stop is .*neither a text nor a list"),
        ({"stop": ["x"] * 5000}, "stop has 5000 words, at most 1024"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\] is -1"),
        ({"logit_bias": {"a": 1}}, "logit_bias key is 'a'"),
        ({"logit_bias": {"1": 101}}, "logit_bias of token 1 is 101, not"),
        ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias of token 1 is given twice"),
        ({"logprobs": 21}, "logprobs is 21, not from 0 to 20, and not -1 for the whole"),
        ({"logprobs": -2}, "logprobs is -2, not from 0 to 20"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs is 1000000, not from 0 to 20"),
        ({"prompt_logprobs": "x"}, "prompt_logprobs is 'x'"),
        ({"logprobs_mode": "raw"}, "logprobs_mode is 'raw', not one of raw_logprobs, processed_lo"),
        ({"logprobs_mode": 1}, "logprobs_mode is 1, not a text"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"best_of": 2, "n": 3}, "best_of is 2, below n, which is 3"),
        ({"structured_outputs": '{"yaml": {}}'}, "structured_outputs.'yaml' is not known"),
        ({"lora_name": 5}, "lora_name is 5"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config is .*: a request cannot"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens is 3: .*--speculation"),
        ("[1]", r"sampling_parameters is \[1\], not a JSON object"),
        ("{", "sampling_parameters is not JSON"),
        ("[" * 100_000, "sampling_parameters is not JSON"),
    ],
)
def test_refusals(sampling, message):
    with pytest.raises(ContractError, match=message):
        ask(sampling)


def test_parameters_beside_the_tensor_are_refused_unless_it_says_the_same():
    """The example client of vllm_backend sends its parameters in both."""
    with pytest.raises(ContractError, match=r"'top_k' beside .*: it is 5, but missing"):
        ask({"temperature": 1}, {"top_k": 5})
    with pytest.raises(ContractError, match=r"'top_k' beside .*: it is '5', but 6 there"):
        ask({"top_k": 6}, {"top_k": "5"})
    with pytest.raises(ContractError, match=r"'max_completion_tokens' beside .*: it is 5, but 6"):
        ask({"max_completion_tokens": 6}, {"max_completion_tokens": 5})
    assert ask({"temperature": 0.5}, {"id": "7"}).sampling.temperature == 0.5
    theirs = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}
    for same in (theirs, {"max_tokens": 100}, {"top_p": 0.95, "max_tokens": "1e2"}):
        assert ask(theirs, same) == ask(theirs)
    assert ask({"ignore_eos": True}, {"ignore_eos": "true"}) == ask({"ignore_eos": True})
    with pytest.raises(ContractError, match="unknown request parameter 'temprature'"):
        ask({"temprature": 1}, {"temprature": 1})


def test_numbers_that_no_float_holds():
    for name in ("temperature", "top_p", "logit_bias"):
        value = {"1": 10**400} if name == "logit_bias" else 10**400
        with pytest.raises(ContractError, match=f"{name}.* is 1000.*, not a number"):
            ask({name: value})


def test_all_of_the_vocabulary():
    assert ask({"top_k": -1}) == ask({"top_k": 0}) == ask()


def test_seeds():
    assert ask({"seed": -1}).sampling.seed is None
    assert ask({"seed": -2}).sampling.seed == 2**64 - 2
    assert ask({"seed": 0}).sampling.seed == 0


def test_later_inputs():
    for name in ("image", "embedding_request"):
        assert ask(**{name: ""}) == ask()
        with pytest.raises(ContractError, match=f"{name} is not supported yet: .*, leave it out$"):
            ask(**{name: "x"})


SAMPLING_NAMES = """
    n max_tokens min_tokens temperature top_p top_k min_p seed stop stop_token_ids logit_bias
    bad_words logprobs prompt_logprobs logprobs_mode ignore_eos best_of presence_penalty
    repetition_penalty
"""
NAMES = st.sampled_from(SAMPLING_NAMES.split())
values = st.recursive(
    st.one_of(scalars, st.sampled_from(["1", "0.5", 1, 0, 0.5])),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(NAMES, values, max_size=3))
def test_any_sampling_parameters_are_some_or_an_error(sampling):
    outcome = served_or_refused(ask, sampling)
    if isinstance(outcome, GenerateRequest):
        assert math.isfinite(outcome.sampling.temperature)
        assert outcome.sampling.max_tokens >= 1


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(near_requests(VLLM, "text_input"))
def test_any_request_is_one_or_an_error(asked):
    served_or_refused(vllm_request, *asked)


@given(st.binary(max_size=20))
def test_any_bytes_as_sampling_parameters(data):
    inputs = {"text_input": strings("a"), "sampling_parameters": strings(data)}
    served_or_refused(vllm_request, inputs, {})


def test_elements_are_read_from_one_dimension():
    array = np.array([True])
    assert vllm_request({"text_input": strings("a"), "stream": array}, {}).options.is_streaming
