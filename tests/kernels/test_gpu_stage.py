"""The beginning of a step on a GPU against its reference, bit for bit."""

import pytest
import torch
from fixtures.kernels.checking import Judge, same_bits
from slipstream.kernels.staging.stage import start_step

pytestmark = pytest.mark.gpu


def test_begin_step() -> None:
    judge = Judge("start_step")
    generator = torch.Generator().manual_seed(1)
    for num_tokens, num_rows, width, columns in [
        (1, 1, 1, 1),
        (1, 8, 0, 5),
        (16, 3, 7, 7),
        (300, 256, 13, 4096),
        (2048, 256, 300, 400),
        (40_000, 600, 1, 9),
    ]:
        staged = torch.randint(0, 1 << 30, (100 + num_rows * width,), generator=generator)
        sources = torch.randint(-50, 50, (num_tokens,), generator=generator)
        inputs = [
            torch.tensor([37, width, num_rows]).int(),
            staged.int(),
            torch.randint(0, 128_000, (num_tokens,), generator=generator),
            sources.clamp(min=-1).int(),
            torch.randint(0, 128_000, (50,), generator=generator),
            torch.full((num_rows + 3, columns), -7, dtype=torch.int32),
        ]
        on_gpu = [tensor.cuda() for tensor in inputs]
        start_step(*on_gpu)
        start_step(*inputs)
        case = f"{num_tokens} tokens, {num_rows} rows of {width}"
        for name, ours, want in zip(("tokens", "tables"), on_gpu[2::3], inputs[2::3], strict=True):
            judge.true(f"{name} of {case}", same_bits(ours.cpu(), want))
    judge.verdict()
