"""Forms of blocks: whatever a launch may follow from is in them."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from fixtures.kernels.driverless import driverless
from fixtures.models.checkpoints import FAMILIES
from fixtures.models.six_layers import made
from slipstream.errors import ConfigError
from slipstream.fuse.alike import Form, form_of
from torch import Tensor

QUICK, REST = ["gpt2", "llama"], ["deepseek_v3", "gemma3", "gpt_oss", "mixtral"]
SCHEMES = ("none", "fp8", "w4a8", "w8a8")
ELSE = [family for family in sorted(FAMILIES) if family not in QUICK + REST]


def fields(part: object, seen: list[object]) -> Iterator[tuple[object, str, object]]:
    """Yield the attributes of a block and of its parts, by their owner and name."""
    while hasattr(part, "without_terms"):
        part = part.without_terms
    if any(part is each for each in seen):
        return
    seen.append(part)
    inner: list[object] = []
    if isinstance(part, tuple | list):
        inner = list(part)
    elif isinstance(part, FunctionType):
        inner = [cell.cell_contents for cell in part.__closure__ or ()]
    elif isinstance(part, MethodType):
        inner = [part.__self__]
    elif type(part).__module__.startswith("slipstream") and not isinstance(part, Enum):
        names = [x for kind in type(part).__mro__ for x in getattr(kind, "__slots__", ())]
        for name in [*names, *getattr(part, "__dict__", {})]:
            if hasattr(part, name):
                inner.append(getattr(part, name))
                yield part, name, inner[-1]
    for each in inner:
        yield from fields(each, seen)


def others_of(value: object) -> list[object]:
    """Return values that a launch may tell from this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value + 0.25, -value]
    if isinstance(value, str):
        return [f"{value}, and more"]
    if value is None:
        return [0.5, torch.zeros(8)]
    if isinstance(value, Tensor) and value.numel() > 1:
        size = value.numel() * value.itemsize
        kinds = [x for x in (torch.uint8, torch.int16, torch.int32) if x.itemsize == value.itemsize]
        other = value.view(torch.int8 if value.dtype in kinds else kinds[0]) if kinds else value[:0]
        moved = torch.zeros(size + 64, dtype=torch.uint8)
        start = -moved.data_ptr() % 16 + 8
        moved = moved[start : start + size].view(value.dtype).view(value.shape)
        wide = value.new_zeros(*value.shape, 2)[..., 0]
        return [other, moved, value[:-1], wide]
    return []


def check_block(block: object) -> int:
    """Change each attribute of a block, and return how often."""
    form = form_of(block)
    assert form is not None
    count = 0
    for owner, name, value in list(fields(block, [])):
        for other in others_of(value):
            object.__setattr__(owner, name, other)
            changed: Form | None = form_of(block)
            object.__setattr__(owner, name, value)
            assert changed is None or changed.parts != form.parts, (type(owner), name, value, other)
            count += 1
    assert form_of(block) == form
    return count


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        *[(family, "none") for family in QUICK],
        *[pytest.param(x, "none", marks=pytest.mark.rest) for x in REST],
        *[pytest.param("mixtral", x, marks=pytest.mark.rest) for x in SCHEMES[1:]],
        *[pytest.param(x, y, marks=pytest.mark.slow) for x in ELSE for y in SCHEMES],
    ],
)
def test_a_number_or_a_tensor_of_another_kind_makes_another_form(
    family: str, scheme: str, tmp_path: Path
) -> None:
    with driverless(), torch.inference_mode():
        try:
            _, model = made(family, scheme, tmp_path)
        except ConfigError:
            return
        assert check_block(model.blocks[3]) > 20


def test_functions_are_told_apart_by_their_code() -> None:
    """Also two of one name, and by what they have by default."""

    def made_of(factor: float) -> list[Any]:
        def named(x: Tensor, *, power: float = factor) -> Tensor:
            return x**power

        return [lambda x: x + 1, lambda x: x + 2, named]

    first, again, other = made_of(1.0), made_of(1.0), made_of(2.0)
    parts = [[form.parts for each in x if (form := form_of(each))] for x in (first, again, other)]
    assert parts[0] == parts[1]
    assert parts[0][:2] == parts[2][:2]
    assert len({*parts[0], *parts[2]}) == 4


def test_of_a_function_that_lacks_a_value_nothing_is_known() -> None:
    def read() -> int:
        return later

    if form_of(read) is not None:
        pytest.fail("it has no value yet")
    later = 1
    assert form_of(read) is not None
