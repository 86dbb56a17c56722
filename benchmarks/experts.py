"""Mixtures of experts by rows: microseconds of each kernel, of a layer, and the share of the limit.

Each layer has weights of its own, and a choice of its own that is uniform over experts. The limit
is what the distinct experts of the rows take to read. Of up to eight rows `choose` and `down_add`
are kernels of their own, `few` a layer by them with its norm, `normed` by the others with its norm.
`--tiles` times every size of tiles, by which `slipstream.kernels.experts.grouped` chooses, and
`--both` each by the kernel of all GPUs and by Hopper's, in turn, which for e4m3 is `streamed.cu`
with the rounding of its rows, else `piped.cu`. Packed weights, by
`--weights`, have one kernel; their limit is of the bytes that a GPU keeps. `--layers` and
`--choices` make weights and choices of layers as far apart in memory as those of a model are.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from unittest.mock import patch

import torch
from limits import rates_of
from packed_weights import FORMS, packed_experts
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.experts import packed
from slipstream.kernels.experts.combine import combine
from slipstream.kernels.experts.down_add import MAX_ROWS, down_add
from slipstream.kernels.experts.grouped import (
    SKINNY_ROWS,
    TILE_ROWS,
    ExpertMatrix,
    down,
    gate_up,
    tile_rows,
)
from slipstream.kernels.experts.route import Routed, route
from slipstream.kernels.experts.router import Chosen, RouterStages, choose_rows
from slipstream.kernels.experts.sm90 import piped, streamed
from slipstream.kernels.experts.spec import Gate, Routing
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.runtime import jit
from slipstream.kernels.runtime.registry import target_of
from timing import need_gpu, rows, time_graph


@dataclass(frozen=True)
class Model:
    """Sizes of a layer, and how many a model has."""

    name: str
    hidden: int
    experts: int
    top_k: int
    inner: int
    num_layers: int


MODELS = (
    Model("Qwen3-30B-A3B", 2048, 128, 8, 768, 48),
    Model("Mixtral-8x7B", 4096, 8, 2, 14336, 32),
    Model("gpt-oss-20b", 2880, 32, 4, 2880, 24),
)
KINDS = ("bf16", "e4m3", *FORMS)


@dataclass
class Result:
    """A line of the table: a kernel or a layer at a number of rows."""

    model: str
    weights: str
    rows: int
    tile_rows: int
    of_kernel: str  # tiles, or of a Hopper piped or streamed
    kernel: str
    microseconds: float
    share_of_limit: float | None


class Layer:
    """The experts of one layer, with their router."""

    def __init__(self, model: Model, kind: str) -> None:
        self.model = model
        self.routing = Routing(model.experts, model.top_k, normalises=True)
        self.router = rows(model.experts, model.hidden).mul_(model.hidden**-0.5)
        self.norm = torch.ones_like(self.router[0])
        self.gate_up = self._matrix(2 * model.inner, model.hidden, kind)
        self.down = self._matrix(model.hidden, model.inner, kind)

    def _matrix(self, outputs: int, inputs: int, kind: str) -> ExpertMatrix:
        if kind in FORMS:
            return packed_experts(kind, self.model.experts, outputs, inputs, self.router.device)
        values = rows(self.model.experts, outputs, inputs).mul_(inputs**-0.5)
        if kind == "bf16":
            return ExpertMatrix(values)
        found = [eight_bits.quantize(each) for each in values]
        return ExpertMatrix(
            torch.stack([each.values.view(torch.uint8) for each in found]).view(eight_bits.E4M3),
            torch.stack([each.scales for each in found]),
        )

    def route(self, logits: torch.Tensor, size: int) -> Routed:
        """Choose experts."""
        return route(logits, self.routing, size)

    def up(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Multiply with gates and ups."""
        return gate_up(x, self.gate_up.values, self.gate_up, routed, Gate.SILU)

    def out(self, inner: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Multiply with the second matrices."""
        return down(inner, self.down.values, self.down, routed)

    def run(self, x: torch.Tensor, residual: torch.Tensor, size: int) -> torch.Tensor:
        """Run the layer, its router too."""
        routed = self.route(linear(x, Matrix(self.router)), size)
        return combine(residual, self.out(self.up(x, routed), routed))

    def normed(self, x: torch.Tensor, residual: torch.Tensor, size: int) -> torch.Tensor:
        """Run the layer with its norm."""
        return self.run(rms_norm(x, self.norm, 1e-6), residual, size)

    def choose(self, x: torch.Tensor, size: int) -> Chosen:
        """Normalise a few rows and choose experts."""
        return choose_rows(x, self.router, self.norm, RouterStages(1e-6, self.routing, size))

    def add(self, inner: torch.Tensor, residual: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Add the outputs of a few rows' experts."""
        return down_add(inner, self.down.values, residual, self.down, routed)

    def few(self, x: torch.Tensor, residual: torch.Tensor, size: int) -> torch.Tensor:
        """Run the layer with its norm by the kernels of a few rows."""
        x, _, routed = self.choose(x, size)
        inner = self.up(x, routed)
        if size == SKINNY_ROWS and self.down.groups is None:
            return self.add(inner, residual, routed)
        return combine(residual, self.out(inner, routed))


def num_bytes_of(matrix: ExpertMatrix) -> int:
    """Count the bytes of all experts as they are kept."""
    groups = matrix.groups
    own = [matrix.values] if groups is None else [matrix.values, groups.scales, groups.zeros]
    return sum(each.numel() * each.element_size() for each in own if each is not None)


def timed(layers: list[Layer], n: int, size: int) -> dict[str, tuple[float, float]]:
    """Seconds of each kernel and of the whole layer, and bytes of the weights that it reads."""
    model = layers[0].model
    x = [rows(n, model.hidden) for _ in layers]
    residual = [torch.zeros_like(each) for each in x]
    logits = [linear(one, Matrix(layer.router)) for one, layer in zip(x, layers, strict=True)]
    routed = [layer.route(one, size) for layer, one in zip(layers, logits, strict=True)]
    inner = [layer.up(*each) for layer, *each in zip(layers, x, routed, strict=True)]
    products = [layer.out(*each) for layer, *each in zip(layers, inner, routed, strict=True)]
    active = sum(int(torch.unique(each.experts).numel()) for each in routed) / len(layers)
    num_bytes = [
        active / model.experts * num_bytes_of(matrix)
        for matrix in (layers[0].gate_up, layers[0].down)
    ]
    whole = sum(num_bytes) + layers[0].router.numel() * 2

    def each(run: Callable[..., object], *args: list[object]) -> float:
        runs = [lambda given=given: run(*given) for given in zip(*args, strict=True)]
        return time_graph(runs)

    sizes = [size] * len(layers)
    found = {
        "route": (each(Layer.route, layers, logits, sizes), 0),
        "gate_up": (each(Layer.up, layers, x, routed), num_bytes[0]),
        "down": (each(Layer.out, layers, inner, routed), num_bytes[1]),
        "combine": (each(combine, residual, products), 0),
        "layer": (each(Layer.run, layers, x, residual, sizes), whole),
    }
    if n <= MAX_ROWS:
        found["choose"] = (each(Layer.choose, layers, x, sizes), 0)
        if size == SKINNY_ROWS and layers[0].down.groups is None:
            found["down_add"] = (each(Layer.add, layers, inner, residual, routed), num_bytes[1])
        found["normed"] = (each(Layer.normed, layers, x, residual, sizes), whole)
        found["few"] = (each(Layer.few, layers, x, residual, sizes), whole)
    return found


def make_layers(model: Model, kind: str, count: int | None) -> list[Layer]:
    """Make layers, by default so many that their weights are several times the L2 cache."""
    size = 3 * model.experts * model.inner * model.hidden * (2 if kind == "bf16" else 1)
    wanted = max(2, min(8, math.ceil(12e9 / size))) if count is None else count
    return [Layer(model, kind) for _ in range(wanted)]


@contextmanager
def chosen_by(is_hoppers: bool) -> Iterator[None]:
    """Choose kernels as on this GPU, or, if not `is_hoppers`, as on one before Hopper."""
    with ExitStack() as stack:
        if not is_hoppers:
            stack.enter_context(patch.object(piped, "runs_on", lambda *_: False))
            stack.enter_context(patch.object(streamed, "refusal", lambda *_: "is Hopper's"))
        yield


def measure(
    layers: list[Layer],
    kind: str,
    counts: list[int],
    all_tiles: bool,
    kernels: list[bool],
) -> list[Result]:
    """Time a model's layer with every number of rows, by each of the kernels: Hopper's, or not."""
    rate, model = rates_of(torch.cuda.get_device_name(), {}).read, layers[0].model
    results, device, is_fp8 = [], layers[0].router.device, kind == "e4m3"
    own = [each.groups.packing for each in (layers[0].gate_up, layers[0].down) if each.groups]
    hoppers, of_hopper = (streamed, "streamed") if is_fp8 else (piped, "piped")
    for n, is_own in itertools.product(counts, kernels[:1] if own else kernels):
        pairs, name = n * model.top_k, of_hopper if is_own else "tiles"
        with chosen_by(is_own):
            chosen = tile_rows(pairs, model.experts, is_fp8, target=target_of(device), packings=own)
        sizes = hoppers.TILE_ROWS if is_own else (SKINNY_ROWS, *TILE_ROWS)
        sizes = packed.tile_rows(own[0]) if own else sizes
        for tile in sizes if all_tiles else (chosen,):
            with chosen_by(is_own):
                found = timed(layers, n, tile)
            line = f"{model.name:14} {kind:10} {n:5} rows, {name} of"
            line += f" {tile:3}{'*' * (tile == chosen):1}"
            for kernel, (seconds, num_bytes) in found.items():
                share = num_bytes / rate / seconds if num_bytes else None
                line += f" {kernel} {seconds * 1e6:7.1f} us"
                line += f" {share:4.0%}" if share else ""
                how = (model.name, kind, n, tile, name, kernel)
                results.append(Result(*how, seconds * 1e6, share))
            ms = found["layer"][0] * model.num_layers * 1e3
            print(f"{line} | {ms:.2f} ms a step of {model.num_layers}", flush=True)
    return results


def main() -> None:
    """Time what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32, 128, 512])
    parser.add_argument("--tiles", action="store_true", help="every size of tiles")
    parser.add_argument("--both", action="store_true", help="by both kernels")
    parser.add_argument("--weights", nargs="*", choices=KINDS, default=["bf16", "e4m3"])
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="*", choices=names, default=names)
    parser.add_argument("--layers", type=int, help="layers, each with weights of its own")
    parser.add_argument("--choices", type=int, default=1, help="of experts, by each layer")
    args = parser.parse_args()
    for name in ("layers", "choices"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: 1 at least")
    need_gpu()
    torch.manual_seed(0)
    results = []
    kernels = [False, True] if args.both else [jit.is_hopper(torch.device("cuda", 0))]
    for model, kind in itertools.product(MODELS, args.weights):
        if model.name not in args.models:
            continue
        layers = make_layers(model, kind, args.layers) * args.choices
        results += measure(layers, kind, args.rows, args.tiles, kernels)
        del layers
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
