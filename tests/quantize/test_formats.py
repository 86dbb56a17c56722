"""What is written is what was meant: by plain unpacking, and by the reference's own reader."""

from pathlib import Path

import pytest
import torch
from fixtures.quantize import tiny
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from slipstream.kernels.gemm.packing import E2M1
from slipstream.models.weights import FileSource
from slipstream.quant.matrix import dequantise
from slipstream_quantize.formats import packed_e2m1, packed_words


@given(st.sampled_from([4, 8]), st.integers(1, 5), st.integers(1, 40), st.integers(0, 999))
def test_words(bits: int, n: int, k: int, seed: int) -> None:
    top = 2 ** (bits - 1)
    q = torch.randint(-top, top, (n, k), generator=torch.Generator().manual_seed(seed))
    words = packed_words(q, bits)
    assert words.dtype == torch.int32
    assert words.shape == (n, -(-k * bits // 32))
    for row, numbers in zip(words.tolist(), q.tolist(), strict=True):
        stream = b"".join(word.to_bytes(4, "little", signed=True) for word in row)
        whole = int.from_bytes(stream, "little")
        got = [(whole >> bits * i & 2**bits - 1) - top for i in range(k)]
        assert got == numbers


@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 999))
def test_e2m1(n: int, pairs: int, seed: int) -> None:
    codes = torch.randint(0, 16, (n, 2 * pairs), generator=torch.Generator().manual_seed(seed))
    table = torch.tensor([*E2M1, *(-x for x in E2M1)])
    packed = packed_e2m1(table[codes])
    assert torch.equal(torch.stack((packed & 15, packed >> 4), -1).flatten(1).long(), codes)


@pytest.mark.parametrize("name", tiny.FORMATS)
def test_slipstream_reads_what_was_meant(name: str, tmp_path: Path) -> None:
    output, recipe = tmp_path / "out", tiny.FORMATS[name]
    opened = tiny.quantised(tiny.small(tmp_path / "original"), recipe, output)
    source = FileSource(output, torch.device("cpu"), opened.plan.model.tensors)
    for probe in opened.probes:
        for one, meant in zip(probe.names, torch.split(probe.values, probe.sizes), strict=True):
            read = source.quantized(one, *meant.shape)
            assert read is not None
            assert torch.allclose(dequantise(read).float(), meant, rtol=1e-6, atol=1e-9)
            assert read.row_type == recipe.activations


@pytest.mark.parametrize("name", tiny.FORMATS)
def test_the_reference_reads_what_was_meant(name: str, tmp_path: Path) -> None:
    """`read.safetensors`: what compressed-tensors, or transformers, made of the same files."""
    read = load_file(tiny.READ)
    opened = tiny.quantised(tiny.small(tmp_path / "original"), tiny.FORMATS[name])
    meant = opened.source.tensors
    for part in ("self_attn.k_proj", "mlp.down_proj"):
        expected = meant[f"model.layers.0.{part}.weight"]
        got = read[f"{name}.{part}"].float()
        assert (got - expected).abs().max() <= 2**-8 * expected.abs().max()
        # To the last bit of what it computes in, and the next one where it scales in 16 bits.
        assert torch.allclose(got, expected, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("name", tiny.MIXTURES)
def test_the_reference_reads_the_experts_that_were_meant(name: str, tmp_path: Path) -> None:
    """All experts in their order, gate above up, as the reader stacks them."""
    read, (family, recipe) = load_file(tiny.READ), tiny.MIXTURES[name]
    opened = tiny.quantised(tiny.small(tmp_path / "original", family), recipe)
    probes = [probe for probe in opened.probes if ".experts." in probe.names[0]]
    for part, meant in (("gate_up_proj", probes[::2]), ("down_proj", probes[1::2])):
        got = read[f"{name}.experts.{part}"].float()
        expected = torch.stack([probe.values for probe in meant]).float()
        assert torch.allclose(got, expected, rtol=2**-7, atol=1e-30)
