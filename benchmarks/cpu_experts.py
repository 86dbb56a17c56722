"""Layers of experts on a CPU: milliseconds a layer, and the share of the limit.

    python benchmarks/cpu_experts.py [--threads N] [--rows N ...] [--weights NAME ...]

Each layer has weights of its own, random ones, and each row a choice of its own that is uniform
over experts: together they fit no cache. The limit is what the distinct experts of the rows take to
read at the rate at which a copy reads and writes. `torch` is what computes without these kernels:
the weights of each expert in fp32, then torch's product. The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from cpu import copy_bandwidth
from slipstream.kernels.experts.combine import combine
from slipstream.kernels.experts.grouped import ExpertMatrix, down, expert_matrix, gate_up
from slipstream.kernels.experts.route import Routed, route
from slipstream.kernels.experts.spec import Gate, Routing
from slipstream.quant.forms import make_numbers, make_tiles
from slipstream.quant.matrix import Kind, QuantMatrix

SECONDS = 2.0  # of a measurement, at least


@dataclass(frozen=True)
class Model:
    """Sizes of a layer, and how many are made."""

    name: str
    hidden: int
    experts: int
    top_k: int
    inner: int
    gate: Gate = Gate.SILU
    num_layers: int = 2


MODELS = (
    Model("Qwen3-30B-A3B", 2048, 128, 8, 768),
    Model("gpt-oss-20b", 2880, 32, 4, 2880, Gate.CLAMPED),
    Model("OLMoE-1B-7B", 2048, 64, 8, 1024),
)
WEIGHTS = ("Q4_0", "MXFP4", "Q8_0", "bf16")


@dataclass
class Result:
    """A line of the table."""

    model: str
    weights: str
    threads: int
    rows: int
    kernel: str
    milliseconds: float  # of a layer, the least
    share_of_limit: float


def random_matrix(weights: str, rows: int, inputs: int) -> QuantMatrix:
    """Make weights by 32 inputs."""
    groups = (rows, inputs // 32)
    if weights == "Q8_0":
        codes = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
        return QuantMatrix(Kind.W8, codes, torch.rand(groups).half() / 1000, 32, inputs)
    codes = torch.randint(0, 256, (rows, inputs // 2), dtype=torch.uint8)
    if weights == "Q4_0":
        return QuantMatrix(Kind.W4, codes, torch.rand(groups).half() / 100, 32, inputs)
    return QuantMatrix(Kind.F4, codes, torch.exp2(torch.randint(-9, -5, groups)), 32, inputs)


class Layer:
    """The experts of one layer."""

    def __init__(self, model: Model, weights: str) -> None:
        self.model = model
        self.routing = Routing(model.experts, model.top_k, normalises=True)
        self.gate_up = self._matrix(weights, 2 * model.inner, model.hidden)
        self.down = self._matrix(weights, model.hidden, model.inner)

    def _matrix(self, weights: str, outputs: int, inputs: int) -> ExpertMatrix:
        count = self.model.experts
        if weights == "bf16":
            values = torch.empty(count * outputs, inputs, dtype=torch.bfloat16).normal_(0, 0.02)
            return expert_matrix(make_numbers(values), count, None)
        return expert_matrix(
            make_tiles(random_matrix(weights, count * outputs, inputs)), count, None
        )

    def num_bytes(self, routed: Routed) -> float:
        """Return the bytes of the experts that rows have."""
        active = int((routed.offsets.diff() > 0).sum())
        parts = [
            part
            for each in (self.gate_up, self.down)
            for part in (each.values, each.groups.scales, each.groups.minimums)
            if part is not None
        ]
        return sum(part.nbytes for part in parts) * active / self.model.experts

    def run(self, x: torch.Tensor, logits: torch.Tensor, is_torch: bool) -> Routed:
        """Compute the layer, choice and sum included, by the kernels or by torch."""
        ops = (route, gate_up, down, combine)
        choose, first, last, add = (each.oracle if is_torch else each for each in ops)
        routed = choose(logits, self.routing, 8)
        inner = first(x, self.gate_up.values, self.gate_up, routed, self.model.gate)
        add(x.clone(), last(inner, self.down.values, self.down, routed))
        return routed


def least_seconds(layers: list[Layer], rows: int, is_torch: bool) -> tuple[float, float]:
    """Return the least seconds of a layer, and the mean bytes of the experts of a step."""
    model = layers[0].model
    found, num_bytes, ends = [], [], time.perf_counter() + SECONDS
    while time.perf_counter() < ends or len(found) < 3:
        took = 0.0
        for layer in layers:
            x, logits = torch.randn(rows, model.hidden), torch.randn(rows, model.experts)
            began = time.perf_counter()
            routed = layer.run(x, logits, is_torch)
            took += time.perf_counter() - began
            num_bytes.append(layer.num_bytes(routed))
        found.append(took / len(layers))
    return min(found), sum(num_bytes) / len(num_bytes)


def main(show: Callable[[str], None] = print) -> int:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS)
    parser.add_argument("--models", nargs="+", default=[each.name for each in MODELS[:2]])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rate, results = copy_bandwidth(options.threads), []
    show(f"a copy reads and writes {rate / 1e9:.1f} GB/s with {options.threads} threads")
    for model in (each for each in MODELS if each.name in options.models):
        for weights in options.weights:
            layers = [Layer(model, weights) for _ in range(model.num_layers)]
            for rows in options.rows:
                for kernel in ("ours", "torch"):
                    seconds, num_bytes = least_seconds(layers, rows, kernel == "torch")
                    case = model.name, weights, options.threads, rows, kernel
                    made = Result(*case, seconds * 1e3, num_bytes / rate / seconds)
                    results.append(made)
                    shown = f"{model.name:14} {weights:6} {rows:4} rows {kernel:6}"
                    show(f"{shown} {made.milliseconds:9.3f} ms {made.share_of_limit:7.1%}")
    show(json.dumps([asdict(each) for each in results]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
