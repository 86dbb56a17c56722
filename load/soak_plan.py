"""What a soak asks for: few distinct questions, many requests, and when some of them are left.

Everything is drawn from one seed. Distinct questions are few so that the answer of each is computed
once, undisturbed, and every request can be held against it.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import PROMPTS
from slipstream_preprocessing.tokenizer import load_tokenizer

MODELS = ("ensemble", "tensorrt_llm_bls", "vllm_model", "tensorrt_llm")
CHILD_STREAMS = 20  # held by one process, which is then killed
LEAVINGS = ("first", "middle", "end", "deadline")

_TEXTS = (*PROMPTS[:2], "".join(PROMPTS))
# Fractions of two: the same number as FP32 tensor and as JSON.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 24, "temperature": 0.0},
    "short": {"max_tokens": 9, "temperature": 0.0},
    "top_k": {"max_tokens": 24, "temperature": 0.75, "top_k": 40, "seed": 7},
    "top_p": {
        "max_tokens": 96,  # these grow, and the cache is too small for all that do
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 0.875,
        "seed": 8,
    },
    "two": {"max_tokens": 16, "temperature": 0.875, "top_k": 20, "seed": 9, "n": 2},
}
_LONGEST = "top_p"


@dataclass(frozen=True)
class Question:
    """What an answer is a function of. The text models answer a question alike."""

    is_tokens: bool
    prompt: int  # index
    sampling: str


@dataclass(frozen=True)
class Ask:
    """One request. `leaving` is empty for one that stays to the end, else why it ends early.

    `when` is in seconds for `first` and `deadline`, else the part of the answer that it waits for.
    """

    question: Question
    model: str
    leaving: str = ""
    when: float = 0.0


@dataclass(frozen=True)
class Child:
    """A process with streams of its own, killed `when` seconds after it has asked for them."""

    asks: tuple[Ask, ...]
    when: float


class Prompts:
    """Prompts by index, as text and as token ids."""

    def __init__(self, checkpoint: Path) -> None:
        tokenizer = load_tokenizer(checkpoint)
        self._ids = [tokenizer.encode(text).ids for text in _TEXTS]

    def arguments(self, ask: Ask) -> dict[str, Any]:
        """Arguments of the client's `stream` for a request."""
        question = ask.question
        sampling = dict(SAMPLING[question.sampling])
        if "n" in sampling and ask.model != "vllm_model":
            sampling["num_return_sequences"] = sampling.pop("n")
        prompt = (self._ids if question.is_tokens else _TEXTS)[question.prompt]
        return {"prompt": prompt, "model": ask.model, **sampling}


def draw(num_requests: int, num_cancels: int, seed: int) -> list[Ask | Child]:
    """The requests in the order in which they are made; `num_cancels` of them leave early.

    A quarter of those that leave (rounded to whole children) do so by the death of their process.
    """
    assert 0 <= num_cancels <= num_requests
    rng = random.Random(seed)
    num_children = round(num_cancels / 4 / CHILD_STREAMS + 0.25)
    num_left = num_cancels - num_children * CHILD_STREAMS
    if num_left < 0:
        num_children, num_left = 0, num_cancels
    items: list[Ask | Child] = [_ask(rng) for _ in range(num_requests - num_cancels)]
    items += [_leaving(rng, LEAVINGS[i % len(LEAVINGS)]) for i in range(num_left)]
    items += [_child(rng) for _ in range(num_children)]
    rng.shuffle(items)
    return items


def _ask(rng: random.Random, sampling: str = "") -> Ask:
    model = rng.choice(MODELS)
    sampling = sampling or rng.choice(list(SAMPLING))
    return Ask(Question(model == "tensorrt_llm", rng.randrange(len(_TEXTS)), sampling), model)


def _leaving(rng: random.Random, leaving: str) -> Ask:
    low, high = {
        "first": (0.0, 0.03),
        "middle": (0.05, 0.8),
        "end": (0.9, 1.0),
        "deadline": (0.02, 1.0),
    }[leaving]
    ask = _ask(rng)
    return Ask(ask.question, ask.model, leaving, rng.uniform(low, high))


def _child(rng: random.Random) -> Child:
    asks = tuple(_ask(rng, _LONGEST) for _ in range(CHILD_STREAMS))
    return Child(asks, rng.uniform(0.0, 1.0))
