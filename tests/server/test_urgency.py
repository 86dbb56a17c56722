"""Timeouts, priorities and full queues on the real server, in every wiring and protocol."""

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest
from fixtures.server.support import (
    KV_CACHE_TOKENS,
    PROMPT,
    TEXT_MODELS,
    Client,
    RequestError,
    compose,
    lasting,
    long_checkpoint,
    serving,
    text,
)
from fixtures.tiers import quick_of
from slipstream.engine.waiting import OLDEST_EVERY

pytestmark = [pytest.mark.triton, pytest.mark.beside]

T = TypeVar("T")
MODELS = (*TEXT_MODELS, "vllm_model", "tensorrt_llm")
EXPIRED = re.compile(
    r"DEADLINE_EXCEEDED: (\d+) ms have passed, of (\d+) asked for by timeout_ms or timeout; "
    r"(\d+) tokens were generated"
)


def content(model: str, responses: list[dict[str, object]]) -> str | list[int]:
    """Text or token ids of a stream, over gRPC or HTTP."""
    if model == "tensorrt_llm":
        return [int(i) for response in responses for i in np.ravel(response["output_ids"])]
    if all(isinstance(response["text_output"], str) for response in responses):
        return "".join(response["text_output"] for response in responses)
    return text(responses)


def expired(ask: Callable[[int], Iterator[T]]) -> tuple[list[T], int]:
    """Responses before a deadline, and the number of tokens that its error says.

    400 ms are enough for a token, unless the machine has much else to do: then they are doubled.
    """
    for timeout_ms in (400 << doubled for doubled in range(8)):
        responses: list[T] = []
        with pytest.raises(RequestError) as caught:
            responses.extend(ask(timeout_ms))
        found = EXPIRED.search(str(caught.value))
        assert found, caught.value
        passed_ms, asked_ms, num_tokens = map(int, found.groups())
        assert passed_ms >= asked_ms == timeout_ms
        if num_tokens:
            break
    assert num_tokens > 0
    return responses, num_tokens


def in_turn(names: list[str], quick: tuple[str, ...]) -> list[object]:
    """Every model with each name; in the quick tier, each of these with one."""
    pairs = [(model, name) for model in MODELS for name in names]
    return quick_of(pairs, [(model, names[i % len(names)]) for i, model in enumerate(quick)])


@pytest.mark.parametrize(
    "asked", in_turn(["timeout_ms", "timeout of Triton"], MODELS[1:4]), ids="-".join
)
def test_a_stream_ends_at_its_deadline_with_all_it_has(idle, asked):
    model, name = asked
    request = lasting(model) | {"return_num_output_tokens": True}

    def ask(timeout_ms: int):
        if name == "timeout_ms":
            return idle.iterate(model, parameters={name: timeout_ms}, **request)
        return idle.iterate(model, timeout_us=timeout_ms * 1000, **request)

    responses, num_tokens = expired(ask)
    counts = [int(response["num_output_tokens"].ravel()[0]) for response in responses]
    assert sum(counts) == num_tokens
    got = content(model, responses)
    whole = content(model, idle.stream(model, **lasting(model, num_tokens)))
    assert whole == got


@pytest.mark.parametrize(
    "asked", in_turn(["timeout", "timeout_ms"], ("vllm_model", "tensorrt_llm")), ids="-".join
)
def test_over_http(idle, asked):
    model, name = asked
    unit = 1 if name == "timeout_ms" else 1000

    def ask(timeout_ms: int):
        body = {name: timeout_ms * unit, "return_num_output_tokens": True}
        status, answer = idle.post(f"{model}/generate_stream", lasting(model) | body)
        assert status == 200
        *events, rest = answer.split("\n\n")
        assert rest == ""
        *responses, last = [json.loads(event.removeprefix("data: ")) for event in events]
        assert not any("error" in response for response in responses)
        yield from responses
        raise RequestError(last["error"])

    responses, num_tokens = expired(ask)
    assert sum(response["num_output_tokens"] for response in responses) == num_tokens
    whole = content(model, idle.stream(model, **lasting(model, num_tokens + 8)))
    got = content(model, responses)
    assert 0 < len(got) < len(whole)
    assert whole[: len(got)] == got


