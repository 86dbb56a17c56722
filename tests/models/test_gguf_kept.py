"""GGUF's types of 4 to 8 bits stay packed on a GPU: a GEMM's weights are what the file has."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.models.checkpoints import make_model, make_runner
from fixtures.models.gguf_files import SIZES, random_blocks, unpacked, write_gguf
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError
from slipstream.fuse.rewrite import places
from slipstream.kernels.cpu.native import library
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.gemm.packing import dense
from slipstream.kernels.runtime.registry import CPU, KNOWN, Target
from slipstream.layers.decoder import Decoder
from slipstream.layers.embedding import Table
from slipstream.models.decoder import build
from slipstream.models.entries import TensorEntry
from slipstream.models.gguf.kept import KEPT, kept
from slipstream.models.gguf.restore import restore
from slipstream.models.gguf.types import QUANTISED
from slipstream.models.hf import read_config
from slipstream.models.source import Weights
from slipstream.models.weights import FileSource
from slipstream.quant.matrix import dequantise
from slipstream.runner.matrices import weight_bytes, weight_parts

HOST = torch.device("cpu")
BF16 = torch.bfloat16
AS_LONG = ("Q4_0", "Q4_1", "Q8_0")  # as in the file
# Bits of a weight as a GPU keeps it.
BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 8.5,
    "Q5_1": 9,
    "Q8_0": 8.5,
    "Q3_K": 9,
    "Q4_K": 5,
    "Q5_K": 9,
    "Q6_K": 9,
    "MXFP4": 4.5,  # and a factor of each row
    "IQ4_NL": 8.5,
    "IQ4_XS": 9,
}
PACKED = "kept packed, multiplied with 16-bit rows"


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_a_matrix_is_what_its_blocks_are(kind: str, heads: int, tmp_path: Path) -> None:
    columns = 3 * QUANTISED[kind].elements
    raw = random_blocks(np.random.default_rng(heads), kind, 24, columns)
    blocks = torch.from_numpy(raw).flatten()
    entry = TensorEntry(tmp_path, kind, (24, columns), 0, blocks.numel(), paired_heads=heads)
    values = torch.empty(24, columns)
    restore(entry, blocks, values)
    matrix = kept(entry, blocks)
    assert torch.equal(dequantise(matrix), values)
    if kind in AS_LONG:
        size = matrix.num_bytes - (0 if matrix.zeros is None else matrix.zeros.numel())
        assert size == raw.nbytes


def decoder_of(directory: Path, target: Target) -> Decoder:
    """A checkpoint's model, read to this host in the form of a target."""
    model = read_config(directory)
    source = FileSource(directory, HOST, model.tensors)
    return build(model, Weights(source, HOST, BF16, target=target), max_model_len=8)


def matrices(directory: Path, target: Target) -> dict[str, Matrix]:
    """Matrices of a checkpoint's places, read to this host in the form of a target."""
    found: dict[str, Matrix] = {}
    for name, place in places(decoder_of(directory, target)):
        assert isinstance(place.linear.weights, Matrix)
        found[f"{name} {len(found)}"] = place.linear.weights
    return found


