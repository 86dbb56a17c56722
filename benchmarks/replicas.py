"""Replicas of an engine in simulated time, fast enough for a thousand GPUs.

A replica takes the time of recorded steps (`step_times.py`), as large as the engine's graphs, but
not the engine itself: requests in order of arrival, decodes first, then chunks within the rows of a
step. Only counts are kept of running requests, so a step costs the same whatever its size.
`test_cluster.py` compares it with the real engine over the same steps (`simulated.slipstream`),
which is a hundred times slower.

A prefix that requests share is cached until others need its room. A pipeline of m stages is m
replicas: each of m batches reads all weights once, stage by stage, while the others are elsewhere.
"""

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace

from limits import CARDS, Model
from slipstream.runner.graphs import Buckets
from step_times import SIZES, StepTimes, times_of
from traces import Arrival

MAX_ROWS = 256
# Of a step of decodes and prompts: whole tiles. What the engine's prefill budget comes to: such
# steps have up to 1,408 to 1,920 rows (p99), at 8 to 28 requests a second of an 8B.
ROWS = 1536
ALONE = 2048  # tokens of a step of prompts alone
HOST_S = 0.0003  # of the host, between two launches
MEMORY = {"H100": 80e9, "H200": 141e9}  # bytes
_SHARE = 0.88  # of memory, for weights and cache
_LINK = 300e9  # bytes a second of an all-reduce of two shots: assumed, not measured here
_ALL_REDUCE_S = 5e-6  # and its latency; published: 4 to 10 us on H100
_HOP_S = 30e-6  # from stage to stage
_SIZES = Buckets(MAX_ROWS, ALONE).sizes


@dataclass(frozen=True, slots=True)
class Shaped:
    """How a replica lies on GPUs: a shape of `SIZES`, a card, ranks of tensors and stages."""

    shape: str = "8b"
    card: str = "H100"
    tensor: int = 1
    pipeline: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one replica with all its stages."""
        return self.tensor * self.pipeline

    def kv_tokens(self) -> int:
        """Return the tokens that the cache of one batch holds. Raises ValueError if none fits."""
        model = Model(SIZES[self.shape], CARDS[self.card])
        weights = _weight_bytes(model)
        room = self.gpus * MEMORY[self.card] * _SHARE - weights
        if room <= 0:
            raise ValueError(
                f"{self.shape}: {weights / 1e9:.0f} GB of weights do not fit on "
                f"{self.gpus} of {self.card}"
            )
        return int(room / model.kv_bytes / self.pipeline)


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Times of steps of a replica with several ranks: parts of one GPU's, and what they exchange.

    Args:
        base: of one GPU.
        tensor, pipeline: ranks.
        num_layers, hidden: of the model.
    """

    base: StepTimes
    tensor: int
    pipeline: int
    num_layers: int
    hidden: int

    def step_ms(self, num_decodes: int, context: int, chunks: list[tuple[int, int]]) -> float:
        """Return the time of a step, as `StepTimes.step_ms` does; of its graph, if it has one."""
        num_tokens = num_decodes + sum(size for _, size in chunks)
        graph = _SIZES.graph_of(num_decodes, num_tokens - num_decodes) if chunks else None
        padding = sum(graph) - num_tokens if graph else 0
        whole = self.base.step_ms(num_decodes, context, chunks, padding)
        hops = 1e3 * (self.pipeline - 1) * _HOP_S
        if self.tensor == 1:
            return whole + hops
        moved = (num_tokens + padding) * self.hidden * 2
        each_s = _ALL_REDUCE_S + 2 * moved * (self.tensor - 1) / self.tensor / _LINK
        return whole / self.tensor + 2e3 * self.num_layers * each_s + hops


def _weight_bytes(model: Model) -> int:
    """Return the bytes of all weights; the embedding is as large as the head."""
    return int(model.in_layers * model.layer_itemsize + 4 * model.in_head)


def rank_times(shaped: Shaped) -> RankTimes:
    """Return the times of a replica of that shape."""
    config = SIZES[shaped.shape]
    base = times_of(shaped.shape, shaped.card)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    return RankTimes(base, shaped.tensor, shaped.pipeline, layers, hidden)


@dataclass(slots=True)
class Request:
    """A request on its way; times in s.

    Attributes:
        prefix: what it shares with others: a name, and tokens; no name: nothing.
        first_s, end_s: of its first and last token; 0: not yet.
    """

    arrival: Arrival
    prefix: str = ""
    num_prefix: int = 0
    num_cached: int = 0
    num_left: int = 0  # of the prompt
    decoded_at: int = 0  # the replica's count of decode steps at its first token
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """All tokens of it."""
        return self.arrival.num_input + self.arrival.num_output


