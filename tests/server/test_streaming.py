"""What holds for every stream, whatever is asked: order, counts, one end, the one-shot text."""

import json
import queue
import time

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from fixtures.server.support import PROMPT, Client
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_contract.stream_state import StreamState

pytestmark = pytest.mark.triton

Response = dict[str, np.ndarray]


def responses(client: Client, model: str, **inputs: object) -> list[Response]:
    """All responses of a stream, of which the last one, and no other, says that it is the last."""
    results: queue.Queue[tuple[object, object]] = queue.Queue()
    found, is_final = [], False
    with grpcclient.InferenceServerClient(client.address) as connection:
        connection.start_stream(lambda result, error: results.put((result, error)))
        tensors = client.tensors(model, inputs)
        connection.async_stream_infer(model, tensors, enable_empty_final_response=True)
        while not is_final:
            result, error = results.get(timeout=120)
            assert error is None, error
            response = result.get_response()
            found.append({output.name: result.as_numpy(output.name) for output in response.outputs})
            is_final = response.parameters["triton_final_response"].bool_param
        time.sleep(0.02)
        assert results.empty(), "a response after the last"
        connection.stop_stream()
    assert all(found), "a response without outputs"
    return found


def joined(found: list[Response]) -> str:
    """The text; every response is valid by itself, whatever the borders of its tokens."""
    return "".join(response["text_output"].ravel()[0].decode() for response in found)


def count(found: list[Response]) -> int:
    """Tokens of a stream by what each response says of itself."""
    counts = [int(response["num_output_tokens"].ravel()[0]) for response in found]
    assert all(each >= 1 for each in counts[:-1]), counts  # the last one may tell the end alone
    assert counts[-1] >= 0
    return sum(counts)


def inputs(model: str, prompt: str, sampling: dict[str, object], is_streaming: bool) -> dict:
    """The same request in the words of each text model; every response is to tell its tokens."""
    flags = {"stream": is_streaming, "exclude_input_in_output": True}
    flags |= {"text_input": prompt, "return_num_output_tokens": True}
    if model != "vllm_model":
        return flags | {name: value for name, value in sampling.items() if value != []}
    named = {{"stop_words": "stop"}.get(name, name): value for name, value in sampling.items()}
    options = json.dumps(named | {"include_stop_str_in_output": True})
    return flags | {"return_finish_reason": True, "sampling_parameters": options}


def ask(client: Client, model: str, prompt: str, sampling: dict[str, object], is_streaming: bool):
    """Over gRPC."""
    asked = inputs(model, prompt, sampling, is_streaming)
    if model == "tensorrt_llm_bls":
        asked["return_num_output_tokens"] = np.array([[True]])
    return responses(client, model, **asked)


def events(client: Client, model: str, asked: dict[str, object]) -> list[Response]:
    """All events of HTTP `generate_stream`, and there is nothing else before the answer's end."""
    status, body = client.post(f"{model}/generate_stream", asked)
    assert status == 200, body
    *found, rest = body.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: {") for event in found), body
    answers = [json.loads(event.removeprefix("data: ")) for event in found]
    assert not any("error" in answer for answer in answers), body
    return [{name: as_array(value) for name, value in answer.items()} for answer in answers]


def as_array(value: object) -> np.ndarray:
    """Return the value as gRPC gives it."""
    return np.array([value.encode()], object) if isinstance(value, str) else np.array([value])


WORDS = ["\n", "e", "self.", "):", "return", "  ", "é", "日", "\ufffd", "🙂"]
samplings = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 24),
        "temperature": st.sampled_from([0.0, 1.0, 2.0]),
        "top_k": st.just(100),
        "top_p": st.just(0.875),
        "seed": st.integers(0, 1 << 40),
        "stop_words": st.lists(st.sampled_from(WORDS), max_size=3, unique=True),
    }
)
prompts = st.sampled_from([PROMPT, "# é日本🙂\n", "x"]) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20
)


@settings(max_examples=8)
@given(prompts, samplings)
def test_every_stream_joins_to_the_one_shot_text_of_any_model(client, prompt, sampling):
    (whole,) = ask(client, "tensorrt_llm_bls", prompt, sampling, False)
    want, num_tokens = joined([whole]), int(whole["num_output_tokens"].item())
    assert 1 <= num_tokens <= sampling["max_tokens"]
    for model in ("tensorrt_llm_bls", "ensemble", "vllm_model"):
        over_http = events(client, model, inputs(model, prompt, sampling, True))
        for found in (ask(client, model, prompt, sampling, True), over_http):
            assert joined(found) == want, model
            assert count(found) == num_tokens, model
            if model == "vllm_model":
                reasons = [response["finish_reason"].item() for response in found]
                assert set(reasons[:-1]) <= {b"None"}
                assert reasons[-1] in (b"stop", b"length")
    (other,) = ask(client, "ensemble", prompt, sampling, False)
    assert (joined([other]), other["num_output_tokens"].item()) == (want, num_tokens)


@pytest.mark.parametrize("is_asked", [True, False])
def test_token_ids_always_say_how_many_they_are(idle, is_asked):
    asked = {"input_ids": [290, 293, 8], "input_lengths": 3, "request_output_len": 20}
    asked |= {"return_num_output_tokens": is_asked, "exclude_input_in_output": True}
    (whole,) = responses(idle, "tensorrt_llm", **asked, streaming=False)
    over_http = events(idle, "tensorrt_llm", asked | {"streaming": True})
    for found in (responses(idle, "tensorrt_llm", **asked, streaming=True), over_http):
        ids = [i for response in found for i in response["output_ids"].ravel().tolist()]
        assert ids == whole["output_ids"].ravel().tolist()
        lengths = [response["sequence_length"].item() for response in found]
        assert lengths == [response["output_ids"].size for response in found]
        assert sum(lengths) == 20
        packed = [response["STREAM_STATE"].ravel().tolist() for response in found]
        states = [StreamState.unpack(values)[0] for values in packed]
        assert [state.number for state in states] == list(range(1, len(found) + 1))
        assert [state.is_first for state in states] == [True] + [False] * (len(found) - 1)
        assert [state.is_last for state in states] == [False] * (len(found) - 1) + [True]
        if is_asked:
            assert [response["num_output_tokens"].item() for response in found] == lengths


def test_with_several_sequences_each_response_tells_its_sequence_and_its_tokens(idle):
    for model in ("ensemble", "tensorrt_llm_bls"):
        flag = np.array([[True]]) if model == "tensorrt_llm_bls" else True
        several = np.array([[3]], np.int32) if model == "tensorrt_llm_bls" else 3
        asked = {"text_input": PROMPT, "max_tokens": 9, "stream": True, "temperature": 1.0}
        asked |= {"num_return_sequences": several, "return_num_output_tokens": flag, "seed": 5}
        counts: dict[int, list[int]] = {}
        for response in responses(idle, model, **asked):
            index = response["sequence_index"].item()
            counts.setdefault(index, []).append(response["num_output_tokens"].item())
        assert sorted(counts) == [0, 1, 2]
        assert all(1 <= sum(each) <= 9 for each in counts.values())
    sampling = {"max_tokens": 9, "temperature": 1.0, "seed": 5, "n": 3}
    found = ask(idle, "vllm_model", PROMPT, sampling, True)
    sums = np.sum([response["num_output_tokens"] for response in found], axis=0)
    assert sums.shape == (3,)
    assert np.all((sums >= 1) & (sums <= 9))
