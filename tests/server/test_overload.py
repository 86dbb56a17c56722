"""Bounds on waiting, Triton's own queues, long bodies and a small cache, on the real server."""

import contextlib
import io
import itertools
import json
import os
import queue
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from fixtures.server.metrics_page import settled, wait_for_page
from fixtures.server.support import (
    CHECKPOINT,
    KV_CACHE_TOKENS,
    LONG,
    PROMPT,
    Client,
    RequestError,
    compose,
    long_checkpoint,
    serving,
    text,
)
from slipstream_client.codec import request_of
from slipstream_runtime import inflight
from slipstream_serve.serve import _EngineLog
from tritonclient.grpc import service_pb2_grpc

pytestmark = pytest.mark.triton

MODELS = ("ensemble", "tensorrt_llm_bls", "vllm_model", "tensorrt_llm")
MAX_SEQS, MAX_WAITING, MAX_WAITING_TOKENS = 4, 20, 16_650
BIG = 27_000_000  # bytes
_FIRSTS = itertools.count(10)
FULL = re.compile(
    rf"UNAVAILABLE: the engine is full: {MAX_WAITING} requests wait with \d+ tokens, "
    rf"max_waiting is {MAX_WAITING} \(\d sequences are running\); retry_after_ms: (\d+)"
)
# As a user may write it: three levels, of which 1 goes first, and at most 5 wait in each.
QUEUES = """dynamic_batching {
  preferred_batch_size: [ 1 ]
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy {
    timeout_action: REJECT
    default_timeout_microseconds: 5000000
    allow_timeout_override: true
    max_queue_size: 5
  }
}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[Client]:
    """A few sequences at a time, and a few wait."""
    folder = tmp_path_factory.mktemp("small")
    bounds = {
        "max-num-seqs": MAX_SEQS,
        "max-waiting": MAX_WAITING,
        "max-waiting-tokens": MAX_WAITING_TOKENS,
        "kv-cache-tokens": KV_CACHE_TOKENS,
    }
    options = [word for name, value in bounds.items() for word in (f"--{name}", str(value))]
    repository = compose(
        long_checkpoint(folder / "checkpoint"), folder / "models", *options, "--dtype", "float32"
    )
    with serving(repository, folder / "server.log") as client:
        yield client


def asking(model: str, max_tokens: int, num_prompt: int = 0, first: int = 5) -> dict[str, object]:
    """Inputs of a request that generates so many tokens; token ids begin with `first`."""
    if model == "tensorrt_llm":
        ids = np.arange(first, first + (num_prompt or 8), dtype=np.int32)[None]
        lengths = {"input_lengths": ids.shape[1], "request_output_len": max_tokens}
        return {"input_ids": ids, "end_id": -1, "streaming": True, **lengths}
    prompt = PROMPT * max(1, num_prompt // 8)
    if model == "vllm_model":
        sampling = json.dumps({"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True})
        return {"text_input": prompt, "stream": True, "sampling_parameters": sampling}
    return {"text_input": prompt, "max_tokens": max_tokens, "end_id": -1, "stream": True}


def body(model: str, max_tokens: int, num_prompt: int = 0) -> dict[str, object]:
    """The same over HTTP."""
    inputs = asking(model, max_tokens, num_prompt)
    return {k: v.ravel().tolist() if isinstance(v, np.ndarray) else v for k, v in inputs.items()}


def refusal(client: Client, model: str, protocol: str, num_prompt: int = 0) -> str:
    """The error of a request."""
    try:
        if protocol == "grpc":
            client.stream(model, timeout_s=120.0, **asking(model, 4, num_prompt))
        elif protocol == "http stream":
            client.events(model, **body(model, 4, num_prompt))
        else:
            is_streaming = "streaming" if model == "tensorrt_llm" else "stream"
            client.generate(model, **body(model, 4, num_prompt) | {is_streaming: False})
    except RequestError as error:
        return str(error)
    return "no error"


@contextlib.contextmanager
def streams(client: Client, number: int, max_tokens: int, num_prompt: int = 0) -> Iterator[None]:
    """So many requests at once, which are left in the end. More than may wait would be refused."""
    opened = []
    with grpcclient.InferenceServerClient(client.address) as one:
        one.start_stream(lambda result, error: opened.append((result, error)))
        for _ in range(number):  # none of them finds another one's blocks
            asked = asking("tensorrt_llm", max_tokens, num_prompt, next(_FIRSTS))
            one.async_stream_infer("tensorrt_llm", client.tensors("tensorrt_llm", asked))
        try:
            yield
        finally:  # or the client would wait for all of them
            one.stop_stream(cancel_requests=True)


def wait_for(client: Client, is_so: Callable[[dict[str, int]], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so(state := client.health()):
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


def test_too_many_requests_are_refused_at_once_everywhere(small):
    with contextlib.ExitStack() as stack:
        stack.enter_context(streams(small, MAX_SEQS, LONG))  # none of them ends meanwhile
        wait_for(small, lambda state: state["running"] == MAX_SEQS)
        stack.enter_context(streams(small, MAX_WAITING, LONG))
        wait_for(small, lambda state: state["waiting"] >= MAX_WAITING)
        for model in MODELS:
            for protocol in ("grpc", "http stream", "http"):
                error = refusal(small, model, protocol)
                found = FULL.search(error)
                assert found, (model, protocol, error)
                assert 50 <= int(found[1]) <= 30_000
    small.wait_idle(120)


def test_an_ensemble_is_refused_by_its_first_step(small):
    """The first step refuses once the engine is full; a request for token ids alone is answered."""
    url = small.server.endpoints.metrics
    name, labels = "slipstream_refusals_total", {"model": "preprocessing", "reason": "max_waiting"}

    def refused() -> float:
        page = wait_for_page(url, lambda page: True)
        return page.get(name, **labels) if labels in page.labels(name) else 0.0

    before, deadline = refused(), time.monotonic() + 60
    with streams(small, MAX_SEQS, LONG):
        wait_for(small, lambda state: state["running"] == MAX_SEQS)
        with streams(small, MAX_WAITING, LONG):
            wait_for(small, lambda state: state["waiting"] >= MAX_WAITING)
            while refused() == before:  # it is told once a second
                assert time.monotonic() < deadline
                with contextlib.suppress(RequestError, queue.Empty):  # one may have ended
                    small.stream("ensemble", timeout_s=2, **asking("ensemble", 4))
            [answer] = small.stream("preprocessing", QUERY=PROMPT, REQUEST_OUTPUT_LEN=4)
            assert answer["INPUT_ID"].size > 0
    small.wait_idle(120)


@pytest.mark.rest
@pytest.mark.beside
def test_too_many_tokens_are_refused_at_once_everywhere(small):
    with contextlib.ExitStack() as stack:
        stack.enter_context(streams(small, MAX_SEQS, LONG))
        wait_for(small, lambda state: state["running"] == MAX_SEQS)
        # Of 1,001 tokens each, 16 may wait.
        stack.enter_context(streams(small, 16, LONG, num_prompt=1001))
        wait_for(small, lambda state: state["waiting"] >= 16)
        for model in MODELS:
            for protocol in ("grpc", "http stream", "http"):
                error = refusal(small, model, protocol, num_prompt=1900)
                pattern = (
                    rf"UNAVAILABLE: the engine is full: \d+ requests wait with \d+ tokens, "
                    rf"max_waiting_tokens is {MAX_WAITING_TOKENS}, this prompt has \d+ "
                    r"\(\d+ sequences are running\); retry_after_ms: (\d+)"
                )
                found = re.search(pattern, error)
                assert found, (model, protocol, error)
                assert 50 <= int(found[1]) <= 30_000
    small.wait_idle(120)


def test_serve_says_the_bounds_when_it_is_ready(small):
    log = _EngineLog(small.server.runtime.log, io.StringIO())
    log.show()
    assert f"at most {MAX_WAITING} requests with {MAX_WAITING_TOKENS:,} tokens wait" in log.banner


@pytest.fixture
def tenth(tmp_path) -> Iterator[Client]:
    """A few sequences at a time, and the cache holds two of them."""
    options = ["--max-num-seqs", str(MAX_SEQS), "--kv-cache-tokens", "2048", "--dtype", "float32"]
    repository = compose(CHECKPOINT, tmp_path / "models", *options)
    with serving(repository, tmp_path / "server.log") as client:
        yield client


@pytest.mark.slow  # a small soak, in test_soak.py, has as small a cache
def test_a_cache_of_a_tenth_of_what_is_asked_for(tenth):
    """2,048 tokens for 20 requests of 1,030: everything completes, as if alone."""

    def ask(number: int) -> list[int]:
        asked = asking("tensorrt_llm", 200, num_prompt=830, first=1000 + number)
        responses = tenth.iterate("tensorrt_llm", timeout_s=120, **asked)
        return [int(i) for response in responses for i in response["output_ids"].ravel()]

    wanted = [ask(number) for number in range(MAX_WAITING)]
    before = preemptions(tenth)
    with ThreadPoolExecutor(MAX_WAITING) as pool:
        with held(tenth, MAX_WAITING):
            answers = [pool.submit(ask, number) for number in range(MAX_WAITING)]
        assert [answer.result() for answer in answers] == wanted
    tenth.wait_idle(120)
    assert 0 < preemptions(tenth) - before <= 3 * len(answers)


@pytest.fixture
def tiny(tmp_path) -> Iterator[Client]:
    """All may run, but the cache holds two of them."""
    options = ["--kv-cache-tokens", "256", "--request-log", str(tmp_path / "requests.jsonl")]
    repository = compose(CHECKPOINT, tmp_path / "models", *options, "--dtype", "float32")
    with serving(repository, tmp_path / "server.log") as client:
        yield client


@pytest.mark.rest
@pytest.mark.beside
def test_nobody_is_preempted_again_and_again_where_a_tenth_fits(tiny):
    """20 requests of 128 tokens, each prompt through both wirings: all complete, as if alone."""
    numbers = range(20)

    def ask(number: int, name: str = "") -> str:
        model = ("ensemble", "tensorrt_llm_bls")[number % 2]
        prompt = f"def read_{number // 2}(path):\n    "
        asked = {"text_input": prompt, "max_tokens": 116, "end_id": -1, "stream": True}
        return text(tiny.iterate(model, name, timeout_s=120, **asked))

    wanted = [alone for number in numbers[::2] for alone in [ask(number)] * 2]
    before = preemptions(tiny)
    with ThreadPoolExecutor(len(numbers)) as pool:
        with held(tiny, len(numbers)):
            answers = [pool.submit(ask, number, str(number)) for number in numbers]
        assert [answer.result() for answer in answers] == wanted
    log = (tiny.server.repository.parent / "requests.jsonl").read_text()
    lines = [line for line in map(json.loads, log.splitlines()) if line["id"]]
    assert sorted(int(line["id"]) for line in lines) == list(numbers)
    assert {tuple(line["finish_reasons"]) for line in lines} == {("length",)}
    counts = [line["num_preemptions"] for line in lines]
    assert 0 < max(counts) <= 3, counts
    assert preemptions(tiny) - before == sum(counts)


@contextlib.contextmanager
def held(client: Client, number: int) -> Iterator[None]:
    """Hold the engine until so many requests, which the block sends, wait for it: all come at once.

    The ensemble's are in the hands of `tensorrt_llm`.
    """
    engine, runtime = client.health()["engine_pid"], client.server.runtime
    os.kill(engine, signal.SIGSTOP)
    try:
        yield
        begin = time.monotonic()
        while (
            sum(
                inflight.count_clients(runtime.in_flight(model, pid))
                for model in ("tensorrt_llm", "tensorrt_llm_bls")
                for pid in client.stubs(model)
            )
            < number
        ):
            assert time.monotonic() - begin < 120
            time.sleep(0.01)
    finally:
        os.kill(engine, signal.SIGCONT)


def preemptions(client: Client) -> float:
    """So far, as the server's metrics say."""
    url, name = client.server.endpoints.metrics, "vllm:num_preemptions_total"
    return settled(url, lambda page: name in page.names).get(name)


