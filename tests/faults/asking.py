"""The requests of a storm, of all models and over gRPC and HTTP, and their answers."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache

import numpy as np
from faults.planter import VICTIM
from server.support import CHECKPOINT, PROMPT, Client, RequestError
from slipstream_contract import whole
from slipstream_preprocessing.tokenizer import load_tokenizer

MODELS = ("ensemble", "tensorrt_llm_bls", "vllm_model", "tensorrt_llm")
_TEMPERATURE = 0.75  # the same number as FP32 tensor and as JSON


class ClosedError(Exception):
    """The connection ended before the answer did, and nothing said why."""


class CutError(RequestError):
    """The answer ended in good order and too early, which is never right (docs/faults.md)."""


@dataclass(frozen=True)
class Ask:
    """One request; the answer is streamed, and `tensorrt_llm` answers with token ids."""

    model: str
    prompt: str
    seed: int
    max_tokens: int = 60
    is_greedy: bool = False
    is_http: bool = False
    end_id: int = 0  # of `vllm_model` only whether there is one: below 0 there is none

    @property
    def is_victim(self) -> bool:
        """Whether faults are aimed at it."""
        return self.seed == VICTIM

    @property
    def body(self) -> dict[str, object]:
        """Of HTTP `generate_stream`; its names and values are those of the tensors, too."""
        how: dict[str, object] = {"temperature": _TEMPERATURE, "seed": self.seed}
        if self.model == "vllm_model":
            how |= {"temperature": 0.0} if self.is_greedy else {}
            how |= {"max_tokens": self.max_tokens, "ignore_eos": self.end_id < 0}
            sampling = json.dumps(how)
            shared = {"text_input": self.prompt, "exclude_input_in_output": True}
            return shared | {"sampling_parameters": sampling, "stream": True}
        top_k = "runtime_top_k" if self.model == "tensorrt_llm" else "top_k"
        how |= {"temperature": 1.0, top_k: 1} if self.is_greedy else {top_k: 0}
        how["end_id"] = self.end_id
        if self.model == "tensorrt_llm":
            ids = _ids(self.prompt)
            lengths = {"input_lengths": len(ids), "request_output_len": self.max_tokens}
            return how | lengths | {"input_ids": list(ids), "streaming": True}
        return how | {"text_input": self.prompt, "max_tokens": self.max_tokens, "stream": True}


def asks(
    num: int,
    max_tokens: int = 60,
    victim: str = "",
    is_http: bool = False,
    models: tuple[str, ...] = MODELS,
) -> list[Ask]:
    """Requests of these models in turn, each with a prompt of its own, half of them over HTTP.

    The last one is the victim, where a model is named for it, over gRPC or over HTTP.
    """
    found = [
        Ask(models[i % len(models)], f"{PROMPT}x{i} = ", 100 + i, max_tokens, i % 3 == 0, _turn(i))
        for i in range(num)
    ]
    if victim:
        found.append(Ask(victim, f"{PROMPT}victim = ", VICTIM, max_tokens, is_http=is_http))
    return found


def _turn(index: int) -> bool:
    """Of eight in a row, one of each model over HTTP and one over gRPC."""
    return (index + index // 4) % 2 == 1


@cache
def _ids(prompt: str) -> tuple[int, ...]:
    return tuple(load_tokenizer(CHECKPOINT).encode(prompt).ids)


def pieces(client: Client, ask: Ask, timeout_s: float) -> Iterator[str]:
    """The answer as it comes; of token ids each with a blank after it.

    Raises RequestError with what the server said, CutError, ClosedError, or an error of the client.
    """
    yield from (_over_http if ask.is_http else _over_grpc)(client, ask, timeout_s)


def _over_grpc(client: Client, ask: Ask, timeout_s: float) -> Iterator[str]:
    inputs = dict(ask.body)
    if ask.model == "tensorrt_llm":
        inputs["input_ids"] = np.array(inputs["input_ids"], np.int32)[None]
    try:
        for part in client.iterate(ask.model, "", timeout_s, **inputs):
            if ask.model == "tensorrt_llm":
                yield _told(part["output_ids"].ravel().tolist())
            else:
                yield part["text_output"].ravel()[0].decode()
    except RequestError as error:
        if "[StatusCode." in str(error):  # of the call, not of the request
            raise ClosedError(str(error)) from None
        raise


def _over_http(client: Client, ask: Ask, timeout_s: float) -> Iterator[str]:
    error, is_whole = "", False
    try:
        for event in _events(client, ask, timeout_s):
            if error:
                raise RequestError(f"an event after its error: {event}")
            is_whole = is_whole or whole.is_last(event)
            if "error" in event:
                error = str(event["error"])
            elif "output_ids" in event:
                ids = event["output_ids"]
                yield _told(ids if isinstance(ids, list) else [ids])
            else:
                yield str(event["text_output"])
    except (http.client.HTTPException, ConnectionError) as closed:
        raise ClosedError(f"{type(closed).__name__}: {closed}") from None
    if error:
        raise RequestError(error)
    if not is_whole:
        raise CutError(whole.CUT)


def _events(client: Client, ask: Ask, timeout_s: float) -> Iterator[dict[str, object]]:
    """Also of a refusal, whose body is one event or bare JSON."""
    rest, url = b"", f"/v2/models/{ask.model}/generate_stream"
    link = http.client.HTTPConnection(client.http.removeprefix("http://"), timeout=timeout_s)
    with closing(link):
        link.request("POST", url, json.dumps(ask.body | whole.mark_of(ask.model)))
        reply = link.getresponse()
        while chunk := reply.read1():  # readline() takes a connection that breaks for the end
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                yield json.loads(event.removeprefix(b"data: "))
    if rest.strip():
        yield json.loads(rest.removeprefix(b"data: "))


def _told(ids: list[int]) -> str:
    return "".join(f"{token_id} " for token_id in ids)
