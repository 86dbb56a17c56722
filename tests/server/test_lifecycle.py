"""Models that go and come while others serve, and the ensemble served by the bridge alone."""

import contextlib
import json
import os
import signal

import pytest
from fixtures.server.support import (
    PROMPT,
    Client,
    RequestError,
    compose,
    lasting,
    long_checkpoint,
    serving,
)
from fixtures.server.support import text as join
from fixtures.waiting import wait_for

pytestmark = [pytest.mark.triton, pytest.mark.rest, pytest.mark.beside]

BODY = {"text_input": PROMPT, "max_tokens": 12}


@pytest.fixture(scope="module")
def explicit(repository, tmp_path_factory):
    """A server whose models can be unloaded and loaded."""
    log = tmp_path_factory.mktemp("explicit") / "log"
    with serving(repository, log, is_supervised=True) as client:
        yield client


def control(client: Client, model: str, verb: str) -> None:
    client.server.control(verb, model, 60)


def is_served(client: Client, model: str) -> bool:
    with contextlib.suppress(RequestError, OSError, json.JSONDecodeError):
        client.generate(model, **BODY)
        return True
    return False


def test_models_can_be_unloaded_and_loaded_while_the_engine_serves_on(explicit):
    want = explicit.generate("tensorrt_llm_bls", **BODY)["text_output"]
    pid = explicit.health()["engine_pid"]
    for model in ("tensorrt_llm_bls", "tensorrt_llm"):
        control(explicit, model, "unload")
        wait_for(lambda model=model: not is_served(explicit, model))
        assert explicit.health()["engine_pid"] == pid
        assert is_served(explicit, "vllm_model")
        control(explicit, model, "load")
    control(explicit, "ensemble", "load")
    for model in ("ensemble", "tensorrt_llm_bls"):
        wait_for(lambda model=model: is_served(explicit, model))
        assert explicit.generate(model, **BODY)["text_output"] == want
    assert explicit.health()["engine_pid"] == pid


def test_a_killed_stub_costs_its_streams_only_and_comes_back_by_unload_and_load(explicit):
    lost = explicit.iterate("tensorrt_llm_bls", **lasting("tensorrt_llm_bls"))
    next(lost)
    with explicit.cancelling():
        os.kill(explicit.busy_stub("tensorrt_llm_bls"), signal.SIGKILL)
    lost.close()
    want = explicit.generate("ensemble", **BODY)["text_output"]
    control(explicit, "tensorrt_llm_bls", "unload")
    control(explicit, "tensorrt_llm_bls", "load")
    wait_for(lambda: is_served(explicit, "tensorrt_llm_bls"))
    assert explicit.generate("tensorrt_llm_bls", **BODY)["text_output"] == want


def test_the_ensemble_served_by_the_bridge(client, tmp_path):
    want = client.generate("ensemble", **BODY)["text_output"]
    options = ["--wiring", "fused", "--dtype", "float32"]
    checkpoint = long_checkpoint(tmp_path / "checkpoint")
    repository = compose(checkpoint, tmp_path / "models", *options)
    with serving(repository, tmp_path / "log") as fused:
        assert fused.generate("ensemble", **BODY)["text_output"] == want
        assert PROMPT + join(fused.stream("ensemble", **BODY, stream=True)) == want
        stream = fused.iterate("ensemble", **lasting("ensemble"))
        next(stream)
        stream.close()
        fused.wait_idle(120)
