"""Mixtures of experts on a GPU: routing by its reference, sums by fp64, repeated bitwise."""

import pytest
import torch
from fixtures.kernels.checking import Judge, poison, same_bits, short
from fixtures.kernels.expert_cases import SHAPES, Case, Sizes, drawn_scores, make_case
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.experts.combine import Shared, combine
from slipstream.kernels.experts.down_add import MAX_ROWS, down_add
from slipstream.kernels.experts.grouped import SKINNY_ROWS, TILE_ROWS, down, gate_up
from slipstream.kernels.experts.route import choose, placed, route
from slipstream.kernels.experts.router import RouterStages, choose_rows
from slipstream.kernels.experts.sm90 import piped, streamed
from slipstream.kernels.experts.spec import Gate, Routing, Score
from slipstream.kernels.runtime import jit
from torch import Tensor

pytestmark = pytest.mark.gpu

ALL_ROWS = (SKINNY_ROWS, *TILE_ROWS)
ROUTINGS = [
    Routing(8, 2, normalises=True),
    Routing(16, 2, Score.SPARSEMIXER, jitter=0.01),
    Routing(32, 4, normalises=True),
    Routing(60, 4),
    Routing(64, 8),
    Routing(128, 8, normalises=True),
    Routing(256, 8, Score.SIGMOID, normalises=True, factor=2.5),
    Routing(300, 6, Score.SPARSEMIXER, jitter=0.2),
    Routing(512, 10),
    Routing(1, 1),
    Routing(256, 8, Score.SIGMOID, normalises=True, factor=2.5, groups=8, top_groups=4),
    Routing(160, 6, factor=16.0, groups=8, top_groups=3),
    Routing(12, 3, Score.SIGMOID, groups=6, top_groups=2),
    Routing(512, 16, Score.SIGMOID, groups=64, top_groups=7),
    Routing(320, 16, groups=64, top_groups=40),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=short)
def test_routing(dtype: torch.dtype) -> None:
    """Choice and places to the bit, ties too; logits lie in rows of a wider matrix."""
    judge = Judge(f"route {short(dtype)}")
    generator = torch.Generator("cuda").manual_seed(1)
    for routing in ROUTINGS:
        e = routing.num_experts
        correction = None
        if routing.score is Score.SIGMOID:
            correction = torch.randn(e, generator=generator, device="cuda") * 0.1
        for n in (1, 2, 15, 16, 17, 100, 513, 4097):
            wide = torch.randn(n, e + 9, generator=generator, device="cuda")
            logits = (wide.round(decimals=1) if n % 2 else wide).to(dtype)[:, :e]
            rows = ALL_ROWS[n % len(ALL_ROWS)]
            found = route(logits, routing, rows, correction)
            experts, weights = choose(logits.float().cpu(), routing, _cpu(correction))
            case = f"{routing} of {n} rows"
            same = (found.experts.cpu() == experts).all(-1)
            # Scores by two exponential functions: some that differ in the last bit change places.
            least = 0.99 if routing.score is Score.SIGMOID else 1.0
            judge.true(f"experts of {case}", float(same.float().mean()) >= least)
            error = float((found.weights.cpu() - weights)[same].abs().max())
            judge.true(f"weights of {case}: {error}", error < 1e-5)
            expected = placed(found.experts.cpu(), found.weights.cpu(), e, rows)
            for name in ("order", "offsets", "tiles"):
                ours, want = getattr(found, name).cpu(), getattr(expected, name)
                judge.true(f"{name} of {case}", same_bits(ours, want))
    judge.verdict()


@pytest.fixture(params=["tiled", "piped"])
def sizes_of_tiles(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, ...]:
    """Multiply tiles by one kernel or the other; return the sizes that it takes.

    A Hopper would multiply tiles of e4m3 by a third one, which rounds rows (test_gpu_streamed.py).
    """
    if request.param == "piped" and not jit.is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(piped, "runs_on", lambda *_: request.param == "piped")
    monkeypatch.setattr(streamed, "refusal", lambda *_: "is not the kernel under test")
    return piped.TILE_ROWS if request.param == "piped" else TILE_ROWS


BY_KERNELS = pytest.mark.parametrize(
    ("sizes_of_tiles", "fp8"),
    [("tiled", False), ("tiled", True), ("piped", False)],
    indirect=["sizes_of_tiles"],
    ids=["tiled-16 bits", "tiled-e4m3", "piped"],
)


