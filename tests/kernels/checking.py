"""One judge for every kernel: error against fp64 at most twice that of naive same-dtype arithmetic.

A test runs all its configurations and reports each failure in one line: a GPU is lent, not owned.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NUM_REPETITIONS = int(os.environ.get("SLIPSTREAM_TEST_REPETITIONS", "20"))


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


def bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN."""
    return x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def naive_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in the dtype of `x`: of 16 bits summed in fp32 and rounded once.

    Not by the library's kernels of 16 bits, which end in an error under racecheck, whoever
    launches them.
    """
    if x.dtype not in (torch.float16, torch.bfloat16):
        return functional.linear(x, weight, bias)
    wide = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(x.dtype)


def poison(*shapes: Sequence[int], dtype: torch.dtype, device: str = "cuda") -> None:
    """Leave NaN in the memory that the allocator hands out next for tensors of these shapes."""
    kept = [torch.full(tuple(shape), float("nan"), dtype=dtype, device=device) for shape in shapes]
    del kept


@dataclass
class Judge:
    """Collects what failed; `verdict` fails the test with all of it."""

    name: str
    num_checks: int = 0
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)

    def close(self, case: str, actual: Tensor, exact: Tensor, naive: Tensor) -> None:
        """`|actual - exact| <= 2 |naive - exact| + eps |exact|`, as root mean square and maximum.

        A few naive results may happen to be exact: then of 4 eps, of inputs that are of order 1.
        """
        self.num_checks += 1
        assert actual.shape == exact.shape == naive.shape, f"{case}: shapes differ"
        if exact.numel() == 0:
            return
        error, allowed = (actual.double() - exact).abs(), (naive.double() - exact).abs()
        eps = torch.finfo(actual.dtype).eps
        few = 4 * eps if exact.numel() < 512 else 0.0
        ratios = [
            float(m(error) / (2 * m(allowed) + max(few, eps * m(exact.abs())) + 1e-30))
            for m in (lambda x: x.pow(2).mean().sqrt(), torch.max)
        ]
        ratio = max(ratios, key=lambda r: float("inf") if r != r else r)
        self.worst = max(self.worst, ratio)
        if not ratio <= 1:
            num_nan = int(actual.isnan().sum())
            where = tuple(
                int(i)
                for i in (
                    error.nan_to_num(float("inf")) == error.nan_to_num(float("inf")).max()
                ).nonzero()[0]
            )
            self.failures.append(
                f"{case}: error {ratio:.3g} x allowed (rms {ratios[0]:.3g}, max {ratios[1]:.3g}), "
                f"{num_nan} NaN of {actual.numel()}, worst at {where}"
            )

    def true(self, case: str, condition: bool) -> None:
        self.num_checks += 1
        if not condition:
            self.failures.append(case)

    def repeats(self, case: str, run: Callable[[], Tensor]) -> None:
        """`run` gives the same bits every time."""
        first = run()
        differing = sum(not same_bits(first, run()) for _ in range(NUM_REPETITIONS - 1))
        self.true(
            f"{case}: {differing} of {NUM_REPETITIONS - 1} repetitions differ", differing == 0
        )

    def verdict(self) -> None:
        print(
            f"{self.name}: {self.num_checks} checks, {len(self.failures)} failed, "
            f"worst error {self.worst:.2f} x allowed"
        )
        for failure in self.failures[:25]:
            print(f"  FAILED {failure}")
        if len(self.failures) > 25:
            print(f"  ... and {len(self.failures) - 25} more")
        assert not self.failures, f"{self.name}: {len(self.failures)} of {self.num_checks} failed"
