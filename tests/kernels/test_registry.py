"""Implementations of an op: which is chosen, and what the others say."""

import pytest
import torch
from slipstream.kernels.runtime.op import KernelError, op
from slipstream.kernels.runtime.registry import (
    CPU,
    KNOWN,
    Implementation,
    Implementations,
    Target,
    architecture_of,
    target_of,
)

HOPPER = KNOWN["sm_90a"]


def named(name: str, device: str = "cuda", **settings: object) -> Implementation[int]:
    return Implementation(name, lambda: name, device, **settings)


def even(spec: int) -> str | None:
    return None if spec % 2 == 0 else "takes even numbers"


@pytest.fixture
def implementations() -> Implementations[int]:
    made: Implementations[int] = Implementations()
    made.add(named("torch", "cpu"))
    made.add(named("general", cost=lambda _: 2.0))
    made.add(named("hopper", architecture="sm_90a", takes=even))
    made.add(named("cheap for large", cost=lambda spec: 3.0 if spec < 100 else 0.5))
    return made


@pytest.mark.parametrize(
    ("spec", "target", "name"),
    [
        (1, CPU, "torch"),
        (1, HOPPER, "general"),
        (2, HOPPER, "hopper"),
        (2, KNOWN["sm_80"], "general"),
        (200, HOPPER, "cheap for large"),
    ],
)
def test_the_cheapest_that_takes_a_spec_is_chosen(
    implementations: Implementations[int], spec: int, target: Target, name: str
) -> None:
    chosen = implementations.choose(spec, target)
    assert chosen is not None
    assert chosen.implementation.name == name


def test_all_say_why_not(implementations: Implementations[int]) -> None:
    answers = implementations.answers(1, KNOWN["sm_80"])
    assert [(answer.implementation.name, answer.refusal) for answer in answers] == [
        ("general", None),
        ("cheap for large", None),
        ("hopper", "needs sm_90a"),
        ("torch", "runs on cpu"),
    ]
    assert implementations.choose(1, Target("npu")) is None


def test_modules_of_a_package_register_before_the_first_choice() -> None:
    from slipstream.kernels.gemm.op import gemm

    names = {each.name for each in gemm.implementations}
    assert names >= {"cublaslt", "torch", "gemv", "skinny", "tall"}


def test_an_op_has_its_oracle_apart_from_what_runs() -> None:
    @op("x[n]:T")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    x = torch.arange(3)
    assert double(x).tolist() == [0, 2, 4]

    @double.implementation("shift", "cpu", cost=0.5)
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x << 1 | 1  # wrong, to be seen

    assert double(x).tolist() == [1, 3, 5]
    assert double.oracle(x).tolist() == [0, 2, 4]


def test_an_op_without_an_implementation_says_so() -> None:
    def spec(x: torch.Tensor) -> int:
        return len(x)

    @op("x[n]:T", spec=spec)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    double.implementation("pairs", "cpu", takes=even)(lambda x: x * 2)
    assert double(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(KernelError, match="double has no implementation for 3: pairs takes even"):
        double(torch.ones(3))


def test_targets() -> None:
    assert target_of(torch.device("cpu")) == target_of(torch.device("meta")) == CPU
    names = [architecture_of(capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0))]
    assert names == ["sm_80", "sm_89", "sm_90a", "sm_100a"]
    assert {"cpu", *names} == KNOWN.keys()
