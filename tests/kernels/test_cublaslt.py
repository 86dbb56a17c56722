"""The product's reference, which algorithm is taken for what lies where, and the search for it."""

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import pytest
import torch
from fixtures.kernels.checking import Judge
from slipstream.kernels.gemm import cublaslt, search, tiles, trials, tuning
from slipstream.kernels.gemm.cublaslt import matmul
from slipstream.kernels.gemm.cublaslt_api import WORKSPACE, Algorithm, GemmShape
from slipstream.kernels.runtime.op import KernelError

GUESS, SPLIT, TUNED, TUNED_TO_ADD = (
    Algorithm(bytes([i]) * 64, size) for i, size in ((1, 0), (2, 9), (3, 0), (4, 0))
)


# ---- the reference ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference(dtype: torch.dtype) -> None:
    judge = Judge("reference")
    torch.manual_seed(0)
    x, weight = torch.randn(7, 40).to(dtype), (torch.randn(12, 40) / 7).to(dtype)
    exact = x.double() @ weight.double().t()
    judge.close("product", matmul(x, weight), exact, x @ weight.t())
    holder = torch.randn(7, 20).to(dtype)
    before = holder.clone()
    out = holder[:, 3:15]
    assert matmul(x, weight, out, accumulate=True) is out
    naive = x @ weight.t() + before[:, 3:15]
    judge.close("sum", out, exact + before[:, 3:15].double(), naive)
    holder[:, 3:15] = before[:, 3:15]
    judge.true("elsewhere", torch.equal(holder, before))
    judge.verdict()


def test_reference_fp8() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 32).to(torch.float8_e4m3fn) for n in (5, 16))
    exact = x.double() @ weight.double().t()
    assert matmul(x, weight).dtype == torch.bfloat16
    assert torch.equal(matmul(x, weight, dtype=torch.float32), exact.float())


@pytest.mark.parametrize("run", [matmul, matmul.launcher])
def test_nothing_to_add_to(run: Callable[..., object]) -> None:
    with pytest.raises(KernelError, match="no `out` to add to"):
        run(torch.zeros(2, 8), torch.zeros(4, 8), accumulate=True)


# ---- plans ----


class FakeProblem:
    """Stands where cuBLASLt would."""

    heard: list[int] = []
    without_workspace: list[Algorithm] = [GUESS]
    can_run = True

    def __init__(self, shape: GemmShape, device: int) -> None:
        self.shape = shape
        self.device = device

    def heuristics(self, workspace: int, count: int = 8) -> list[Algorithm]:
        self.heard.append(workspace)
        return self.without_workspace if workspace == 0 else [SPLIT]

    def algorithm_of(self, blob: bytes) -> Algorithm | None:
        return Algorithm(blob, 0) if self.can_run else None


@pytest.fixture(autouse=True)
def lt(monkeypatch: pytest.MonkeyPatch) -> type[FakeProblem]:
    """cuBLASLt, faked; 64 rows of a product of 128 and 256 are tuned."""

    class Fresh(FakeProblem):
        heard: list[int] = []

    product = tuning.Product(128, 256, "bfloat16", "bfloat16", adds=False)
    adding = msgspec.structs.replace(product, adds=True)
    choices = [
        tuning.Choice(product, 64, TUNED.blob.hex(), "", 1.0, 2.0),
        tuning.Choice(adding, 32, TUNED_TO_ADD.blob.hex(), "", 1.0, 2.0),
    ]
    monkeypatch.setattr(cublaslt, "Problem", Fresh)
    monkeypatch.setattr(
        cublaslt, "MatmulPlan", lambda problem, algorithm: (problem.shape, algorithm)
    )
    monkeypatch.setattr(tuning, "choices", lambda device: tuning.Choices(choices))
    cublaslt._plan.cache_clear()
    return Fresh


