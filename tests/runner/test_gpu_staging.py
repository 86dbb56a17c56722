"""Staging on a GPU: what a step was given stays what it was given."""

import numpy as np
import pytest
import torch
from slipstream.runner.staging import Staging

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("reserved", [64, 1 << 16])  # too small, and enough for half of them
def test_an_upload_does_not_overtake_the_one_before(reserved: int) -> None:
    staging = Staging(torch.device("cuda"), reserved)
    seen = []
    for number in range(50):
        torch.cuda._sleep(2_000_000)  # about 1 ms: the stream is behind the host
        (tensor,) = staging.upload([np.full(1000 + 100 * number, number, np.int64)])
        seen.append(tensor.clone())
    for number, tensor in enumerate(seen):
        assert tensor.unique().tolist() == [number]


def test_arrays_lie_where_they_lay() -> None:
    staging = Staging(torch.device("cuda"), 1 << 12)
    first = staging.upload([np.arange(5), np.ones(3, np.float32), np.arange(8, dtype=np.int32)])
    again = staging.upload([np.arange(5), np.zeros(3, np.float32), np.arange(2, dtype=np.int32)])
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in again]
    assert first[0].data_ptr() == staging.home.data_ptr()
    assert first[1].tolist() == [0, 0, 0]
    assert staging.copy(np.zeros(1 << 15, np.uint8)) is not staging.home
    staging.sent()
    torch.cuda.synchronize()
    assert first[0].tolist() == list(range(5))
