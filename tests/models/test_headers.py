"""Headers of safetensors files: those that the library refuses are refused, by name; no others."""

import json
import struct
from pathlib import Path

import pytest
from fixtures.models.adapters import draw_pairs, targets_of, write_adapter
from fixtures.models.checkpoints import make_model, make_runner, save
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from slipstream.errors import CheckpointError
from slipstream.models.files import header_entries, tensor_entries
from slipstream.runner.adapters import Adapters

PIECES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([0, 0, 0, 0, 1, 4, -1])), max_size=5
)  # bytes of each tensor, and those left out before it


@given(PIECES, st.sampled_from([0, 0, 1, 9, -1]), st.permutations(range(5)))
def test_the_library_refuses_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    pieces: list[tuple[int, int]],
    tail: int,
    order: list[int],
) -> None:
    path, at = tmp_path_factory.mktemp("headers") / "model.safetensors", 0
    specs: dict[str, object] = {}
    for number, (size, gap) in enumerate(pieces):
        at = max(0, at + gap)
        specs[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    header = json.dumps({f"t{i}": specs[f"t{i}"] for i in order if f"t{i}" in specs}).encode()
    data = bytes(max(0, at + tail))
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    try:
        with safe_open(path, "numpy") as opened:
            wanted = set(opened.keys())
    except SafetensorError:
        with path.open("rb") as file, pytest.raises(CheckpointError, match=r"model\.safetensors: "):
            header_entries(file, path)
    else:
        with path.open("rb") as file:
            assert header_entries(file, path).keys() == wanted


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    model = make_model("llama", vocab_size=97, hidden_size=32, intermediate_size=48, head_dim=8)
    base = save(model, tmp_path / "base")
    adapters = make_runner(base).adapters
    assert isinstance(adapters, Adapters)
    adapter = write_adapter(tmp_path / "adapter", draw_pairs(model, targets_of(model), 3), 3)
    adapters.read(str(adapter))
    for path in (adapter / "adapter_model.safetensors", base / "model.safetensors"):
        with path.open("ab") as file:
            file.write(bytes(7))
    size = (adapter / "adapter_model.safetensors").stat().st_size
    said = rf"adapter_model.safetensors: bytes {size - 7} to {size}, its end, belong to no tensor"
    with pytest.raises(CheckpointError, match=said):
        adapters.read(str(adapter))
    with pytest.raises(CheckpointError, match=r"/model.safetensors: bytes \d+ to \d+, its end, "):
        tensor_entries(base)
