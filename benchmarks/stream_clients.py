"""Clients that only note times and bytes while streams run, a process for many streams.

What was noted is read when all have ended: parsing would make a client late.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import numpy as np
from slipstream_client.client import CHANNEL_OPTIONS
from slipstream_client.codec import chunks_of, request_of
from tritonclient.grpc import service_pb2

_STREAMS_PER_CHANNEL = 64
_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_NS = 1_000_000_000


@dataclass
class Received:
    """One stream as its client saw it."""

    seed: int
    opened_ns: int
    times_ns: np.ndarray  # int64, of each response
    counts: np.ndarray  # int64, tokens of each response, as it says itself if it was asked to
    text: bytes
    error: str = ""


@dataclass(frozen=True)
class Prompt:
    """A request. Its id is its seed, so that whoever sees the one can tell the other."""

    seed: int
    text: str
    max_tokens: int


@dataclass(frozen=True)
class Load:
    """What a client's process does."""

    address: str
    model: str
    slots: Sequence[Sequence[Prompt]]  # side by side; the prompts of a slot one after the other
    begin_ns: int
    timeout_s: float
    has_counts: bool  # ask for the number of tokens too, as the SDK does
    is_greedy: bool = False  # and without an early end


def lengths_of(slot: int, num_slots: int, total: int, longest: int) -> list[int]:
    """Return the tokens of each stream of a slot, one after another, `total` or some more in all.

    A stream has `longest` at most; each slot begins its next one at another time.
    """
    if total <= longest:
        return [total]
    first = max(4, longest * (slot + 1) // num_slots)
    rest = max(4, total - first)
    return [first, *[longest] * (rest // longest), max(4, rest % longest)]


_Raw = tuple[int, int, list[tuple[int, bytes]], str]  # seed, opened, responses, error


def receive(load: Load) -> tuple[list[Received], float]:
    """From `begin_ns` on ask and read all prompts to their ends; also the CPU seconds of that."""
    requests = [[_request(load, prompt) for prompt in slot] for slot in load.slots]
    time.sleep(max(0.0, (load.begin_ns - time.time_ns()) / _NS))
    gc.disable()  # while streams run
    try:
        begin_s = time.process_time()
        found = asyncio.run(_receive_all(load, requests))
        seconds = time.process_time() - begin_s
    finally:
        gc.enable()
    return [parse(*raw, load.has_counts) for raw in found], seconds


def _request(load: Load, prompt: Prompt) -> bytes:
    parameters: dict[str, object] = {"max_tokens": prompt.max_tokens, "seed": prompt.seed}
    if load.is_greedy:
        parameters |= {"min_tokens": prompt.max_tokens, "temperature": 0.0}
    parameters |= {
        "return_num_input_tokens": load.has_counts,
        "return_num_output_tokens": load.has_counts,
    }
    request = request_of(load.model, prompt.text, parameters, str(prompt.seed))
    return bytes(request.SerializeToString())


async def _receive_all(load: Load, requests: list[list[bytes]]) -> list[_Raw]:
    options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    async with contextlib.AsyncExitStack() as stack:
        slots = []
        for number, (prompts, messages) in enumerate(zip(load.slots, requests, strict=True)):
            if number % _STREAMS_PER_CHANNEL == 0:
                new = grpc.aio.insecure_channel(load.address, options=options)
                channel = await stack.enter_async_context(new)
            slots.append(_receive_slot(channel, load, prompts, messages))
        return [raw for found in await asyncio.gather(*slots) for raw in found]


async def _receive_slot(
    channel: grpc.aio.Channel, load: Load, prompts: Sequence[Prompt], requests: list[bytes]
) -> list[_Raw]:
    pairs = zip(prompts, requests, strict=True)
    return [await _receive_one(channel, load, prompt.seed, data) for prompt, data in pairs]


async def _receive_one(channel: grpc.aio.Channel, load: Load, seed: int, request: bytes) -> _Raw:
    responses: list[tuple[int, bytes]] = []
    method = channel.stream_stream(_METHOD, None, None)
    opened_ns = time.time_ns()
    call = method(iter([request]), timeout=load.timeout_s)
    error = ""
    try:
        async for data in call:
            responses.append((time.time_ns(), data))
    except grpc.RpcError as failure:
        error = f"{failure.code().name}: {failure.details()}"
    return seed, opened_ns, responses, error


def parse(
    seed: int, opened_ns: int, responses: list[tuple[int, bytes]], error: str, has_counts: bool
) -> Received:
    """A stream from what was noted of it. Without counts its tokens are taken for a byte each."""
    texts, counts = [], []
    for _, data in responses:
        message = service_pb2.ModelStreamInferResponse.FromString(data)
        if message.error_message:
            error = message.error_message
            break
        chunk = chunks_of(message.infer_response)[0]
        texts.append(chunk.text.encode())
        counts.append(chunk.num_output_tokens if has_counts else len(texts[-1]))
    times = np.array([time_ns for time_ns, _ in responses[: len(texts)]], np.int64)
    if None in counts:
        error = error or "a response does not say how many tokens it holds"
        counts = [count or 0 for count in counts]
    return Received(seed, opened_ns, times, np.array(counts, np.int64), b"".join(texts), error)
