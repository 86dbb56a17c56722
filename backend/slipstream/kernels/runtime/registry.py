"""Implementations of an op, the choice among them, and why the others do not take a case.

An implementation names the device and the architecture that it runs on, says of a case's spec
(shapes, dtypes, stages around it) why it does not take it, and what it costs. The cheapest that
takes a spec is chosen, once; after that the choice is one look into a dict.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

S = TypeVar("S")


class Target(NamedTuple):
    """A device as implementations see it."""

    device: str  # "cuda" or "cpu"
    architecture: str = ""  # "sm_90a", say; "" on a CPU
    multiprocessors: int = 0

    @property
    def capability(self) -> tuple[int, int]:
        """Return the compute capability; (0, 0) on a CPU."""
        digits = self.architecture.removeprefix("sm_").removesuffix("a")
        return (int(digits[:-1]), int(digits[-1])) if digits else (0, 0)


CPU = Target("cpu")
# What `slipstream kernels` knows without a GPU: cards by architecture.
KNOWN = {
    "cpu": CPU,
    "sm_80": Target("cuda", "sm_80", 108),  # A100
    "sm_89": Target("cuda", "sm_89", 142),  # L40S
    "sm_90a": Target("cuda", "sm_90a", 132),  # H100 and H200
    "sm_100a": Target("cuda", "sm_100a", 148),  # B200
}


def architecture_of(capability: tuple[int, int]) -> str:
    """Name the architecture of a compute capability; from 9.0 on with its own instructions."""
    return "sm_{}{}{}".format(*capability, "a" if capability >= (9, 0) else "")


@functools.cache
def target_of(device: torch.device) -> Target:
    """Return what implementations see of a device; torch's `meta` counts as a CPU."""
    if device.type != "cuda":
        return CPU
    properties = torch.cuda.get_device_properties(device)
    architecture = architecture_of(torch.cuda.get_device_capability(device))
    return Target("cuda", architecture, int(properties.multi_processor_count))


def takes_all(spec: object) -> str | None:
    """Take every spec."""
    return None


@dataclass(frozen=True, slots=True)
class Implementation(Generic[S]):
    """A way to compute an op."""

    name: str
    run: Callable[..., Any]
    device: str
    architecture: str = ""  # the one whose instructions it needs; "": any
    takes: Callable[[S], str | None] = takes_all  # why it does not take a spec; None: it does
    cost: Callable[[S], float] = lambda _: 1.0  # in kernels, about; of two that take a spec

    def refusal(self, spec: S, target: Target) -> str | None:
        """Say why it does not run a spec on a target; None: it does."""
        if self.device != target.device:
            return f"runs on {self.device}"
        if self.architecture not in ("", target.architecture):
            return f"needs {self.architecture}"
        return self.takes(spec)


class Answer(NamedTuple):
    """An implementation's answer to a spec: a cost, or why it does not take it."""

    implementation: Implementation[Any]
    cost: float
    refusal: str | None


def _rank(answer: Answer) -> tuple[bool, float, str]:
    return answer.refusal is not None, answer.cost, answer.implementation.name


class Implementations(Generic[S]):
    """All implementations of one op.

    Args:
        package: its modules register implementations and are imported before the first choice.
    """

    def __init__(self, package: str = "") -> None:
        self._package = package
        self._all: list[Implementation[S]] = []

    def add(self, implementation: Implementation[S]) -> None:
        """Register one; of equal cost the first by name is chosen."""
        self._all.append(implementation)

    def __iter__(self) -> Iterator[Implementation[S]]:
        if self._package:
            package, self._package = self._package, ""
            path = importlib.import_module(package).__path__
            for module in sorted(m.name for m in pkgutil.walk_packages(path, f"{package}.")):
                importlib.import_module(module)
        return iter(self._all)

    def answers(self, spec: S, target: Target) -> list[Answer]:
        """Ask all of them; those that take the spec come first, the cheapest in front."""
        found = []
        for each in self:
            refusal = each.refusal(spec, target)
            found.append(Answer(each, 0.0 if refusal else each.cost(spec), refusal))
        return sorted(found, key=_rank)

    def choose(self, spec: S, target: Target) -> Answer | None:
        """Return the cheapest that takes a spec; None where none does."""
        answers = self.answers(spec, target)
        return answers[0] if answers and answers[0].refusal is None else None