@pytest.mark.parametrize("model", quick_of(MODELS, ("ensemble", "tensorrt_llm")))
def test_without_streaming_there_is_the_error_alone(idle, model):
    request = lasting(model)
    request["streaming" if model == "tensorrt_llm" else "stream"] = False

    def ask(timeout_ms: int):
        yield idle.generate(model, **request, timeout_ms=timeout_ms)

    assert expired(ask)[0] == []
    assert expired(lambda ms: idle.iterate(model, timeout_us=ms * 1000, **request))[0] == []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"timeout_ms": -1}, "timeout_ms is -1, not a whole number from 1 to 86400000"),
        ({"timeout_ms": "soon"}, "timeout_ms is 'soon', not a whole number"),
        ({"request_priority": 10}, "request_priority is 10, not a whole number from 0 to 9"),
    ],
)
def test_bad_values_are_refused_by_name(idle, model, parameters, words):
    with pytest.raises(RequestError, match=f"INVALID_ARGUMENT: {words}"):
        list(idle.iterate(model, parameters=parameters, **lasting(model)))
    with pytest.raises(RequestError, match=f"INVALID_ARGUMENT: {words}"):
        idle.generate(model, **lasting(model), **parameters)


@pytest.mark.parametrize("model", MODELS)
def test_a_priority_is_taken(idle, model):
    request = lasting(model, 4)
    assert list(idle.iterate(model, parameters={"request_priority": 0}, **request))
    assert idle.events(model, **request, priority=9)
    with pytest.raises(RequestError, match="INVALID_ARGUMENT: priority is 10, not a whole number"):
        idle.events(model, **request, priority=10)


def hang(
    idle: Client, asked: dict[str, dict[str, object]], timeout_ms: int
) -> tuple[dict[str, object], list[str], bool]:
    """Stop the engine under streams with and without a deadline, until those with one have ended.

    Returns what the others got, the errors, and whether it stood still before the first deadline.
    """
    got: dict[str, object] = {}
    errors: list[str] = []
    begun, stopped = threading.Semaphore(0), threading.Event()

    def stay(model: str) -> None:
        stream = idle.iterate(model, **asked[model])
        first = next(stream)
        begun.release()
        got[model] = content(model, [first, *stream])

    def expire(model: str) -> None:
        stream = idle.iterate(model, parameters={"timeout_ms": timeout_ms}, **lasting(model))
        with contextlib.suppress(RequestError):  # where it was too late
            next(stream)
        begun.release()
        collect(lambda: list(stream))

    def expire_later(ask: Callable[..., object], model: str, **timeout: object) -> None:
        stopped.wait(120)
        collect(lambda: ask(model, **timeout, **lasting(model)))

    def collect(ask: Callable[[], object]) -> None:
        try:
            errors.append(f"no error: {ask()}")
        except RequestError as error:
            errors.append(str(error))

    threads = []
    for model in MODELS:
        threads += [threading.Thread(target=each, args=(model,)) for each in (stay, expire)]
        for ask, timeout in ((idle.stream, "timeout_us"), (idle.events, "timeout")):
            pair, more = (ask, model), {timeout: timeout_ms * 1000}
            threads.append(threading.Thread(target=expire_later, args=pair, kwargs=more))
    engine = idle.health()["engine_pid"]
    started_s = time.monotonic()
    for thread in threads:
        thread.start()
    assert all(begun.acquire(timeout=120) for _ in range(2 * len(MODELS)))
    os.kill(engine, signal.SIGSTOP)
    is_in_time = time.monotonic() - started_s < timeout_ms / 1000
    try:
        stopped.set()
        begin = time.monotonic()
        while len(errors) < 3 * len(MODELS):
            assert time.monotonic() - begin < 120, errors
            time.sleep(0.05)
    finally:
        os.kill(engine, signal.SIGCONT)
    for thread in threads:
        thread.join(120)
    return got, errors, is_in_time


@pytest.mark.rest
def test_a_hung_engine_outlives_a_deadline_by_a_second_and_goes_on_unharmed(idle):
    """The engine stands still: its bridges end what has a deadline, and nothing else."""
    asked = {model: lasting(model, 80) for model in MODELS}
    want = {model: content(model, idle.stream(model, **asked[model])) for model in MODELS}
    for timeout_ms in (5000, 10_000, 20_000, 40_000):  # a busy machine takes long to begin
        got, errors, is_in_time = hang(idle, asked, timeout_ms)
        assert got == want
        if is_in_time:
            break
    assert is_in_time
    for error in errors:
        found = re.search(
            rf"DEADLINE_EXCEEDED: (\d+) ms have passed, of {timeout_ms} asked for by timeout_ms or "
            r"timeout; the engine has not ended it",
            error,
        )
        assert found, error
        assert int(found[1]) >= timeout_ms + 1000


# --- a small server -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """One sequence at a time, and two may wait."""
    folder = tmp_path_factory.mktemp("narrow")
    options = ["--max-num-seqs", "1", "--max-waiting", "2", "--max-waiting-tokens", "1000"]
    options += ["--request-log", str(folder / "requests.jsonl")]
    options += ["--kv-cache-tokens", str(KV_CACHE_TOKENS)]
    repository = compose(long_checkpoint(folder / "checkpoint"), folder / "models", *options)
    with serving(repository, folder / "server.log") as client:
        yield client


