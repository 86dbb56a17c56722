"""Sixty bad inputs on a real server: each is answered, and nobody else notices."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator

import pytest
from fixtures.server.sixty_ask import LATEST_S, as_tensors, ask, call, check, infer, raw, whole
from fixtures.server.sixty_cases import (
    CLOSED,
    GOOD,
    MODELS,
    PATHS,
    STAGES,
    TEXTS,
    Call,
    Grpc,
    Http,
    Item,
    text,
    vllm,
)
from fixtures.server.sixty_rest import ALL
from fixtures.server.support import Client, RequestError, lasting
from fixtures.tiers import quick_of
from tritonclient.grpc import service_pb2 as messages

pytestmark = [pytest.mark.triton, pytest.mark.beside]


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


SENT = [number for number, item in ALL.items() if item.cases]


@pytest.mark.parametrize("number", quick_of(SENT, SENT[::5]))
def test_it_is_answered_and_nobody_else_notices(watched: Client, number: int) -> None:
    for case in ALL[number].cases:
        ask(watched, case)


def protocols(item: Item) -> set[str]:
    """Return the protocols of its cases; a JSON body goes over gRPC too, where gRPC can say it."""
    found = set()
    for case in item.cases:
        if isinstance(case, Http):
            found.add("HTTP")
            models = () if case.alone else PATHS.get(case.path, (case.path,))
            if case.status == 400 and models:  # it must have a twin, or is not sent at all
                found.add("gRPC")
            elif case.status == 500:  # no JSON of the tensor's type
                found |= {"gRPC" for m in models for _ in as_tensors(m, whole(m, case.body))}
        elif isinstance(case, Grpc):
            found |= {"gRPC"} | (set() if case.alone else {"HTTP"})
        else:
            found.add("gRPC" if isinstance(case, Call) else "HTTP")
    return found


def test_all_sixty_are_here() -> None:
    """Each is tried over both protocols, or it says why not."""
    assert sorted(ALL) == list(range(1, 61))
    for number, item in ALL.items():
        assert item.cases or item.why, number
        assert not item.cases or bool(item.alone) == (len(protocols(item)) == 1), number


def test_what_is_not_sent_from_here_is_elsewhere() -> None:
    """A number without a case has a test of its own below, or names where it is tested."""
    here = {name.split("_")[1] for name in globals() if re.match(r"test_\d", name)}
    for number, item in ALL.items():
        assert item.cases or str(number) in here or "tests/" in item.why, number


def test_a_model_that_generates_has_no_answers_of_one_response(watched: Client) -> None:
    """So there is no code of a refusal's own beside the text: see sixty_ask.py."""
    for model in MODELS:
        request = messages.ModelInferRequest(model_name=model)
        code, details, _ = call(watched, "ModelInfer", request.SerializeToString())
        assert (code, "decoupled" in details) == ("UNIMPLEMENTED", True)
        status, said = infer(watched, request)
        assert (status, "decoupled" in said) == (501, True)


