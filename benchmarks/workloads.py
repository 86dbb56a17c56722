"""The workloads both engines run: same prompts (seeded), same lengths, greedy, no early end.

They are defined by (seed, number of requests, input lengths, output tokens) alone, so that any
engine can be measured on them; token ids are uniform over the first 128,000 of Llama 3.1.
"""

from dataclasses import dataclass

import numpy as np

VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests submitted at once: `prompts` of token ids, each answered by `max_tokens` tokens."""

    name: str
    prompts: list[list[int]]
    max_tokens: int


def _prompts(rng: np.random.Generator, lengths: list[int]) -> list[list[int]]:
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


def decode(batch: int, max_tokens: int = 256, num_input: int = 128) -> Workload:
    """`batch` prompts of one length, decoded together: the inter-token latency of a full batch."""
    rng = np.random.default_rng(1)
    return Workload(f"decode_{batch}", _prompts(rng, [num_input] * batch), max_tokens)


def prefill(num_prompts: int = 16, length: int = 2048) -> Workload:
    """Prompts only: one token each."""
    return Workload("prefill", _prompts(np.random.default_rng(1), [length] * num_prompts), 1)


def mixed(num_requests: int = 512, max_tokens: int = 256, longest: int = 1024) -> Workload:
    """Prompts of an eighth of `longest` tokens to as many, all offered at the start."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(longest // 8, longest + 1, num_requests).tolist()
    return Workload("mixed", _prompts(rng, lengths), max_tokens)


def long_context(batch: int = 16, length: int = 15_744, max_tokens: int = 1_280) -> Workload:
    """Decode over a long cache: on average 16,384 tokens a sequence.

    Prompts that are processed beside decodes take several hundred steps: the first requests must
    still run when the last begins.
    """
    return Workload(
        "long_context", _prompts(np.random.default_rng(1), [length] * batch), max_tokens
    )