def wait_waiting(client, number: int) -> None:
    begin = time.monotonic()
    while client.health()["waiting"] != number:
        assert time.monotonic() - begin < 120, client.health()
        time.sleep(0.01)


def ended(client: Client) -> list[dict[str, object]]:
    """Requests that the engine took, in the order of their ends."""
    log = client.server.repository.parent / "requests.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


def wait_ended(client: Client, number: int) -> list[dict[str, object]]:
    """Wait until the log has that many requests: a line may come after its client's answer."""
    begin = time.monotonic()
    while len(lines := ended(client)) < number:
        assert time.monotonic() - begin < 120, lines
        time.sleep(0.01)
    return lines


def ask(client: Client, protocol: str, model: str, name: str, priority: int) -> threading.Thread:
    """A request of that id, which waits."""

    def run() -> None:
        if protocol == "http":
            client.events(model, **lasting(model, 4), id=name, priority=priority)
        else:
            parameters = {"request_priority": priority}
            client.stream(model, name, parameters=parameters, **lasting(model, 4))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def check_refused(client: Client, reason: str, **prompts: dict[str, object]) -> None:
    """By every model, over both protocols; `prompts` are inputs of models."""
    pattern = (
        rf"UNAVAILABLE: the engine is full: \d requests wait with \d+ tokens, {reason} "
        r"\(1 sequences are running\); retry_after_ms: (\d+)"
    )
    for model in MODELS:
        request = lasting(model, 4) | prompts.get(model, {})
        is_streaming = "streaming" if model == "tensorrt_llm" else "stream"
        for call in (client.stream, client.events, client.generate):
            with pytest.raises(RequestError) as caught:
                call(model, **request | {is_streaming: call != client.generate})
            found = re.search(pattern, str(caught.value))
            assert found, (model, call, str(caught.value))
            assert 50 <= int(found[1]) <= 30_000


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.rest
def test_the_higher_priority_is_admitted_first(narrow, model, protocol):
    num_before = len(ended(narrow))
    running = narrow.iterate("ensemble", **lasting("ensemble"))
    next(running)
    threads = [ask(narrow, protocol, model, "low", 9)]
    wait_waiting(narrow, 1)
    threads.append(ask(narrow, protocol, model, "high", 0))
    wait_waiting(narrow, 2)
    num_admitted = 1 + sum(line["queue_s"] is not None for line in ended(narrow))
    running.close()
    for thread in threads:
        thread.join(120)
    _, first, second = wait_ended(narrow, num_before + 3)[num_before:]
    # Or it is the turn of the one that has waited longest, whatever its priority.
    is_turn_of_oldest = num_admitted % OLDEST_EVERY == OLDEST_EVERY - 1
    want = [("low", 9), ("high", 0)] if is_turn_of_oldest else [("high", 0), ("low", 9)]
    assert [(line["id"], line["priority"]) for line in (first, second)] == want
    narrow.wait_idle(120)


@pytest.mark.rest
def test_a_full_queue_refuses_everywhere(narrow):
    running = narrow.iterate("ensemble", **lasting("ensemble"))
    next(running)
    threads = [ask(narrow, "grpc", "ensemble", name, 5) for name in ("one", "two")]
    wait_waiting(narrow, 2)
    check_refused(narrow, "max_waiting is 2")
    running.close()
    for thread in threads:
        thread.join(120)
    narrow.wait_idle(120)


@pytest.mark.rest
def test_one_that_waits_is_over_time_too(narrow):
    running = narrow.iterate("ensemble", **lasting("ensemble"))
    next(running)
    waiting = r"DEADLINE_EXCEEDED: \d+ ms .*; it was waiting"
    for model in MODELS:
        request = lasting(model, 4)
        with pytest.raises(RequestError, match=waiting):
            narrow.stream(model, parameters={"timeout_ms": 100}, **request)
        with pytest.raises(RequestError, match=waiting):
            narrow.events(model, timeout=100_000, **request)
    running.close()
    narrow.wait_idle(120)


@pytest.mark.rest
def test_too_many_tokens_wait(narrow):
    running = narrow.iterate("ensemble", **lasting("ensemble"))
    next(running)
    waiting = threading.Thread(
        target=narrow.stream,
        args=("ensemble",),
        kwargs={"text_input": PROMPT * 60, "max_tokens": 1},
    )
    waiting.start()
    wait_waiting(narrow, 1)
    longer = {model: {"text_input": PROMPT * 150} for model in MODELS}
    longer["tensorrt_llm"] = {"input_ids": [5] * 800, "input_lengths": 800}
    check_refused(narrow, r"max_waiting_tokens is 1000, this prompt has \d+", **longer)
    running.close()
    waiting.join(120)
    narrow.wait_idle(120)
