"""Twin dispatch: a kernel's public function is its torch reference; on a GPU its CUDA twin runs.

The signature string is checked for both twins, so a mistake shows on a laptop:
`"x[n,d]:T, weight[d]:T"` binds n, d and T at first sight and demands the same ever after.
A dtype is a variable (capitals) or one of `f32 bf16 e4m3 bool i16 i32 i64 any`; `_` is any size.
"""

import functools
import re
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class KernelError(Exception):
    """A shape, stride or dtype that no kernel is built for (what the plan should have refused)."""


_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "bool": torch.bool,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
}
_SPEC = re.compile(r"(\w+)\[([\w,]*)\]:(\w+)")
_MOST_FITTING = 1024  # of an op
_Traits = tuple[tuple[object, ...] | None, ...]


def _traits(x: object) -> tuple[object, ...] | None:
    """All that a signature says of a tensor; None of anything else."""
    return (x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else None


class Op(Generic[P, R]):
    """A function with two bodies and one checked signature; tensors are its leading arguments."""

    def __init__(self, reference: Callable[P, R], signature: str) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.launcher: Callable[P, R] | None = None
        self._fitting: set[_Traits] = set()  # what was found to fit the signature
        self._tensors = [
            (name, dims.split(",") if dims else [], dtype)
            for name, dims, dtype in _SPEC.findall(signature)
        ]

    def cuda(self, launcher: Callable[P, R]) -> Callable[P, R]:
        """Register the GPU twin (decorator)."""
        self.launcher = launcher
        return launcher

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Check the tensors, then run the twin of their device."""
        traits = tuple([_traits(tensor) for tensor in args[: len(self._tensors)]])
        if traits not in self._fitting:
            self._check(args)
            if len(self._fitting) == _MOST_FITTING:
                self._fitting.clear()
            self._fitting.add(traits)
        first = args[0]
        assert isinstance(first, torch.Tensor)
        if first.is_cuda:
            if self.launcher is None:
                raise KernelError(f"{self.reference.__name__} has no CUDA twin")
            return self.launcher(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def _check(self, args: tuple[object, ...]) -> None:
        sizes: dict[str, int] = {}
        dtypes: dict[str, torch.dtype] = {}
        devices: set[torch.device] = set()
        op = self.reference.__name__
        for (name, dims, dtype), tensor in zip(self._tensors, args, strict=False):
            assert isinstance(tensor, torch.Tensor), f"{op}: {name} is not a tensor"
            assert tensor.ndim == len(dims), f"{op}: {name} has {tensor.ndim} dims, not {dims}"
            for dim, size in zip(dims, tensor.shape, strict=True):
                want = int(dim) if dim.isdigit() else sizes.setdefault(dim, size)
                assert dim == "_" or want == size, (
                    f"{op}: {name} disagrees on {dim}: {size} vs {want}"
                )
            bound = tensor.dtype if dtype == "any" else dtypes.setdefault(dtype, tensor.dtype)
            want_dtype = _DTYPES.get(dtype, bound)
            assert tensor.dtype == want_dtype, f"{op}: {name} is {tensor.dtype}, not {want_dtype}"
            devices.add(tensor.device)
        assert len(devices) == 1, f"{op}: tensors on several devices: {devices}"


def op(signature: str) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a reference function an `Op`."""
    return lambda reference: Op(reference, signature)
