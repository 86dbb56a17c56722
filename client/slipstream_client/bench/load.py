"""Generate load: due times, lengths, prompts and requests. Seeded, no network."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from slipstream_contract import whole
from slipstream_contract.deployment import role_of
from slipstream_contract.errors import ContractError, clip

from slipstream_client.bench import openai
from slipstream_client.bench.protocols import GRPC, OPENAI
from slipstream_client.codec import TENSORRT_LLM, VLLM, request_of

ARRIVALS = ("poisson", "even", "bursts")
MAX_LENGTH = 1 << 24
_TEXT = """
alpha beta gamma delta item value index count size name list table queue stack node tree graph path
file line word text data code test case time date year number total result
"""
_WORDS = _TEXT.split()


# --- lengths -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, and its text on the command line."""

    text: str
    sample: Callable[[np.random.Generator, int], NDArray[np.int64]]


def lengths(field: str, text: str) -> Lengths:
    """Parse `N`, `uniform:LOW:HIGH` (both included) or `lognormal:MEDIAN:SIGMA[:MAX]`.

    Lognormal samples above MAX are sampled again. Raises ContractError.
    """
    kind, *words = text.split(":")
    try:
        if kind == "uniform" and len(words) == 2:
            low, high = (_whole(word) for word in words)
            if low <= high:
                return Lengths(text, lambda rng, size: rng.integers(low, high + 1, size))
        elif kind == "lognormal" and len(words) in (2, 3):
            median, sigma = _whole(words[0]), float(words[1])
            most = _whole(words[2]) if len(words) == 3 else MAX_LENGTH
            if 0 <= sigma <= 10 and median <= most:
                return Lengths(text, lambda rng, size: _lognormal(rng, size, median, sigma, most))
        elif not words:
            length = _whole(kind)
            return Lengths(text, lambda rng, size: np.full(size, length, np.int64))
    except ValueError:
        pass
    raise ContractError(
        f"{field} is {clip(text)}: not a number of tokens from 1 to {MAX_LENGTH}, "
        "uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MAX]"
    )


def _whole(word: str) -> int:
    value = int(word)
    if not 1 <= value <= MAX_LENGTH:
        raise ValueError
    return value


def _lognormal(
    rng: np.random.Generator, size: int, median: int, sigma: float, most: int
) -> NDArray[np.int64]:
    found = np.zeros(size, np.int64)
    missing = np.ones(size, np.bool_)
    while missing.any():  # at least half of all samples are within bounds
        sampled = rng.lognormal(np.log(median), sigma, int(missing.sum()))
        found[missing] = np.maximum(1, np.rint(np.minimum(sampled, most + 1.0))).astype(np.int64)
        missing = found > most
    return found


# --- times ---------------------------------------------------------------------------------------


def schedule(
    arrivals: str, rate: float, burst: int, size: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the due times of `size` requests, in ns after the start, `rate` requests a second.

    `poisson`: independent of each other; `even`: equally far apart; `bursts`: `burst` at once, the
    bursts independent of each other.
    """
    if arrivals == "even":
        seconds = np.arange(size) / rate
    elif arrivals == "bursts":
        num_bursts = -(-size // burst)
        times = np.cumsum(rng.exponential(burst / rate, num_bursts))
        seconds = np.repeat(times, burst)[:size]
    else:
        seconds = np.cumsum(rng.exponential(1 / rate, size))
    return np.rint(seconds * 1e9).astype(np.int64)


# --- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its max_tokens; None: a sample of --output-len."""

    content: str | list[int]
    max_tokens: int | None = None


def read_prompts(path: Path, model: str) -> list[Prompt]:
    """Read JSON lines: `prompt` (or `text_input`), or `input_ids` for the token model, and
    optionally `max_tokens`. Raises OSError, or ContractError that names the line.
    """
    wanted = ("input_ids",) if role_of(model) == TENSORRT_LLM else ("prompt", "text_input")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            found.append(_prompt(f"{path}:{number}", line, wanted))
    if not found:
        raise ContractError(f"{path}: contains no prompt")
    return found


def _prompt(place: str, line: str, wanted: tuple[str, ...]) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ContractError(f"{place}: no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ContractError(f"{place}: {clip(entry)} is not a JSON object")
    unknown = sorted(entry.keys() - {*wanted, "max_tokens"})
    content = next((entry[name] for name in wanted if name in entry), None)
    if unknown or content is None:
        wrong = f"has {clip(unknown[0])}" if unknown else "has no prompt"
        raise ContractError(f"{place}: {wrong}; {' or '.join(wanted)} and max_tokens are read")
    is_ids = isinstance(content, list) and all(type(i) is int for i in content)
    if not (isinstance(content, str) if wanted[0] == "prompt" else is_ids) or not content:
        raise ContractError(f"{place}: {clip(content)} is no prompt")
    max_tokens = entry.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ContractError(f"{place}: max_tokens is {clip(max_tokens)}, not a number above 0")
    return Prompt(content, max_tokens)


def make_text(rng: np.random.Generator, num_words: int) -> str:
    """Return random words: no two prompts share a prefix."""
    return " ".join(_WORDS[i] for i in rng.integers(0, len(_WORDS), num_words))


def make_prompts(
    model: str, sizes: NDArray[np.int64], vocabulary: int, tokens_per_word: float, seed: int
) -> list[Prompt]:
    """Make prompts of these sizes in tokens: exact for ids below `vocabulary`, near for text."""
    rng = np.random.default_rng([seed, 1])
    if role_of(model) == TENSORRT_LLM:
        return [Prompt(rng.integers(0, vocabulary, size).tolist()) for size in sizes]
    words = np.maximum(1, np.rint(sizes / tokens_per_word)).astype(np.int64)
    return [Prompt(make_text(rng, int(count))) for count in words]


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """The parts of a request that do not depend on its prompt."""

    protocol: str
    model: str
    sampling: Mapping[str, Any]  # temperature, top_k, ... by the names of the text models
    has_end: bool  # whether the model's own end of text ends a sequence

    @property
    def _role(self) -> str:
        return role_of(self.model)

    def payload(self, prompt: str | list[int], max_tokens: int, request_id: str) -> bytes:
        """Serialise a request. Raises ContractError for a parameter the model does not take."""
        if self.protocol == OPENAI:
            assert isinstance(prompt, str)
            return openai.body(self.model, prompt, max_tokens, self.sampling, self.has_end)
        parameters = dict(self.sampling) | {"max_tokens": max_tokens}
        if not self.has_end:
            parameters |= {"ignore_eos": True} if self._role == VLLM else {"end_id": -1}
        # Over HTTP this only checks the parameters.
        request = request_of(self.model, prompt, parameters, request_id)
        if self.protocol == GRPC:
            return bytes(request.SerializeToString())
        return json.dumps(self._body(prompt, parameters)).encode()

    def _body(self, prompt: str | list[int], parameters: dict[str, Any]) -> dict[str, Any]:
        flags: dict[str, object] = {
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
            "exclude_input_in_output": True,
        }
        flags |= whole.mark_of(self.model)
        if self._role == VLLM:
            sampling = json.dumps(parameters)
            return {"text_input": prompt, "stream": True, "sampling_parameters": sampling} | flags
        if self._role != TENSORRT_LLM:
            return {"text_input": prompt, "stream": True} | parameters | flags
        names = {"max_tokens": "request_output_len", "top_k": "runtime_top_k"}
        names["top_p"] = "runtime_top_p"
        own = {names.get(name, name): value for name, value in parameters.items()}
        length = {"input_ids": prompt, "input_lengths": len(prompt), "streaming": True}
        return length | own | flags