@pytest.mark.rest
@pytest.mark.beside
def test_27_megabytes_are_refused_everywhere_and_cost_next_to_nothing(small):
    """By processor time, of which a tokenizer would take minutes for all of the texts."""
    words = "word and " * (BIG // 9)
    ids = np.full((1, BIG // 4), 999, np.int32)
    before_s = processor_s(small)
    for model in MODELS:
        inputs = asking(model, 4)
        if model == "tensorrt_llm":
            inputs |= {"input_ids": ids, "input_lengths": ids.shape[1]}
            data = {"input_ids": [999] * (BIG // 5), "input_lengths": BIG // 5}
        else:
            inputs |= {"text_input": words}
            data = {"text_input": words}
        with pytest.raises(RequestError, match=r"INVALID_ARGUMENT: .*(the|of 2048|context)"):
            small.stream(model, **inputs)
        encoded = json.dumps(body(model, 4) | data).encode()
        status, answer = small.post(f"{model}/generate_stream", encoded)
        assert status == 400
        assert "INVALID_ARGUMENT" in answer, answer[:300]
    assert processor_s(small) - before_s < 60
    assert small.server.exit_code is None
    assert small.generate("ensemble", text_input=PROMPT, max_tokens=2)


def processor_s(client: Client) -> float:
    """Processor time of all processes of a server so far."""
    times = [psutil.Process(pid).cpu_times() for pid in client.server.processes()]
    return sum(each.user + each.system for each in times)


@pytest.mark.parametrize("kind", ["int64_param", "uint64_param", "string_param"])
@pytest.mark.rest
def test_a_grpc_parameter_priority_is_tritons_own(small, kind):
    """99 is none of ours: whoever is told of it would refuse it."""
    request = request_of("tensorrt_llm_bls", PROMPT, {"max_tokens": 2}, "")
    setattr(request.parameters["priority"], kind, "99" if kind == "string_param" else 99)
    with grpc.insecure_channel(small.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        errors = [reply.error_message for reply in stub.ModelStreamInfer(iter([request]))]
    if kind == "string_param":
        assert "'priority' parameter" in errors[0]
    else:
        assert not any(errors)
    with pytest.raises(RequestError, match="priority is 99"):
        small.generate("tensorrt_llm_bls", text_input=PROMPT, max_tokens=2, priority=99)


# --- Triton's own queues --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def queued(tmp_path_factory) -> Iterator[Client]:
    """Models with queues of Triton's in front, each of one process that can be made to stand still.

    And an engine that takes one after the other.
    """
    folder = tmp_path_factory.mktemp("queued")
    options = ["--max-num-seqs", "1", "--max-waiting", "64"]
    repository = compose(CHECKPOINT, folder / "models", *options)
    for model in ("preprocessing", "tensorrt_llm_bls"):
        add_queues(repository / model / "config.pbtxt")
    with serving(repository, folder / "server.log") as client:
        yield client


def add_queues(path: Path) -> None:
    plain = re.sub(r"dynamic_batching \{.*\}\n", "", path.read_text())
    plain = plain.replace("{ count: 2 ", "{ count: 1 ")
    path.write_text(plain.replace("\ninstance_group", f"\n{QUEUES}\ninstance_group", 1))


@pytest.mark.parametrize(
    ("model", "stub"),
    [("ensemble", "preprocessing"), ("tensorrt_llm_bls", "tensorrt_llm_bls")],
)
@pytest.mark.rest
def test_triton_keeps_its_own_priorities_and_queue_policies(queued, model, stub):
    """While the model's process stands still, and for less than the second after which Triton takes
    it for dead, requests wait in Triton's queue. Where the machine is late, it is tried again.
    """
    for _ in range(8):
        answers, is_in_time = ask_in_levels(queued, model, stub)
        if is_in_time:
            break
        wait_served(queued, model)
    assert is_in_time
    assert all("Exceeds maximum queue size" in error for _, error in answers[:2])
    order = [name for name, error in answers if not error]
    assert sorted(order) == ["1a", "1b", "2-0", "2-1", "2-2", "2a", "3a", "3b", "first"]
    assert order.index("1a") < order.index("2a") < order.index("3a")
    assert order.index("1b") < order.index("2-1") < order.index("3b")
    assert any("timeout expired" in error for _, error in answers), answers


def wait_served(client: Client, model: str) -> None:
    begin = time.monotonic()
    while True:
        with contextlib.suppress(RequestError, queue.Empty):
            client.stream(model, **asking(model, 2))
            return
        assert time.monotonic() - begin < 120
        time.sleep(0.1)


def ask_in_levels(client: Client, model: str, stub: str) -> tuple[list[tuple[str, str]], bool]:
    """Send requests of each level while the process of a model stands still.

    Returns ids and errors in the order of their answers, and whether all came as they should: the
    first was at the model before the others, two were refused, and the process went on in time.
    """
    answers: list[tuple[str, str]] = []  # request, error

    def hear(result: object, error: object) -> None:
        response = None if result is None else result.get_response()
        if response is None or response.outputs:
            answers.append(("" if response is None else response.id, str(error or "")))

    inputs = client.tensors(model, asking(model, 2) | {"stream": False})
    client.stream(model, **asking(model, 2))  # its process is up
    pid = client.stub(stub)
    with grpcclient.InferenceServerClient(client.address) as remote:
        remote.start_stream(hear)

        def ask(name: str, **urgency: int) -> None:
            remote.async_stream_infer(model, inputs, request_id=name, **urgency)

        begin = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            ask("first")  # it is at the model already
            time.sleep(0.1)
            for name, priority in [("3a", 3), ("3b", 3), ("2a", 0), ("1a", 1), ("1b", 1)]:
                ask(name, priority=priority)
            ask("late", timeout=50_000)
            for number in range(5):  # with 2a and late there are seven of a level for five
                ask(f"2-{number}")
            while (passed_s := time.monotonic() - begin) < 0.4 or (
                len(answers) < 2 and passed_s < 0.7
            ):
                time.sleep(0.01)
            num_refused = len(answers)
        finally:
            os.kill(pid, signal.SIGCONT)
        is_in_time = num_refused == 2 and time.monotonic() - begin < 0.7
        until = time.monotonic() + 120
        while is_in_time and len(answers) < 12 and time.monotonic() < until:
            time.sleep(0.05)
        remote.stop_stream()
    return answers, is_in_time
