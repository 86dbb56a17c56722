"""Memory that is read into is used again, and never by two at a time."""

import gc
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from slipstream.models.adapters.memory import Memory

MIB = 1 << 20
SIZES = st.sampled_from([0, 1000, MIB, 2 * MIB - 16, 3 * MIB])
ACTS = st.lists(st.tuples(st.sampled_from(["take", "take", "drop", "view"]), SIZES), min_size=4)


@given(acts=ACTS, most=st.sampled_from([0, 3 * MIB, 64 * MIB]))
def test_what_is_in_use_is_nobody_elses(acts: list[tuple[str, int]], most: int) -> None:
    """A view, of another dtype too, keeps its room; what is free is bounded."""
    memory, held = Memory(most), list[torch.Tensor]()
    for act, number in acts:
        if act == "take":
            held.append(memory.take(number))
            assert held[-1].shape == (number,)
        elif held and act == "drop":
            del held[number % 7 % len(held)]
        elif held and len(held[-1]) and held[-1].dtype == torch.uint8:
            size = len(held[-1]) // 16 * 16
            held[-1] = held[-1][:size].view(torch.bfloat16)[::2]
        assert memory.num_kept <= most
        spans = sorted((x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in held)
        rooms = [span for span in spans if span[1]]
        assert all(a + size <= b for (a, size), (b, _) in pairwise(rooms))


def test_a_room_is_used_again() -> None:
    memory = Memory(8 * MIB)
    first = memory.take(2 * MIB + 1)
    where = first.data_ptr()
    buffer = first.numpy().data
    del first
    assert memory.num_kept == 0, "its bytes are in use"
    del buffer
    gc.collect()
    assert memory.num_kept == 3 * MIB
    assert memory.take(MIB).data_ptr() != where, "more than twice what is asked for"
    assert memory.take(3 * MIB).data_ptr() == where
