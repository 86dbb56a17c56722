"""GEMMs of decode steps, shapes of Llama-3.1-8B: each matrix alone, all of a step in a chain."""

from collections.abc import Callable

import torch
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import Around, Matrix
from timing import DTYPE, FFN, HEAD_SIZE, HIDDEN, KV_HEADS, Q_HEADS, VOCAB, Result, report, rows

NUM_LAYERS = 32
QKV = (Q_HEADS + 2 * KV_HEADS) * HEAD_SIZE
SHAPES = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "lm_head": (VOCAB, HIDDEN),
}
EPS = 1e-5


class Weights:
    """Weights of all layers and the head: 15 GB, so that nothing stays in the L2 cache."""

    def __init__(self) -> None:
        self.matrices = {
            name: [
                rows(*shape).mul_(shape[1] ** -0.5)
                for _ in range(1 if name == "lm_head" else NUM_LAYERS)
            ]
            for name, shape in SHAPES.items()
        }
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=DTYPE)

    def product(self, name: str, n: int, layer: int) -> Callable[[], object]:
        """One product of `n` rows, with what stands around it in a block."""
        weight = self.matrices[name][layer]
        x, residual = rows(n, weight.shape[1]), rows(n, weight.shape[0])
        if name in ("o", "down"):
            return lambda: linear(x, Matrix(weight), Around(residual=residual))
        around = Around(self.norm, EPS, gate="silu" if name == "gate_up" else "")
        return lambda: linear(x, Matrix(weight), around)

    def chain(self, n: int) -> Callable[[], object]:
        """All GEMMs of a step of `n` rows, each of the one before; no attention."""
        x = rows(n, HIDDEN)

        def run() -> object:
            residual, norm = x.clone(), Around(self.norm, EPS)
            for qkv, o, gate_up, down in zip(*list(self.matrices.values())[:4], strict=True):
                queries = linear(residual, Matrix(qkv), norm)[:, :HIDDEN]
                linear(queries, Matrix(o), Around(residual=residual))
                gated = linear(residual, Matrix(gate_up), norm._replace(gate="silu"))
                linear(gated, Matrix(down), Around(residual=residual))
            return linear(residual, Matrix(self.matrices["lm_head"][0]), norm)

        return run


def cases() -> list[Result]:
    weights = Weights()
    results = []
    for n in (1, 2, 8, 16, 32, 64, 128, 160, 176, 192, 256):
        total = 0
        for name, (outputs, inputs) in SHAPES.items():
            layers = range(len(weights.matrices[name]))
            size = outputs * inputs * 2
            total += size * len(layers)
            runs = [weights.product(name, n, layer) for layer in layers]
            results.append(report(name, f"{n} rows", runs, size, 2 * n * outputs * inputs))
        results.append(report("step", f"{n} rows", [weights.chain(n)], total, n * total))
    return results
