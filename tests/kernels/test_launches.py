"""The kernels of a step, in order and with their arguments, are those of `launches.json`.

What a model launches is all that it costs, and decides its bits. A change of `launches.json` is a
change of either: the file says for each case the kernels, and a digest of their arguments. Where
the change is meant, write the file anew and commit it with the figures:

    cd tests; ../.venv/bin/python -c "from kernels.test_launches import write; write()"
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fixtures.kernels.recording import recorded
from fixtures.quant.int8_rows import NAME as INT8_ROWS
from fixtures.quant.int8_rows import int8_rows
from fixtures.tiers import quick_of
from slipstream.fuse.rewrite import fused
from slipstream.kernels.elementwise.rope import HeadStages, rope_and_cache
from slipstream.kernels.runtime.registry import KNOWN
from slipstream.layers.dims import Dims
from slipstream.layers.embedding import Head, Table
from slipstream.layers.linear import Linear, LinearAdd, NormLinear
from slipstream.layers.mlp import GatedMLP, GeluMLP, PlainMLP, TwoStepMLP
from slipstream.layers.norm import LayerNorm, Norm
from slipstream.layers.residual import Residual
from slipstream.models.source import Weights
from torch import Tensor

GOLDEN = Path(__file__).with_name("launches.json")
META = torch.device("meta")
SIZES = {
    "8b": Dims(128256, 4096, 14336, 1, 32, 8, 128, 1e-5),
    "odd": Dims(1000, 272, 528, 1, 4, 2, 64, 1e-5),  # no multiples of 64
}
ROWS = {"8b": (1, 2, 3, 8, 64, 128, 129, 256, 2048), "odd": (1, 2, 3, 128, 2048)}


class Case(NamedTuple):
    size: str
    dtype: str
    scheme: str
    variant: str  # plain, bias, qk norms, gemma, gpt, deterministic

    def __str__(self) -> str:
        return " ".join(self)

    def rows(self) -> list[int]:
        rows = ROWS[self.size]
        if self.variant == "qk norms":
            return [n for n in rows if n in (1, 129)]
        if self.variant == "gpt":
            return [n for n in rows if n in (1, 3, 129)]
        return [n for n in rows if self.variant != "deterministic" or n % 128 == 0]


def cases() -> Iterator[Case]:
    variants = ("plain", "bias", "qk norms", "gemma", "deterministic")
    for size in SIZES:
        for scheme in ("none", "fp8"):
            for variant in variants:
                if (scheme, variant) != ("fp8", "gemma"):
                    yield Case(size, "bfloat16", scheme, variant)
            yield Case(size, "bfloat16", scheme, "gpt")
        yield Case(size, "bfloat16", "w4a8", "plain")
        for variant in ("plain", "deterministic"):
            yield Case(size, "bfloat16", INT8_ROWS, variant)
        yield Case(size, "float16", INT8_ROWS, "bias")
        yield Case(size, "float16", "none", "plain")
        yield Case(size, "float16", "fp8", "bias")
        yield Case(size, "float32", "none", "plain")


class NoWeights:
    """A source of weights that have shapes alone."""

    def has(self, name: str) -> bool:
        return False

    def fill(self, names: list[str], outs: list[Tensor]) -> None:
        pass

    def mapped(self, *given: object) -> None:
        return None

    def note(self, text: str) -> None:
        pass

    def quantized(self, name: str, rows: int, inputs: int) -> None:
        return None


class Model:
    """The linear layers of a block, with the rotation, and the head; attention is left out."""

    def __init__(self, case: Case) -> None:
        self.dims = d = SIZES[case.size]
        self.dtype = getattr(torch, case.dtype)
        # What is packed depends on the GPU; fp8 of a device without memory does not ask.
        target = KNOWN["sm_90a"] if case.scheme == "w4a8" else None
        settings = (META, self.dtype, case.scheme, case.variant == "deterministic")
        w = Weights(NoWeights(), *settings, target=target)
        bias, gemma = case.variant in ("bias", "gpt"), case.variant == "gemma"
        is_gpt = case.variant == "gpt"  # layer norms, and an MLP without a gate
        self.sizes = [n * d.head_size for n in (d.num_heads, d.num_kv_heads, d.num_kv_heads)]

        def norm(size: int = d.hidden_size) -> Norm | LayerNorm:
            return LayerNorm(w, size, d.eps) if is_gpt else Norm(w, size, d.eps, gemma)

        qkv = Linear.read(w, ("q", "k", "v"), self.sizes, d.hidden_size, bias)
        out = Linear.read(w, ("o",), (d.hidden_size,), self.sizes[0], bias)
        self.qkv = fused(NormLinear(qkv, leaves_scales=True))
        self.out = fused(LinearAdd(out, norm() if gemma else None))
        if is_gpt:
            self.mlp: TwoStepMLP = PlainMLP(w, d, "gelu, by tanh", bias)
            self.mlp.up = fused(self.mlp.up, self.mlp.down.linear)
        else:
            self.mlp = (GeluMLP if gemma else GatedMLP)(w, d, bias, norm() if gemma else None)
            self.mlp.gate_up = fused(self.mlp.gate_up, self.mlp.down.linear)
        self.mlp.down = fused(self.mlp.down)
        self.head = Head(Table(w.tensor("weight", d.vocab_size, d.hidden_size)), w.deterministic)
        self.head.product = fused(self.head.product)
        self.norms = [norm(), norm(), norm()]
        self.qk = Norm(w, d.head_size, d.eps) if case.variant == "qk norms" else None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=META)

    def attend(self, residual: Residual) -> None:
        d, n = self.dims, len(residual)
        product, scales = self.qkv(self.norms[0], residual)
        q, k, v = (part.view(n, -1, d.head_size) for part in product.split(self.sizes, -1))
        angles = self.empty(64, d.head_size, dtype=torch.float32)
        places = [self.empty(n, dtype=torch.int64) for _ in range(2)]
        cache = self.empty(8, d.num_kv_heads, 2, 32, d.head_size)
        norms = (self.qk.weight, self.qk.weight, d.eps) if self.qk else (None, None, 0.0)
        rope_and_cache(q, k, v, angles, *places, cache, HeadStages(scales, *norms))
        self.out(self.empty(n, self.sizes[0]), residual)

    def run(self, num_rows: int) -> None:
        """A block, the first half of another, and the head."""
        residual = Residual(self.empty(num_rows, self.dims.hidden_size))
        self.attend(residual)
        self.mlp(self.norms[1], residual)
        self.attend(residual)
        self.head(self.norms[2], residual)


def launches(case: Case) -> dict[str, list[tuple[str, str]]]:
    """By rows."""
    with recorded(), int8_rows():
        model = Model(case)
    found = {}
    for num_rows in case.rows():
        with recorded() as notes:
            model.run(num_rows)
        found[str(num_rows)] = notes
    return found


def summary(notes: list[tuple[str, str]]) -> str:
    text = "\n".join(f"{name} {arguments}" for name, arguments in notes)
    names = " ".join(name for name, _ in notes)
    return f"{names} #{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def write() -> None:
    """Write the file of what is launched now."""
    found = {
        str(case): {rows: summary(notes) for rows, notes in launches(case).items()}
        for case in cases()
    }
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


QUICK = [case for case in cases() if case.size == "8b" and case.variant != "qk norms"]


@pytest.mark.parametrize("case", quick_of(cases(), QUICK), ids=str)
def test_kernels_and_their_arguments(case: Case) -> None:
    golden = json.loads(GOLDEN.read_text())[str(case)]
    found = launches(case)
    for rows, notes in found.items():
        assert summary(notes) == golden[rows], "\n".join(" ".join(note) for note in notes)
    assert found.keys() == golden.keys()
