"""NVIDIA's newer contract on a real server, requested as the clients in NVIDIA's repositories do.

Two servers' worth of models in one: `tensorrt_llm` is the LLM-API model as NVIDIA has it, with one
response a request; `streams` is the same, decoupled.
"""

import json
import queue
import urllib.request
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from fixtures.server.support import (
    KV_CACHE_TOKENS,
    LONG,
    PROMPT,
    Client,
    RequestError,
    long_checkpoint,
    serving,
)
from slipstream_client.cli import main
from slipstream_serve.server import server_directory
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.triton

CONTRACTS = ("llmapi=tensorrt_llm", "llmapi=streams,decoupled", "llmapi")
MODELS = ("tensorrt_llm", "streams", "llmapi_model")
ANSWERS_S = 120


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[Client]:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    folder = tmp_path_factory.mktemp("llmapi")
    checkpoint = long_checkpoint(folder / "checkpoint")
    paths = ["--checkpoint", str(checkpoint), "--output", str(folder / "models")]
    options = ["--kv-cache-tokens", str(KV_CACHE_TOKENS), "--dtype", "float32"]
    options += ["--request-log", str(folder / "requests.jsonl")]
    options += [option for each in CONTRACTS for option in ("--contract", each)]
    assert main(["compose", *paths, *options]) == 0
    with serving(folder / "models", folder / "server.log") as client:
        yield client


@pytest.fixture(scope="module")
def expected(client: Client) -> str:
    """What another contract's model answers, greedy."""
    sampling = {"max_tokens": 24, "temperature": 0}
    answer = client.generate("vllm_model", text_input=PROMPT, parameters=sampling)
    return str(answer["text_output"])


class Asked:
    """Unary gRPC requests with a callback, as `llmapi_client.py` sends them."""

    def __init__(self, client: Client) -> None:
        self.grpc = grpcclient.InferenceServerClient(client.address)
        self._done: queue.Queue[object] = queue.Queue()

    def send(self, inputs: list, request_id: str, model: str = "tensorrt_llm"):
        return self.grpc.async_infer(
            model,
            inputs,
            outputs=None,
            request_id=request_id,
            callback=lambda result, error: self._done.put(error or result),
            parameters={"Streaming": False},
        )

    def get(self):
        return self._done.get(timeout=ANSWERS_S)


@pytest.fixture
def asked(idle: Client) -> Iterator[Asked]:
    asked = Asked(idle)
    yield asked
    asked.grpc.close()


def tensor(name: str, array: np.ndarray) -> grpcclient.InferInput:
    kind = "BYTES" if array.dtype.kind in "OS" else grpcclient.np_to_triton_dtype(array.dtype)
    made = grpcclient.InferInput(name, array.shape, kind)
    made.set_data_from_numpy(array)
    return made


def generation(text: str, length: int) -> list[grpcclient.InferInput]:
    return [
        tensor("text_input", np.array([text], dtype=object)),
        tensor("sampling_param_max_tokens", np.array([length], np.int32)),
    ]


def stop_signals() -> list[grpcclient.InferInput]:
    return [
        tensor("text_input", np.empty([1], dtype=np.bytes_)),
        tensor("stop", np.array([True])),
    ]


@pytest.mark.parametrize("model", MODELS)
def test_generate_is_answered_as_nvidia_documents_it(idle, expected, model) -> None:
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 24}
    assert idle.generate(model, **body)["text_output"] == expected
    bare = idle.generate(model, **body, sampling_param_exclude_input_from_output=True)
    assert PROMPT + str(bare["text_output"]) == expected
    # An older page of theirs has `max_tokens`.
    assert idle.generate(model, text_input=PROMPT, max_tokens=24)["text_output"] == expected
    metrics = idle.generate(model, **body, sampling_param_return_perf_metrics=True)
    assert metrics["total_draft_tokens"] == 0
    assert metrics["arrival_time_ns"] < metrics["last_token_time_ns"]
    assert metrics["kv_cache_hit_rate"] == 0


def test_infer_over_http_takes_and_gives_tensors(idle, expected) -> None:
    inputs = [
        ("text_input", "BYTES", PROMPT),
        ("sampling_param_max_tokens", "INT32", 24),
        ("sampling_param_exclude_input_from_output", "BOOL", False),
    ]
    body = {
        "inputs": [
            {"name": name, "shape": [1], "datatype": kind, "data": [value]}
            for name, kind, value in inputs
        ],
        "outputs": [{"name": "text_output"}],
    }
    status, said = idle.post("tensorrt_llm/infer", body)
    [output] = json.loads(said)["outputs"]
    assert (status, output["shape"], output["data"]) == (200, [1], [expected])


def test_tritonclient_over_http(idle, expected) -> None:
    text = httpclient.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([PROMPT], dtype=object))
    length = httpclient.InferInput("sampling_param_max_tokens", [1], "INT32")
    length.set_data_from_numpy(np.array([24], np.int32))
    with httpclient.InferenceServerClient(idle.http.removeprefix("http://")) as http:
        result = http.infer("tensorrt_llm", [text, length], request_id="1")
    assert result.as_numpy("text_output")[0].decode() == expected
    assert result.get_response()["id"] == "1"


