"""The rows of the GPU table: workload, figure, goal; what both engines are measured by."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import limits
import workloads
from limits import Rates, Work
from shapes import SHAPES
from workloads import Workload

SHAPE = "llama-3.1-8b"
MAX_SEQUENCES = 256
BUDGET = 4096  # tokens of a step of ours
PARETO = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batches of the short decodes behind the plots
PARETO_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    `goal` was set beside the peer's `reference`: the ratio of the two is what is to be reached
    beside a peer in the same sitting.
    """

    name: str
    label: str
    unit: str  # ms/token, tok/s, ms, s: the first of them tells what is better
    figure: str  # of a `driving.Run`; "start" is a process of its own
    goal: float
    reference: float
    make: Callable[[], Workload] | None = None
    is_fp8: bool = False
    runs_a_repetition: float = 1  # below 1: one run is cut into repetitions

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.unit == "tok/s"

    @property
    def ratio_to_reach(self) -> float:
        """Return the ratio to reach; above 1 where ours is to be better."""
        return self.goal / self.reference if self.is_rate else self.reference / self.goal

    def ratio(self, ours: float, peer: float) -> float:
        """How many times better ours is."""
        return ours / peer if self.is_rate else peer / ours

    def workload(self) -> Workload:
        """What is run."""
        assert self.make is not None, self.name
        return self.make()

    def warm_up(self) -> Workload:
        """A short run before it: kernels and allocators have met its shapes."""
        whole = self.workload()
        num_prompts = {"long-context": 1, "mixed-512": 32, "fp8-mixed-512": 32}
        few = whole.prompts[: num_prompts.get(self.name)]
        return replace(whole, prompts=few, max_tokens=min(whole.max_tokens, 16))

    def work(self, rates: Rates) -> list[Work] | None:
        """List the work of GEMMs, head and attention on a GPU of these rates: of a step
        where the figure is one, else of the whole workload."""
        if self.make is None:
            return None
        model, load = limits.Model(SHAPES[SHAPE], rates, self.is_fp8), self.workload()
        if self.figure == "itl_ms":
            context = len(load.prompts[0]) + load.max_tokens / 2
            return limits.decode_work(model, len(load.prompts), context)
        if self.figure == "output_tok_s":
            return limits.whole_work(model, load, MAX_SEQUENCES)
        return limits.prompt_work(model, load)

    def num_tokens(self) -> int:
        """That a rate counts."""
        load = self.workload()
        if self.figure == "output_tok_s":
            return load.max_tokens * len(load.prompts)
        return sum(map(len, load.prompts))

    def seconds(self, figure: float) -> float:
        """Convert a figure in the row's unit to seconds of its `work`."""
        return self.num_tokens() / figure if self.is_rate else figure / 1e3

    def limit(self, rates: Rates) -> float | None:
        """The least time or the highest rate on a GPU of these rates, in the row's unit."""
        parts = self.work(rates)
        if parts is None:
            return None
        if self.figure == "output_tok_s":  # reads of some steps while others compute
            parts = [sum(parts, Work())]
        seconds = sum(work.seconds for work in parts)
        return self.num_tokens() / seconds if self.is_rate else 1e3 * seconds


def _decode(batch: int, goal: float, reference: float, **options: object) -> Row:
    name = f"{'fp8-' if options else ''}decode-bs{batch}"
    label = f"{'fp8, ' if options else ''}decode, batch {batch}"
    tokens = 128 if batch == 256 else 256
    return Row(
        name,
        label,
        "ms/token",
        "itl_ms",
        goal,
        reference,
        lambda: workloads.decode(batch, tokens),
        bool(options),
    )


def _mixed(goal: float, reference: float, is_fp8: bool = False) -> Row:
    name, label = "mixed-512", "512 requests, 128-1,024 in, 256 out"
    if is_fp8:
        name, label = f"fp8-{name}", f"fp8, {label}"
    return Row(
        name, label, "tok/s", "output_tok_s", goal, reference, workloads.mixed, is_fp8=is_fp8
    )


ROWS = {
    row.name: row
    for row in (
        _decode(1, 3.55, 4.89),
        _decode(32, 4.2, 5.50),
        _decode(128, 5.5, 7.35),
        _decode(200, 7.95, 9.15),  # both between their neighbours: the ratio is the goal
        _decode(256, 8.4, 10.6),
        Row(
            "prefill",
            "16 prompts of 2,048",
            "tok/s",
            "input_tok_s",
            45_000,
            42_900,
            workloads.prefill,
        ),
        _mixed(12_000, 9_200),
        Row(
            "ttft",
            "first token, batch 1, 128 in",
            "ms",
            "ttft_ms",
            6,
            16.5,
            lambda: workloads.decode(1, max_tokens=2),
            runs_a_repetition=3,
        ),
        Row(
            "long-context",
            "decode, 16 x 16,384 tokens",
            "ms/token",
            "itl_ms",
            11.4,
            12.6,
            workloads.long_context,
            runs_a_repetition=1 / 3,
        ),
        Row("start", "process start to first token", "s", "start", 10, 72),
        _decode(1, 2.25, 3.48, is_fp8=True),
        _decode(128, 4.1, 5.9, is_fp8=True),
        _mixed(16_500, 12_370, is_fp8=True),
    )
}


def pareto_limit_ms(batch: int, rates: Rates) -> float:
    """Return the limit of a step of the short bf16 decodes."""
    model = limits.Model(SHAPES[SHAPE], rates)
    return 1e3 * limits.decode_step(model, batch, 128 + PARETO_TOKENS / 2)