def plan(
    rows: int,
    outputs: int = 512,
    x_strides: tuple[int, int] = (128, 1),
    weight_strides: tuple[int, int] = (128, 1),
    alignment: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    adds: bool = False,
) -> tuple[GemmShape, Algorithm]:
    shapes = ((rows, 128), outputs, (rows, outputs), dtype, dtype)
    strides = (x_strides, weight_strides, (outputs, 1))
    return cublaslt._plan(*shapes, *strides, alignment, adds, 0)  # type: ignore[return-value]


def test_the_sum_is_split_only_where_it_must_be(lt: type[FakeProblem]) -> None:
    assert plan(65)[1] == GUESS
    assert plan(65)[1] == GUESS
    assert lt.heard == [0]  # remembered
    lt.without_workspace = []
    assert plan(66)[1] == SPLIT
    assert lt.heard == [0, 0, WORKSPACE]


def test_no_kernel_at_all(lt: type[FakeProblem], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lt, "heuristics", lambda *_: [])
    with pytest.raises(KernelError, match=r"\[3, 128\] x \[512, 128\]\^T, bfloat16: cuBLASLt has"):
        plan(3)


def test_tuned_where_it_was_measured(lt: type[FakeProblem]) -> None:
    assert plan(64, 256)[1] == TUNED
    assert plan(48, 256)[1] == TUNED
    assert plan(47, 256)[1] == GUESS  # too far from what was measured
    assert plan(65, 256)[1] == GUESS
    assert plan(64, 248)[1] == GUESS
    assert plan(64, 256, dtype=torch.float16)[1] == GUESS
    assert plan(64, 256, x_strides=(136, 1))[1] == TUNED


def test_what_adds_is_tuned_apart(lt: type[FakeProblem]) -> None:
    assert plan(32, 256)[1] == GUESS
    shape, algorithm = plan(32, 256, adds=True)
    assert (shape.adds, algorithm) == (True, TUNED_TO_ADD)
    assert plan(64, 256, adds=True)[1] == TUNED  # measured, if not so


def test_tuned_kernels_need_alignment(lt: type[FakeProblem]) -> None:
    assert plan(64, 256, alignment=8)[1] == GUESS
    assert plan(64, 256, x_strides=(132, 1))[1] == GUESS
    assert plan(64, 256, weight_strides=(129, 1))[1] == GUESS


def test_a_choice_that_cannot_run(lt: type[FakeProblem], caplog: pytest.LogCaptureFixture) -> None:
    lt.can_run = False
    with caplog.at_level(logging.WARNING):
        assert plan(64, 256)[1] == GUESS
    assert "[64, 128] x [256, 128]^T, bfloat16: the tuned kernel cannot do it" in caplog.text


def test_strides(lt: type[FakeProblem]) -> None:
    assert plan(4, x_strides=(140, 1))[0].strides == (140, 128, 512)
    assert plan(1, x_strides=(0, 1))[0].strides[0] == 128
    with pytest.raises(KernelError, match="rows of x overlap"):
        plan(2, x_strides=(0, 1))
    with pytest.raises(KernelError, match="elements of a row of weight"):
        plan(2, weight_strides=(1, 512))
    with pytest.raises(KernelError, match="float64"):
        plan(2, dtype=torch.float64)
    strides = ((8, 1), (8, 1), (4, 1))
    with pytest.raises(KernelError, match=r"out is \[2, 4\], not \[2, 3\]"):
        cublaslt._plan((2, 8), 3, (2, 4), torch.half, torch.half, *strides, 16, False, 0)


# ---- the search ----


def test_numbers_of_tiles() -> None:
    """Some of `cublasLtMatmulTile_t`."""
    sizes = tiles.tile_sizes()
    known = {1: (8, 8), 24: (256, 128), 27: (96, 64), 46: (8, 768), 123: (64, 768), 134: (80, 64)}
    known |= {197: (168, 128), 311: (768, 64), 312: (64, 16), 393: (128, 8), 447: (128, 512)}
    known |= {513: (256, 256), 590: (576, 24), 630: (768, 80)}
    assert {number: sizes[number] for number in known} == known
    assert len(sizes) == len(set(sizes.values())) == 630


