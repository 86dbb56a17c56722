"""What a cache that remembers is measured on; the same for any engine, which keeps its own answers.

    shared  requests with the same beginning, offered at once; cold, then warm: others, but for it
    chat    users that ask, read the answer to its end and ask again; every prompt is all so far

Token ids are random (seeded), answers greedy and of a fixed length. Every repetition has other ids,
so what a cache holds of earlier ones is worth nothing.
"""

import statistics
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np


class Output(NamedTuple):
    """What a step made of a request."""

    number: int
    token_ids: list[int]
    is_finished: bool


class Target(Protocol):
    """An engine that generates greedily and ends a request only at its number of tokens."""

    vocabulary: int  # token ids below it may be in a prompt

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Offer a request, under a number that was never used."""

    def step(self) -> list[Output]:
        """Wait for more."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the workloads; in tokens unless said."""

    requests: int = 256
    shared: int = 1024
    own: int = 64
    output: int = 64
    users: int = 64
    turns: int = 8
    system: int = 1000
    question: int = 200
    answer: int = 200
    mixed: int = 512  # requests


SMALL = Sizes(6, 70, 9, 5, users=3, turns=3, system=70, question=11, answer=6, mixed=6)


@dataclass(slots=True)
class Client:
    """Offers requests to an engine, and notes what comes of them."""

    target: Target
    num_offered: int = 0
    first_tokens: list[float] = field(default_factory=list)  # seconds after its request
    num_tokens: int = 0
    _open: dict[int, tuple[float, list[int]]] = field(default_factory=dict)

    def offer(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Submit a request; `number` is new to this engine."""
        self._open[number] = (time.perf_counter(), [])
        self.num_offered += 1
        self.target.submit(number, prompt, max_tokens)

    def step(self) -> list[tuple[int, list[int]]]:
        """Numbers and answers of the requests that ended."""
        ended = []
        for number, token_ids, is_finished in self.target.step():
            began, answer = self._open[number]
            if token_ids and not answer:
                self.first_tokens.append(time.perf_counter() - began)
            answer += token_ids
            self.num_tokens += len(token_ids)
            if is_finished:
                ended.append((number, answer))
                del self._open[number]
        return ended

    @property
    def is_done(self) -> bool:
        """Whether no request is open."""
        return not self._open


class Figures(NamedTuple):
    """Figures of one run."""

    requests_s: float
    output_tok_s: float
    first_token_ms: float  # median of all requests
    first_token_p99_ms: float


class Workloads:
    """The workloads on one engine, each run with ids that it never saw.

    Args:
        target: the engine.
        sizes: of the workloads.
        seed: of all ids.
    """

    def __init__(self, target: Target, sizes: Sizes | None = None, seed: int = 0) -> None:
        self._target = target
        self._sizes = sizes or Sizes()
        self._rng = np.random.default_rng(seed)
        self._next = 0

    def shared(self) -> tuple[Figures, Figures]:
        """Cold, then warm: the beginning is the same, what follows is not."""
        beginning = self._ids(self._sizes.shared)
        return self._offer_shared(beginning), self._offer_shared(beginning)

    def mixed(self, max_tokens: int = 256, shortest: int = 128, longest: int = 1024) -> Figures:
        """Requests that share nothing, of many lengths, offered at once."""
        lengths = self._rng.integers(shortest, longest + 1, self._sizes.mixed)
        return self._offer([self._ids(length) for length in lengths], max_tokens)

    def chat(self) -> Figures:
        """All users begin at once."""
        sizes, client, begin = self._sizes, Client(self._target), time.perf_counter()
        system = self._ids(sizes.system)
        texts = {self._number(): [*system] for _ in range(sizes.users)}
        left = dict.fromkeys(texts, sizes.turns)
        who = {user: user for user in texts}  # of a request
        for user, text in texts.items():
            text += self._ids(sizes.question)
            client.offer(user, list(text), sizes.answer)
        while not client.is_done:
            for number, answer in client.step():
                assert len(answer) == sizes.answer, f"request {number} ended early"
                user = who[number]
                left[user] -= 1
                if left[user] == 0:
                    continue
                texts[user] += answer + self._ids(sizes.question)
                again = self._number()
                who[again] = user
                client.offer(again, list(texts[user]), sizes.answer)
        return self._figures(client, time.perf_counter() - begin)

    def _offer_shared(self, beginning: list[int]) -> Figures:
        sizes = self._sizes
        prompts = [beginning + self._ids(sizes.own) for _ in range(sizes.requests)]
        return self._offer(prompts, sizes.output)

    def _offer(self, prompts: list[list[int]], max_tokens: int) -> Figures:
        client, begin = Client(self._target), time.perf_counter()
        for prompt in prompts:
            client.offer(self._number(), prompt, max_tokens)
        while not client.is_done:
            for number, answer in client.step():
                assert len(answer) == max_tokens, f"request {number} ended early"
        return self._figures(client, time.perf_counter() - begin)

    @staticmethod
    def _figures(client: Client, seconds: float) -> Figures:
        waits = sorted(1e3 * wait for wait in client.first_tokens)
        assert len(waits) == client.num_offered
        late = waits[min(len(waits) - 1, int(0.99 * len(waits)))]
        return Figures(
            client.num_offered / seconds,
            client.num_tokens / seconds,
            statistics.median(waits),
            late,
        )

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(0, self._target.vocabulary, count).tolist()
        return ids