def _cpu(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.cpu()


def _kind(shared: Shared | None) -> str:
    if shared is None:
        return "experts alone"
    return "a shared one" if shared.gate is None else "a shared one behind a gate"


def run(case: Case, rows: int, residual: Tensor) -> Tensor:
    """With NaN in the memory that the results get."""
    pairs = len(case.x) * case.sizes.top_k
    poison((pairs, case.sizes.inner), (pairs, case.sizes.hidden), dtype=case.x.dtype)
    return case.run(rows, residual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
@BY_KERNELS
def test_sums_of_experts(sizes_of_tiles: tuple[int, ...], dtype: torch.dtype, fp8: bool) -> None:
    judge = Judge(f"experts {short(dtype)}{' e4m3' if fp8 else ''}")
    for sizes, all_rows in SHAPES if dtype == torch.bfloat16 else SHAPES[:3]:
        if fp8 and (sizes.hidden % 16 or sizes.inner % 16):
            continue
        for n in all_rows:
            gate, bias = (Gate.CLAMPED, True) if sizes.top_k == 4 else (Gate.SILU, n % 2 == 0)
            case = make_case(n, sizes, dtype, fp8, bias, gate, "cuda", seed=n)
            residual = torch.randn_like(case.x)
            routed = case.routed(SKINNY_ROWS)
            exact = case.expected(routed, residual, torch.float64)
            naive = case.expected(routed, residual, dtype)
            for rows in (SKINNY_ROWS, *sizes_of_tiles):
                name = f"{n} rows of {sizes}, tiles of {rows}"
                judge.close(name, run(case, rows, residual), exact, naive)
                judge.repeats(name, lambda: case.run(rows, residual))  # noqa: B023
    judge.verdict()


@BY_KERNELS
def test_rows_do_not_depend_on_their_neighbours(sizes_of_tiles: tuple[int, ...], fp8: bool) -> None:
    """Bit for bit: in tiles of every size, and at every place in one."""
    judge = Judge("rows alone")
    for sizes, n in ((Sizes(128, 8, 2048, 768), 200), (Sizes(8, 2, 1024, 512), 300)):
        case = make_case(n, sizes, torch.bfloat16, fp8, device="cuda")
        residual = torch.randn_like(case.x)
        whole = case.run(sizes_of_tiles[0], residual)
        for rows in sizes_of_tiles:
            judge.true(f"tiles of {rows}", same_bits(case.run(rows, residual), whole))
            for kept in (torch.arange(1), torch.arange(n).flip(0)[:77], torch.arange(3, n, 7)):
                some = make_case(n, sizes, torch.bfloat16, fp8, device="cuda")
                some.x, some.logits = some.x[kept.cuda()], some.logits[kept.cuda()]
                found = some.run(rows, residual[kept.cuda()])
                judge.true(f"{len(kept)} rows by {rows}", same_bits(found, whole[kept.cuda()]))
    judge.verdict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=short)
def test_combine(dtype: torch.dtype) -> None:
    judge = Judge(f"combine {short(dtype)}")
    for n, width, top_k in ((1, 2048, 8), (3, 64, 1), (300, 4096, 2), (17, 2880, 5), (2, 14336, 4)):
        residual, shared = (torch.randn(n, width, device="cuda").to(dtype) for _ in range(2))
        products = torch.randn(n * top_k, width, device="cuda").to(dtype)
        gates = torch.randn(n, 9, device="cuda").to(dtype)[:, 8:]
        for given in (None, Shared(shared), Shared(shared, gates)):
            exact = residual.double() + products.double().view(n, top_k, -1).sum(1)
            naive = residual + products.view(n, top_k, -1).sum(1)
            if given is not None:
                factor = 1 if given.gate is None else gates.double().sigmoid()
                exact = exact + shared.double() * factor
                naive = naive + (shared * factor).to(dtype)
            out = combine(residual.clone(), products, given)
            judge.close(f"{n} x {width}, {top_k}, {_kind(given)}", out, exact, naive)
    judge.verdict()


@pytest.mark.usefixtures("sizes_of_tiles")
def test_in_a_graph_the_choice_is_made_anew() -> None:
    """A replay of one graph with other rows and other experts gives what a launch gives."""
    sizes = Sizes(64, 8, 1024, 256)
    for n in (1, 8, 40, 128):
        case = make_case(n, sizes, torch.bfloat16, device="cuda")
        residual = torch.zeros_like(case.x)
        rows = SKINNY_ROWS if n < 20 else 32
        case.run(rows, residual)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.run(rows, residual)
        for seed in range(5):
            other = make_case(n, sizes, torch.bfloat16, device="cuda", seed=seed)
            case.x.copy_(other.x)
            case.logits.copy_(other.logits)
            case.logits[:, : 8 * seed].sub_(100.0 * (seed % 2))
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(out, case.run(rows, residual)), f"{n} rows, seed {seed}"


@pytest.mark.parametrize("num_rows", [1, 8, 40])
def test_groups_in_a_graph(num_rows: int) -> None:
    """A replay chooses anew; no number stays in its row, and a row is what it is alone."""
    routing = Routing(256, 8, Score.SIGMOID, True, 2.5, groups=8, top_groups=4)
    correction = torch.linspace(-0.2, 0.2, 256, device="cuda")
    logits = torch.zeros(num_rows, 256, dtype=torch.bfloat16, device="cuda")
    route(logits, routing, 16, correction)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = route(logits, routing, 16, correction)
    for seed in range(6):
        logits.copy_(drawn_scores(num_rows, 256, seed, ties=seed % 2 == 0))
        alone = route(logits[-1:].clone(), routing, 16, correction)
        if num_rows > 1:
            logits[0, seed::7] = (float("nan"), float("inf"), float("-inf"))[seed % 3]
        graph.replay()
        torch.cuda.synchronize()
        for name, found in zip(out._fields[:5], out[:5], strict=True):
            again = getattr(route(logits, routing, 16, correction), name)
            assert same_bits(found, again), f"{name}, seed {seed}"
        assert same_bits(out.experts[-1:], alone.experts)
        assert same_bits(out.weights[-1:], alone.weights)
        for chosen in out.experts.tolist():
            assert len({*chosen} & {*range(256)}) == 8


def test_no_rows() -> None:
    sizes = Sizes(8, 2, 64, 32)
    case = make_case(0, sizes, torch.bfloat16, device="cuda")
    routed = case.routed(16)
    inner = gate_up(case.x, case.gate_up.values, case.gate_up, routed, Gate.SILU)
    assert inner.shape == (0, 32)
    assert down(inner, case.down.values, case.down, routed).shape == (0, 64)
    assert routed.offsets.tolist() == [0] * 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=short)