@pytest.mark.parametrize("family", quick_of(("llama", "qwen3"), {"llama"}))
@pytest.mark.parametrize("kind", quick_of(KEPT, {"Q4_0", "Q4_K", "Q6_K"}))
def test_packed_weights_are_those_of_a_cpu(
    family: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Llama's rows of q and k are in pairs in the file, Qwen's are not."""
    path = write_gguf(make_model(family, **SIZES), family, tmp_path / "model.gguf", kind)
    directory = unpacked(path, tmp_path / "checkpoint")
    with caplog.at_level(logging.INFO):
        packed = matrices(directory, KNOWN["sm_90a"])
    assert f": {PACKED} (8)" in caplog.text
    assert re.search(f"the head's weights of .*: {PACKED}", caplog.text)
    assert re.search("the embedding of .*: kept packed, rows dequantised one by one", caplog.text)
    plain = matrices(directory, CPU)
    assert packed.keys() == plain.keys()
    for name, matrix in packed.items():
        assert matrix.groups is not None, name
        weight = dense(matrix.values, matrix.groups)
        weight = weight if matrix.scales is None else weight * matrix.scales[:, None]
        assert torch.equal(weight.bfloat16(), plain[name].values), name
    config, model = EngineConfig(checkpoint=str(directory)), read_config(directory)
    bytes_on = [weight_bytes(config, model, BF16, target) for target in (CPU, KNOWN["sm_90a"])]
    count = sum(each.values.numel() for each in plain.values())
    rows = model.dims.vocab_size * model.dims.hidden_size  # that a CPU looks up in the file
    more = BITS[kind] / 8 - QUANTISED[kind].num_bytes / QUANTISED[kind].elements
    factors = [0 if each.scales is None else len(each.scales) for each in packed.values()]
    factors.append(model.dims.vocab_size if any(factors) else 0)  # of the embedding
    less = (2 - BITS[kind] / 8) * count - more * rows - 4 * sum(factors)
    assert bytes_on[0] - bytes_on[1] == less


@pytest.mark.parametrize("kind", quick_of(KEPT, {"Q8_0", "Q6_K"}))
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_those_of_a_cpu(
    kind: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A matrix that is both is there once."""
    sizes = SIZES | {"tie_word_embeddings": tied}
    path = write_gguf(make_model("llama", **sizes), "llama", tmp_path / "model.gguf", kind)
    directory = unpacked(path, tmp_path / "checkpoint")
    with caplog.at_level(logging.INFO):
        packed = decoder_of(directory, KNOWN["sm_90a"])
    assert ("embedding and head, one matrix of " in caplog.text) is tied
    plain = decoder_of(directory, CPU)
    table, ids = packed.embedding.table, torch.tensor([0, 3, 3, 200, SIZES["vocab_size"] - 1])
    assert torch.equal(table.rows(ids), plain.embedding.table.rows(ids))
    assert torch.equal(packed.head.table.rows(ids), plain.head.table.weight[ids])
    assert "weight" not in vars(table), "all of it was dequantised"
    assert torch.equal(table.weight, plain.embedding.table.weight)
    assert (table is packed.head.table) is tied
    config, model = EngineConfig(checkpoint=str(directory)), read_config(directory)
    found = weight_parts(config, model, BF16, KNOWN["sm_90a"])
    each = sum(x.nbytes for x in tensors_of(packed.head.matrix))
    assert found.has_packed_head
    assert found.embedding_bytes == (0 if tied else each)
    blocks = [place.linear.weights for name, place in places(packed) if name != "head"]
    kept = sum(x.nbytes for matrix in blocks for x in tensors_of(matrix))
    assert sum(part.num_bytes for part in found.packed) == kept + each


def tensors_of(matrix: Matrix) -> list[torch.Tensor]:
    assert matrix.groups is not None
    found = (matrix.values, matrix.scales, matrix.groups.scales, matrix.groups.zeros)
    return [each for each in found if each is not None]


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_both_ends_are_dequantised_as_they_are_looked_up(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    if tied and library() is None:
        pytest.skip("torch multiplies with all of a tied embedding")
    sizes = SIZES | {"tie_word_embeddings": tied}
    path = write_gguf(make_model("llama", **sizes), "llama", tmp_path / "model.gguf", kind)
    directory = unpacked(path, tmp_path / "checkpoint")
    model = read_config(directory)
    source = FileSource(directory, HOST, model.tensors)
    decoder = build(model, Weights(source, HOST, torch.float32), max_model_len=8)
    ids = torch.tensor([0, 3, 3, SIZES["vocab_size"] - 1])
    names = ["model.embed_tokens", "model.embed_tokens" if tied else "lm_head"]
    for name, end in zip(names, (decoder.embedding, decoder.head), strict=True):
        entry, table = source.entry(f"{name}.weight"), end.table
        assert entry is not None
        whole = torch.empty(entry.shape)
        blocks = np.frombuffer(path.read_bytes()[entry.begin : entry.end], np.uint8).copy()
        restore(entry, torch.from_numpy(blocks), whole)
        assert torch.equal(table.rows(ids), whole[ids])
        parts = torch.cat([rows for _, rows in table.parts(HOST)])
        assert torch.equal(parts, whole)
        if library() is not None:
            assert "weight" not in vars(table), "all of it was dequantised"
        assert torch.equal(Table(table._source).weight, whole)


def test_types_that_differ_within_a_gemm_are_one_of_8_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in files named Q4_K_M; each number is what it is in the file."""
    model, others = make_model("llama", **SIZES), {"v_proj": "Q6_K", "up_proj": "Q5_1"}
    others |= {"down_proj": "Q8_0"}
    path = write_gguf(model, "llama", tmp_path / "model.gguf", "Q4_K", others=others)
    directory = unpacked(path, tmp_path / "checkpoint")
    with caplog.at_level(logging.INFO):
        packed = matrices(directory, KNOWN["sm_90a"])
    assert f"weights of 8 bits by 16 inputs with minimums: {PACKED} (4)" in caplog.text
    plain = matrices(directory, CPU)
    for name, matrix in packed.items():
        if matrix.groups is not None:
            weight = dense(matrix.values, matrix.groups)
            assert torch.equal(weight.bfloat16(), plain[name].values), name
    found = [each.groups.packing.record for each in packed.values() if each.groups is not None]
    assert found == ["wide", "shared", "wide", ""] * 2 + ["shared"]  # the head


def test_the_start_says_what_is_dequantised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(make_model("llama", **SIZES), "llama", tmp_path / "model.gguf", "Q2_K")
    directory = unpacked(path, tmp_path / "checkpoint")
    with caplog.at_level(logging.INFO):
        matrices(directory, KNOWN["sm_90a"])
    assert "tensors of Q2_K: dequantised to bfloat16 as they are loaded" in caplog.text
    assert PACKED not in caplog.text


@pytest.mark.parametrize(("kind", "at"), [("Q8_0", 0), ("Q4_1", 2), ("Q4_K", 2), ("Q6_K", 208)])
def test_scales_that_are_no_numbers_are_refused(kind: str, at: int, tmp_path: Path) -> None:
    """Nor minimums, nor units of either."""
    path = write_gguf(make_model("llama", **SIZES), "llama", tmp_path / "model.gguf", kind)
    directory = unpacked(path, tmp_path / "checkpoint")
    source = FileSource(directory, HOST, read_config(directory).tensors)
    entry = source.entry("model.layers.1.mlp.down_proj.weight")
    assert entry is not None
    with path.open("r+b") as file:
        file.seek(entry.begin + at)
        file.write(np.array([np.inf], dtype=np.float16).tobytes())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN, inf"):
        make_runner(directory)
