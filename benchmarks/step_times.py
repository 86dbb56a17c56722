"""What a step takes on a GPU, from recorded figures: for simulations of the scheduler.

Recorded are, in `results/step-h100.json` and `step-h200.json`, both engines in one sitting: steps
of 1, 32, 128 and 256 decodes, of 16 decodes behind 16,384 tokens, and prompts of 2,048 tokens. They
fix, for a shape and an engine,

- `rest`: GEMMs, head, norms and gaps of a step of n tokens: the decodes less their reads of the
  cache, straight lines between them, and from where that is more n times what a token of a prompt
  costs;
- reads of the cache, at the rate that 16 decodes behind 16,384 tokens had;
- attention of chunks: operations over `CHUNK_RATE`, as the kernel has it behind 8,192 tokens.

On an H200 that gives 23.5 ms for 255 decodes behind 704 tokens and a chunk of 576, and 57.1 with a
chunk of 2,048; measured were 22.9 and 57.0.

Nothing is recorded of other shapes but single figures, so they are made: limits of the shape
(`limits.py`) over the share of the limit that the recorded shape has at that number of tokens, and
the time that launching needs where that is more.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from limits import CARDS, Model
from shapes import SHAPES

TILE = 128
RESULTS = Path(__file__).parent / "results"
RECORDED = "llama-3.1-8b"
CHUNK_RATE = 600e12  # operations a second of a chunk's attention, measured on an H200
_CONTEXTS = {1: 256, 32: 256, 128: 256, 256: 192}  # mean context of the recorded decodes
_LONG = (16, 16_384)  # decodes, and their context, of the row `long-context`
_PROMPT = 2048
_FINE_ROWS = 256  # a step of more has GEMMs of tiles of TILE rows
# What an idle row of a last tile takes of a row's time: graphs of 8 to 32 decodes of 8B on H200s,
# of 256 rows 7.6 ms and 288 8.9, of 384 9.9 and 416 11.3, of 512 12.3 and 544 13.7.
_IDLE = 1 / 3

# A step never takes less than its launches, in ms: of at most `GRAPHS` tokens, which replay graphs,
# and of others. One row of the 1B shape takes ours 0.95 ms and vLLM 2.1. The second of vLLM is a
# guess; what ours without a graph take is the host's part, below.
LAUNCHES = {"slipstream": (0.3, 0.3), "vllm": (2.1, 3.0)}
GRAPHS = 512
# Of the host, of the recorded shape, in traffic on H200s: 8 to 15, 10 to 12 at the median.
EAGER_MS = 10.0
# Added to first tokens of vLLM, for the processes between: alone, one prompt of 128 tokens takes
# 19 to 26 ms, of which a step is 7; most of that is not counted, to be on the safe side.
FIRST_MS = {"slipstream": 0.5, "vllm": 2.0}

SIZES = {
    "1b": SHAPES["llama-3.2-1b"],
    "8b": SHAPES[RECORDED],
    "14b": SHAPES["llama-14b"],
    "70b": SHAPES["llama-3.3-70b"],
}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of steps of one engine on one card and shape.

    Args:
        rest: (tokens, ms) of all but attention, by tokens.
        token_ms: of a prompt's token in a large step, attention excluded.
        read_ms: of a cached token, in a decode.
        pair_ms: of a query and a key, in a chunk.
        launches: least ms of a step of at most `GRAPHS` tokens, and of a larger one.
        first_ms: what a first token takes longer.
        eager_ms: of the host, to launch a step of ours that is no graph.
    """

    rest: tuple[tuple[int, float], ...]
    token_ms: float
    read_ms: float
    pair_ms: float
    launches: tuple[float, float]
    first_ms: float
    eager_ms: float

    def rest_ms(self, num_tokens: float) -> float:
        """Return the time of all but attention of a step of so many tokens."""
        at = bisect_left(self.rest, (num_tokens, 0.0))
        if at == len(self.rest):
            return max(self.rest[-1][1], num_tokens * self.token_ms)
        if at == 0:
            return self.rest[0][1]
        (low, low_ms), (high, high_ms) = self.rest[at - 1 : at + 1]
        return low_ms + (high_ms - low_ms) * (num_tokens - low) / (high - low)

    def step_ms(
        self, num_decodes: int, context: int, chunks: Iterable[tuple[int, int]], padding: int = 0
    ) -> float:
        """Return the time of a step.

        Args:
            num_decodes: rows of one token.
            context: tokens before all of these together.
            chunks: first position and number of tokens of each.
            padding: tokens that a graph has besides: they are multiplied, and attend to nothing.
        """
        num_tokens, pairs, before = num_decodes + padding, 0.0, 0
        for start, size in chunks:
            num_tokens += size
            pairs += size * (start + size / 2)
            before += start
        attention = context * self.read_ms + max(pairs * self.pair_ms, before * self.read_ms)
        rows = num_tokens if num_tokens <= _FINE_ROWS else _with_idle(num_tokens)
        return max(self.launches[num_tokens > GRAPHS], self.rest_ms(rows) + attention)


def _with_idle(num_rows: int) -> float:
    """Return the rows that take as long, were all of them computed."""
    return num_rows + _IDLE * (-num_rows % TILE)


def recorded(card: str, engine: str) -> StepTimes:
    """Return the times of the recorded shape; `engine` is slipstream or vllm."""
    table = json.loads((RESULTS / f"step-{card.lower()}.json").read_text())
    side = "ours" if engine == "slipstream" else "peer"
    figures = {row["row"]: row[side] for row in table["rows"]}
    model = Model(SIZES["8b"], CARDS[card])
    pair_ms = 1e3 * model.operations_a_pair / CHUNK_RATE
    num_long, context = _LONG
    decodes = {n: figures[f"decode-bs{n}"] for n in _CONTEXTS}
    # The line through 1 and 32 rows is near enough to 16 rows without a cache.
    base_ms = decodes[1] + (decodes[32] - decodes[1]) * (num_long - 1) / 31
    read_ms = (figures["long-context"] - base_ms) / (num_long * (context - _CONTEXTS[1]))
    rest = tuple((n, ms - n * _CONTEXTS[n] * read_ms) for n, ms in decodes.items())
    token_ms = 1e3 / figures["prefill"] - _PROMPT / 2 * pair_ms
    others = LAUNCHES[engine], FIRST_MS[engine], EAGER_MS
    return StepTimes(rest, token_ms, read_ms, pair_ms, *others)


def times_of(
    shape: str, card: str = "H100", engine: str = "slipstream", is_fp8: bool = False
) -> StepTimes:
    """Return the times of a shape of `SIZES`, made from the recorded one's if need be."""
    known = recorded(card, engine)
    if shape == "8b" and not is_fp8:
        return known
    model, base = both = (
        Model(SIZES[shape], CARDS[card], is_fp8),
        Model(SIZES["8b"], CARDS[card]),
    )

    def scaled(num_tokens: int) -> float:
        own, recorded_s = (sum(w.seconds for w in m.products(num_tokens, num_tokens)) for m in both)
        return own / recorded_s

    floor = known.launches[0]
    rest = tuple((n, max(floor, ms * scaled(n))) for n, ms in known.rest)
    layers = model.in_layers / model.layer_rate / (base.in_layers / base.layer_rate)
    return StepTimes(
        rest,
        known.token_ms * layers,
        known.read_ms * model.kv_bytes / base.kv_bytes,
        known.pair_ms * model.operations_a_pair / base.operations_a_pair,
        known.launches,
        known.first_ms,
        known.eager_ms * SIZES[shape]["num_hidden_layers"] / SIZES["8b"]["num_hidden_layers"],
    )
