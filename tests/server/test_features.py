"""Features in pairs on a real server, over gRPC and HTTP, which must agree: see tests/features."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fixtures.features import answers
from fixtures.features.house import DECLARED, tensors_of
from fixtures.features.pairing import cases
from fixtures.features.table import MODELS, body_of
from fixtures.server.support import CHECKPOINT, Client, serving
from fixtures.tiers import quick_of
from slipstream_client.cli import main
from slipstream_serve.server import server_directory

pytestmark = pytest.mark.triton

CASES = [(model, names) for model in MODELS for names in cases(model)]
SAMPLE = [(model, cases(model)[place]) for model in MODELS for place in (0, -1)]


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
        client.wait_idle(30)


def as_arrays(event: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of an event; HTTP unwraps what has one element."""
    arrays = {}
    for name, value in event.items():
        values = value if isinstance(value, list) else [value]
        is_text = bool(values) and isinstance(values[0], str)
        made = [each.encode() for each in values] if is_text else values
        arrays[name] = np.array(made, object if is_text else None)
    return arrays


@pytest.mark.parametrize(
    "case", quick_of(CASES, SAMPLE), ids=["-".join((model, *names)) for model, names in CASES]
)
def test_both_protocols_give_the_answer_of_the_features(client: Client, case) -> None:
    model, names = case
    body = body_of(model, names)
    inputs, parameters = tensors_of(model, body)
    named = {k: str(v) if isinstance(v, float) else v for k, v in parameters.items()}
    if DECLARED[model].max_batch_size:  # scalars, too, have two dimensions on the wire
        inputs = {k: array[None] if array.ndim == 1 else array for k, array in inputs.items()}
    responses = client.stream(model, parameters=named, **inputs)
    answer = answers.read(model, names, responses)
    answers.check(model, names, answer, responses)
    if any(isinstance(value, list) and isinstance(value[0], list) for value in body.values()):
        return  # `generate` has no tensors of two dimensions
    events = [as_arrays(event) for event in client.events(model, **body)]
    other = answers.read(model, names, events)
    assert (other.texts, other.num_tokens) == (answer.texts, answer.num_tokens)
    pairs = zip(other.log_probs, answer.log_probs, strict=True)
    assert all(np.allclose(*pair, atol=1e-4) for pair in pairs)
