"""Ops: a signature, a torch oracle that defines the result, and implementations by device.

The oracle is what tests compare with. It also is the implementation on a CPU until another is
registered. The signature string is checked whatever the device, so a mistake shows on a laptop:
`"x[n,d]:T, weight[d]:T"` binds n, d and T at first sight and demands the same ever after.
A dtype is a variable (capitals) or one of `f32 bf16 e4m3 bool i16 i32 i64 any`; `_` is any size.
"""

import functools
import re
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from slipstream.kernels.runtime.registry import (
    Implementation,
    Implementations,
    takes_all,
    target_of,
)

P = ParamSpec("P")
R = TypeVar("R")


class KernelError(Exception):
    """A shape, stride or dtype that no kernel is built for; the plan should have refused it."""


_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "bool": torch.bool,
    "u8": torch.uint8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
}
_SPEC = re.compile(r"(\w+)\[([\w,]*)\]:(\w+)")
_MOST_CHOICES = 1024  # of an op


def _traits(x: object) -> tuple[object, ...] | None:
    """Return what a signature checks of a tensor; None for anything else."""
    return (x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else None


class Op(Generic[P, R]):
    """An oracle, a checked signature and implementations; tensors are the leading arguments.

    Args:
        oracle: what the op computes; the implementation on a CPU if there is no `spec`.
        signature: of the tensors.
        spec: all that implementations choose by; shapes, dtypes and device of the tensors if None.
        package: its modules register implementations.
    """

    def __init__(
        self,
        oracle: Callable[P, R],
        signature: str,
        spec: Callable[..., Hashable] | None = None,
        package: str = "",
    ) -> None:
        functools.update_wrapper(self, oracle)
        self.oracle = oracle
        self.implementations: Implementations[Any] = Implementations(package)
        if spec is None:
            self.implementations.add(Implementation("torch", oracle, "cpu"))
        self._spec = spec
        self._chosen: dict[Hashable, Callable[P, R]] = {}  # for what was found to fit
        self._tensors = [
            (name, dims.split(",") if dims else [], dtype)
            for name, dims, dtype in _SPEC.findall(signature)
        ]

    def implementation(
        self,
        name: str,
        device: str,
        architecture: str = "",
        takes: Callable[[Any], str | None] = takes_all,
        cost: Callable[[Any], float] | float = 1.0,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register an implementation (decorator)."""
        price = cost if callable(cost) else lambda _: cost

        def register(run: Callable[P, R]) -> Callable[P, R]:
            made = Implementation(name, run, device, architecture, takes, price)
            self.implementations.add(made)
            self._chosen.clear()
            return run

        return register

    def cuda(self, launcher: Callable[P, R]) -> Callable[P, R]:
        """Register the implementation for all GPUs (decorator)."""
        return self.implementation("cuda", "cuda")(launcher)

    @property
    def launcher(self) -> Callable[P, R] | None:
        """The implementation for GPUs."""
        return next((each.run for each in self.implementations if each.device == "cuda"), None)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Check the tensors, then run the implementation that was chosen for such."""
        spec: Hashable
        if self._spec is None:
            spec = tuple([_traits(tensor) for tensor in args[: len(self._tensors)]])
        else:
            spec = self._spec(*args, **kwargs)
        run = self._chosen.get(spec)
        if run is None:
            run = self._choose(spec, args)
        return run(*args, **kwargs)

    def _choose(self, spec: Hashable, args: tuple[object, ...]) -> Callable[P, R]:
        self.check(args)
        first = args[0]
        assert isinstance(first, torch.Tensor)
        target = target_of(first.device)
        chosen = self.implementations.choose(spec, target)
        if chosen is None:
            answers = self.implementations.answers(spec, target)
            why = "; ".join(f"{each.implementation.name} {each.refusal}" for each in answers)
            raise KernelError(f"{self.oracle.__name__} has no implementation for {spec}: {why}")
        if len(self._chosen) >= _MOST_CHOICES:
            self._chosen.clear()
        run: Callable[P, R] = chosen.implementation.run
        self._chosen[spec] = run
        return run

    def check(self, args: tuple[object, ...]) -> None:
        """Hold arguments against the signature; AssertionError names what disagrees."""
        sizes: dict[str, int] = {}
        dtypes: dict[str, torch.dtype] = {}
        devices: set[torch.device] = set()
        op = self.oracle.__name__
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


def op(
    signature: str, spec: Callable[..., Hashable] | None = None, package: str = ""
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make an oracle an `Op`."""
    return lambda oracle: Op(oracle, signature, spec, package)
