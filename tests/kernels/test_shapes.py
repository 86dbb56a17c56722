"""The shapes of CTAs fit the shared memory of the GPUs that they are for; no GPU needed."""

import itertools

import pytest
import torch
from slipstream.kernels.attention import decode, decode_shapes, prefill, rules
from slipstream.kernels.cache import kv_format
from slipstream.kernels.cache.pages import TileShape
from slipstream.kernels.runtime import jit

SMALL, AMPERE, HOPPER = 99 * 1024, 163 * 1024, 227 * 1024  # of a CTA, at most
HALVES = (torch.float16, torch.bfloat16)
FORMATS = tuple(kv_format.FORMATS.values())
PLANNED = [
    (cached, head_size)
    for cached, head_size in itertools.product((*HALVES, *FORMATS), jit.HEAD_SIZES)
    if decode_shapes.is_planned(cached, head_size)
]


@pytest.mark.parametrize("limit", [SMALL, AMPERE, HOPPER])
@pytest.mark.parametrize(("cached", "head_size"), PLANNED, ids=str)
def test_a_shape_of_decode_fits(
    cached: torch.dtype, head_size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, which is best, where shared memory is that of a Hopper."""
    monkeypatch.setattr(jit, "shared_memory_limit", lambda _: limit)
    monkeypatch.setattr(jit, "num_multiprocessors", lambda _: 132)
    decode._device.cache_clear()
    try:
        _, shape = decode._device(0, cached, head_size)
    finally:
        decode._device.cache_clear()
    assert shape.shared_memory(cached, head_size) <= limit
    shapes = decode_shapes.shapes(cached, head_size)
    assert shape == shapes[0] or limit < HOPPER
    assert sorted(shapes, key=lambda s: -s.shared_memory(cached, head_size)) == list(shapes)


@pytest.mark.parametrize("shape_of", [decode._split_shape, prefill.tiles_shape])
@pytest.mark.parametrize("head_size", jit.HEAD_SIZES)
def test_tiles_fit(shape_of: object, head_size: int) -> None:
    """Two stages the smallest GPUs, whatever the cache holds; all stages the largest."""
    assert callable(shape_of)
    for dtype, cached in itertools.product(jit.DTYPES, (None, *FORMATS)):
        shape = shape_of(dtype, head_size)
        assert isinstance(shape, TileShape)
        assert shape.shared_memory(dtype, head_size, 2, cached) <= SMALL
        assert shape.shared_memory(dtype, head_size, shape.stages) <= HOPPER


@pytest.mark.parametrize("head_size", rules.WGMMA_HEAD_SIZES)
def test_tiles_of_a_warpgroup_fit(head_size: int) -> None:
    assert prefill.wgmma_memory(head_size) <= HOPPER