def test_silence_is_no_closed_connection(watched: Client) -> None:
    with pytest.raises(TimeoutError):
        raw(watched, b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHos", patience_s=0.5)
    assert raw(watched, b"no HTTP at all\r\n\r\n") == (CLOSED, "")


@pytest.mark.parametrize("model", quick_of([*MODELS, *STAGES], ("ensemble", STAGES[0])))
def test_57_an_output_twice_is_answered_once(watched: Client, model: str) -> None:
    outputs = {"tensorrt_llm": "output_ids", STAGES[0]: "INPUT_ID", STAGES[1]: "OUTPUT"}
    name = outputs.get(model, "text_output")
    request = messages.ModelInferRequest(model_name=model)
    for tensor in watched.tensors(model, GOOD[model]):
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    for _ in range(2):
        request.outputs.add(name=name)
    code, _, [reply] = call(watched, "ModelStreamInfer", request.SerializeToString())
    answer = messages.ModelStreamInferResponse.FromString(reply)
    assert (code, answer.error_message) == ("OK", "")
    assert [output.name for output in answer.infer_response.outputs] == [name]


@pytest.mark.parametrize("protocol", ["HTTP", "gRPC"])
def test_10_slow_headers_hold_up_nobody(watched: Client, protocol: str) -> None:
    host, port = watched.http.removeprefix("http://").split(":")
    half = b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHos"
    if protocol == "gRPC":
        (host, port), half = watched.address.split(":"), b"PRI * HTTP/2.0\r\n\r\nSM"
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(half)
        for model in TEXTS:
            assert watched.generate(model, **text())["text_output"].startswith("def f(")
            assert watched.stream(model, **text())


@pytest.mark.parametrize(
    "model", quick_of(["ensemble", "tensorrt_llm_bls", "vllm_model"], ("ensemble",))
)
def test_14_a_nul_is_a_character(watched: Client, model: str) -> None:
    asked = GOOD[model] | {"text_input": "a = '\0'\n"}
    answer = watched.generate(model, **asked)
    assert str(answer["text_output"]).startswith("a = '\0'\n")
    [response] = watched.stream(model, **asked)
    assert response["text_output"].ravel()[0].decode() == answer["text_output"]


@pytest.mark.parametrize("model", quick_of([*TEXTS, "vllm_model"], ("vllm_model",)))
def test_33_the_smaller_of_two_bounds_holds(watched: Client, model: str) -> None:
    """LiteLLM sends max_completion_tokens beside a max_tokens of its own, and other names."""
    greedy = {"temperature": 0} if model == "vllm_model" else {}
    body = {"text_input": "def f(", "stream": False}
    want = watched.generate(model, **body, parameters=greedy | {"max_tokens": 3})
    openai = {"max_completion_tokens": 3, "user": "u-1", "model": "gpt-4o"}
    asked = greedy | openai | {"max_tokens": 2000}
    assert watched.generate(model, **body, parameters=asked) == want
    if model == "vllm_model":
        responses = watched.stream(model, text_input="def f(", parameters=asked | {"n": "1"})
    else:
        del asked["max_tokens"]
        responses = watched.stream(model, text_input="def f(", max_tokens=2000, parameters=asked)
    [response] = responses
    assert response["text_output"].ravel()[0].decode() == want["text_output"]


@pytest.mark.parametrize("model", quick_of(TEXTS, ("ensemble",)))
def test_35_the_smallest_temperature_is_greedy(watched: Client, model: str) -> None:
    greedy = watched.generate(model, **text(temperature=0.0, top_k=50))["text_output"]
    tiny = text(temperature=1e-300, top_k=50)
    assert watched.generate(model, **tiny)["text_output"] == greedy
    of_vllm = vllm(max_tokens=3, temperature=1e-300)
    assert watched.generate("vllm_model", **of_vllm)["text_output"] == greedy
    for name, asked in ((model, tiny), ("vllm_model", of_vllm)):
        [response] = watched.stream(name, **asked)
        assert response["text_output"].ravel()[0].decode() == greedy


@pytest.mark.parametrize("model", quick_of(MODELS, ("ensemble",)))
def test_58_an_id_in_use(watched: Client, model: str) -> None:
    """The second is refused by name; the first goes on."""
    first = watched.iterate(model, "the same", **lasting(model))
    with watched.cancelling(), contextlib.closing(first):
        next(first)
        with pytest.raises(RequestError, match="ALREADY_EXISTS: request id 'the same'"):
            watched.stream(model, "the same", **GOOD[model])
        status, said = watched.post(f"{model}/generate", GOOD[model] | {"id": "the same"}, LATEST_S)
        assert status == 400
        check(json.loads(said)["error"], "ALREADY_EXISTS: request id 'the same'")
        assert len([next(first) for _ in range(5)]) == 5
    assert watched.stream(model, "the same", **GOOD[model])
