"""Requests that are odd but right, and checkpoints that are not; the sixty are in test_sixty.py."""

import os
import shutil
import signal
import time

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from fixtures.server.support import CHECKPOINT, PROMPT, TEXT_MODELS, RequestError, compose
from slipstream_serve.triton import Endpoints, ServeError, TritonServer

pytestmark = [pytest.mark.triton, pytest.mark.beside]

DTYPES = (np.uint64, np.float16, np.int32)  # of an adapter's inputs
TOKENS = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 4}


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_the_longest_output_there_can_be_is_no_error(idle, model):
    inputs = {"text_input": PROMPT, "max_tokens": 2**31 - 1, "stop_words": ["\n"], "stream": True}
    assert idle.stream(model, **inputs)


@pytest.mark.parametrize("kind", ["context_only", "generation_only", "both"])
def test_a_request_type_of_disaggregated_serving_is_refused(idle, kind):
    with pytest.raises(RequestError, match=f"INVALID_ARGUMENT: request_type.* {kind}|'{kind}'"):
        idle.stream("tensorrt_llm", parameters={"request_type": kind}, **TOKENS)
    assert idle.stream("tensorrt_llm", **TOKENS)


def test_weights_of_an_adapter_that_are_wrong_fail_alone(idle):
    """By gRPC: ids to 2^64 - 1, rows that lie nowhere, NaN, what is missing."""
    before = idle.stream("tensorrt_llm", **TOKENS)[-1]
    zeros = [[0.0] * 8]
    for number, weights, config, code in (
        (2**64 - 1, None, None, "NOT_FOUND"),
        (2**63, zeros, [[1, 0, 0]], "INVALID_ARGUMENT"),
        (1, zeros, [[1, 2**31 - 1, 1]], "INVALID_ARGUMENT"),
        (1, zeros, [[-(2**31), 0, 1]], "INVALID_ARGUMENT"),
        (1, zeros, [[1, 0, 512]], "INVALID_ARGUMENT"),
        (1, [[float("nan")] * 640], [[2, 0, 1]], "INVALID_ARGUMENT"),
        (1, zeros * 2, [[1, 0, 1]], "INVALID_ARGUMENT"),
        (1, zeros, None, "INVALID_ARGUMENT"),
        (0, zeros, [[1, 0, 1]], "INVALID_ARGUMENT"),
    ):
        given = {"lora_task_id": number, "lora_weights": weights, "lora_config": config}
        arrays = {
            name: np.array([value], dtype)
            for (name, value), dtype in zip(given.items(), DTYPES, strict=True)
            if value is not None
        }
        arrays["lora_task_id"] = arrays["lora_task_id"][None]
        with pytest.raises(RequestError, match=code):
            idle.stream("tensorrt_llm", **TOKENS, **arrays)
    after = idle.stream("tensorrt_llm", **TOKENS)[-1]
    assert np.array_equal(after["output_ids"], before["output_ids"])


def test_stop_is_not_for_the_ensemble(idle):
    body = {"text_input": PROMPT, "max_tokens": 2, "stop": True}
    status, text = idle.post("ensemble/generate", body)
    assert status != 200 or "error" in text
    assert "stop is no input of the ensemble" in text


@pytest.mark.parametrize("model", [*TEXT_MODELS, "vllm_model"])
def test_a_text_that_is_shorter_than_it_says_fails_alone(idle, model):
    """Requests that wait together for a model's process are passed to it one by one."""
    inputs = {"text_input": PROMPT} | ({} if model == "vllm_model" else {"max_tokens": 2})
    good, bad = (idle.tensors(model, inputs) for _ in range(2))
    bad[0]._raw_content = bad[0]._raw_content[:-1]
    served, errors = [], []

    def hear(result: object, error: object) -> None:
        response = None if result is None else result.get_response()
        if response is None:
            errors.append(str(error))
        elif response.parameters["triton_final_response"].bool_param:
            served.append(int(response.id))

    idle.stream(model, **inputs)  # its process is up
    pid = idle.stub("preprocessing" if model == "ensemble" else model)
    with grpcclient.InferenceServerClient(idle.address) as client:
        client.start_stream(hear)
        os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(9):
                asked = bad if number in (2, 6) else good
                client.async_stream_infer(
                    model, asked, request_id=str(number), enable_empty_final_response=True
                )
            time.sleep(0.3)
        finally:
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 120
        while len(served) + len(errors) < 9 and time.monotonic() < deadline:
            time.sleep(0.05)
        client.stop_stream()
    assert sorted(served) == [0, 1, 3, 4, 5, 7, 8], errors
    assert len(errors) == 2
    assert all("incomplete string data" in error for error in errors), errors


@pytest.mark.rest
def test_a_bad_checkpoint_ends_a_bare_server_with_one_line(repository, tmp_path):
    """One that `slipstream serve` has not started: for that, see test_bad_starts.py."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, checkpoint)
    models = compose(checkpoint, tmp_path / "models")
    os.truncate(checkpoint / "model.safetensors", 1000)
    server = TritonServer(models, Endpoints.free(), tmp_path / "log")
    try:
        server.start()
        with pytest.raises(ServeError, match="checkpoint") as error:
            server.wait_ready(120)
        assert "\n" not in str(error.value)
        assert "Traceback" not in str(error.value)
    finally:
        server.stop()
    assert list(server.processes()) == []