@dataclass(slots=True)
class Replica:
    """An engine: a queue, a batch, a cache of prefixes. Its clock goes from step to step."""

    times: RankTimes
    kv_tokens: int
    now_s: float = 0.0
    born_s: float = 0.0
    waiting: deque[Request] = field(default_factory=deque)
    chunked: deque[Request] = field(default_factory=deque)  # whose prompts are computed
    num_decodes: int = 0
    context: int = 0  # tokens before all decodes
    used: int = 0  # tokens of running requests, at their ends
    num_steps: int = 0
    num_found: int = 0  # tokens of prompts that were cached
    num_output: int = 0
    _ends: list[tuple[int, int, Request]] = field(default_factory=list)
    _number: int = 0
    _prefixes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _held: int = 0  # tokens of `_prefixes`

    @property
    def load(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + self.num_running

    @property
    def num_queued(self) -> int:
        """Tokens of prompts that are not computed, as far as the cache lacks them."""
        running = sum(request.num_left for request in self.chunked)
        return running + sum(
            request.arrival.num_input - self.cached(request) for request in self.waiting
        )

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return self.num_decodes + len(self.chunked)

    @property
    def usage(self) -> float:
        """The share of the cache that running requests hold."""
        return self.used / self.kv_tokens

    def cached(self, request: Request) -> int:
        """Return how many tokens of a request's prompt are cached here."""
        return min(self._prefixes.get(request.prefix, 0), request.num_prefix)

    def submit(self, request: Request) -> None:
        """Take a request, at its arrival."""
        self.waiting.append(request)

    def advance(self, until_s: float) -> None:
        """Run steps that begin before `until_s`."""
        while self.now_s < until_s:
            if not (self.num_decodes or self.chunked):
                if not self.waiting:
                    self.now_s = until_s
                    return
                self.now_s = max(self.now_s, self.waiting[0].arrival.due_s)
            self._admit()
            self._step()

    def _admit(self) -> None:
        while self.waiting and self.num_running < MAX_ROWS:
            request = self.waiting[0]
            is_alone = not self.num_running
            if request.arrival.due_s > self.now_s:
                return
            if self.used + request.num_tokens > self.kv_tokens and not is_alone:
                return
            self.waiting.popleft()
            self.used += request.num_tokens
            request.num_cached = min(self.cached(request), request.arrival.num_input - 1)
            self.num_found += request.num_cached
            request.num_left = request.arrival.num_input - request.num_cached
            self._keep(request.prefix, request.arrival.num_input)
            self.chunked.append(request)

    def _keep(self, prefix: str, num_tokens: int) -> None:
        """Note a prefix as cached and used just now; evict what its room needs."""
        if prefix:
            self._held += num_tokens - self._prefixes.pop(prefix, 0)
            self._prefixes[prefix] = num_tokens
        while self._prefixes and self._held + self.used > self.kv_tokens:
            self._held -= self._prefixes.popitem(last=False)[1]

    def _step(self) -> None:
        budget, chunks = ROWS - self.num_decodes if self.num_decodes else ALONE, []
        done = []
        while budget and self.chunked:
            request = self.chunked[0]
            size = min(budget, request.num_left)
            chunks.append((request.arrival.num_input - request.num_left, size))
            budget -= size
            request.num_left -= size
            if not request.num_left:
                done.append(self.chunked.popleft())
        took_ms = self.times.step_ms(self.num_decodes, self.context, chunks)
        self.now_s += took_ms / 1e3 + (HOST_S if chunks else 0.0)
        self.num_steps += 1
        self.num_output += self.num_decodes + len(done)
        self.context += self.num_decodes
        self._end()
        for request in done:
            request.first_s = self.now_s + self.times.base.first_ms / 1e3
            self._start_decode(request)

    def _start_decode(self, request: Request) -> None:
        if request.arrival.num_output <= 1:
            request.end_s = request.first_s
            self.used -= request.num_tokens
            self._keep(request.prefix, request.num_tokens)
            return
        self.num_decodes += 1
        self.context += request.arrival.num_input
        self._number += 1
        last = self.num_steps + request.arrival.num_output - 1
        heapq.heappush(self._ends, (last, self._number, request))

    def _end(self) -> None:
        """End requests whose last token this step made."""
        while self._ends and self._ends[0][0] <= self.num_steps:
            request = heapq.heappop(self._ends)[2]
            request.end_s = self.now_s
            self.num_decodes -= 1
            self.context -= request.num_tokens - 1
            self.used -= request.num_tokens
            self._keep(request.prefix, request.num_tokens)


def make(shaped: Shaped, born_s: float = 0.0) -> list[Replica]:
    """Return the replicas that one set of GPUs is: one a stage."""
    times, tokens = rank_times(shaped), shaped.kv_tokens()
    one = Replica(times, tokens, now_s=born_s, born_s=born_s)
    return [
        replace(one, waiting=deque(), chunked=deque(), _ends=[], _prefixes=OrderedDict())
        for _ in range(shaped.pipeline)
    ]
