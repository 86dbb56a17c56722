"""The synchronous client against real gRPC: text, counts, cancel, errors, deadlines."""

import gc
import threading
import time

import grpc
import numpy as np
import pytest
import slipstream_client
from fixtures.client.triton import HEALTH, inputs_of
from slipstream_client import Code, ContractError, RequestTimeoutError, SlipstreamClient


@pytest.fixture
def client(served):
    with SlipstreamClient(served[1], timeout_s=120.0) as made:
        yield made


def wait_arrived(triton, request_id: str) -> None:
    begin = time.monotonic()
    while request_id not in triton.cancelled:
        assert time.monotonic() - begin < 120
        time.sleep(0.01)


def wait_cancelled(triton, request_id: str) -> None:
    assert triton.cancelled[request_id].wait(120), "the server never heard of the cancel"


def test_a_stream_is_its_chunks_in_order(client):
    chunks = list(client.stream("say one two three", max_tokens=3))
    assert [chunk.text for chunk in chunks] == ["one ", "two ", "three "]
    assert [chunk.num_output_tokens for chunk in chunks] == [1, 1, 1]
    assert {chunk.num_input_tokens for chunk in chunks} == {5}


def test_a_completion_is_the_joined_stream(client):
    completion = client.complete("say one two", max_tokens=2)
    assert completion.text == "one two "
    assert completion.num_input_tokens == 5
    assert completion.num_output_tokens == (2,)
    assert completion.finish_reason is None


def test_sequences_are_kept_apart(client):
    completion = client.complete("say a b", max_tokens=2, num_return_sequences=3)
    assert completion.texts == ("a b ", "a1 b1 ", "a2 b2 ")
    assert completion.num_output_tokens == (2, 2, 2)


def test_what_is_sent_is_the_contract(client, served):
    client.complete("say one", max_tokens=7, temperature=0.5, stop_words=["a", "b\n"], seed=2**63)
    request = served[0].requests[-1]
    inputs = inputs_of(request)
    assert {tensor.name: tensor.datatype for tensor in request.inputs} == {
        "text_input": "BYTES",
        "max_tokens": "INT32",
        "temperature": "FP32",
        "stop_words": "BYTES",
        "seed": "UINT64",
        "stream": "BOOL",
        "exclude_input_in_output": "BOOL",
        "return_num_input_tokens": "BOOL",
        "return_num_output_tokens": "BOOL",
    }
    assert all(array.shape[0] == 1 and array.ndim == 2 for array in inputs.values())
    assert inputs["stop_words"].tolist() == [[b"a", b"b\n"]]
    assert inputs["seed"].item() == 2**63
    assert inputs["stream"].item() is True
    assert request.id


def test_token_ids_go_to_the_token_model(client, served):
    chunks = list(client.stream([1, 2, 3], model="tensorrt_llm", max_tokens=4, top_k=2))
    assert [chunk.token_ids for chunk in chunks] == [(2, 3), (4,)]
    inputs = inputs_of(served[0].requests[-1])
    assert inputs["input_ids"].tolist() == [[1, 2, 3]]
    assert inputs["input_lengths"].tolist() == [[3]]
    assert inputs["request_output_len"].tolist() == [[4]]
    assert inputs["runtime_top_k"].tolist() == [[2]]
    assert inputs["streaming"].item() is True


def test_vllm_parameters_travel_as_json(client, served):
    client.complete("say one", model="vllm_model", max_tokens=4, stop=["x"], min_p=0.1)
    inputs = inputs_of(served[0].requests[-1])
    assert inputs["text_input"].shape == (1,)
    sampling = inputs["sampling_parameters"].item()
    assert sampling == b'{"max_tokens": 4, "stop": ["x"], "min_p": 0.1}'


def test_break_cancels_on_the_server(client, served):
    for chunk in client.stream("forever", max_tokens=4, request_id="left"):
        assert chunk.text == "x"
        break
    gc.collect()
    wait_cancelled(served[0], "left")


def test_with_block_cancels_on_the_server(client, served):
    with client.stream("forever", max_tokens=4, request_id="with") as chunks:
        next(chunks)
        kept = chunks  # a reference that lives on: the block's end must suffice
    wait_cancelled(served[0], "with")
    assert list(kept) == []


def test_cancel_from_another_thread_ends_the_iteration(client, served):
    chunks = client.stream("silent", max_tokens=4, request_id="other")
    canceller = threading.Thread(target=lambda: (wait_arrived(served[0], "other"), chunks.cancel()))
    canceller.start()
    assert list(chunks) == []
    wait_cancelled(served[0], "other")
    canceller.join()


def test_one_cancel_leaves_the_other_stream_alone(client):
    with client.stream("forever", max_tokens=4) as lasting:
        next(lasting)
        for _ in range(3):
            with client.stream("forever", max_tokens=4) as other:
                next(other)
        assert next(lasting).text == "x"


