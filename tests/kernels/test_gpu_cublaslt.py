"""Products by cuBLASLt on a GPU: every layout against fp64, repeated, captured, tuned."""

import pytest
import torch
from fixtures.kernels.checking import Judge, poison, random, same_bits, short
from slipstream.kernels.gemm import cublaslt, search, tiles, trials, tuning
from slipstream.kernels.gemm.cublaslt import matmul
from slipstream.kernels.runtime.op import KernelError

pytestmark = pytest.mark.gpu

ROWS = (1, 5, 8, 13, 33, 64, 65, 128, 200, 257, 600)
SIZES = ((8, 8), (64, 72), (37, 41), (129, 1000), (1000, 130), (4096, 1024), (1024, 14336))
FP8_SIZES = ((16, 16), (64, 80), (4096, 1024), (1024, 14336))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _untuned(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cublaslt.discard_plans()
    yield
    cublaslt.discard_plans()


def spread(rows: torch.Tensor, gap: int, offset: int) -> torch.Tensor:
    """The same numbers with NaN between the rows, `offset` elements off."""
    n, width = rows.shape
    wide = torch.full((n, width + gap), float("nan"), device=rows.device).to(rows.dtype)
    return wide[:, offset : offset + width].copy_(rows)


def exact_and_naive(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.double() @ weight.double().t(), x @ weight.t()


def check(judge: Judge, x: torch.Tensor, weight: torch.Tensor, case: str) -> None:
    exact, naive = exact_and_naive(x, weight)
    poison(exact.shape, dtype=x.dtype)
    out = matmul(x, weight)
    judge.close(case, out, exact, naive)
    for gap, offset in ((24, 8), (3, 1)):
        layout = f"{case} rows {gap} apart"
        placed = [spread(matrix, gap, offset) for matrix in (x, weight)]
        judge.close(layout, matmul(*placed), exact, naive)
        holder = torch.full((len(x), len(weight) + gap), float("nan"), dtype=x.dtype, device="cuda")
        target = holder[:, offset : offset + len(weight)]
        matmul(x, weight, target)
        judge.close(f"{layout} out", target, exact, naive)
        target.fill_(float("nan"))
        judge.true(f"{layout}: elsewhere", bool(holder.isnan().all()))
        before = random(*exact.shape, dtype=x.dtype, seed=9)
        target.copy_(before)
        returned = matmul(x, weight, target, accumulate=True)
        judge.true(f"{layout}: returns out", returned.data_ptr() == target.data_ptr())
        judge.close(f"{layout} sum", target, exact + before.double(), naive + before)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_products(dtype: torch.dtype) -> None:
    judge = Judge(f"matmul {short(dtype)}")
    for inputs, outputs in SIZES:
        weight = random(outputs, inputs, dtype=dtype, seed=1) * inputs**-0.5
        for n in ROWS:
            x = random(n, inputs, dtype=dtype, seed=n)
            case = f"{n} x {inputs} -> {outputs}"
            check(judge, x, weight, case)
            judge.repeats(case, lambda x=x, weight=weight: matmul(x, weight))
    assert matmul(x[:0], weight).shape == (0, len(weight))
    judge.verdict()


def test_fp8() -> None:
    """Terms of either sign, whose sums stay small: as good as bf16 is."""
    judge = Judge("matmul e4m3")
    for inputs, outputs in FP8_SIZES:
        weight = random(outputs, inputs, dtype=torch.float8_e4m3fn, seed=1000)
        for n in ROWS:
            x = random(n, inputs, dtype=torch.float8_e4m3fn, seed=n)
            case = f"{n} x {inputs} -> {outputs}"
            exact = x.double() @ weight.double().t()
            poison(exact.shape, dtype=torch.bfloat16)
            judge.close(case, matmul(x, weight), exact, exact.bfloat16())
            narrow = matmul(x, weight, dtype=torch.float16)
            judge.true(f"{case} to fp16", bool((narrow - exact).norm() <= 4e-3 * exact.norm()))
            out = random(n, outputs, dtype=torch.bfloat16, seed=2)
            wanted = exact + out.double()
            judge.close(f"{case} sum", matmul(x, weight, out, True), wanted, wanted.bfloat16())
            judge.repeats(case, lambda x=x, weight=weight: matmul(x, weight))
    judge.verdict()
    with pytest.raises(KernelError, match=r"\[4, 17\] x \[32, 17\]\^T, float8_e4m3fn to bfloat16"):
        matmul(weight[:4, :17].contiguous(), weight[:32, :17].contiguous())


def test_int8() -> None:
    """Sums are exact, with more bits than fp32 has, of few rows and of many, odd numbers too."""
    judge = Judge("matmul int8")
    generator = torch.Generator("cuda").manual_seed(0)
    for inputs, outputs in FP8_SIZES:
        weight, every = (
            torch.randint(-127, 128, (n, inputs), generator=generator, device="cuda").to(torch.int8)
            for n in (outputs, max(ROWS))
        )
        for n in ROWS:
            x = every[:n].clone()
            x[-1] = weight[0] // 64 * 127  # of one sign with the first output
            exact = (x.double() @ weight.double().t()).to(torch.int32)
            case = f"{n} x {inputs} -> {outputs}"
            judge.true(case, torch.equal(matmul(x, weight), exact))
            judge.repeats(case, lambda x=x, weight=weight: matmul(x, weight))
    judge.verdict()


def test_fp8_sums_of_one_sign() -> None:
    """A term loses what lies below the last bits of the sum so far: here always the same way."""
    weight = random(1024, 4096, dtype=torch.float8_e4m3fn)
    exact = float(weight[0].double().pow(2).sum())
    assert abs(float(matmul(weight[:1], weight)[0, 0]) / exact - 1) <= 4096 / 2**15


def test_refusals() -> None:
    x, weight = random(4, 16, dtype=torch.bfloat16), random(8, 16, dtype=torch.bfloat16)
    with pytest.raises(KernelError, match="rows of x overlap"):
        matmul(x[:1].expand(4, 16), weight)
    with pytest.raises(KernelError, match="elements of a row of weight"):
        matmul(x, random(16, 8, dtype=torch.bfloat16).t())
    with pytest.raises(KernelError, match=r"out is \[4, 9\], not \[4, 8\]"):
        matmul(x, weight, x.new_empty(4, 9))
    with pytest.raises(KernelError, match="no `out` to add to"):
        matmul(x, weight, accumulate=True)
    with pytest.raises(KernelError, match="float64"):
        matmul(x.double(), weight.double())
    assert same_bits(matmul(x[:1].expand(2, 16)[:1], weight), matmul(x[:1], weight))


def test_captured_in_a_graph() -> None:
    """A graph replays on new inputs, and products in it share the workspace one after the other."""
    weights = [random(4096, 4096, dtype=torch.bfloat16, seed=i) / 64 for i in range(3)]
    x = random(200, 4096, dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        y = x
        for weight in weights:
            y = matmul(y, weight)
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for seed in (5, 6):
        x.copy_(random(200, 4096, dtype=torch.bfloat16, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, chain())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_bits_do_not_depend_on_the_rows_beside(dtype: torch.dtype) -> None:
    """No sum is split, and all kernels add in the same order."""
    judge = Judge(f"alone or among others {dtype}")
    for inputs, outputs in ((4096, 6144), (14336, 4096), (1024, 1024), (256, 4096)):
        weight = random(outputs, inputs, dtype=dtype, seed=1)
        x = random(600, inputs, dtype=dtype, seed=2)
        alone = torch.cat([matmul(x[i : i + 1], weight) for i in range(600)])
        for n in (2, 5, 8, 16, 24, 33, 64, 100, 128, 200, 256, 384, 512, 600):
            judge.true(f"{n} of {inputs} -> {outputs}", same_bits(matmul(x[:n], weight), alone[:n]))
    judge.verdict()


def save(operands: trials.Operands, rows: int, algorithm: bytes) -> None:
    product = tuning.Product.of(operands.shape(rows))
    choice = tuning.Choice(product, rows, algorithm.hex(), "", 1.0, 1.0)
    tuning.save(tuning.Machine.of(0), [choice])
    cublaslt.discard_plans()


@pytest.mark.parametrize(
    ("dtype", "adds"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float8_e4m3fn, False)],
    ids=str,
)
def test_tuned(dtype: torch.dtype, adds: bool) -> None:
    """What the search finds is right, is what then runs, and repeats its bits."""
    judge = Judge(f"tuned {dtype}{' to add' if adds else ''}")
    operands = trials.Operands.random(4096, 2048, dtype, adds)
    weight, rows_of_x, before = operands.weights[0], operands.x(128), operands.out(128)

    def product(n: int) -> torch.Tensor:
        return matmul(rows_of_x[:n], weight, before[:n].clone(), adds)

    guessed = product(128)
    for rows in (16, 64, 128):
        found = search.search(operands, rows)
        print(rows, tiles.describe(found.algorithm), found.seconds, found.default_seconds)
        assert found.seconds <= found.default_seconds
        save(operands, rows, found.algorithm.blob)
        for n in (rows - 5, rows):
            x = rows_of_x[:n]
            exact = x.double() @ weight.double().t()
            naive = exact.bfloat16()
            if adds:
                exact, naive = exact + before[:n].double(), naive + before[:n]
            judge.close(f"{n}", product(n), exact, naive)
            judge.repeats(f"{n}", lambda n=n: product(n))
            plan = cublaslt.plan_of(x, weight, before[:n].clone(), adds)
            judge.true(f"{n} runs the choice", plan.algorithm.blob == found.algorithm.blob)
            judge.true(f"{n} has the default's bits", same_bits(product(n), guessed[:n]))
    judge.verdict()


def test_a_choice_that_cannot_run_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    operands = trials.Operands.random(4096, 2048, torch.bfloat16)
    x = operands.x(64)
    found = search.search(operands, 64)
    save(operands, 64, found.algorithm.changed(tile=9999))
    out = matmul(x, operands.weights[0])
    assert "tune again" in caplog.text
    exact, naive = exact_and_naive(x, operands.weights[0])
    judge = Judge("default instead")
    judge.close("64", out, exact, naive)
    judge.verdict()