def test_tiles_that_won_are_ranked_high() -> None:
    """Measured on an H200 of 132 multiprocessors: outputs, rows, and the tile that was fastest."""
    won = {
        (6144, 128, (96, 64)),
        (6144, 192, (152, 64)),
        (6144, 256, (96, 128)),
        (4096, 32, (64, 16)),
        (4096, 64, (64, 32)),
        (4096, 128, (64, 64)),
        (4096, 192, (64, 96)),
        (4096, 256, (128, 64)),
        (4096, 512, (128, 128)),
        (28672, 32, (128, 32)),
        (28672, 64, (112, 64)),
        (28672, 128, (240, 64)),
        (28672, 192, (128, 192)),
        (28672, 256, (224, 128)),
        (28672, 512, (176, 128)),
    }
    for outputs, rows, tile in won:
        ranked = tiles.ranked(tiles.tile_sizes().values(), rows, outputs, 132)
        assert tile in ranked[: search._NUM_TILES], (outputs, rows, tile)


class FakeTrial(trials.Trial):
    """Kernels whose seconds are known; `broken` ones compute something else, some do not start.

    Those that are `hot` take twice as long once they have run for 20 ms without another one.
    """

    def __init__(
        self,
        seconds: dict[int, float],
        broken: tuple[int, ...] = (),
        rows: int = 64,
        hot: tuple[int, ...] = (),
    ) -> None:
        operands = type("Operands", (), {"weights": [None] * 5})
        shape = type("Shape", (), {"rows": rows})
        self._problem, self._operands = type("Problem", (), {"shape": shape}), operands
        self._hot = [algorithm(i).blob for i in hot]
        self._last = (b"", 0.0)  # the last kernel, and how long it has run
        self._seconds = {}
        self._known = {algorithm(i).blob: value for i, value in seconds.items()}
        self._broken = [algorithm(i).blob for i in broken]
        self._clock = 0.0
        self.launches: dict[int, int] = {}
        self.is_running = False
        self.pieces: list[float] = []  # seconds
        self.proofs: list[tuple[int, int]] = []
        self.broken_rows = {rows, rows - 8}

    def _launch(self, plan: object, count: int) -> None:
        blob = plan[1].blob  # type: ignore[index]
        self.launches[blob[0]] = self.launches.get(blob[0], 0) + count
        if self._known[blob] < 0:
            raise KernelError("it does not start")
        last, alone = self._last
        alone = alone if last == blob else 0.0
        seconds = self._known[blob] * count * (2 if blob in self._hot and alone > 0.02 else 1)
        self._last = (blob, alone + seconds)
        self._clock += seconds

    def _elapsed(self, work: Callable[[], None]) -> float:
        begin = self._clock
        work()
        return self._clock - begin

    def _captured(self, plan: object, count: int) -> object:
        return type("Graph", (), {"replay": lambda _: self._launch(plan, count)})()

    @contextmanager
    def _piece(self) -> Iterator[None]:
        assert not self.is_running
        begin, self.is_running = self._clock, True
        yield
        self.is_running = False
        self.pieces.append(self._clock - begin)

    def _agree(self, default: Algorithm, algorithm: Algorithm, weight: object, rows: int) -> bool:
        self.proofs.append((algorithm.blob[0], rows))
        return algorithm.blob not in self._broken or rows not in self.broken_rows


T = TypeVar("T")


