"""Staging on a GPU: what a step was given stays what it was given."""

import numpy as np
import pytest
import torch
from slipstream.engine.staging import Staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]


def test_an_upload_does_not_overtake_the_one_before() -> None:
    staging = Staging(torch.device("cuda"), 64)  # grows on the way, too
    seen = []
    for number in range(50):
        torch.cuda._sleep(2_000_000)  # about 1 ms: the stream is behind the host
        (tensor,) = staging.upload([np.full(1000 + 100 * number, number, np.int64)])
        seen.append(tensor.clone())
    for number, tensor in enumerate(seen):
        assert tensor.unique().tolist() == [number]
