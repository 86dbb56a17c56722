"""Attention of decodes over caches in fewer bits: the CUDA source of plan, kernel and merge, and of
the kernel by split, emulated, against attention in fp64.
"""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from fixtures.kernels import emulation
from fixtures.kernels.attention_cases import Case, attend, in_format, make_case, poison_bytes
from fixtures.kernels.checking import Judge
from fixtures.kernels.emulation import emulate, meanwhile
from slipstream.kernels.attention import decode as module
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.cache import kv_format
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.kernels.runtime import jit
from torch import Tensor

pytestmark = pytest.mark.rest  # a compiler's second, before anything runs

MULTIPROCESSORS = 3  # fewer than sequences: a CTA has several, and some are of several CTAs
# Query heads and kv heads: several, or one, of these, by turns.
HEADS = (((8, 2), (20, 2), (6, 3), (4, 4)), ((1, 1), (8, 1), (9, 1)))
LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130, 257)
NUM_SEQUENCES = 6  # a plan's kernel is compiled for a number of them
WINDOWS = (1, 17, 32, 40, 100, 1000)


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    name: str  # of the cache's format
    head_size: int
    dtype: torch.dtype
    has_window: bool
    converts: bool = False  # e4m3 by an instruction, as GPUs from Ada on


BF16, HALF = torch.bfloat16, torch.float16
# Rows of 4, 5, 2 and 8 chunks; 1, 2 and 4 groups.
PLANNED = (
    Variant("fp8", 64, BF16, False, converts=True),
    Variant("int8", 80, HALF, True),
    Variant("int4", 64, HALF, True),
    Variant("int4", 128, BF16, True),
    Variant("int4", 256, BF16, False),
)
# Tiles of narrow heads, and of fp32, are those of chunks: test_emulated_prefill.py.
BY_SPLIT = (Variant("fp8", 256, HALF, False, converts=True),)


@pytest.fixture(autouse=True)
def _emulated(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    emulate(monkeypatch)
    if variant.converts:
        monkeypatch.setattr(jit, "launch", launch)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: MULTIPROCESSORS)
    module._device.cache_clear()
    yield
    module._device.cache_clear()


def drawn(variant: Variant, blocks: tuple[int, ...], seed: int) -> Iterator[tuple[str, Case, Case]]:
    """A name, a batch over such a cache and one with the numbers that are left of it; per block."""
    rng = random.Random(f"{variant} {seed}")
    for i, block in enumerate(blocks):
        heads = rng.choice(HEADS[i % 2])
        lengths = rng.sample(LENGTHS, NUM_SEQUENCES)
        window = rng.choice(WINDOWS) if variant.has_window else 0
        sizes = (heads, variant.head_size, block, variant.dtype, "cpu", seed, window)
        case, left = in_format(
            make_case([1] * len(lengths), lengths, *sizes), FORMATS[variant.name]
        )
        poison_bytes(case)
        yield f"heads {heads} block {block} window {window} lengths {lengths}", case, left


def launch(wanted: jit.Variant, *args: Any, **more: Any) -> None:
    """As on Ada."""
    arch = {"__CUDA_ARCH__": "890"} if "FORMAT" in dict(wanted.defines) else {}
    defines = (*wanted.defines, *arch.items())
    emulation.launch(dataclasses.replace(wanted, defines=defines), *args, **more)


def decode(case: Case, is_planned: bool) -> Tensor:
    plan = torch.empty(0, dtype=torch.int32)
    if is_planned:
        plan = plan_decode.launcher(case.lengths, case.cache, case.q.shape[1], case.window)
        assert len(plan)
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
    where = (case.cache, case.block_tables, case.lengths, plan, case.scale, out)
    return decode_attention.launcher(case.q, *where, window=case.window)


def check(variant: Variant, blocks: tuple[int, ...], is_planned: bool, seed: int = 0) -> None:
    judge = Judge(str(variant))
    for name, case, left in drawn(variant, blocks, seed):
        out = decode(case, is_planned)
        judge.close(name, out, attend(left, torch.float64), attend(left, variant.dtype))
        judge.true(f"{name}: length 0", not out[case.lengths == 0].any())
    judge.verdict()


@pytest.mark.parametrize("variant", PLANNED, ids=str)
def test_by_plan(variant: Variant) -> None:
    check(variant, (16, 32, 64), is_planned=True)


@pytest.mark.parametrize("variant", [PLANNED[0], PLANNED[-1]], ids=str)
def test_what_kernels_in_front_write_is_waited_for(variant: Variant) -> None:
    """Queries, and the newest token of each sequence: numbers and scales."""
    judge = Judge(f"newest {variant}")
    for name, case, left in drawn(variant, (16, 32), seed=1):
        tensors = case.q, *kv_format.numbers_and_scales(case.cache)
        written = [x.clone() for x in tensors]
        unwritten = [x.clone() for x in tensors]
        unwritten[0].fill_(torch.nan)
        for row, length in enumerate(case.lengths.tolist()):
            last, block = length - 1, case.cache.shape[3]
            if length:
                number = int(case.block_tables[row, last // block])
                unwritten[1][number, :, :, last % block] = 0x7F
                unwritten[2][number, :, :, last % block] = 255

        def write(have_ended: bool, now=tensors, then=(unwritten, written)) -> None:
            for x, value in zip(now, then[have_ended], strict=True):
                x.copy_(value)

        with meanwhile(write):
            out = decode(case, is_planned=True)
        judge.close(name, out, attend(left, torch.float64), attend(left, variant.dtype))
    judge.verdict()


@pytest.mark.parametrize("variant", BY_SPLIT, ids=str)
def test_by_split(variant: Variant) -> None:
    check(variant, (16, 32, 256), is_planned=False)
