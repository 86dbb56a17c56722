"""Regions of files into a GPU's tensors, in pieces that reuse every buffer many times."""

from pathlib import Path

import pytest
import torch
from slipstream.models import reading
from slipstream.models.reading import Region, TensorReader

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("piece", [4096, 1 << 20])
def test_pieces_arrive_whole(
    wanted: torch.dtype, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", piece)
    monkeypatch.setattr(reading, "_LEAST_BYTES", piece)
    numbers = torch.randn(1_000_003)
    regions, outs, expected = [], [], []
    for i, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.float64)):
        path = tmp_path / str(i)
        path.write_bytes(b"x" * (i + 1) + numbers.to(dtype).view(torch.uint8).numpy().tobytes())
        regions.append(Region(str(dtype), path, i + 1, dtype))
        outs.append(torch.full(numbers.shape, float("nan"), dtype=wanted, device="cuda"))
        expected.append(numbers.to(dtype).to(wanted))
    reader = TensorReader(torch.device("cuda"))
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        reader.read(regions, outs)
        doubled = [out + out for out in outs]  # of the current stream, behind the copies
        for out, twice, right in zip(outs, doubled, expected, strict=True):
            assert torch.equal(out.cpu(), right)
            assert torch.equal(twice.cpu(), right + right)
    reader.close()
