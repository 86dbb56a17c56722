"""GEMMs of 129 to 256 rows of an 8B's step: each launch, and gates and ups by either kernel.

    python benchmarks/gated_rows.py [--rows N ...] [--turns N]

Shows microseconds of each GEMM with what a step computes around it, and of a layer's four in a
chain of 32 layers with weights of their own; beside them those of gates and ups, and of the layer,
where the skinny GEMM takes gated rows up to 192 (`skinny.gated_rows`). The two take turns, each
under load for a third of a second; medians are shown, and the share of the limit of a layer: its
bytes at 4.707 TB/s or its operations at 790 TFLOP/s. `slipstream tune` goes first, if it is to
count.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from cases_linear import SHAPES, Weights
from slipstream.kernels.gemm import linear
from slipstream.kernels.gemm.sm90 import skinny
from timing import need_gpu, time_graph

ROWS = (128, 136, 144, 160, 176, 192, 200, 224, 256)
BYTES_S, OPERATIONS_S = 4.707e12, 790e12
PLACES = ("qkv", "o", "gate_up", "down", "lm_head")
_REPLAYS = 90


@contextmanager
def gated_rows(most: int) -> Iterator[None]:
    """Choose kernels as if the skinny GEMM took so many gated rows."""
    before = skinny.gated_rows
    skinny.gated_rows = most
    linear.discard_routes()
    try:
        yield
    finally:
        skinny.gated_rows = before
        linear.discard_routes()


def limit(rows: int) -> float:
    """Return the least seconds of a layer's GEMMs."""
    size = sum(outputs * inputs for name, (outputs, inputs) in SHAPES.items() if name != "lm_head")
    return max(2 * size / BYTES_S, 2 * size * rows / OPERATIONS_S)


def clocks(weights: Weights, rows: int) -> dict[str, Callable[[], float]]:
    """Return what measures each place, and a layer of the chain, in seconds."""
    made = {}
    for name in PLACES:
        count = len(weights.matrices[name])
        runs = [weights.product(name, rows, layer) for layer in range(count)]
        made[name] = lambda runs=runs: time_graph(runs, _REPLAYS)
    chain = weights.chain(rows)
    made["chain"] = lambda: time_graph([chain], _REPLAYS)
    return made


def measure(weights: Weights, rows: int, turns: int) -> dict[str, float]:
    """Return microseconds by place; those with skinny gates end with `by skinny`."""
    found: dict[str, list[float]] = {}
    most = (skinny.MAX_ROWS, skinny.MOST_GATED_ROWS)
    is_both = skinny.MAX_ROWS < rows <= skinny.MOST_GATED_ROWS
    for turn in range(turns):
        order = most if turn % 2 == 0 else most[::-1]
        for each in order if is_both else most[:1]:
            is_skinny = each != most[0]
            with gated_rows(each):
                for name, clock in clocks(weights, rows).items():
                    if is_skinny and name not in ("gate_up", "chain"):
                        continue
                    label = f"{name} by skinny" if is_skinny else name
                    found.setdefault(label, []).append(1e6 * clock())
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    """Print a table, a line as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    weights = Weights()
    layers = len(weights.matrices["qkv"])
    print(f"{torch.cuda.get_device_name()}; microseconds; a layer is of the chain without its head")
    print(
        " rows" + "".join(f"{name:>9}" for name in PLACES) + "    layer  limit | by skinny: gate_up"
    )
    for rows in options.rows:
        found = measure(weights, rows, options.turns)
        layer = {
            name: (us - found["lm_head"]) / layers
            for name, us in found.items()
            if name.startswith("chain")
        }
        line = f"{rows:5}" + "".join(f"{found[name]:9.2f}" for name in PLACES)
        line += f"{layer['chain']:9.2f} {1e6 * limit(rows) / layer['chain']:6.1%} |"
        if "gate_up by skinny" in found:
            ratio = layer["chain by skinny"] / layer["chain"]
            line += f" {found['gate_up by skinny']:9.2f}, layer {layer['chain by skinny']:9.2f}"
            line += f" ({ratio:.3f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
