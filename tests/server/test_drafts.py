"""Drafts through a real server, over gRPC and HTTP: streamed, in batches, and refused by name."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fixtures.bridge.texts import TEXT
from fixtures.server.support import CHECKPOINT, Client, RequestError, serving, text
from slipstream_client.cli import main
from slipstream_serve.server import server_directory

pytestmark = [pytest.mark.triton, pytest.mark.rest, pytest.mark.beside]

PROMPT = "def read(self, path):\n    return self.path\n" * 3
IDS = TEXT.encode(PROMPT)
LENGTH = 24
FIGURES = ("total_draft_tokens", "total_accepted_draft_tokens")


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[Client]:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    folder = tmp_path_factory.mktemp("drafts")
    paths = ["--checkpoint", str(CHECKPOINT), "--output", str(folder / "models")]
    options = ["--kv-cache-tokens", "4096", "--dtype", "float32"]
    assert main(["compose", *paths, *options]) == 0
    with serving(folder / "models", folder / "server.log") as client:
        yield client
        client.wait_idle(120)


def batch_of(size: int, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors of so many equal prompts for `tensorrt_llm`."""
    scalars = {"input_lengths": len(IDS), "request_output_len": LENGTH}
    tensors = {name: np.full((size, 1), value, np.int32) for name, value in scalars.items()}
    tensors["input_ids"] = np.tile(np.int32(IDS), (size, 1))
    flags = dict.fromkeys(
        ("return_perf_metrics", "exclude_input_in_output"), np.ones((size, 1), bool)
    )
    return tensors | flags | more


def outputs(client: Client, size: int = 1, **more: np.ndarray) -> dict[int, Any]:
    """Return by batch index the token ids, and the last response, over gRPC."""
    found: dict[int, Any] = {}
    for each in client.stream("tensorrt_llm", **batch_of(size, **more)):
        index = int(each["batch_index"].item()) if size > 1 else 0
        ids = [*found.get(index, ([],))[0], *each["output_ids"].ravel().tolist()]
        found[index] = ids, each
    return found


def figures(response: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(np.ravel(response[name])[0]) for name in FIGURES)


def test_drafts_of_a_client(client: Client) -> None:
    """Alone, streamed and in a batch, with logits; over HTTP the same."""
    right, plain = outputs(client)[0]
    assert len(right) == LENGTH
    assert figures(plain) == (0, 0)
    drafts = np.int32([[*right, 5, 5]])
    for stream in (False, True):
        ids, last = outputs(client, draft_input_ids=drafts, streaming=np.array([[stream]]))[0]
        assert ids == right
        assert figures(last) == (LENGTH + 2, LENGTH)
    rows = np.int32([right[:4], [*right[:2], (right[2] + 1) % 4096, right[3]]])
    logits = np.zeros((2, 4, 4096), np.float32)
    both = outputs(client, 2, draft_input_ids=rows, draft_logits=logits)
    assert both[0][0] == both[1][0] == right
    assert [figures(both[index][1]) for index in (0, 1)] == [(4, 4), (4, 2)]
    body = {"input_ids": IDS, "input_lengths": len(IDS), "request_output_len": LENGTH}
    body |= {"return_perf_metrics": True, "exclude_input_in_output": True}
    [event] = client.events("tensorrt_llm", **body, draft_input_ids=right[:6])
    assert event["output_ids"] == right
    assert figures(event) == (6, 6)
    assert event["acceptance_rate"] == 1.0


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
def test_drafts_that_are_asked_for(client: Client, model: str) -> None:
    """The ensemble has no such input: there, and over HTTP, they are request parameters."""
    body = {"text_input": PROMPT, "max_tokens": LENGTH, "return_perf_metrics": True}
    asked = {"num_draft_tokens": 4}
    plain = text(client.stream(model, **body))
    for stream in (False, True):
        events = client.events(model, **body, **asked, stream=stream)
        told = "".join(event["text_output"] for event in events)
        assert told == (plain if not stream else plain.removeprefix(PROMPT))
        total, accepted = figures(events[-1])
        assert total >= accepted > 0
    given = {"parameters": asked} if model == "ensemble" else asked
    responses = client.stream(model, **body, **given)
    assert text(responses) == plain
    assert figures(responses[-1])[1] > 0


def test_bad_drafts_are_refused_by_name(client: Client) -> None:
    wrong = {
        "draft_input_ids": np.int32([[-1]]),
        "draft_logits": np.zeros((1, 1, 4096), np.float32),
        "draft_acceptance_threshold": np.float32([[0.5]]),
        "lookahead_ngram_size": np.int32([[3]]),
    }
    for name, array in wrong.items():
        with pytest.raises(RequestError, match=f"INVALID_ARGUMENT: {name}"):
            client.stream("tensorrt_llm", **batch_of(1, **{name: array}))
    body = {"text_input": PROMPT, "max_tokens": LENGTH}
    with pytest.raises(RequestError, match="INVALID_ARGUMENT: num_draft_tokens is 65"):
        client.generate("tensorrt_llm_bls", **body, num_draft_tokens=65)
    with pytest.raises(RequestError, match=r"INVALID_ARGUMENT: beam_width is .* and draft.*: "):
        client.generate("tensorrt_llm_bls", **body, num_draft_tokens=4, beam_width=2)
