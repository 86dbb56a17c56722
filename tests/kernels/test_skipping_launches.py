"""What heads that skip blocks launch on a GPU: kernels of all models, for rows of a head each."""

import pytest
import torch
from fixtures.kernels.recording import recorded
from slipstream.kernels.attention.backend import PagedCuda
from slipstream.kernels.attention.spec import AttentionSpec
from slipstream.layers.attention import StepRows
from slipstream.layers.dims import SkipConfig
from slipstream.layers.skipping import Skipping

META = torch.device("meta")
HEADS, GROUPS, SIZE, BLOCK = 32, 8, 128, 16
SKIPS = SkipConfig(frozenset({0}), 64, 16, 8, (7, 6, 5, 4, 3, 2, 1, 0) * 4)
BLOCKING = {"torch.nonzero", "torch._local_scalar_dense", "torch.item", "torch.masked_select"}
Notes = list[tuple[str, str]]


def launches(num_decodes: int, chunk: int, cached: torch.dtype = torch.bfloat16) -> list[Notes]:
    """Names and arguments of a step's inputs, and of a layer's attention; contexts are of 8,192."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    n, count = num_decodes + chunk, num_decodes + (chunk > 0)
    every, starts = empty(n, dtype=torch.int64), empty(1 + (chunk > 0))
    rows = StepRows(every, every, empty(count, 512), starts, empty(count), num_decodes, chunk)
    width = SIZE + (cached is torch.int8)
    cache = empty(8, GROUPS, 2, BLOCK, width, dtype=cached)
    sizes = (torch.bfloat16, cached, HEADS, GROUPS, SIZE, BLOCK)
    spec = AttentionSpec("cuda", *sizes, skipped_tokens=64)
    q = empty(n, HEADS, SIZE, dtype=torch.bfloat16)
    with recorded() as notes:
        maker = Skipping(SKIPS, PagedCuda(spec), 512, META)
        notes.clear()
        inputs = maker.inputs(cache, rows, n)
        made = list(notes)
        notes.clear()
        out = inputs.attend(q, None, cache, 0.1)
    assert out.shape == q.shape
    return [made, notes]


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(("num_decodes", "chunk"), [(1, 0), (32, 0), (0, 200), (3, 200)])
def test_rows_of_heads(num_decodes: int, chunk: int, cached: torch.dtype) -> None:
    """No host waits; a layer has a kernel of decodes and one of chunks, and few copies."""
    made, notes = launches(num_decodes, chunk, cached)
    names = [name for name, _ in [*made, *notes]]
    assert BLOCKING.isdisjoint(names)
    own = [(name, text) for name, text in notes if not name.startswith("torch")]
    kernels = ["decode_attention"] * (num_decodes > 0) + ["prefill_attention"] * (chunk > 0)
    assert [name for name, _ in own] == kernels
    assert len(made) <= (101 if chunk else 25)
    assert len(notes) - len(own) <= (4 if chunk else 1)
    if chunk:  # 200 queries in at most 3 + 2 blocks, for each head
        assert f" (1, 1, {5 * HEADS}) 128 " in own[-1][1]
        assert "prefill.cu" in own[-1][1]


def test_more_rows_than_a_plan_takes_are_split() -> None:
    made, notes = launches(513, 0)
    assert "plan_decode" not in [name for name, _ in made]
    assert "decode_split" in [name for name, _ in notes]
