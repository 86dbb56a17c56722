"""Small inputs on their way to a GPU, bit for bit, repeated, and past copies that are under way."""

import pytest
import torch
from fixtures.kernels.checking import Judge, same_bits
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.staging.upload import Upload

pytestmark = pytest.mark.gpu
ROOM = 1 << 20


def test_what_was_asked_for_and_nothing_else() -> None:
    judge = Judge("upload")
    upload = Upload(torch.cuda.current_stream())
    source = torch.empty(ROOM, dtype=torch.uint8, pin_memory=True)
    for num_bytes in (0, 16, 48, 4096, 70_000, ROOM):
        for repetition in range(20):
            source.random_()
            destination = torch.full((ROOM,), 7, dtype=torch.uint8, device="cuda")
            upload(destination.data_ptr(), source.data_ptr(), num_bytes)
            want = torch.full((ROOM,), 7, dtype=torch.uint8)
            want[:num_bytes] = source[:num_bytes]
            judge.true(f"{num_bytes}, time {repetition}", same_bits(destination.cpu(), want))
    judge.verdict()


def test_copies_that_are_under_way_are_not_waited_for() -> None:
    upload = Upload(torch.cuda.current_stream())
    much = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)  # 20 ms a copy, at least
    there = torch.empty_like(much, device="cuda")
    source = torch.ones(ROOM, dtype=torch.uint8, pin_memory=True)
    destination = torch.zeros(ROOM, dtype=torch.uint8, device="cuda")
    other, copied = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(20):
            there.copy_(much, non_blocking=True)
        copied.record()
    upload(destination.data_ptr(), source.data_ptr(), ROOM)
    torch.cuda.current_stream().synchronize()
    assert not copied.query()
    assert int(destination.min()) == 1


def test_addresses_that_are_not_aligned_are_refused() -> None:
    memory = torch.zeros(64, dtype=torch.uint8, device="cuda").data_ptr()
    with pytest.raises(KernelError, match="aligned"):
        Upload(torch.cuda.current_stream())(memory, memory + 8, 16)
