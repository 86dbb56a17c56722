"""Products with what stands around them, on a GPU: against fp64, poisoned, repeated bitwise."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from fixtures.kernels.checking import (
    Judge,
    naive_linear,
    poison,
    random,
    same_bits,
    short,
    spread,
)
from slipstream.kernels.elementwise.activation import EVERY, activate
from slipstream.kernels.elementwise.eight_bits import quantize
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.op import E4M3, INT8, Around, Matrix, Spec, spec_of
from slipstream.kernels.gemm.sm90.gemv import MAX_ROWS, gemv, refusal
from slipstream.kernels.gemm.sm90.skinny import skinny
from slipstream.kernels.gemm.sm90.skinny import takes as skinny_takes
from slipstream.kernels.gemm.sm90.tall import takes as tall_takes
from slipstream.kernels.gemm.sm90.tall import tall
from torch.nn import functional

pytestmark = pytest.mark.gpu

EPS = 1e-5
SHAPES = [(n, k) for n in (1, 7, 130, 4096) for k in (8, 64, 520, 1000, 4096, 14336)]
SHAPES += [(6144, 4096), (28672, 4096), (130, 8192), (130, 28672), (1000, 2048)]
ROWS = (1, 2)


@dataclass
class Case:
    """A product in some precision."""

    x: torch.Tensor
    weight: torch.Tensor  # of the precision of x, or of 8 bits
    norm: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    gated: bool = False
    residual: torch.Tensor | None = None
    kernel: Callable[..., torch.Tensor] = gemv
    shift: torch.Tensor | None = None  # of a layer norm
    activation: str = ""

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        x, weight = self.x.to(dtype), self.weight.to(dtype)
        if self.scales is not None:
            weight = weight * self.scales[:, None].to(dtype)
        if self.shift is not None:
            centred = x - x.mean(-1, keepdim=True)
            factor = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + EPS)
            x = centred * factor * self.norm.to(dtype) + self.shift.to(dtype)
        elif self.norm is not None:
            x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * self.norm.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        y = naive_linear(x, weight, bias)
        if self.gated:
            gate, up = y.chunk(2, -1)
            y = functional.silu(gate) * up
        if self.activation:
            y = activate(EVERY + self.activation, y)
        return y if self.residual is None else self.residual.to(dtype) + y

    def around(self, residual: torch.Tensor | None = None) -> Around:
        gate = "silu" if self.gated else EVERY + self.activation if self.activation else ""
        stages = {"columns": self.scales, "bias": self.bias, "gate": gate, "residual": residual}
        how = Around(self.norm, EPS, is_centred=self.shift is not None, shift=self.shift)
        return how._replace(**stages)

    def is_taken(self, takes: Callable[[Spec], str | None]) -> bool:
        return takes(spec_of(self.x, self.weight, self.around(self.residual))) is None

    def run(self) -> torch.Tensor:
        residual = None if self.residual is None else spread(self.residual)
        outputs = len(self.weight) // (2 if self.gated else 1)
        poison((len(self.x), outputs), dtype=self.x.dtype)
        out = self.kernel(self.x, self.weight, self.around(residual))
        if residual is not None:
            assert out is residual
            assert bool(residual._base.view(len(out), -1)[:, :8].isnan().all())
        return out


def cases(
    rows: int, outputs: int, width: int, dtype: torch.dtype, kind: torch.dtype | None = None
) -> dict[str, Case]:
    seed = outputs + width
    x = spread(random(rows, width, dtype=dtype, seed=seed))
    weight = random(outputs, width, dtype=dtype, seed=seed + 1) * width**-0.5
    norm = 1 + 0.1 * random(width, dtype=dtype, seed=2)
    bias, shift = random(outputs, dtype=dtype, seed=3), random(width, dtype=dtype, seed=5)
    residual = random(rows, outputs, dtype=dtype, seed=4)
    scales = None
    if kind is not None:
        weight, scales = quantize.oracle(weight.float(), kind)
    found = {
        "plain": Case(x, weight, scales=scales),
        "bias, residual": Case(x, weight, None, bias, scales, residual=residual),
        "norm, bias": Case(x, weight, norm, bias, scales),
        # A mean far from zero, which one pass over the squares would lose.
        "layer norm": Case(x + 20, weight, norm, bias, scales, shift=shift),
        "bias, relu": Case(x, weight, None, bias, scales, activation="relu"),
    }
    for activation in ("gelu", "gelu, by tanh"):
        stages = {"shift": shift, "activation": activation}
        found[f"layer norm, {activation}"] = Case(x, weight, norm, bias, scales, **stages)
    if outputs % 2 == 0:
        found["norm, gated"] = Case(x, weight, norm, None, scales, gated=True)
        found["bias, gated"] = Case(x, weight, None, bias, scales, gated=True)
    return found


def every(step: int, first: int, found: dict[str, Case]) -> list[tuple[str, Case]]:
    """Some of the cases: where `first` goes through all numbers, all of them come."""
    return [each for i, each in enumerate(found.items()) if (i + first) % step == 0]


def check(
    judge: Judge,
    number: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    kind: torch.dtype | None,
) -> int:
    """Half of the cases of one row, and the others of two, by turns."""
    taken = 0
    found = [
        (rows, *each)
        for i, rows in enumerate(ROWS)
        for each in every(len(ROWS), number + i, cases(rows, *shape, dtype, kind))
    ]
    for rows, what, case in found:
        if not case.is_taken(refusal):
            continue
        name = f"{rows} x {shape} {what} {kind or ''}"
        judge.close(name, case.run(), case.expected(torch.float64), case.expected(dtype))
        judge.repeats(name, case.run)
        taken += 1
    return taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("kind", [None, E4M3, INT8], ids=["16 bits", "e4m3", "int8"])
def test_few_rows(dtype: torch.dtype, kind: torch.dtype | None) -> None:
    judge = Judge(f"gemv {short(dtype)} {kind or ''}")
    shapes = SHAPES if dtype == torch.bfloat16 else [(130, 1000), (4096, 4096), (130, 14336)]
    taken = [check(judge, number, shape, dtype, kind) for number, shape in enumerate(shapes)]
    assert sum(n > 0 for n in taken) > len(taken) // 2
    judge.verdict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_skinny(dtype: torch.dtype) -> None:
    """Up to 128 rows: tiles of every width, alone and by clusters, the last of them cut."""
    judge = Judge(f"skinny {short(dtype)}")
    shapes = [(8, 256), (264, 320), (1000, 1024), (4096, 576), (4096, 4096), (6144, 4096)]
    shapes += [(28672, 4096), (4096, 14336), (18944, 3584), (70000, 512), (128256, 4096)]
    shapes += [(1000, 28672)]
    for number, shape in enumerate(shapes if dtype == torch.bfloat16 else shapes[2:6]):
        for i, rows in enumerate((1, 3, 8, 9, 16, 31, 33, 64, 65, 100, 128)):
            for what, case in every(3, number + i, cases(rows, *shape, dtype)):
                if not case.is_taken(skinny_takes):
                    continue
                case.kernel = skinny
                name = f"{rows} x {shape} {what}"
                judge.close(name, case.run(), case.expected(torch.float64), case.expected(dtype))
                judge.repeats(name, case.run)
    judge.verdict()


def test_skinny_rows_do_not_see_their_neighbours() -> None:
    """Nor how many there are, up to 64 and above: a sum's order is the weights' alone."""
    judge = Judge("rows of skinny, fewer and more")
    for shape in ((6144, 4096), (4096, 14336), (28672, 4096)):
        for most, fewer in ((64, (3, 17, 40, 63)), (128, (65, 100, 127))):
            for what, case in cases(most, *shape, torch.bfloat16).items():
                if case.norm is not None:
                    continue
                case.kernel = skinny
                out = case.run()
                for rows in fewer:
                    residual = None if case.residual is None else case.residual[:rows]
                    part = replace(case, x=case.x[:rows], residual=residual)
                    judge.true(f"{rows} x {shape} {what}", same_bits(part.run(), out[:rows]))
    judge.verdict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_skinny_with_a_gate_and_more_rows(dtype: torch.dtype) -> None:
    """Three groups of rows, tiles of 128 to 224 weight rows, which are multiplied by halves."""
    judge = Judge(f"skinny {short(dtype)}, gated")
    for outputs, width in ((28672, 4096), (25344, 512), (18944, 3584), (16384, 1024)):
        whole = cases(192, outputs, width, dtype)["bias, gated"]
        whole.kernel = skinny
        out = whole.run()
        for rows in (192, 169, 176, 177, 185, 191):
            case = replace(whole, x=whole.x[:rows])
            assert case.is_taken(skinny_takes)
            name = f"{rows} x {outputs, width}"
            judge.close(name, case.run(), case.expected(torch.float64), case.expected(dtype))
            judge.repeats(name, case.run)
            judge.true(f"{name}, bits of more rows", same_bits(case.run(), out[:rows]))
    judge.verdict()


TALL_ROWS = (2304, 256, 193, 200, 231, 255, 510, 512, 1019)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_tall(dtype: torch.dtype) -> None:
    """Rows in every part of a warpgroup's second block, tiles of every width, the last one cut;
    one tile of rows, some, and more than take turns.
    """
    judge = Judge(f"tall {short(dtype)}")
    shapes = [(28672, 4096), (28704, 192), (24576, 1024), (23248, 64), (29568, 320)]
    for outputs, width in shapes:
        x = spread(random(2304, width, dtype=dtype, seed=width))
        weight = random(outputs, width, dtype=dtype, seed=outputs) * width**-0.5
        for bias in (None, random(outputs, dtype=dtype, seed=3)):
            whole = None
            for rows in TALL_ROWS:
                case = Case(x[:rows], weight, bias=bias, gated=True)
                assert case.is_taken(tall_takes)
                name = f"{rows} x {outputs, width}{'' if bias is None else ' bias'}"
                poison((rows, outputs // 2), dtype=dtype)
                out = tall(case.x, weight, case.around())
                judge.close(name, out, case.expected(torch.float64), case.expected(dtype))
                judge.repeats(name, lambda c=case: tall(c.x, c.weight, c.around()))
                whole = out if whole is None else whole
                judge.true(f"{name}, bits of more rows", same_bits(out, whole[:rows]))
    judge.verdict()


def test_a_row_does_not_see_its_neighbours() -> None:
    judge = Judge("rows alone and together")
    for shape in ((6144, 4096), (4096, 14336), (1000, 520)):
        for kind in (None, E4M3, INT8):
            if kind is not None and shape[1] % 16:
                continue
            for what, case in cases(MAX_ROWS, *shape, torch.bfloat16, kind).items():
                if not case.is_taken(refusal):
                    continue
                out = case.run()
                for rows in ROWS:
                    residual = None if case.residual is None else case.residual[:rows]
                    fewer = replace(case, x=case.x[:rows], residual=residual)
                    judge.true(f"{rows} x {shape} {what}", same_bits(fewer.run(), out[:rows]))
    judge.verdict()


# ---- a step's products, one after the other ----

HIDDEN, FFN, NUM_LAYERS, VOCAB = 4096, 14336, 32, 128256
MATRICES = {
    "qkv": (6144, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}


class Chain:
    """The products of 32 layers and the head, with norms, gates and sums; no attention."""

    def __init__(self) -> None:
        def matrix(outputs: int, inputs: int) -> torch.Tensor:
            numbers = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
            return numbers.mul_(inputs**-0.5)

        torch.manual_seed(0)
        self.layers = [
            {name: matrix(*shape) for name, shape in MATRICES.items()} for _ in range(NUM_LAYERS)
        ]
        self.head = matrix(VOCAB, HIDDEN)
        self.norm = 1 + 0.1 * random(HIDDEN, dtype=torch.bfloat16)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Logits; through the kernels."""
        residual, norm = x.clone(), Around(self.norm, EPS)
        for layer in self.layers:
            qkv = linear(residual, Matrix(layer["qkv"]), norm)
            linear(qkv[:, :HIDDEN], Matrix(layer["o"]), Around(residual=residual))
            gated = linear(residual, Matrix(layer["gate_up"]), norm._replace(gate="silu"))
            linear(gated, Matrix(layer["down"]), Around(residual=residual))
        return linear(residual, Matrix(self.head), norm)

    def expected(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        residual, norm = x.to(dtype), self.norm.to(dtype)

        def normed() -> torch.Tensor:
            return residual * torch.rsqrt((residual**2).mean(-1, keepdim=True) + EPS) * norm

        for layer in self.layers:
            qkv = naive_linear(normed(), layer["qkv"].to(dtype))
            residual = residual + naive_linear(qkv[:, :HIDDEN], layer["o"].to(dtype))
            gate, up = naive_linear(normed(), layer["gate_up"].to(dtype)).chunk(2, -1)
            residual = residual + naive_linear(functional.silu(gate) * up, layer["down"].to(dtype))
        return naive_linear(normed(), self.head.to(dtype))


@pytest.fixture(scope="module")
def chain() -> Chain:
    return Chain()


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 64, 128])
def test_a_chain_of_products(chain: Chain, rows: int) -> None:
    """60 replays of one graph, in which each kernel starts before the one ahead has ended."""
    judge = Judge(f"chain of {rows}")
    x = random(rows, HIDDEN, dtype=torch.bfloat16, seed=rows)
    chain.run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = chain.run(x)
    graph.replay()
    first = logits.clone()
    exact, naive = chain.expected(x, torch.float64), chain.expected(x, torch.bfloat16)
    judge.close("logits", first, exact, naive)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(60):
        logits.fill_(float("nan"))
        graph.replay()
        differing += (logits.view(torch.int16) != first.view(torch.int16)).any()
    judge.true(f"{int(differing)} of 60 replays differ", int(differing) == 0)
    judge.verdict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=short)