def test_a_few_rows_choose(dtype: torch.dtype) -> None:
    """Norm and outputs by fp64, choice and places exact of the outputs; runs repeat bitwise."""
    judge = Judge(f"router {short(dtype)}")
    for number, routing in enumerate(ROUTINGS):
        e = routing.num_experts
        for n, width in ((1, 2048), (1, 7168), (2, 4096), (5, 1000), (8, 2048), (8, 64)):
            columns = -(-(e + number % 2) // 8) * 8
            generator = torch.Generator("cuda").manual_seed(n)

            def random(*shape: int, by: torch.Generator = generator) -> Tensor:
                return torch.randn(shape, generator=by, device="cuda")

            x = (random(n, width + 8) * 3).to(dtype)[:, :width]
            weight = (random(columns, width) * width**-0.5).to(dtype)
            norm, bias = (1 + random(width) / 9).to(dtype), random(columns).to(dtype)
            is_sigmoid, plus_one = routing.score is Score.SIGMOID, n == 5
            correction = random(e) * 0.1 if is_sigmoid else None
            given_bias = bias if n == 2 else None
            stages = RouterStages(1e-6, routing, 8, given_bias, correction, plus_one, True)
            poison((n, width), (n, columns), dtype=dtype)
            found = choose_rows(x, weight, norm, stages)
            case = f"{n} rows of {width}, {routing}"
            exact = rms_norm.oracle(x.double(), norm.double(), 1e-6, plus_one)
            naive = rms_norm.oracle(x.float(), norm.float(), 1e-6, plus_one).to(dtype)
            judge.close(f"norm of {case}", found.x, exact, naive)
            assert found.outputs is not None
            added = bias if n == 2 else torch.zeros_like(bias)
            exact = found.x.double() @ weight.double().T + added.double()
            judge.close(f"outputs of {case}", found.outputs, exact, found.x @ weight.T + added)
            experts, weights = choose(found.outputs[:, :e].float().cpu(), routing, _cpu(correction))
            routed = found.routed
            same = (routed.experts.cpu() == experts).all(-1)
            judge.true(f"experts of {case}", is_sigmoid or bool(same.all()))
            error = (routed.weights.cpu() - weights)[same].abs()
            judge.true(f"weights of {case}", bool((error < 1e-5).all()))
            expected = placed(routed.experts.cpu(), routed.weights.cpu(), e, 8)
            for name in ("order", "offsets", "tiles"):
                ours, want = getattr(routed, name).cpu(), getattr(expected, name)
                judge.true(f"{name} of {case}", same_bits(ours, want))
            again = choose_rows(x, weight, norm, stages)
            judge.true(f"{case} again", same_bits(again.outputs, found.outputs))
            judge.true(f"{case} again", same_bits(again.routed.weights, routed.weights))
    judge.verdict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "e4m3"])