def finished(pieces: Iterator[None] | Generator[None, None, T]) -> T | None:
    """Run all pieces; return what the last one returns."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T | None = end.value
            return result


def algorithm(number: int) -> Algorithm:
    return Algorithm(bytes([number]) * 64, 0)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MatmulPlan", lambda problem, algorithm: (problem, algorithm))


@pytest.mark.usefixtures("plans")
def test_slow_kernels_run_twice_and_no_more() -> None:
    trial = FakeTrial({1: 1e-4, 2: 5e-3, 3: 9e-5, 4: -1, 5: 1.9e-4})
    finished(trial.time(map(algorithm, (1, 2, 3, 4, 5, 3))))
    assert trial.launches == {1: 7, 2: 2, 3: 7, 4: 1, 5: 7}
    assert trial.best(9) == [algorithm(i) for i in (3, 1, 5, 2)]


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(
    ("seconds", "broken", "winner"),
    [
        ({1: 1e-4, 2: 9e-5, 3: 8e-5}, (), 3),
        ({1: 1e-4, 2: 9e-5, 3: 8e-5}, (3,), 2),
        ({1: 1e-4, 2: 9e-5, 3: 8e-5}, (2, 3), 1),
        ({1: 1e-4, 2: 9.98e-5}, (), 1),
        ({1: 1e-4, 2: 2e-4}, (), 1),
    ],
)
def test_the_fastest_that_is_right_wins(
    seconds: dict[int, float], broken: tuple[int, ...], winner: int
) -> None:
    trial = FakeTrial(seconds, broken)
    finished(trial.time(map(algorithm, seconds)))
    found = finished(trial.finish(algorithm(1)))
    assert found.algorithm == algorithm(winner)
    assert found.seconds == pytest.approx(seconds[winner])
    assert found.default_seconds == pytest.approx(1e-4)


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(("rows", "fewer"), [(64, 56), (1000, 936), (8, 1)])
def test_bits_are_compared_at_fewer_rows_that_every_kernel_takes(rows: int, fewer: int) -> None:
    trial = FakeTrial({1: 1e-4, 2: 8e-5}, rows=rows)
    finished(trial.time(map(algorithm, (1, 2))))
    finished(trial.finish(algorithm(1)))
    assert {given for _, given in trial.proofs} == {rows, fewer}


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize(("rows", "winner"), [(1023, 2), (1024, 3), (4096, 3)])
def test_of_many_rows_the_fastest_under_load_wins(rows: int, winner: int) -> None:
    trial = FakeTrial({1: 1e-4, 2: 8e-5, 3: 9e-5}, rows=rows, hot=(2,))
    finished(trial.time(map(algorithm, (1, 2, 3))))
    found = finished(trial.finish(algorithm(1)))
    assert found.algorithm == algorithm(winner)
    assert found.seconds == pytest.approx({2: 8e-5, 3: 9e-5}[winner])


@pytest.mark.usefixtures("plans")
def test_a_default_that_does_not_start() -> None:
    trial = FakeTrial({1: -1, 2: 1e-4})
    finished(trial.time(map(algorithm, (1, 2))))
    with pytest.raises(KernelError, match="does not run"):
        finished(trial.finish(algorithm(1)))


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"tile": 312, "splits": 1, "cluster": 5, "custom": 2, "swizzle": 3}
    monkeypatch.setattr(Algorithm, "read", lambda self, name: values[name])
    assert tiles.describe(GUESS) == "64x16 cluster 1x2 option 2 swizzle 3"
    values |= {"tile": 9999, "splits": 4, "cluster": 51}
    assert tiles.describe(GUESS) == "tile 9999 cluster #51 option 2 swizzle 3 split 4"


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("rows", [64, 1024])
def test_pieces_are_short_and_stand_alone(rows: int) -> None:
    """A kernel is launched twice at least; all else fits into some milliseconds."""
    known = {i: i * 2e-4 for i in range(1, 12)}
    trial = FakeTrial(known, rows=rows)
    pieces = trial.time(map(algorithm, known))
    for _ in pieces:
        assert not trial.is_running
    found = finished(trial.finish(algorithm(3)))
    assert found is not None
    assert found.algorithm == algorithm(1)
    assert max(trial.pieces) <= 5e-3
    assert trial.pieces[10] == pytest.approx(2 * known[11])


@pytest.mark.usefixtures("plans")
def test_what_differs_in_fewer_rows_is_not_taken() -> None:
    trial = FakeTrial({1: 1e-4, 2: 8e-5, 3: 9e-5}, broken=(2,), rows=64)
    trial.broken_rows = {56}
    finished(trial.time(map(algorithm, (1, 2, 3))))
    found = finished(trial.finish(algorithm(1)))
    assert found is not None
    assert found.algorithm == algorithm(3)
    assert trial.proofs == [(2, 64), (2, 56), (3, 64), (3, 56), (3, 64), (3, 56)]
