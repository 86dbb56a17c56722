"""The blocks of every family on a GPU that notes launches: what the plan takes, kernels take.

A step must not be the first to find that no kernel has a family's sizes: the plan refuses them. No
step multiplies by torch, in no scheme of weights, but for the heads of latents: what is left to
torch is named here, element by element.
"""

import random
import re
from pathlib import Path

import pytest
import torch
from fixtures.kernels.recording import recorded
from fixtures.models.checkpoints import FAMILIES, classes, make_sizes
from fixtures.models.gpu_sizes import OWN, SIZES
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.cache.kv_format import row_size
from slipstream.kernels.runtime.registry import Target
from slipstream.layers.attention import AttentionInputs, StepRows
from slipstream.layers.chunked import ChunkView
from slipstream.layers.residual import Residual
from slipstream.models.decoder import build
from slipstream.models.fileless import SizeSource
from slipstream.models.source import Weights
from slipstream.runner.plan import Plan, settle
from torch import Tensor

META = torch.device("meta")
BLOCK_SIZE = 16
# Activations, weights, cache.
WAYS = [
    ("bfloat16", "none", "auto"),
    ("float16", "fp8", "auto"),
    ("float32", "none", "auto"),
    ("bfloat16", "none", "fp8"),
    ("bfloat16", "none", "int8"),
    ("bfloat16", "int8", "auto"),
    ("bfloat16", "int4", "auto"),
    ("bfloat16", "w4a8", "auto"),
    ("bfloat16", "w8a8", "auto"),
]
STEPS = [(1, 0), (5, 0), (0, 40), (3, 140)]  # decodes, tokens of a chunk
PROMPTS = [(2, 599)]  # whose packed weights are put into e4m3
# Sizes of fp8, fp32 of experts, and latents.
REFUSALS = re.compile(
    "multiples of 16|experts on a GPU needs dtype|a cache of latents has the dtype"
)
HOPPER = Target("cuda", "sm_90a", 132)
# Operators of torch in a step: layer norms and activations that no GEMM fuses, norms and factors
# of results behind them, rows in another order, and the logit of a row's one expert.
ELEMENTWISE = {
    *("native_layer_norm", "gelu", "silu", "relu", "pow", "sigmoid", "mul", "mul_", "clamp", "add"),
    *("add_", "zeros_like", "clone", "copy_", "cat", "_to_copy", "div", "tanh", "index"),
    "gather",
}
OF_LATENTS = {"bmm"}
OF_INT8 = {"new_zeros"}  # rows that cuBLASLt multiplies as 32, fewer of which it has no kernels for
# Of fp32, and of more rows than own kernels have tiles for: cuBLAS through torch, into a residual
# or biases.
MANY, BY_CUBLAS = 64, {"addmm", "mm", "repeat"}


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def planned(
    family: str, dtype: str, scheme: str, cached: str, folder: Path, **drawn: int
) -> Plan | str:
    """Settle a family for a GPU that need not be there, or return why it is refused."""
    sizes = make_sizes(family, **(SIZES | drawn)) | OWN.get(family, {})
    config = classes(family)[0](**sizes)
    config.architectures = [FAMILIES[family]]
    config.save_pretrained(folder)
    asked = {"dtype": dtype, "quantization": scheme, "kv_cache_dtype": cached}
    given = EngineConfig(checkpoint=str(folder), device="cuda", block_size=BLOCK_SIZE, **asked)
    try:
        return settle(given, torch.device("cuda"))
    except ConfigError as error:
        return str(error)


def seen(plan: Plan, rows: StepRows, window: int) -> tuple[StepRows, int]:
    """Return the rows that a layer of this window sees, which are made once a step, and its own."""
    if window and plan.window.is_chunked:
        return ChunkView.of(rows, window, BLOCK_SIZE)(rows), 0
    return rows, window


def notes_of(plan: Plan, scheme: str, steps: list[tuple[int, int]]) -> list[list[str]]:
    """Launch all blocks of steps, and return the names of what each launched."""
    dims, dtype = plan.model.dims, plan.dtype
    with recorded():
        model = build(plan.model, Weights(SizeSource(), META, dtype, scheme, target=HOPPER), 256)
    kept = plan.attention.spec.cache_dtype
    width = dims.head_size if plan.model.axes.latent else row_size(kept, dims.head_size)
    cache = empty(8, dims.num_kv_heads, 2, BLOCK_SIZE, width, dtype=kept)
    found = []
    for decodes, chunk in steps:
        count, n = decodes + (chunk > 0), decodes + chunk
        every, starts = empty(n, dtype=torch.int64), empty(1 + (chunk > 0))
        rows = StepRows(every, every, empty(count, 16), starts, empty(count), decodes, chunk)
        layers = [seen(plan, rows, window) for window in plan.model.windows]
        with recorded() as notes:
            residual = Residual(empty(n, dims.hidden_size, dtype=dtype))
            for block, given in zip(model.blocks, layers, strict=True):
                block(residual, AttentionInputs.of(plan.attention, cache, *given), cache)
        found.append([name for name, _ in notes])
    return found


def check(family: str, plan: Plan, scheme: str, steps: list[tuple[int, int]]) -> None:
    """Launch steps; no operator of torch may be among them that is not named above."""
    allowed = ELEMENTWISE | (OF_LATENTS if plan.model.axes.latent else set())
    allowed |= OF_INT8 if scheme == "w8a8" else set()
    for step, names in zip(steps, notes_of(plan, scheme, steps), strict=True):
        by_torch = {name.removeprefix("torch.") for name in names if name.startswith("torch.")}
        assert len(names) > len(by_torch)
        is_large = sum(step) > MANY or plan.dtype == torch.float32
        left = by_torch - allowed - (BY_CUBLAS if is_large else set())
        assert not left, (family, plan.dtype, scheme, step)


@pytest.mark.parametrize("family", quick_of(sorted(FAMILIES), {"gpt2", "llama", "mixtral"}))
def test_kernels_take_what_the_plan_takes(family: str, tmp_path: Path) -> None:
    for way in WAYS:
        plan = planned(family, *way, tmp_path)
        if isinstance(plan, str):
            assert way != WAYS[0], plan
            assert REFUSALS.search(plan), plan
            continue
        check(family, plan, way[1], STEPS + (PROMPTS if way[1] == "w4a8" else []))


@pytest.mark.rest
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_drawn_steps(family: str, tmp_path: Path) -> None:
    """Inner sizes, layers and steps that are drawn, in a scheme of weights that is drawn."""
    for seed in range(3):
        rng = random.Random(f"{family} {seed}")
        drawn = {"intermediate_size": 64 * rng.randrange(4, 20)}
        scheme = rng.choice(["none", "fp8", "int8", "int4", "w4a8", "w8a8"])
        plan = planned(family, "bfloat16", scheme, "auto", tmp_path, **drawn)
        if isinstance(plan, str):
            assert REFUSALS.search(plan), plan
            continue
        steps = [(rng.randrange(0, 9), rng.choice([0, 1, 30, 300])), (rng.randrange(1, 300), 0)]
        check(family, plan, scheme, [step for step in steps if sum(step)])