def test_a_few_rows_are_added(dtype: torch.dtype, fp8: bool) -> None:
    """By the last GEMM, with what is shared; as CTAs that are alone and that are two."""
    judge = Judge(f"down_add {short(dtype)}{' e4m3' if fp8 else ''}")
    for sizes, all_rows in SHAPES:
        if fp8 and (sizes.hidden % 16 or sizes.inner % 16):
            continue
        for n in {*all_rows, 4} & {*range(1, MAX_ROWS + 1)}:
            case = make_case(n, sizes, dtype, fp8, n % 2 == 0, device="cuda", seed=n)
            residual, shared = torch.randn_like(case.x), torch.randn_like(case.x)
            gates = torch.randn(n, 9, device="cuda").to(dtype)[:, 8:]
            routed = case.routed(SKINNY_ROWS)
            given = (case.gate_up.values, case.gate_up, routed, case.gate)
            last = (case.down, routed)
            for beside in (None, Shared(shared), Shared(shared, gates)):
                poison((n * sizes.top_k, sizes.inner), dtype=dtype)

                def add(beside: Shared | None = beside) -> Tensor:
                    out = residual.clone()  # noqa: B023
                    inner = gate_up(case.x, *given)  # noqa: B023
                    return down_add(inner, case.down.values, out, *last, beside)  # noqa: B023

                exact = case.expected(routed, residual, torch.float64)
                naive = case.expected(routed, residual, dtype)
                if beside is not None:
                    factor = 1 if beside.gate is None else gates.double().sigmoid()
                    exact = exact + shared.double() * factor
                    naive = naive + (shared * factor).to(dtype)
                name = f"{n} rows of {sizes}, {_kind(beside)}"
                judge.close(name, add(), exact, naive)
                judge.repeats(name, add)
    judge.verdict()


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_layers_of_a_few_rows_in_a_graph(num_rows: int) -> None:
    """Launches overlap and memory is used again; results are as if each had waited."""
    sizes, dtype = Sizes(64, 8, 2048, 768), torch.bfloat16
    cases = [make_case(num_rows, sizes, dtype, device="cuda", seed=seed) for seed in range(3)]
    stages = RouterStages(1e-6, Routing(sizes.experts, sizes.top_k, normalises=True), SKINNY_ROWS)
    norm = torch.ones(sizes.hidden, dtype=dtype, device="cuda")
    routers = [torch.randn(64, 2048, device="cuda").mul_(0.02).to(dtype) for _ in cases]

    def run(residual: Tensor, waits: bool) -> Tensor:
        for case, router in [*zip(cases, routers, strict=True)] * 4:
            for step in range(3):
                if step == 0:
                    x, _, routed = choose_rows(residual, router, norm, stages)
                elif step == 1:
                    inner = gate_up(x, case.gate_up.values, case.gate_up, routed, case.gate)
                else:
                    down_add(inner, case.down.values, residual, case.down, routed)
                if waits:
                    torch.cuda.synchronize()
        return residual

    start = torch.randn(num_rows, sizes.hidden, device="cuda").to(dtype)
    run(start.clone(), waits=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(start.clone(), waits=False)
    for seed in range(5):
        start.copy_(torch.randn_like(start) * (1 + seed))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, run(start.clone(), waits=True)), f"seed {seed}"
