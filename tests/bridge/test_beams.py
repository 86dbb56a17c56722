"""Beam searches at every model name, on the default checkpoint: those of transformers."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from fixtures.bridge.beams import beams_of_transformers
from fixtures.bridge.texts import TEXT
from fixtures.features.house import House
from slipstream_contract.stream_state import StreamState, unpack_beams
from slipstream_postprocessing.detokenize import detokenize

PROMPT, LENGTH, WIDTH = "def read(self, path):\n    ", 10, 4
IDS = TEXT.encode(PROMPT)


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    yield house
    house.engine.check_integrity()
    house.close()


@pytest.fixture(scope="module")
def theirs() -> tuple[list[list[int]], list[float]]:
    return beams_of_transformers(IDS, WIDTH, LENGTH)


OLD = {"text_input": PROMPT, "max_tokens": LENGTH, "beam_width": WIDTH}
TOKENS = {
    "input_ids": IDS,
    "input_lengths": len(IDS),
    "request_output_len": LENGTH,
    "beam_width": WIDTH,
    "end_id": TEXT.end_ids[0],
}


def asked_of_vllm(**values: object) -> dict[str, object]:
    given = {"max_tokens": LENGTH, "use_beam_search": True, "n": WIDTH} | values
    return {"text_input": PROMPT, "sampling_parameters": json.dumps(given)}


def texts_of(response: dict) -> list[str]:
    return [each.decode() for each in response["text_output"].ravel()]


def whole(rows: list[list[int]], is_echoed: bool = False) -> list[str]:
    return [detokenize(TEXT.vocab, (IDS if is_echoed else []) + row) for row in rows]


def test_tokens_and_log_probs_are_those_of_transformers(house, theirs) -> None:
    rows, sums = theirs
    flags = {"return_log_probs": True, "exclude_input_in_output": True}
    [got] = house.ask("tensorrt_llm", TOKENS | flags | {"return_num_output_tokens": True})
    lengths = got["sequence_length"]
    assert lengths.shape == (1, WIDTH)
    assert got["output_ids"].shape == (1, WIDTH, lengths.max())
    found = [got["output_ids"][0, i, : lengths[0, i]].tolist() for i in range(WIDTH)]
    assert found == rows
    assert got["cum_log_probs"].shape == (1, WIDTH)
    assert got["cum_log_probs"][0] == pytest.approx(sums, abs=1e-3)
    log_probs = got["output_log_probs"]
    assert log_probs.shape == got["output_ids"].shape
    full = [i for i in range(WIDTH) if lengths[0, i] == LENGTH]
    assert log_probs[0, full].sum(-1) == pytest.approx(np.array(sums)[full], abs=1e-3)
    assert got["num_output_tokens"].item() == lengths.sum()


@pytest.mark.parametrize("is_echoed", [False, True])
def test_text_models_have_all_beams_in_one_response(house, theirs, is_echoed: bool) -> None:
    flag = {"exclude_input_in_output": not is_echoed}
    [got] = house.ask("tensorrt_llm_bls", OLD | flag)
    assert texts_of(got) == whole(theirs[0], is_echoed)
    [fewer] = house.ask("tensorrt_llm_bls", OLD | flag | {"num_return_sequences": 2})
    assert texts_of(fewer) == texts_of(got)[:2]


def test_vllm_has_them_too(house, theirs) -> None:
    body = asked_of_vllm(length_penalty=0.0, early_stopping=True)
    wanted = {"exclude_input_in_output": True, "return_finish_reason": True}
    wanted |= {"return_cumulative_logprob": True, "return_logprobs": True}
    [got] = house.ask("vllm_model", body | wanted | {"return_num_output_tokens": True})
    assert texts_of(got) == whole(theirs[0])
    assert got["cumulative_logprob"] == pytest.approx(theirs[1], abs=1e-3)
    assert got["num_output_tokens"].tolist() == list(map(len, theirs[0]))
    assert {each.decode() for each in got["finish_reason"]} <= {"length", "stop"}
    for row, entries in zip(theirs[0], map(json.loads, got["logprobs"]), strict=True):
        assert [int(next(iter(entry))) for entry in entries] == row


def test_the_llm_api_has_them_as_parameters(house, theirs) -> None:
    body = {"text_input": PROMPT, "sampling_param_max_tokens": LENGTH, "n": WIDTH}
    body |= {"use_beam_search": True, "length_penalty": 0.0, "early_stopping": True}
    body |= {"sampling_param_exclude_input_from_output": True, "return_finish_reason": True}
    [got] = house.ask("llmapi_model", body)
    assert texts_of(got) == whole(theirs[0])


def test_a_stream_ends_with_the_same_beams(house, theirs) -> None:
    responses = house.ask("tensorrt_llm_bls", OLD | {"stream": True})
    assert texts_of(responses[-1]) == whole(theirs[0])
    assert all(len(texts_of(each)) == WIDTH for each in responses)
    token_responses = house.ask("tensorrt_llm", TOKENS | {"streaming": True})
    assert token_responses[-1]["sequence_length"][0].tolist() == list(map(len, theirs[0]))


def test_postprocessing_makes_the_same_texts(house, theirs) -> None:
    [got] = house.ask("tensorrt_llm", TOKENS | {"exclude_input_in_output": True})
    _, _, beams = unpack_beams(got["STREAM_STATE"][0].tolist())
    texts = [
        detokenize(TEXT.vocab, ids, StreamState(is_last=is_last, drop_bytes=drop))
        for ids, drop, is_last in beams
    ]
    assert texts == whole(theirs[0])


def test_penalties_follow_the_beams(house) -> None:
    """With a repetition penalty each beam's counts are its own: a beam alone is scored the same."""
    penalised = OLD | {"repetition_penalty": 1.5, "exclude_input_in_output": True}
    more = {"return_log_probs": True}
    [got] = house.ask("tensorrt_llm_bls", penalised | more)
    [plain] = house.ask("tensorrt_llm_bls", OLD | {"exclude_input_in_output": True})
    assert texts_of(got) != texts_of(plain)
    for seed_width in (2, 3):
        [other] = house.ask("tensorrt_llm_bls", penalised | more | {"beam_width": seed_width})
        shared = {*texts_of(got)} & {*texts_of(other)}
        for text in shared:
            own = got["cum_log_probs"][0, texts_of(got).index(text)]
            assert own == pytest.approx(
                other["cum_log_probs"][0, texts_of(other).index(text)], abs=1e-3
            )


def test_beams_end_at_stop_words(house) -> None:
    [got] = house.ask(
        "tensorrt_llm_bls",
        OLD | {"stop_words": ["("], "exclude_input_in_output": True, "max_tokens": 16},
    )
    for text in texts_of(got):
        assert text.find("(") in (-1, len(text) - 1)
