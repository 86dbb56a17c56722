"""Changed scores: the oracle beside plain definitions in fp64, in every format of the cache."""

import dataclasses
import itertools

import pytest
import torch
from fixtures.kernels.attention_cases import attend, in_format, kinds_of_scores, make_case
from slipstream.kernels.attention.decode import decode_attention
from slipstream.kernels.attention.prefill import prefill_attention
from slipstream.kernels.attention.rules import SINKING, SLOPED
from slipstream.kernels.attention.scores import Scores, passed
from slipstream.kernels.cache.kv_format import FORMATS
from slipstream.kernels.runtime.op import KernelError

CHUNKS, LENGTHS = [1, 5, 0, 30, 3], [1, 5, 8, 61, 90]
NONE = torch.empty(0, dtype=torch.int32)
KINDS = kinds_of_scores(6, "cpu")
ALL = Scores(1.5, KINDS[SLOPED].slopes, KINDS[SINKING].sinks)


@pytest.mark.parametrize("name", [None, *FORMATS])
def test_every_change_alone_and_all_together(name: str | None) -> None:
    for changed, window in itertools.product([*KINDS.values(), ALL], (0, 24)):
        case = make_case(CHUNKS, LENGTHS, (6, 2), 64, 16, torch.float32, "cpu", window=window)
        single = make_case([1] * 5, LENGTHS, (6, 2), 64, 16, torch.float32, "cpu", window=window)
        for each in (case, single):
            own = left = dataclasses.replace(each, changed=changed)
            if name is not None:
                own, left = in_format(own, FORMATS[name])
            how = {"window": window, "changed": changed}
            if each is case:
                where = (own.cache, own.block_tables, own.query_starts, own.lengths, own.scale)
                got = prefill_attention(own.q, *where, max(CHUNKS), **how)
            else:
                where = (own.cache, own.block_tables, own.lengths, NONE, own.scale)
                got = decode_attention(own.q, *where, **how)
            want = attend(left, torch.float64)
            torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


def test_a_change_makes_a_difference() -> None:
    case = make_case(CHUNKS, LENGTHS, (6, 2), 16, 8, torch.float32, device="cpu")
    found = [
        attend(dataclasses.replace(case, changed=kind), torch.float64) for kind in KINDS.values()
    ]
    found.append(attend(case, torch.float64))
    for a, b in itertools.combinations(found, 2):
        assert (a - b).abs().max() > 0.1


def test_what_a_kernel_cannot_change_is_refused() -> None:
    q = torch.zeros(2, 6, 64)
    with pytest.raises(KernelError, match="no kernel makes two changes"):
        passed("decode_attention", q, ALL)
    for wrong in (torch.zeros(5), torch.zeros(6, dtype=torch.float16), torch.zeros(12)[::2]):
        with pytest.raises(KernelError, match="no fp32 vector of heads"):
            passed("decode_attention", q, Scores(slopes=wrong))
