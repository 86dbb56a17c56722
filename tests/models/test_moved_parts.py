"""Matrices that a family stores rearranged: each rank reads the rows and inputs of its part alone.

Fused q, k and v in every order, gate above up, transposed ones, heads whose pairs lie side by side
or get zeros behind: in every format, and in 16 and 32 bits.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.models.gguf_files import random_blocks
from fixtures.models.quantised import directory_of
from fixtures.models.stored import FORMATS, Draw, Made
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.layers.dims import Dims, RopeConfig
from slipstream.models.axes import EachRow, QkvOrder, TensorNames, joined
from slipstream.models.cuts import Cuts
from slipstream.models.entries import TensorEntry
from slipstream.models.families.baichuan import unit_rows
from slipstream.models.gguf.kept import KEPT
from slipstream.models.moves import places
from slipstream.models.transforms import with_changes
from slipstream.models.weights import FileSource, ShapeSource
from slipstream.quant.matrix import dequantise

HOST = torch.device("cpu")
LAYER = "model.layers.0"
PARTS = {
    "qkv": [f"self_attn.{each}_proj" for each in "qkv"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "out": ["self_attn.o_proj"],
}
PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16}
KINDS = st.sampled_from(sorted([*FORMATS, *PLAIN, *KEPT]))


class Stored:
    """A stored matrix with its sizes, and the change by which the decoder reads it."""

    def __init__(self, draw: Draw, which: str, kind: str) -> None:
        self.which, self.kind = which, kind
        self.order = draw.of(QkvOrder.BLOCKS, QkvOrder.HEADS, QkvOrder.GROUPS)
        self.groups = draw.of(4, 8)
        each = 1 if self.order is QkvOrder.HEADS else draw.of(1, 2)
        self.heads, self.size = self.groups * each, draw.of(32, 64)
        self.padded = self.size + draw.of(0, 32)
        self.hidden, self.inner = 256, draw.of(256, 512)
        is_plain = kind in PLAIN
        turned = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
        self.is_turned = is_plain and which != "gate_up" and draw.of(False, True)
        own = joined("self_attn.query_key_value") | joined("mlp.gate_up_proj", "mlp")
        names = TensorNames(
            own, qkv=self.order, joins_gate_up=True, transposed=turned if self.is_turned else ()
        )
        sizes = (self.heads, self.groups, self.size, 1e-6)
        dims = Dims(512, self.hidden, self.inner, 1, *sizes)
        is_interleaved = draw.of(False, True)
        ropes = [RopeConfig(rotated=draw.of(None, self.size // 2))]
        self.names = with_changes(names, dims, ropes, is_interleaved, self.padded)
        self.stored = self.names.stored(f"{LAYER}.{PARTS[which][0]}")
        rows = (self.heads + 2 * self.groups) * self.size
        self.shape = {
            "qkv": (rows, self.hidden),
            "gate_up": (2 * self.inner, self.hidden),
            "out": (self.hidden, self.heads * self.size),
        }[which]

    def write(self, draw: Draw, folder: Path) -> Path:
        if self.kind in KEPT:
            path = directory_of(folder, {}, {}) / "data"
            path.write_bytes(random_blocks(draw.random, self.kind, *self.shape).tobytes())
            return folder
        made: Made
        if self.kind in PLAIN:
            weight = draw.floats(*self.shape, dtype=PLAIN[self.kind])
            made = ({"weight": (weight.T if self.is_turned else weight).contiguous()}, {})
            directory_of(folder, *made, self.stored)
            (folder / "config.json").write_text("{}")
            return folder
        made = FORMATS[self.kind](draw, *self.shape, 32)
        return directory_of(folder, *made, self.stored)

    def part_shape(self, name: str, size: int) -> tuple[int, int]:
        heads = self.heads if name in ("self_attn.q_proj", "self_attn.o_proj") else self.groups
        if self.which == "gate_up":
            return self.inner // size, self.hidden
        count = heads // size * self.padded
        return (count, self.hidden) if self.which == "qkv" else (self.hidden, count)

    def read(self, folder: Path, rank: int, size: int) -> tuple[list[torch.Tensor], int]:
        """The parts of a rank, and the bytes that it has read."""
        cuts = Cuts(rank, size, self.heads, self.groups, {"inner": self.inner}, False)
        names = replace(self.names, cuts=cuts if size > 1 else None)
        source, found = FileSource(folder, HOST, names), []
        if self.kind in KEPT:
            path = folder / "data"
            entry = TensorEntry(path, self.kind, self.shape, 0, path.stat().st_size)
            source._entries[f"{self.stored}.weight"] = entry
        for each in PARTS[self.which]:
            name, shape = f"{LAYER}.{each}", self.part_shape(each, size)
            if self.kind in PLAIN:
                out = torch.empty(shape, dtype=PLAIN[self.kind])
                source.fill([f"{name}.weight"], [out])
                found.append(out.float())
                continue
            matrix = source.quantized(name, *shape)
            assert matrix is not None
            found.append(dequantise(matrix))
            if self.kind not in KEPT:
                same = ShapeSource(folder, names).quantized(name, *shape)
                assert same is not None
                assert (same.codes.shape, same.scales.shape) == (
                    matrix.codes.shape,
                    matrix.scales.shape,
                )
        return found, source._num_bytes


def check(stored: Stored, folder: Path, size: int) -> list[int]:
    """Compare the parts of all ranks with the whole; return the bytes that each has read."""
    whole, _ = stored.read(folder, 0, 1)
    ranks = [stored.read(folder, rank, size) for rank in range(size)]
    for i, expected in enumerate(whole):
        parts = [found[i] for found, _ in ranks]
        assert torch.equal(torch.cat(parts, 1 if stored.which == "out" else 0), expected)
    return [num_bytes for _, num_bytes in ranks]


@pytest.mark.rest
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(PARTS)), KINDS, st.sampled_from([2, 4]), st.integers(0, 2**20))
def test_parts_are_those_of_one_rank(which: str, kind: str, size: int, seed: int) -> None:
    draw = Draw(seed)
    stored = Stored(draw, which, kind)
    with tempfile.TemporaryDirectory() as folder:
        stored.write(draw, Path(folder))
        check(stored, Path(folder), size)


ORDERS = {
    "gate_up": ("gate_up", QkvOrder.SPLIT),
    "out": ("out", QkvOrder.SPLIT),
    "qkv, blocks": ("qkv", QkvOrder.BLOCKS),
    "qkv, heads": ("qkv", QkvOrder.HEADS),
    "qkv, groups": ("qkv", QkvOrder.GROUPS),
}


@pytest.mark.parametrize("size", quick_of([2, 4], {4}))
@pytest.mark.parametrize(
    "kind", quick_of(["F32", "gptq", "awq, gemm", "bitsandbytes, nf4", "Q4_0"], {"F32", "gptq"})
)
@pytest.mark.parametrize("name", ORDERS)
def test_a_rank_reads_its_bytes(name: str, kind: str, size: int, tmp_path: Path) -> None:
    draw, (which, order) = Draw(3), ORDERS[name]

    def of(*values: object) -> object:
        return next((each for each in values if each is order), values[0])

    draw.of = of  # type: ignore[method-assign]
    stored = Stored(draw, which, kind)
    stored.write(draw, tmp_path)
    paths = [tmp_path / "model.safetensors", tmp_path / "data"]
    weight = sum(path.stat().st_size for path in paths if path.exists())
    ranks = check(stored, tmp_path, size)
    assert len(set(ranks)) == 1
    # What all ranks have: the header, groups of inputs, tables.
    assert weight - 8192 < size * ranks[0] < weight + size * 8192


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", [name for name in ORDERS if name != "out"])
def test_a_rank_reads_its_bytes_of_a_bias(name: str, kind: str, tmp_path: Path) -> None:
    which, order = ORDERS[name]
    draw = Draw(5)
    draw.of = lambda *values: order if order in values else values[-1]  # type: ignore[method-assign]
    stored = Stored(draw, which, kind)
    assert which != "qkv" or stored.padded > stored.size
    bias = draw.floats(stored.shape[0], dtype=PLAIN[kind])
    directory_of(tmp_path, {"bias": bias}, {}, stored.stored)
    (tmp_path / "config.json").write_text("{}")
    found = {}
    for size in (1, 2, 4):
        ranks = []
        for rank in range(size):
            cuts = Cuts(rank, size, stored.heads, stored.groups, {"inner": stored.inner}, False)
            names = replace(stored.names, cuts=cuts if size > 1 else None)
            source = FileSource(tmp_path, HOST, names)
            outs = [torch.empty(stored.part_shape(part, size)[0]) for part in PARTS[which]]
            source.fill([f"{LAYER}.{part}.bias" for part in PARTS[which]], outs)
            ranks.append(outs)
            assert source._num_bytes == bias.nbytes // size
        found[size] = [torch.cat(parts) for parts in zip(*ranks, strict=True)]
    for size in (2, 4):
        for whole, parts in zip(found[1], found[size], strict=True):
            assert torch.equal(whole, parts)
            assert whole.any()


def test_a_head_whose_rows_are_changed_is_read_by_rows(tmp_path: Path) -> None:
    """As NormHead, which divides each row by its length."""
    weight = Draw(1).floats(64, 16, dtype=torch.bfloat16)
    directory_of(tmp_path, {"weight": weight}, {}, "lm_head")
    (tmp_path / "config.json").write_text("{}")
    change = EachRow(unit_rows)
    dims = Dims(64, 16, 16, 1, 4, 2, 4, 1e-6)
    names = TensorNames(changed={"lm_head.weight": change})
    names = with_changes(names, dims, [RopeConfig()], False, 4)
    found = []
    for rank in range(4):
        own = replace(names, cuts=Cuts(rank, 4, 4, 2, {"tokens": 64}, False))
        source, out = FileSource(tmp_path, HOST, own), torch.empty(16, 16)
        source.fill(["lm_head.weight"], [out])
        assert source._num_bytes == weight.nbytes // 4
        found.append(out)
    assert torch.equal(torch.cat(found), change(weight).float())


CHANGES = {
    "lengths": unit_rows,
    "a multiple": lambda x: 2 * x,
    "a sum": lambda x: x + 1,
    "signs": lambda x: -x,
    "one row": lambda x: x[:1].expand_as(x).clone().fill_(1),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("count", [1, 7])
def test_a_change_of_values_is_no_move(name: str, count: int) -> None:
    with pytest.raises(RuntimeError, match="changed"):
        places(CHANGES[name], count, 0)
    assert places(lambda x: x.flip(0), count, 0).tolist() == [*range(count)][::-1]
    assert places(lambda x: torch.cat([0 * x[:1], x]), count, 0).tolist() == [-1, *range(count)]
