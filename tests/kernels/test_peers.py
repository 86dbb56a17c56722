"""Sums over GPUs: no order of events reads stale data or waits for ever; sizes and ways agree."""

import os
import random
import re
import threading

import pytest
import torch
from fixtures.kernels.peers_model import Faults, Machine
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.kernels.comm import all_reduce
from slipstream.kernels.comm.ranks import HostRanks
from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm
from slipstream.kernels.runtime import jit
from slipstream_runtime.ranks import RankMemory

CALLS = st.lists(
    st.tuples(st.sampled_from(["one_shot", "two_shot", "exchange"]), st.integers(1, 7)),
    min_size=2,
    max_size=6,
)


@given(st.integers(2, 4), CALLS, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_no_order_of_events_reads_stale_data_or_waits_for_ever(size, calls, seed):
    Machine(size, calls, Faults()).run(random.Random(seed))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Faults(slack=1), "two_shot"),
        (Faults(empties=False), "one_shot"),
        (Faults(turns=1), "exchange"),
        (Faults(turns=1), "one_shot"),
        (Faults(releases=False), "two_shot"),
        (Faults(checks_halves=False), "one_shot"),
    ],
    ids=str,
)
def test_each_part_of_the_protocol_is_needed(fault, kind):
    """An epoch too few, one buffer, a flag before its data, half a pack: some order shows it."""

    def fails(seed: int) -> bool:
        try:
            Machine(3, [(kind, 5)] * 6, fault).run(random.Random(seed))
        except AssertionError:
            return True
        return False

    assert any(fails(seed) for seed in range(60))


def test_the_layout_is_that_of_the_kernels():
    text = (jit.FOLDER / "comm/peers.cuh").read_text()
    found = dict(re.findall(r"(\w+) = ([^;,]+)[;,]", text))
    names = {"i64": int}
    for name in ("GRID", "THREADS", "MAX_RANKS", "PACKS", "ROOM", "PACKS_AT", "ROOMS_AT"):
        names[name] = eval(found[name], {}, names)
    for name in ("GRID", "THREADS", "MAX_RANKS", "PACKS", "PACKS_AT"):
        assert names[name] == getattr(all_reduce, name)
    assert names["ROOM"] == all_reduce.ROOM_BYTES
    assert names["ROOMS_AT"] + 4 * names["ROOM"] == all_reduce.MEMORY_BYTES


@given(st.integers(2, 8), st.integers(1, 1 << 26), st.booleans())
def test_a_way_takes_what_it_is_given(size, num_bytes, has_nccl):
    way = all_reduce.way_of(num_bytes, size, has_nccl)
    if way == "one_shot":
        piece = min(num_bytes, all_reduce.ROOM_BYTES)
        assert piece <= all_reduce.PACKS // size * all_reduce.PACK_BYTES
    assert (way == "nccl") == (size > 2 and has_nccl and num_bytes > all_reduce.ROOM_BYTES)
    assert size <= all_reduce.most_of(size) <= 8


@given(st.integers(2, 4), st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_a_row_has_the_same_sum_whatever_the_rows_beside_it(size, num_rows, seed):
    """In fp32 in the order of ranks, then the residual sum, rounded once; with its norm."""
    torch.manual_seed(seed)
    x = torch.randn(size, num_rows, 48).bfloat16()
    values, weight = torch.randn(num_rows, 48).bfloat16(), torch.rand(48).bfloat16()
    wanted = x[0].float()
    for part in x[1:]:
        wanted = wanted + part.float()
    wanted = (wanted + values.float()).bfloat16()
    found = of_ranks(size, lambda ranks: sum_and_norm(ranks, values, x[ranks.rank], weight))
    first = of_ranks(size, lambda ranks: sum_and_norm(ranks, values[:1], x[ranks.rank, :1], weight))
    for residual, normed in found:
        assert torch.equal(residual, wanted)
        assert torch.equal(normed, rms_norm(residual, weight, 1e-5))
        assert all(torch.equal(one, residual[:1]) for one, _ in first)


def sum_and_norm(ranks, values, x, weight):
    residual = values.clone()
    return residual, ranks.add_sum_norm(residual, x, RmsNorm(weight, 1e-5))


def of_ranks(size, call):
    """What `call` gives on each rank of threads."""
    descriptor, found = RankMemory.create(size), {}

    def run(rank):
        found[rank] = call(HostRanks(RankMemory(descriptor, size, rank)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    os.close(descriptor)
    return [found[rank] for rank in range(size)]


@given(st.integers(2, 4), st.lists(st.binary(min_size=1, max_size=70), min_size=1, max_size=4))
@settings(max_examples=10, deadline=None)
def test_every_rank_gets_the_bytes_of_all(size, parts):
    """Handles of memory are exchanged so at start."""

    def call(ranks):
        return [ranks.exchange_bytes(part + bytes([ranks.rank])) for part in parts]

    wanted = [[part + bytes([rank]) for rank in range(size)] for part in parts]
    assert of_ranks(size, call) == [wanted] * size
