"""Features in pairs on a real server, over gRPC and HTTP, which must agree: see tests/features."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

import numpy as np
import pytest
from fixtures.contract.asking import array_of
from fixtures.features import answers
from fixtures.features.bad import Bad, bad_bodies
from fixtures.features.house import DECLARED, tensors_of
from fixtures.features.pairing import cases
from fixtures.features.table import MODELS, body_of
from fixtures.server.support import CHECKPOINT, PROMPT, Client, RequestError, serving, text
from fixtures.tiers import quick_of
from slipstream_client.cli import main
from slipstream_serve.server import server_directory

pytestmark = [pytest.mark.triton, pytest.mark.beside]

CASES = [(model, names) for model in MODELS for names in cases(model)]
SAMPLE = [(model, cases(model)[place]) for model in MODELS for place in (0, -1)]
TIMES = 2  # that the rest tier asks for each feature; tests/features asks all without a server


def chosen(model: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Choose cases of a model in which each feature is often enough."""
    asked: Counter[str] = Counter()
    for names in cases(model):
        if any(asked[name] < TIMES for name in names):
            asked.update(names)
            yield model, names


REST = [case for model in MODELS for case in chosen(model)]


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[Client]:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    folder = tmp_path_factory.mktemp("features")
    paths = ["--checkpoint", str(CHECKPOINT), "--output", str(folder / "models")]
    options = ["--kv-cache-tokens", "4096", "--dtype", "float32"]
    assert main(["compose", *paths, *options, "--contract", "llmapi,decoupled"]) == 0
    with serving(folder / "models", folder / "server.log") as client:
        yield client
        client.wait_idle(120)


def as_arrays(event: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of an event; HTTP unwraps what has one element."""
    arrays = {}
    for name, value in event.items():
        values = value if isinstance(value, list) else [value]
        is_text = bool(values) and isinstance(values[0], str)
        made = [each.encode() for each in values] if is_text else values
        arrays[name] = np.array(made, object if is_text else None)
    return arrays


def wire_tensors(model: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a body's tensors and parameters as gRPC has them."""
    inputs, parameters = tensors_of(model, body)
    if DECLARED[model].max_batch_size:  # scalars, too, have two dimensions on the wire
        inputs = {k: array[None] if array.ndim == 1 else array for k, array in inputs.items()}
    return inputs, {k: str(v) if isinstance(v, float) else v for k, v in parameters.items()}


def ask_grpc(client: Client, model: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the responses of a gRPC stream. Raises RequestError."""
    inputs, parameters = wire_tensors(model, body)
    return client.stream(model, parameters=parameters, **inputs)


def marked(case: tuple[str, tuple[str, ...]]) -> object:
    marks = () if case in SAMPLE else pytest.mark.rest if case in REST else pytest.mark.slow
    return pytest.param(case, id="-".join((case[0], *case[1])), marks=marks)


@pytest.mark.parametrize("case", list(map(marked, CASES)))
def test_both_protocols_give_the_answer_of_the_features(client: Client, case) -> None:
    model, names = case
    body = body_of(model, names)
    responses = ask_grpc(client, model, body)
    answer = answers.read(model, names, responses)
    answers.check(model, names, answer, responses)
    if any(isinstance(value, list) and isinstance(value[0], list) for value in body.values()):
        return  # `generate` has no tensors of two dimensions
    events = [as_arrays(event) for event in client.events(model, **body)]
    other = answers.read(model, names, events)
    assert (other.texts, other.num_tokens) == (answer.texts, answer.num_tokens)
    pairs = zip(other.log_probs, answer.log_probs, strict=True)
    assert all(np.allclose(*pair, atol=1e-4) for pair in pairs)


@pytest.mark.rest
@pytest.mark.parametrize("model", MODELS)
def test_bad_values_are_refused_by_both_protocols_and_no_stream_notices(client, model) -> None:
    with canary(client):
        for bad in bad_bodies(model):
            with pytest.raises(RequestError, match=named(bad)):
                ask_grpc(client, model, bad.body)
            if not can_be_json(bad.body):
                continue  # NaN is no JSON, and tensors of two dimensions have no body
            with pytest.raises(RequestError, match=named(bad)):
                client.events(model, **bad.body)


def named(bad: Bad) -> str:
    return rf"INVALID_ARGUMENT: (.*\W)?{bad.field}(\W|$)"


def can_be_json(body: dict[str, Any]) -> bool:
    lists = [value if isinstance(value, list) else [value] for value in body.values()]
    values = [value for each in lists for value in each]
    is_flat = not any(isinstance(value, list) for value in values)
    return is_flat and all(isfinite(value) for value in values if isinstance(value, float))


@pytest.mark.parametrize("model", quick_of(MODELS, ("vllm_model",)))
def test_every_input_of_another_type_or_shape_is_refused_by_its_name(client, model) -> None:
    """By the server itself, or by the model; whatever the input asks for."""
    declared = DECLARED[model]
    good = wire_tensors(model, body_of(model, []))[0]
    with canary(client):
        for tensor in declared.inputs:
            other = np.array([b"x"], object) if tensor.dtype != "STRING" else np.array([1.5])
            rank = len(tensor.dims) + (declared.max_batch_size > 0)
            of_type = array_of(tensor, *([b"x"] if tensor.dtype == "STRING" else [1]))
            for array in (other.reshape((1,) * rank), of_type.reshape((1,) * (rank + 1))):
                with pytest.raises(RequestError, match=rf"'?{tensor.name}\b"):
                    client.stream(model, **good | {tensor.name: array})


@contextmanager
def canary(client: Client) -> Iterator[None]:
    """A long stream beside the block, whose text must be what it is by itself."""
    body = {"text_input": PROMPT, "max_tokens": 400, "min_tokens": 400, "stream": True}
    alone = text(client.stream("tensorrt_llm_bls", **body))
    running = client.iterate("tensorrt_llm_bls", **body)
    responses = [next(running)]
    yield
    assert text([*responses, *running]) == alone
