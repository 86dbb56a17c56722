"""What the GPU tests of attention choose: few cases, in which pairs of parameters meet."""

import itertools

import pytest
import torch
from fixtures.kernels.attention_cases import (
    BLOCK_SIZES,
    HEAD_SIZES,
    HEADS,
    configurations,
    with_windows,
)
from fixtures.kernels.checking import DTYPES
from fixtures.kernels.compiling import is_of_this_gpu, those_with
from slipstream.kernels.attention import decode, decode_shapes
from slipstream.kernels.cache.kv_format import MIN_BLOCK_SIZE
from slipstream.kernels.runtime import jit

HALVES = (torch.float16, torch.bfloat16)


def test_every_head_size_meets_every_block_size_and_every_group() -> None:
    cases = configurations()
    assert len(cases) == len(set(cases)) == len(HEAD_SIZES) * len(HEADS)
    assert {(d, block) for _, d, block in cases} == {*itertools.product(HEAD_SIZES, BLOCK_SIZES)}
    assert {(heads, d) for heads, d, _ in cases} == {*itertools.product(HEADS, HEAD_SIZES)}


@pytest.mark.parametrize("step", [2, 3, 4, 7])
def test_a_few_configurations_have_every_head_size_and_block_size(step: int) -> None:
    chosen = configurations()[::step]
    assert {d for _, d, _ in chosen} == {*HEAD_SIZES}
    assert {block for _, _, block in chosen} == {*BLOCK_SIZES}
    assert len({heads for heads, _, _ in chosen}) >= min(len(chosen), len(HEADS)) * 3 // 4


@pytest.mark.parametrize(
    ("count", "step", "smallest"),
    [(5, 1, 8), (4, 2, 8), (3, 3, 8), (3, 2, MIN_BLOCK_SIZE), (2, 3, 16)],
)
def test_every_head_size_meets_every_window(count: int, step: int, smallest: int) -> None:
    chosen = list(with_windows(range(count), step, smallest))
    met = {(d, window) for _, d, _, window in chosen}
    assert met == {*itertools.product(HEAD_SIZES, range(count))}
    assert {block for _, _, block, _ in chosen} == {x for x in BLOCK_SIZES if x >= smallest}


def test_what_is_compiled_beforehand_is_what_a_step_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By plan, without a format, a change of scores or anything shared; on one GPU."""
    monkeypatch.setattr(decode, "_device", lambda _, *how: (132, decode_shapes.shapes(*how)[0]))
    plain = {"FORMAT": None, "SCORES": None, "SINKS": None, "SHARES": None}
    found = [v for v in those_with(decode.variants(), **plain) if is_of_this_gpu(v)]
    by_plan = {
        decode_shapes.attention_variant(
            dtype, d, decode_shapes.shapes(dtype, d)[0], rotates, window
        )
        for dtype, d, rotates, window in itertools.product(
            HALVES, HEAD_SIZES, (False, True), (0, 1)
        )
    }
    assert by_plan == {each for each in found if each.source == "attention/decode.cu"}
    splits = [dict(v.defines) for v in found if v.source == "attention/decode_split.cu"]
    assert {each["ELEMENT"] for each in splits} == {jit.type_name(dtype) for dtype in DTYPES}
    assert not {"FORMAT", "SCORES"} & {name for each in splits for name in each}
    assert len(found) < 120  # of some 2,000
    fp8 = those_with(decode.variants(), FORMAT=1, SCORES=2, ELEMENT="Half")
    assert {("FORMAT", "1"), ("SCORES", "2"), ("ELEMENT", "Half")} <= set(fp8[-1].defines)
