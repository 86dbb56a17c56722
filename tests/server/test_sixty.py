"""Sixty bad inputs on a real server: each is answered, and nobody else notices."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from server.sixty import MODELS, TEXTS, Grpc, Http, Raw, raw_json, text, vllm
from server.sixty_rest import ALL
from server.support import PROMPT, Client, RequestError

pytestmark = pytest.mark.triton

GOOD: dict[str, dict[str, Any]] = {
    "ensemble": {"text_input": PROMPT, "max_tokens": 5},
    "tensorrt_llm_bls": {"text_input": PROMPT, "max_tokens": 5},
    "vllm_model": {"text_input": PROMPT, "sampling_parameters": '{"temperature": 0}'},
    "tensorrt_llm": {"input_ids": [290, 293, 8], "input_lengths": 3, "request_output_len": 5},
    "preprocessing": {"QUERY": "a", "REQUEST_OUTPUT_LEN": 1},
    "postprocessing": {"TOKENS_BATCH": [[5, 6, 7]], "SEQUENCE_LENGTH": 3},
}
LATEST_S = 60.0  # an answer comes at once; the machine may be busy


def canaries(client: Client) -> dict[str, str]:
    """An answer of every model, greedy: always the same."""
    found = {model: str(client.generate(model, **GOOD[model])) for model in MODELS}
    return found | {"gRPC": str(client.stream("ensemble", **GOOD["ensemble"]))}


@pytest.fixture(scope="module")
def undisturbed(client: Client) -> dict[str, str]:
    return canaries(client)


@pytest.fixture
def watched(idle: Client, undisturbed: dict[str, str]) -> Iterator[Client]:
    """The client; afterwards all answers are what they were, from the same processes."""
    before = idle.health()["engine_pid"], idle.server.stubs()
    yield idle
    assert canaries(idle) == undisturbed
    assert (idle.health()["engine_pid"], idle.server.stubs()) == before


def check(said: str, expected: str) -> None:
    assert re.search(expected, said, re.S), f"{said[:600]} is not {expected}"
    assert not re.search(r"Traceback|\.py\b|File \"|INTERNAL", said), said[:600]
    assert len(said) < 12_000, "a value is not cut"  # the server repeats a model's name as it is


def ask_http(client: Client, case: Http) -> None:
    models = {"{m}": MODELS[:3], "{t}": TEXTS, "{v}": ("vllm_model",)}.get(case.path, (case.path,))
    for model in models:
        for verb in ("generate", "generate_stream"):
            status, said = client.post(f"{model}/{verb}", case.body, LATEST_S)
            assert status == case.status, f"{model}/{verb}: {status} {said[:300]}"
            check(said, case.expected)


def ask_grpc(client: Client, case: Grpc) -> None:
    inputs = GOOD.get(case.model, {}) | case.tensors
    inputs = {name: value for name, value in inputs.items() if value is not None}
    with pytest.raises(RequestError) as error:
        client.stream(case.model, case.request_id, LATEST_S, parameters=case.parameters, **inputs)
    check(str(error.value), case.expected)


def raw(client: Client, data: bytes, patience_s: float) -> int:
    """The status of the answer; 0 where none comes."""
    host, port = client.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), patience_s) as connection:
        answer = b""
        with contextlib.suppress(OSError):
            connection.sendall(data)
        with contextlib.suppress(ConnectionError, TimeoutError):
            answer = connection.recv(64)
    found = re.match(rb"HTTP/1\.[01] (\d+)", answer)
    return int(found[1]) if found else 0


def ask(client: Client, case: Http | Grpc | Raw) -> None:
    match case:
        case Http():
            ask_http(client, case)
        case Grpc():
            ask_grpc(client, case)
        case Raw():
            status = raw(client, case.data, case.patience_s)
            assert status in case.statuses, f"{case.data[:80]!r}: {status}"


@pytest.mark.parametrize("number", [number for number, item in ALL.items() if item.cases])
def test_it_is_answered_and_nobody_else_notices(watched: Client, number: int) -> None:
    for case in ALL[number].cases:
        ask(watched, case)


def test_all_sixty_are_here() -> None:
    assert sorted(ALL) == list(range(1, 61))
    assert all(item.cases or item.why for item in ALL.values())


def test_10_slow_headers_hold_up_nobody(watched: Client) -> None:
    host, port = watched.http.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHos")
        for model in TEXTS:
            assert watched.generate(model, **text())["text_output"].startswith("def f(")


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "vllm_model"])
def test_14_a_nul_is_a_character(watched: Client, model: str) -> None:
    answer = watched.generate(model, **(GOOD[model] | {"text_input": "a = '\0'\n"}))
    assert str(answer["text_output"]).startswith("a = '\0'\n")


@pytest.mark.parametrize("model", TEXTS)
def test_35_the_smallest_temperature_is_greedy(watched: Client, model: str) -> None:
    greedy = watched.generate(model, **text(temperature=0.0, top_k=50))
    body = json.loads(raw_json(max_tokens="3", temperature="1e-300", top_k="50"))
    assert watched.generate(model, **body)["text_output"] == greedy["text_output"]
    tiny = watched.generate("vllm_model", **vllm(max_tokens=3, temperature=1e-300))
    assert tiny["text_output"] == greedy["text_output"]


@pytest.mark.parametrize("model", MODELS)
def test_58_an_id_in_use(watched: Client, model: str) -> None:
    """The second is refused by name; the first goes on to its end."""
    long = {"max_tokens": 60, "request_output_len": 60, "sampling_parameters": '{"max_tokens": 60}'}
    wanted = GOOD[model] | {name: long[name] for name in long.keys() & GOOD[model].keys()}
    wanted |= {"streaming" if model == "tensorrt_llm" else "stream": True}
    first = watched.iterate(model, "the same", **wanted)
    with contextlib.closing(first):
        next(first)
        with pytest.raises(RequestError, match="ALREADY_EXISTS: request id 'the same'"):
            watched.stream(model, "the same", **GOOD[model])
        rest = list(first)
    assert rest
    assert watched.stream(model, "the same", **GOOD[model])