def test_many_threads_share_a_client(client):
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: texts.append(client.complete(f"say {i}").text))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [f"{i} " for i in range(8)]


@pytest.mark.parametrize(
    ("told", "code", "message"),
    [
        ("INVALID_ARGUMENT INVALID_ARGUMENT: top_p is 2", Code.INVALID_ARGUMENT, "top_p is 2"),
        (
            "UNAVAILABLE in ensemble 'ensemble', UNAVAILABLE: the engine restarts",
            Code.UNAVAILABLE,
            "the engine restarts",
        ),
        ("NOT_FOUND unknown model: 'x'", Code.NOT_FOUND, "unknown model: 'x'"),
        (
            "INTERNAL Request for unknown model: 'x' is not found",
            Code.NOT_FOUND,
            "the server has no model 'x': `slipstream models` lists deployments",
        ),
        ("UNIMPLEMENTED no such thing", Code.UNSUPPORTED, "no such thing"),
        ("DATA_LOSS oh: no", Code.INTERNAL, "oh: no"),
    ],
)
def test_refusals_are_typed(client, told, code, message):
    chunks = client.stream(f"refuse {told}", max_tokens=1)
    assert next(chunks).text == "x"
    with pytest.raises(ContractError) as caught:
        next(chunks)
    assert (caught.value.code, caught.value.message) == (code, message)
    assert list(chunks) == []


def test_an_error_in_the_stream_is_typed_too(client):
    with pytest.raises(ContractError) as caught:
        client.complete("fail INVALID_ARGUMENT: max_tokens is 0", max_tokens=0)
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_after_an_error_the_client_waits_for_the_end_of_the_stream(client, served, monkeypatch):
    """A 24.10 keeps memory of every stream that is cancelled; one that never ends is."""
    monkeypatch.setattr("slipstream_client.client.ENDS_S", 120.0)
    for word in ("fail", "stuck"):
        with pytest.raises(ContractError, match="no more"):
            client.complete(f"{word} UNAVAILABLE: no more", max_tokens=1, request_id=word)
        assert served[0].left.get("fail") is False
        monkeypatch.setattr("slipstream_client.client.ENDS_S", 0.1)  # of the second
    wait_cancelled(served[0], "stuck")


def test_deadline_is_a_timeout_and_cancels(client, served):
    for timeout_s in (0.3, 1.0, 5.0, 25.0):  # a busy machine may not have begun by the first
        with pytest.raises(RequestTimeoutError, match="in time"):
            client.complete("silent", max_tokens=4, timeout_s=timeout_s, request_id="late")
        if "late" in served[0].cancelled:
            break
    assert issubclass(RequestTimeoutError, TimeoutError)
    wait_cancelled(served[0], "late")


def test_no_server_is_unavailable(free_port):
    with (
        SlipstreamClient(f"127.0.0.1:{free_port}") as client,
        pytest.raises(ContractError, match="no server answers") as caught,
    ):
        client.complete("a", max_tokens=1)
    assert caught.value.code is Code.UNAVAILABLE


def test_health_and_readiness(client):
    assert client.health() == HEALTH
    assert client.is_ready()
    assert not client.is_ready("nothing")


def test_the_header_for_grpc_statuses_is_never_sent(served):
    """A 24.10 whose clients set this header crashes after some tens of errors that come quickly."""
    triton, url = served
    seen = []
    original = triton.say
    triton.say = lambda *args: (seen.append(args[2].invocation_metadata()), original(*args))[1]
    with SlipstreamClient(url) as client:
        client.complete("say x", max_tokens=1)
    [metadata] = seen
    assert "triton_grpc_error" not in dict(metadata)


def test_interrupt_cancels_on_the_server(client, served, monkeypatch):
    chunks = client.stream("forever", max_tokens=4, request_id="interrupted")
    next(chunks)
    monkeypatch.setattr(chunks, "_call", _Interrupted(chunks._call))
    with pytest.raises(KeyboardInterrupt):
        next(chunks)
    wait_cancelled(served[0], "interrupted")


class _Interrupted:
    """A call during which Ctrl-C is pressed."""

    def __init__(self, call: grpc.Call) -> None:
        self.cancel = call.cancel

    def __next__(self):
        raise KeyboardInterrupt


def test_outputs_come_as_they_are(client):
    [chunk] = client.stream("say one", max_tokens=1)
    assert set(chunk.outputs) == {"text_output", "num_input_tokens", "num_output_tokens"}
    assert chunk.outputs["num_input_tokens"].dtype == np.int32


def test_every_public_name_can_be_imported():
    assert set(slipstream_client.__all__) == set(slipstream_client._MODULES)
    for name in slipstream_client.__all__:
        assert getattr(slipstream_client, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = slipstream_client.nothing
