"""Requests that are odd but right, and checkpoints that are not; the sixty are in test_sixty.py."""

import os
import shutil

import pytest
from server.support import CHECKPOINT, PROMPT, TEXT_MODELS, RequestError, compose
from slipstream_compose.triton import Endpoints, ServeError, TritonServer

pytestmark = pytest.mark.triton

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


def test_stop_is_not_for_the_ensemble(idle):
    body = {"text_input": PROMPT, "max_tokens": 2, "stop": True}
    status, text = idle.post("ensemble/generate", body)
    assert status != 200 or "error" in text
    assert "stop is no input of the ensemble" in text


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
