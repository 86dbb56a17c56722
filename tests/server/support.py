"""A composed repository, a real tritonserver on it, and requests as strangers write them."""

import contextlib
import json
import queue
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from slipstream_serve.triton import Endpoints, TritonServer

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
KV_CACHE_TOKENS = 1536  # less than the context of 2,048: prompts can fit the one and not the other
GPU_HOUR_PRICE = 3.6
PROMPT = "def read(path):\n    "
TEXT_MODELS = ["ensemble", "tensorrt_llm_bls"]
DTYPES = {"text_input": "BYTES", "stop_words": "BYTES", "bad_words": "BYTES", "seed": "UINT64"}


class RequestError(Exception):
    """What the server answered instead of tokens."""


class LateError(RequestError):
    """The engine did not say in time how it is."""


class Client:
    """JSON over HTTP, tensors over gRPC."""

    def __init__(self, server: TritonServer) -> None:
        self.server = server
        self.http = server.endpoints.http
        self.address = server.endpoints.grpc

    def post(self, path: str, body: object, timeout_s: float = 60.0) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.http}/v2/models/{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(self, model: str, **body: object) -> dict[str, object]:
        """HTTP `generate`: one answer. Raises RequestError."""
        status, text = self.post(f"{model}/generate", body)
        answer = json.loads(text)
        if "error" in answer:
            raise RequestError(f"{status}: {answer['error']}")
        return answer

    def events(self, model: str, **body: object) -> list[dict[str, object]]:
        """HTTP `generate_stream`: all events. Raises RequestError."""
        _, text = self.post(f"{model}/generate_stream", body)
        lines = [line for line in text.split("\n") if line.strip()]
        answers = [json.loads(line.removeprefix("data: ")) for line in lines]
        for answer in answers:
            if "error" in answer:
                raise RequestError(answer["error"])
        return answers

    def stream(self, model: str, request_id: str = "", timeout_s: float = 60.0, **inputs):
        """gRPC stream: the responses as dictionaries of arrays. Raises RequestError."""
        return list(self.iterate(model, request_id, timeout_s, **inputs))

    def iterate(
        self,
        model: str,
        request_id: str = "",
        timeout_s: float = 60.0,
        parameters: dict[str, object] | None = None,
        timeout_us: int | None = None,
        **inputs,
    ):
        """gRPC stream, response by response; `timeout_us` is Triton's own. Raises RequestError."""
        results: queue.Queue[tuple[object, object]] = queue.Queue()
        with grpcclient.InferenceServerClient(self.address) as client:
            client.start_stream(lambda result, error: results.put((result, error)))
            client.async_stream_infer(
                model,
                self.tensors(model, inputs),
                request_id=request_id,
                enable_empty_final_response=True,
                parameters=parameters,
                timeout=timeout_us,
            )
            is_running = True
            try:
                while True:
                    result, error = results.get(timeout=timeout_s)
                    if error is not None:
                        is_running = False  # this server can lose a request cancelled just now
                        raise RequestError(str(error))
                    response = result.get_response()
                    names = [output.name for output in response.outputs]
                    if names:
                        yield {name: result.as_numpy(name) for name in names}
                    if response.parameters["triton_final_response"].bool_param:
                        is_running = False
                        return
            finally:
                client.stop_stream(cancel_requests=is_running)

    def tensors(self, model: str, inputs: dict[str, object]) -> list[grpcclient.InferInput]:
        """Tensors of a batch of one; an array is taken as it is."""
        tensors = []
        for name, value in inputs.items():
            array = value if isinstance(value, np.ndarray) else _array(name, value)
            if not isinstance(value, np.ndarray) and model != "vllm_model":
                array = array[None]
            dtype = "BYTES" if array.dtype == object else grpcclient.np_to_triton_dtype(array.dtype)
            tensor = grpcclient.InferInput(name, array.shape, dtype)
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        return tensors

    def health(self) -> dict[str, int]:
        """What the engine says of itself; on a busy machine it may be late once."""
        for _ in range(9):
            with contextlib.suppress(LateError):
                return self.ask_health()
        return self.ask_health()

    def ask_health(self) -> dict[str, int]:
        """The same at the first try."""
        status, text = self.post("slipstream_health/infer", {"inputs": []}, 10)
        if "the engine did not answer within" in text:
            raise LateError(text)
        if status != 200:
            raise RequestError(text)
        return json.loads(json.loads(text)["outputs"][0]["data"][0])

    def stub(self, model: str) -> int:
        """The process that runs a model, the first of several."""
        return self.stubs(model)[0]

    def stubs(self, model: str) -> list[int]:
        """All of them."""
        found = {name: pid for pid, name in self.server.stubs().items()}
        pids = [found[name] for name in sorted(found) if re.fullmatch(rf"{model}_\d+_\d+", name)]
        assert pids, f"no stub of {model}"
        return pids

    def wait_idle(self, timeout_s: float) -> float:
        """Seconds until every block is free again."""
        begin = time.monotonic()
        while True:
            state = self.health()
            if state["kv_blocks_free"] == state["kv_blocks_total"] and not state["running"]:
                return time.monotonic() - begin
            assert time.monotonic() - begin < timeout_s, state
            time.sleep(0.01)

    @contextlib.contextmanager
    def cancelling(self, number: int = 1) -> Iterator[None]:
        """Around a block in which so many requests end because their clients leave.

        As the request log of the repository says; afterwards every block is free.
        """
        log = self.server.repository.parent / "requests.jsonl"

        def ends() -> list[list[str]]:
            lines = log.read_text().splitlines() if log.exists() else []
            return [json.loads(line)["finish_reasons"] for line in lines]

        before = len(ends())
        yield
        begin = time.monotonic()
        while sum("cancelled" in reasons for reasons in ends()[before:]) < number:
            assert time.monotonic() - begin < 30, ends()[before:]
            time.sleep(0.02)
        self.wait_idle(30)

    def wait_running(self, number: int, timeout_s: float = 60.0) -> None:
        begin = time.monotonic()
        while self.health()["running"] != number:
            assert time.monotonic() - begin < timeout_s, self.health()
            time.sleep(0.02)


def _array(name: str, value: object) -> np.ndarray:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str | bytes):
        raw = [v.encode() if isinstance(v, str) else v for v in values]
        return np.array(raw, dtype=object)
    if isinstance(values[0], bool):
        return np.array(values, np.bool_)
    if isinstance(values[0], float):
        return np.array(values, np.float32)
    return np.array(values, np.uint64 if name == "seed" else np.int32)


def text(responses) -> str:
    """All text of a stream."""
    return b"".join(response["text_output"].ravel()[0] for response in responses).decode()


# Whatever machine runs the tests: on two cores one process each would be written.
_PROCESSES = ("--instances", "tensorrt_llm_bls=2", "--instances", "vllm_model=2")


def compose(checkpoint: Path, output: Path, *options: str) -> Path:
    has_text = (checkpoint / "tokenizer.json").is_file()
    options = (*(_PROCESSES if has_text else ()), *options)
    command = [sys.executable, "-m", "slipstream_client.cli", "compose"]
    command += ["--checkpoint", str(checkpoint), "--output", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


def start(repository: Path, log: Path, is_supervised: bool = False) -> TritonServer:
    """A server that is ready."""
    server = TritonServer(repository, Endpoints.free(), log, is_supervised=is_supervised)
    try:
        server.start()
        server.wait_ready(120)
    except BaseException:
        server.stop()
        raise
    return server


@contextlib.contextmanager
def serving(repository: Path, log: Path, is_supervised: bool = False) -> Iterator[Client]:
    server = TritonServer(repository, Endpoints.free(), log, is_supervised=is_supervised)
    with server.running():
        yield Client(server)
