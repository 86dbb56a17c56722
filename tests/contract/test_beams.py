"""Beam searches and choices of the best samples, as each schema asks for them."""

import json

import pytest
from fixtures.contract.asking import inputs_of
from slipstream_contract.beams import AT_WIDTH, NEVER, REACHABLE, Beams
from slipstream_contract.errors import ContractError
from slipstream_contract.log_probs import LogProbs
from slipstream_contract.sampling import SamplingParams, check_sampling
from slipstream_contract.schemas.llmapi import llmapi_request
from slipstream_contract.schemas.trtllm import llm_request, text_request
from slipstream_contract.schemas.vllm import vllm_request
from slipstream_contract.tensors import LLMAPI, MODELS


def text(parameters: dict | None = None, **values: object) -> SamplingParams:
    given = {"text_input": "a", "max_tokens": 9} | values
    inputs = inputs_of(MODELS["tensorrt_llm_bls"], **given)
    return text_request(inputs, parameters or {}).sampling


def tokens(**values: object) -> SamplingParams:
    given = {"input_ids": [1], "input_lengths": 1, "request_output_len": 9} | values
    return llm_request(inputs_of(MODELS["tensorrt_llm"], **given), {}).sampling


def vllm(is_streaming: bool = False, **values: object) -> SamplingParams:
    inputs = inputs_of(
        MODELS["vllm_model"],
        text_input="a",
        stream=is_streaming,
        sampling_parameters=json.dumps(values),
    )
    return vllm_request(inputs, {}).sampling


def test_tensorrt_llm_divides_by_nothing_and_stops_at_width() -> None:
    sampling = text(beam_width=4)
    assert sampling.beams == Beams(width=4, length_penalty=0.0, early_stopping=AT_WIDTH)
    assert sampling.n == 4
    assert tokens(beam_width=4) == sampling


def test_all_inputs_of_tensorrt_llm_count() -> None:
    sampling = tokens(
        beam_width=4,
        len_penalty=0.5,
        early_stopping=False,
        beam_search_diversity_rate=0.25,
        num_return_sequences=2,
    )
    beams = Beams(width=4, length_penalty=0.5, early_stopping=REACHABLE, diversity_rate=0.25)
    assert (sampling.beams, sampling.n) == (beams, 2)


def test_text_models_take_what_they_have_no_tensor_for_as_parameters() -> None:
    given = {"early_stopping": "false", "beam_search_diversity_rate": 0.25}
    beams = text(given, beam_width=2).beams
    assert beams == Beams(width=2, early_stopping=REACHABLE, diversity_rate=0.25)


def test_clients_of_greedy_decoding_may_ask_for_beams() -> None:
    assert text(beam_width=2, top_k=1, top_p=0.0, temperature=0.5).temperature == 0.5
    assert text(beam_width=2, top_k=1).top_k == 0


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: text(beam_width=2, top_k=5), "top_k is 5: beams are not sampled"),
        (lambda: text(beam_width=2, top_p=0.5), r"top_p is 0.5: beams are not sampled"),
        (lambda: text({"min_p": 0.5}, beam_width=2), r"min_p is 0.5: beams are not sampled"),
        (
            lambda: text(beam_width=2, num_return_sequences=3),
            "num_return_sequences is 3, above beam_width, which is 2",
        ),
        (lambda: text(beam_width=33), "beam_width is 33, not a whole number from 1 to 32"),
        (lambda: tokens(len_penalty=0.5), "len_penalty .* is 0.5, which has no effect without"),
        (
            lambda: tokens(beam_search_diversity_rate=0.5),
            "beam_search_diversity_rate is 0.5, which has no effect without beam_width above 1",
        ),
        (lambda: vllm(length_penalty=0.5), "length_penalty is 0.5, .* without use_beam_search"),
        (lambda: vllm(early_stopping="never"), "early_stopping is 'never', .* use_beam_search"),
        (
            lambda: vllm(use_beam_search=True, n=2, early_stopping="soon"),
            "early_stopping is 'soon', not true, false or never",
        ),
        (lambda: vllm(use_beam_search=True, n=2, top_p=0.5), "top_p is 0.5: beams are not"),
        (
            lambda: vllm(use_beam_search=True, n=2, temperature=0.5),
            "temperature is 0.5: beams are not sampled",
        ),
        (lambda: vllm(use_beam_search=True, n=33), r"best_of \(n\) is 33, not a whole"),
        (lambda: vllm(n=3, best_of=2), "best_of is 2, below n, which is 3"),
        (lambda: vllm(best_of=2, temperature=0), "best_of is 2 and temperature is 0: "),
        (lambda: vllm(True, best_of=2), "best_of is 2 and stream is true: "),
    ],
)
def test_refusals(ask, message: str) -> None:
    with pytest.raises(ContractError, match=f"INVALID_ARGUMENT: .*{message}"):
        ask()


def test_vllm_divides_by_the_length_and_goes_on_while_it_pays() -> None:
    sampling = vllm(use_beam_search=True, n=4)
    assert sampling.beams == Beams(width=4, length_penalty=1.0, early_stopping=REACHABLE)
    assert (sampling.n, sampling.best_of, sampling.temperature) == (4, None, 0.0)


@pytest.mark.parametrize(("value", "meaning"), [(True, AT_WIDTH), ("never", NEVER), (False, 0)])
def test_vllm_has_three_ways_to_stop(value: object, meaning: int) -> None:
    beams = vllm(use_beam_search=True, n=2, best_of=3, early_stopping=value).beams
    assert beams == Beams(width=3, length_penalty=1.0, early_stopping=meaning)


def test_one_beam_of_vllm_is_a_search_too() -> None:
    assert vllm(use_beam_search=True).beams == Beams(
        width=1, length_penalty=1.0, early_stopping=REACHABLE
    )


def test_best_of_without_a_search() -> None:
    assert vllm(n=2, best_of=5).best_of == 5
    assert vllm(n=2, best_of=2) == vllm(n=2)


def test_the_llm_api_has_both() -> None:
    given = {"text_input": ["a"], "sampling_param_best_of": 3}
    inputs = inputs_of(LLMAPI, **given, sampling_param_temperature=0.5)
    assert llmapi_request(inputs, {}).sampling.best_of == 3
    search = llmapi_request(inputs_of(LLMAPI, **given), {"use_beam_search": True, "n": 2}).sampling
    assert (search.beams and search.beams.width, search.n) == (3, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logprobs": 5}, "use_beam_search is true and logprobs is 5: "),
        ({"prompt_logprobs": 0}, "use_beam_search is true and prompt_logprobs is 0: "),
        ({"logprobs_mode": "raw_logits"}, "true and logprobs_mode is raw_logits: "),
    ],
)
def test_a_search_has_log_probs_of_its_tokens_alone(values: dict, message: str) -> None:
    asked = {"text_input": "a", "return_logprobs": True}
    given = {"use_beam_search": True, "n": 2} | values
    inputs = inputs_of(MODELS["vllm_model"], **asked, sampling_parameters=json.dumps(given))
    with pytest.raises(ContractError, match=message):
        vllm_request(inputs, {})
    with pytest.raises(ContractError, match="beam_width is 2 and return_context_logits is true: "):
        tokens(beam_width=2, return_context_logits=True)


def test_the_engine_refuses_values_beside_a_search() -> None:
    sampling = SamplingParams(max_tokens=3, beams=Beams(width=2), values=LogProbs(top=3))
    with pytest.raises(ContractError, match="beams and values: "):
        check_sampling(sampling)