def test_nvidias_test_of_cancels_runs_as_it_is(asked) -> None:
    """A stop without its request, a request, a stop after its end, and a request again."""
    asked.send(stop_signals(), "1")
    assert asked.get().status() == "StatusCode.CANCELLED"
    call = asked.send(generation("The current time is", 60), "1")
    first = asked.get().as_numpy("text_output")
    call.cancel()
    asked.send(stop_signals(), "1")
    assert asked.get().status() == "StatusCode.CANCELLED"
    asked.send(generation("The current time is", 60), "2")
    assert np.array_equal(asked.get().as_numpy("text_output"), first)


@pytest.mark.parametrize("by", ["stop", "cancel"])
def test_a_running_request_ends(asked, client, by) -> None:
    reason = tensor("return_finish_reason", np.array([True]))
    call = asked.send([*generation(PROMPT, LONG), reason], "long")
    client.wait_running(1)
    if by == "cancel":
        with client.cancelling():
            call.cancel()
        assert asked.get().status() == "StatusCode.CANCELLED"
        return
    asked.send(stop_signals(), "long")
    answers = [asked.get(), asked.get()]
    [error] = [each for each in answers if isinstance(each, InferenceServerException)]
    [answer] = [each for each in answers if each is not error]
    assert error.status() == "StatusCode.CANCELLED"
    assert answer.as_numpy("finish_reason").tolist() == [b"cancelled"]
    assert answer.as_numpy("text_output")[0].decode().startswith(PROMPT)


def test_a_stream_has_the_whole_text_so_far(idle, expected) -> None:
    body = {"text_input": PROMPT, "sampling_param_max_tokens": 24, "return_finish_reason": True}
    events = idle.events("streams", **body, streaming=True)
    texts = [str(event["text_output"]) for event in events]
    assert texts[-1] == expected
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    *before, last = [event["finish_reason"] for event in events]
    assert set(before) <= {"None"}
    assert last == "length"
    arrays = {
        "text_input": np.array([PROMPT.encode()], object),
        "sampling_param_max_tokens": np.array([24], np.int32),
        "streaming": np.array([True]),
    }
    responses = idle.stream("streams", **arrays)
    assert responses[-1]["text_output"][0].decode() == expected


def test_a_client_that_leaves_a_stream_ends_it(idle) -> None:
    arrays = {
        "text_input": np.array([PROMPT.encode()], object),
        "sampling_param_max_tokens": np.array([LONG], np.int32),
        "streaming": np.array([True]),
    }
    with idle.cancelling():
        stream = idle.iterate("streams", **arrays)
        next(stream)
        stream.close()


BAD = [
    ({"streaming": True}, "streaming is true, but this model has one response"),
    ({"text_input": ""}, "text_input is empty"),
    ({"text_input": ["a", "b"]}, "text_input has 2 texts, not 1"),
    ({"sampling_param_top_k": -1}, "sampling_param_top_k is -1"),
    ({"sampling_param_temperature": -0.5}, r"sampling_param_temperature is -0.5"),
    ({"sampling_param_max_tokens": 0}, "sampling_param_max_tokens is 0"),
    ({"lora_id": 3}, "lora_id is not supported yet"),
    ({"image_url": "http://a/b.png"}, "image_url is not supported yet"),
    ({"sampling_param_logits_post_processor_name": "a"}, "sampling_param_logits_post_processor"),
    ({"sampling_param_temprature": 1}, "unknown request parameter 'sampling_param_temprature'"),
    ({"stop": True}, "stop is true, but the request has no id"),
]


def test_bad_requests_are_refused_by_name_and_no_stream_notices(idle, expected) -> None:
    running = idle.iterate(
        "streams",
        text_input=np.array([PROMPT.encode()], object),
        sampling_param_max_tokens=np.array([24], np.int32),
        streaming=np.array([True]),
    )
    responses = [next(running)]
    for body, message in BAD:
        with pytest.raises(RequestError, match=f"400: INVALID_ARGUMENT: {message}"):
            idle.generate("tensorrt_llm", **{"text_input": PROMPT} | body)
        inputs, parameters = grpc_arrays({"text_input": PROMPT} | body)
        with (
            grpcclient.InferenceServerClient(idle.address) as grpc,
            pytest.raises(InferenceServerException, match=message),
        ):
            grpc.infer("tensorrt_llm", inputs, parameters=parameters)
    responses += running
    assert responses[-1]["text_output"][0].decode() == expected


def grpc_arrays(body: dict) -> tuple:
    """The tensors of a body; a name that is no tensor becomes a request parameter."""
    kinds = {bool: np.bool_, float: np.float32, int: np.int32}
    inputs, parameters = [], {}
    for name, value in body.items():
        if name == "sampling_param_temprature":
            parameters[name] = value
            continue
        values = value if isinstance(value, list) else [value]
        kind = np.uint64 if name == "lora_id" else kinds.get(type(values[0]), object)
        inputs.append(tensor(name, np.array(values, kind)))
    return inputs, parameters


def test_health_and_metrics_know_the_models(idle, capsys) -> None:
    port = idle.address.rpartition(":")[2]
    assert main(["health", "--grpc-port", port]) == 0
    capsys.readouterr()
    assert (
        main(
            [
                "complete",
                "--grpc-port",
                port,
                "--model",
                "llmapi_model",
                "--max-tokens",
                "5",
                PROMPT,
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.strip()
    assert idle.health()["faults"] == []
    with urllib.request.urlopen(idle.server.endpoints.metrics, timeout=60) as page:
        text = page.read().decode()
    for model in MODELS:
        assert f'model="{model}"' in text
