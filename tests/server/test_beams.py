"""Beam searches of a real server, over both protocols: the same at every model name."""

import json

import numpy as np
import pytest
from fixtures.bridge.texts import TEXT
from fixtures.server.support import PROMPT, RequestError

pytestmark = pytest.mark.triton

WIDTH, LENGTH = 3, 8
OLD = {"max_tokens": LENGTH, "beam_width": WIDTH}


def beams_of(response) -> list[str]:
    return [each.decode() for each in np.ravel(response["text_output"])]


@pytest.fixture(scope="module")
def expected(client) -> list[str]:
    [response] = client.stream(
        "tensorrt_llm_bls", text_input=PROMPT, exclude_input_in_output=True, **OLD
    )
    return beams_of(response)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_models_stream_whole_beams(idle, expected, model: str) -> None:
    asked = {"text_input": PROMPT, "exclude_input_in_output": True, **OLD}
    [whole] = idle.stream(model, **asked)
    assert beams_of(whole) == expected
    assert len(set(expected)) == WIDTH
    responses = idle.stream(model, stream=True, **asked)
    assert all(len(beams_of(each)) == WIDTH for each in responses)
    assert beams_of(responses[-1]) == expected
    events = list(idle.events(model, stream=True, **asked))
    assert events[-1]["text_output"] == expected
    [event] = idle.events(model, **asked)
    assert event["text_output"] == expected


def test_log_probs_come_through_the_ensemble(idle) -> None:
    asked = {"text_input": PROMPT, "return_log_probs": True, **OLD}
    [response] = idle.stream("ensemble", **asked)
    sums = response["cum_log_probs"]
    assert sums.shape == (1, WIDTH)
    assert sums[0].tolist() == sorted(sums[0], reverse=True)
    rows = response["output_log_probs"]
    assert rows.shape[:2] == (1, WIDTH)


def test_vllm_model_has_them(idle, expected) -> None:
    sampling = {"max_tokens": LENGTH, "use_beam_search": True, "n": WIDTH}
    sampling |= {"length_penalty": 0, "early_stopping": True}
    body = {"text_input": PROMPT, "sampling_parameters": json.dumps(sampling)}
    [response] = idle.stream("vllm_model", exclude_input_in_output=True, **body)
    assert beams_of(response) == expected


@pytest.mark.parametrize(
    ("field", "message"),
    [({"beam_width": 33}, "beam_width is 33"), ({"top_k": 5}, "top_k is 5: beams are not sampled")],
)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_bad_values_are_refused_by_name(idle, model: str, field: dict, message: str) -> None:
    asked = {"text_input": PROMPT, **OLD, **field}
    with pytest.raises(RequestError, match=message):
        idle.stream(model, **asked)


def test_tokens_are_rows_of_one_tensor(idle, expected) -> None:
    ids = TEXT.encode(PROMPT)
    asked = {"input_ids": np.array([ids], np.int32), "input_lengths": len(ids)}
    asked |= {"request_output_len": LENGTH, "beam_width": WIDTH, "end_id": TEXT.end_ids[0]}
    [response] = idle.stream("tensorrt_llm", exclude_input_in_output=True, **asked)
    lengths = response["sequence_length"]
    assert lengths.shape == (1, WIDTH)
    assert response["output_ids"].shape == (1, WIDTH, lengths.max())