def test_functions(dtype: torch.dtype) -> None:
    """The public functions, whichever kernels they choose."""
    judge = Judge(f"linear {short(dtype)}")
    for rows in (1, 2, 5, 16, 17, 64, 128, 129):
        for outputs, width in ((130, 1000), (512, 37), (4096, 4096)):
            x = random(rows, width, dtype=dtype, seed=rows)
            weight = random(outputs, width, dtype=dtype, seed=1) * width**-0.5
            norm = 1 + 0.1 * random(width, dtype=dtype, seed=2)
            for bias in (None, random(outputs, dtype=dtype, seed=3)):
                residual = random(rows, outputs, dtype=dtype, seed=4)
                name = f"{rows} x {outputs, width}{'' if bias is None else ' bias'}"

                def judged(what: str, out: torch.Tensor, case: Case, name: str = name) -> None:
                    exact = case.expected(torch.float64)
                    judge.close(f"{what} {name}", out, exact, case.expected(dtype))

                kinds = {
                    "plain": Case(x, weight, None, bias),
                    "norm": Case(x, weight, norm, bias),
                    "norm, gate": Case(x, weight, norm, bias, gated=True),
                }
                for what, case in kinds.items():
                    judged(what, linear(x, Matrix(weight), case.around()), case)
                total = residual.clone()
                linear(x, Matrix(weight), Around(bias=bias, residual=total))
                judged("residual", total, Case(x, weight, None, bias, residual=residual))
    judge.verdict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_sums_in_place(dtype: torch.dtype) -> None:
    """Every kernel rounds once, repeats its bits and changes nothing beside the rows."""
    judge = Judge(f"sums {short(dtype)}")
    for outputs, width in ((4096, 4096), (4096, 14336), (1000, 520)):
        weight = random(outputs, width, dtype=dtype, seed=1) * width**-0.5
        for rows in (1, 2, 3, 7, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 256, 257):
            x = random(rows, width, dtype=dtype, seed=rows)
            before = random(rows + 2, outputs, dtype=dtype, seed=4)
            after = [before.clone() for _ in range(8)]
            for total in after:
                linear(x, Matrix(weight), Around(residual=total[1:-1]))
            first, name = after[0], f"{rows} x {outputs, width}"
            case = Case(x, weight, None, None, residual=before[1:-1])
            expected = (case.expected(torch.float64), case.expected(dtype))
            judge.close(name, first[1:-1], *expected)
            judge.true(f"{name} repeats", all(same_bits(first, total) for total in after))
            ends = torch.stack((first[0], first[-1]))
            judge.true(f"{name} around", same_bits(ends, torch.stack((before[0], before[-1]))))
    judge.verdict()
