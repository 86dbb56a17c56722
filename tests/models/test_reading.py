"""Regions of files into tensors: any size against the piece, alignment, dtype and failure."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.errors import CheckpointError
from slipstream.models import reading
from slipstream.models.reading import Region, TensorReader

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CPU = torch.device("cpu")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIECE_BYTES", "_LEAST_BYTES", "_ALIGNMENT"):
        monkeypatch.setattr(reading, name, 64)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    gaps=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=6, max_size=6),
    wanted=st.sampled_from(DTYPES),
    threads=st.integers(1, 4),
)
def test_pieces_at_odd_places(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    gaps: list[int],
    dtypes: list[torch.dtype],
    wanted: torch.dtype,
    threads: int,
) -> None:
    path = tmp_path_factory.mktemp("regions") / "data"
    data, regions, expected = b"", [], []
    for i, size in enumerate(sizes):
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(i)).to(dtypes[i])
        data += b"\xff" * gaps[i]
        regions.append(Region(f"t{i}", path, len(data), dtypes[i]))
        data += raw(tensor)
        expected.append(tensor.to(wanted))
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PIECE_BYTES", "_LEAST_BYTES", "_ALIGNMENT"):
            patch.setattr(reading, name, 64)
        reader = TensorReader(CPU, threads)
        outs = [torch.full((size,), float("nan"), dtype=wanted) for size in sizes]
        reader.read(regions, outs)
        reader.close()
    for out, right in zip(outs, expected, strict=True):
        assert torch.equal(out, right)


def test_parts_of_one_matrix(tmp_path: Path, small_pieces: None) -> None:
    first, second = torch.randn(7, 33), torch.randn(2, 33)
    (tmp_path / "first").write_bytes(raw(first))
    (tmp_path / "second").write_bytes(b"x" + raw(second))
    out = torch.zeros(9, 33)
    reader = TensorReader(CPU, 3)
    reader.read(
        [
            Region("a", tmp_path / "first", 0, torch.float32),
            Region("b", tmp_path / "second", 1, torch.float32),
        ],
        torch.split(out, [7, 2]),
    )
    reader.close()
    assert torch.equal(out, torch.cat((first, second)))


@pytest.mark.parametrize("size", [10, 1000])  # one piece and many
def test_a_file_that_became_shorter(size: int, tmp_path: Path, small_pieces: None) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * size - 1))
    reader = TensorReader(CPU, 2)
    with pytest.raises(
        CheckpointError, match=rf"data: truncated: tensor w ends at byte {4 * size - 1}"
    ) as caught:
        reader.read([Region("w", path, 1, torch.float32)], [torch.empty(size)])
    reader.close()
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    reader = TensorReader(CPU, 1)
    with pytest.raises(CheckpointError, match="tensor w cannot be read: Is a directory"):
        reader.read([Region("w", tmp_path, 0, torch.float32)], [torch.empty(4)])
    reader.close()
