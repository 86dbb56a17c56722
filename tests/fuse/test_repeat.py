"""Blocks by the launches of one before them: the same launches of the same memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fixtures.kernels.driverless import HOPPER, Driver, driverless
from fixtures.models.checkpoints import FAMILIES, classes, make_sizes
from fixtures.models.gpu_sizes import SIZES
from slipstream.config import EngineConfig
from slipstream.fuse.repeat import Repeating
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.decoder import Block, Decoder, InTurn, one_by_one
from slipstream.layers.residual import Residual
from slipstream.models.decoder import build
from slipstream.models.fileless import RandomSource
from slipstream.models.source import Weights
from slipstream.runner.plan import Plan, settle
from torch import Tensor

CPU, BLOCK_SIZE, LAYERS = torch.device("cpu"), 16, 6
STEPS = [(0, 600), (600, 0), (40, 700)]  # decodes, tokens of a chunk


def made(family: str, scheme: str, folder: Path) -> tuple[Plan, Decoder]:
    sizes = make_sizes(family, **(SIZES | {"num_hidden_layers": LAYERS}))
    config = classes(family)[0](**sizes)
    config.architectures = [FAMILIES[family]]
    config.save_pretrained(folder)
    asked = {"dtype": "bfloat16", "quantization": scheme, "block_size": BLOCK_SIZE}
    plan = settle(
        EngineConfig(checkpoint=str(folder), device="cuda", **asked), torch.device("cuda")
    )
    weights = Weights(RandomSource(CPU), CPU, plan.dtype, scheme, target=HOPPER)
    return plan, build(plan.model, weights, 2048)


def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


class Step:
    """A step of a model, from the same start at each run."""

    def __init__(self, plan: Plan, decodes: int, chunk: int) -> None:
        self.plan, count, n = plan, decodes + (chunk > 0), decodes + chunk
        positions, starts = numbers(n, dtype=torch.int64), numbers(1 + (chunk > 0))
        lengths = numbers(count) + 1
        self.rows = StepRows(
            positions, positions + 1, numbers(count, 16), starts, lengths, decodes, chunk
        )

    def run(self, model: Decoder, apply: InTurn) -> list[int]:
        """Return the first words of the residual sum and of all caches."""
        d, dtype = self.plan.model.dims, self.plan.dtype
        caches = [
            torch.full((4, d.num_kv_heads, 2, BLOCK_SIZE, d.head_size), i, dtype=dtype)
            for i, _ in enumerate(model.blocks)
        ]
        of_window = {
            window: AttentionInputs.of(self.plan.attention, caches[0], self.rows, window)
            for window in set(self.plan.model.windows)
        }
        inputs = [of_window[window] for window in self.plan.model.windows]
        inputs[-1] = replace(inputs[-1])
        residual = Residual(torch.ones(len(self.rows.positions), d.hidden_size, dtype=dtype))
        apply(model.blocks, residual, inputs, caches)
        return [first(x) for x in (residual.values, *caches)]


def first(x: Tensor) -> int:
    return int(x.flatten()[:4].view(torch.int64))


@pytest.fixture
def driver() -> Iterator[Driver]:
    with driverless() as found, torch.inference_mode():
        yield found


def compare(family: str, scheme: str, folder: Path, driver: Driver) -> int:
    """Run steps both ways, and return how many blocks were not repeated of each step."""
    plan, model = made(family, scheme, folder)
    repeating, called = Repeating("cpu"), 0
    for step in STEPS:
        each = Step(plan, *step)
        driver.launches.clear()
        expected, launched = each.run(model, one_by_one), [*driver.launches]
        assert each.run(model, one_by_one) == expected, step
        driver.launches.clear()
        with patch.object(Block, "__call__", autospec=True, side_effect=Block.__call__) as calls:
            found = each.run(model, repeating)
        assert driver.launches == launched
        assert found == expected, step
        called = max(called, calls.call_count)
    return called


@pytest.mark.parametrize(
    ("family", "scheme", "most"),
    [("llama", "none", 2), ("qwen3", "none", 2), ("llama", "fp8", 3), ("mistral", "w8a8", 3)],
)
def test_repeated_blocks_launch_what_each_launches(
    family: str, scheme: str, most: int, driver: Driver, tmp_path: Path
) -> None:
    """All but the first of its kind, and the last, whose inputs are its own."""
    assert compare(family, scheme, tmp_path, driver) <= most
