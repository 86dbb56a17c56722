"""The blocks of every family on a GPU that notes launches: what the plan takes, kernels take.

A step must not be the first to find that no kernel has a family's sizes: the plan refuses them.
"""

import re
from pathlib import Path

import pytest
import torch
from fixtures.kernels.recording import recorded
from fixtures.models.checkpoints import FAMILIES, classes, make_sizes
from fixtures.models.gpu_sizes import OWN, SIZES
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.cache.kv_format import row_size
from slipstream.layers.attention import AttentionInputs, StepRows
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
]
STEPS = [(1, 0), (5, 0), (0, 40), (3, 140)]  # decodes, tokens of a chunk
# Sizes of fp8, fp32 of experts, and latents.
REFUSALS = re.compile(
    "multiples of 16|experts on a GPU needs dtype|a cache of latents has the dtype"
)


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def planned(family: str, dtype: str, scheme: str, cached: str, folder: Path) -> Plan | str:
    """Settle a family for a GPU that need not be there, or return why it is refused."""
    sizes = make_sizes(family, **SIZES) | OWN.get(family, {})
    config = classes(family)[0](**sizes)
    config.architectures = [FAMILIES[family]]
    config.save_pretrained(folder)
    asked = {"dtype": dtype, "quantization": scheme, "kv_cache_dtype": cached}
    given = EngineConfig(checkpoint=str(folder), device="cuda", block_size=BLOCK_SIZE, **asked)
    try:
        return settle(given, torch.device("cuda"))
    except ConfigError as error:
        return str(error)


def run_blocks(plan: Plan, scheme: str) -> None:
    """Launch all blocks of steps of several shapes."""
    dims, dtype = plan.model.dims, plan.dtype
    model = build(plan.model, Weights(SizeSource(), META, dtype, scheme), 256)
    kept = plan.attention.spec.cache_dtype
    width = dims.head_size if plan.model.axes.latent else row_size(kept, dims.head_size)
    cache = empty(8, dims.num_kv_heads, 2, BLOCK_SIZE, width, dtype=kept)
    for decodes, chunk in STEPS:
        count, n = decodes + (chunk > 0), decodes + chunk
        every, starts = empty(n, dtype=torch.int64), empty(1 + (chunk > 0))
        rows = StepRows(every, every, empty(count, 16), starts, empty(count), decodes, chunk)
        residual = Residual(empty(n, dims.hidden_size, dtype=dtype))
        for block, window in zip(model.blocks, plan.model.windows, strict=True):
            block(residual, AttentionInputs.of(plan.attention, cache, rows, window), cache)


@pytest.mark.rest
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_kernels_take_what_the_plan_takes(family: str, tmp_path: Path) -> None:
    for way in WAYS:
        plan = planned(family, *way, tmp_path)
        if isinstance(plan, str):
            assert way != WAYS[0], plan
            assert REFUSALS.search(plan), plan
            continue
        with recorded() as notes:
            run_blocks(plan, way[1])
        assert notes
