"""Attention of sequences that stream: the references against the definition, a token at a time."""

import pytest
import torch
from fixtures.kernels.attention_cases import make_case
from fixtures.kernels.sink_cases import attend_sinks, make_sink_case
from slipstream.kernels.attention.decode import decode_attention, plan_decode
from slipstream.kernels.attention.newest import Newest
from slipstream.kernels.attention.sinks import Sinks, sink_attention
from slipstream.kernels.elementwise.rope import rope_and_cache

WINDOWS = [(24, 4), (9, 0), (40, 33), (17, 16)]
CHUNKS, LENGTHS = [1, 5, 0, 30, 3, 21], [1, 5, 8, 61, 90, 100]


@pytest.mark.parametrize(("window", "num_sinks"), WINDOWS)
def test_chunks(window: int, num_sinks: int) -> None:
    x = make_sink_case(
        CHUNKS, LENGTHS, (6, 2), 16, 8, torch.float32, window, num_sinks, device="cpu"
    )
    case = x.case
    where = (case.cache, case.block_tables, case.query_starts, case.lengths, case.scale)
    got = sink_attention(case.q, x.angles, x.positions, *where, 30, window, num_sinks)
    torch.testing.assert_close(got.double(), attend_sinks(x, torch.float64), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "num_sinks"), WINDOWS)
def test_decodes(window: int, num_sinks: int) -> None:
    """With the newest token in the cache, and as it comes from the projection."""
    lengths = [0, *LENGTHS]
    x = make_sink_case(
        [1] * 7, lengths, (6, 2), 16, 8, torch.float32, window, num_sinks, device="cpu"
    )
    case = x.case
    plan = plan_decode(case.lengths, case.cache, 6, window, num_sinks=num_sinks)
    where = (case.block_tables, case.lengths, plan, case.scale)
    sinks = Sinks(x.angles, num_sinks)
    got = decode_attention(case.q, case.cache, *where, window=window, sinks=sinks)
    want = attend_sinks(x, torch.float64)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    k, v = torch.randn((2, 7, 2, 16)).unbind()
    newest = Newest(k, v, torch.rand((7, 16)))
    got = decode_attention(case.q, case.cache, *where, newest=newest, window=window, sinks=sinks)
    slots = torch.full((7,), -1)
    for s, length in enumerate(lengths):
        if length:
            block = case.block_tables[s, (length - 1) // 8]
            slots[s] = block * 8 + (length - 1) % 8
    rope_and_cache(case.q, *newest, torch.arange(7), slots, case.cache)
    want = attend_sinks(x, torch.float64)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_nothing_of_a_table_that_nobody_sees() -> None:
    """The case itself: what is hidden is NaN, and there is such."""
    x = make_sink_case([3], [90], (2, 1), 16, 8, torch.float32, 24, 4, device="cpu")
    plain = make_case([3], [90], (2, 1), 16, 8, torch.float32, device="cpu")
    assert int((x.case.block_tables == 2**30).sum()) == 7  # of tokens 8 to 63
    changed = x.case.cache.isnan() & ~plain.cache.isnan()
    assert int(changed[:, 0, 0, :, 0].sum()) == 64  # tokens 4 to 67
