"""The least time that a workload can take on a GPU: bytes it must read, operations it must do.

A limit is bytes / read rate or operations / matrix rate, the larger. Matrix products and attention
of a step follow one another, so each has a limit of its own and they add up. Many steps, of which
some wait for memory and others for the matrix units, are bounded by the totals alone.
"""

from dataclasses import dataclass
from typing import Any

from workloads import Workload


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU reaches at best: bytes read, operations of its matrix units, a second."""

    read: float
    bf16: float
    fp8: float


# The highest that were measured, under a power cap of 700 W. Both are the same chip: operations are
# as on an H200.
CARDS = {"H200": Rates(4.707e12, 790e12, 1480e12), "H100": Rates(3.11e12, 790e12, 1480e12)}
_NAMES = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100"}  # PCIe and NVL are others
GOALS_CARD = "H200"  # on which the goals of rows.py were set


def card(gpu: str | None) -> str | None:
    """Which of `CARDS` a GPU is, by the name that its driver gives it."""
    return _NAMES.get(gpu or "")


def measured_rates(ceilings: dict[str, float]) -> Rates:
    """What `ceilings.py` measured; fp8 twice as bf16."""
    read, bf16 = ceilings["read_tb_s"] * 1e12, ceilings["bf16_tflop_s"] * 1e12
    return Rates(read, bf16, 2 * bf16)


def rates_of(gpu: str | None, ceilings: dict[str, float]) -> Rates:
    """Return the rates of a GPU; as measured where `CARDS` lacks it."""
    known = card(gpu)
    if known is None and ceilings:
        return measured_rates(ceilings)
    return CARDS[known or GOALS_CARD]


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds that memory and the matrix units need."""

    read_seconds: float = 0.0
    matrix_seconds: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.read_seconds + other.read_seconds, self.matrix_seconds + other.matrix_seconds
        )

    @property
    def seconds(self) -> float:
        """With reading and computing at the same time."""
        return max(self.read_seconds, self.matrix_seconds)


class Model:
    """A shape's matrices on a GPU; all but embedding and head in 8 bits where `is_fp8`."""

    def __init__(self, shape: dict[str, Any], rates: Rates, is_fp8: bool = False) -> None:
        hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
        kv_heads, size = shape["num_key_value_heads"], shape["head_dim"]
        qkvo = 2 * (heads + kv_heads) * size * hidden
        self.in_layers = shape["num_hidden_layers"] * (
            qkvo + 3 * hidden * shape["intermediate_size"]
        )
        self.in_head = shape["vocab_size"] * hidden
        self.kv_bytes = 2 * shape["num_hidden_layers"] * kv_heads * size * 2
        self.operations_a_pair = 4 * shape["num_hidden_layers"] * heads * size
        self.layer_itemsize = 1 if is_fp8 else 2
        self.layer_rate = rates.fp8 if is_fp8 else rates.bf16
        self.rates = rates

    def products(self, num_tokens: float, num_sampled: float) -> list[Work]:
        """List the GEMMs of one step: the layers', then the head's."""
        return [
            Work(
                self.in_layers * self.layer_itemsize / self.rates.read,
                2 * self.in_layers * num_tokens / self.layer_rate,
            ),
            Work(
                self.in_head * 2 / self.rates.read, 2 * self.in_head * num_sampled / self.rates.bf16
            ),
        ]

    def attention(self, cached: float, pairs: float) -> Work:
        """Reading `cached` tokens' keys and values, over `pairs` of a query and a key."""
        return Work(
            self.kv_bytes * cached / self.rates.read,
            self.operations_a_pair * pairs / self.rates.bf16,
        )


def decode_work(model: Model, batch: int, context: float) -> list[Work]:
    """List a step's work that gives `batch` sequences of `context` tokens one each: layers' GEMMs,
    the head's, attention."""
    return [*model.products(batch, batch), model.attention(batch * context, batch * context)]


def prompt_work(model: Model, workload: Workload) -> list[Work]:
    """The same until every prompt has its first token, in as few steps as can be."""
    lengths = [len(prompt) for prompt in workload.prompts]
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return [*model.products(sum(lengths), len(lengths)), model.attention(0, pairs)]


def whole_work(model: Model, workload: Workload, at_once: int) -> list[Work]:
    """The same of prompts and decodes together, at most `at_once` sequences in a step."""
    lengths, outputs = [len(prompt) for prompt in workload.prompts], workload.max_tokens
    num_steps = -(-len(lengths) * outputs // at_once)
    layers, _ = model.products(sum(lengths) + len(lengths) * (outputs - 1), 0)
    _, head = model.products(0, len(lengths) * outputs)
    products = [Work(w.read_seconds * num_steps, w.matrix_seconds) for w in (layers, head)]
    attention = Work()
    for n in lengths:
        read = sum(range(n + 1, n + outputs))  # by every output but the first
        attention += model.attention(read, n * (n + 1) / 2 + read)
    return [*products, attention]


def decode_step(model: Model, batch: int, context: float) -> float:
    """Seconds of `decode_work`, one after the other."""
    return sum(work.seconds for work in decode_work(model, batch, context))
