"""Blocks of GGUF's types: values are those of llama.cpp's package `gguf`, to the last bit."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.models.entries import TensorEntry
from slipstream.models.gguf import blocks
from slipstream.models.gguf.restore import buffer_for, restore, rows_in_order
from slipstream.models.gguf.types import BLOCK_TYPES, QUANTISED, name_of

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def test_sizes() -> None:
    for number, kind in BLOCK_TYPES.items():
        theirs = GGMLQuantizationType(number)
        assert (kind.elements, kind.num_bytes) == GGML_QUANT_SIZES[theirs]
        assert kind.name == theirs.name == name_of(number)
    assert name_of(16) == "IQ2_XXS"
    assert name_of(999) == "number 999"


@pytest.mark.parametrize("kind", QUANTISED)
@settings(max_examples=60)
@given(data=st.data())
def test_any_bits(kind: str, data: st.DataObject) -> None:
    size = QUANTISED[kind].num_bytes
    bits = data.draw(st.binary(min_size=size, max_size=size))
    raw = np.frombuffer(bits, dtype=np.uint8).reshape(1, -1)
    theirs = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]))
    ours = torch.full_like(theirs, torch.nan)
    blocks.dequantise(torch.tensor(raw), QUANTISED[kind], ours)
    both = torch.stack((ours, theirs)).nan_to_num(1234.5)  # NaN in the same places
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("kind", QUANTISED)
def test_in_pieces_and_other_dtypes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, form = np.random.default_rng(3), QUANTISED[kind]
    raw = rng.integers(0, 64, (23, form.num_bytes), dtype=np.uint8)  # scales are finite
    whole, pieces = (torch.empty(23, form.elements, dtype=torch.bfloat16) for _ in range(2))
    blocks.dequantise(torch.from_numpy(raw), form, whole)
    monkeypatch.setattr(blocks, "_PIECE", 5 * form.elements)
    blocks.dequantise(torch.from_numpy(raw), form, pieces)
    exact = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[kind]))
    assert torch.equal(whole, exact.bfloat16())
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_rows_of_pairs(kind: str, tmp_path) -> None:
    """Rows that rotate together are neighbours in the file, and half a head apart elsewhere."""
    heads, size = 3, 8
    block = next(each for each in BLOCK_TYPES.values() if each.name == kind)
    stored = torch.arange(heads * size)  # the row number, which each row is made of
    order = [h * size + 2 * i + j for h in range(heads) for j in range(2) for i in range(size // 2)]
    entry = TensorEntry(tmp_path, kind, (heads * size, 32), 0, 0, paired_heads=heads)
    if kind == "F32":
        out = stored.float().unsqueeze(1).repeat(1, 32)
        restore(entry, out, out)
        assert out[:, 5].tolist() == order
    else:
        row = stored.to(torch.uint8).unsqueeze(1).repeat(1, block.num_bytes)
        assert rows_in_order(entry, row.flatten())[:, 7].tolist() == order


def test_what_was_added_is_taken_off_in_fp32(tmp_path) -> None:
    entry = TensorEntry(tmp_path, "F32", (1,), 0, 4, added=1.0)
    out = torch.empty(1, dtype=torch.bfloat16)
    buffer = buffer_for(entry, out)
    buffer.fill_(1.001)  # bfloat16 has no such number
    restore(entry, buffer, out)
    assert float(out) == pytest.approx(0.001, rel=2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_gpu_makes_the_same_values(kind: str) -> None:
    rng, form = np.random.default_rng(5), QUANTISED[kind]
    raw = torch.from_numpy(rng.integers(0, 64, (4099, form.num_bytes), dtype=np.uint8))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        here, there = (
            torch.empty(4099, form.elements, dtype=dtype, device=device)
            for device in ("cpu", "cuda")
        )
        blocks.dequantise(raw, form, here)
        blocks.dequantise(raw.cuda(), form, there)
        assert torch.equal(here, there.cpu())
