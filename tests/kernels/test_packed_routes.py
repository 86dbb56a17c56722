"""Products of packed weights: how they are divided among CTAs, and which kernel takes which."""

import itertools
from dataclasses import replace

import pytest
import torch
from fixtures.kernels.packed_cases import Form, quantized
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.gemm import linear, packed, packing
from slipstream.kernels.gemm.op import Around, Spec, adapted_gemm, spec_of
from slipstream.kernels.gemm.packing import BLOCK, TILE, Groups, Packing
from slipstream.kernels.gemm.sm90 import packed_pipe, packed_stream, packed_terms, packed_wgmma
from slipstream.kernels.runtime.registry import KNOWN
from slipstream.quant import forms

HOPPER = KNOWN["sm_90a"]
PACKED_4 = Packing(4, 128, 4096, 4096, torch.bfloat16, False)


@given(
    st.integers(1, 32),
    st.integers(1, 4000),
    st.booleans(),
    st.sampled_from([108, 132, 148]),
    st.sampled_from([99, 163, 226]),
    st.sampled_from(list(packed.all_packings(torch.float16))),
)
def test_tiles_fit_and_cover(
    rows: int, tiles: int, gated: bool, sms: int, kib: int, made: Packing
) -> None:
    tiles += tiles % 2 if gated else 0
    made = made._replace(outputs=tiles * TILE)
    found = packed.tiling(rows, made, gated, sms, kib << 10)
    assert found is not None
    assert found.warps == packed.tiling(found.columns, made, gated, sms, kib << 10).warps  # type: ignore[union-attr]
    units = tiles // 2 if gated else tiles
    assert found.columns >= rows
    assert found.share * sms >= units > (found.share - 1) * sms  # none has two more than it needs
    assert not gated or found.tiles % 2 == 0
    assert found.slots >= 2
    assert found.bytes <= kib << 10
    wanted = packed._variant(torch.float16, made, found)
    known = {_without_slots(each) for each in packed.variants()}
    assert _without_slots(wanted) in known


def _without_slots(variant: object) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in variant.defines if pair[0] != "SLOTS")  # type: ignore[attr-defined]


@given(st.sampled_from(packed.TILES), st.integers(2, 6), st.integers(1, 9), st.integers(1, 3))
def test_no_block_of_x_is_overwritten_before_it_is_read(
    tiles: int, slots: int, blocks: int, passes: int
) -> None:
    """The walk of `Ahead` in packed.cu, beside that of the warp."""
    x_slots = (slots - 1 + tiles - 1) // tiles + 1
    walk = [(p, b, t) for p in range(passes) for b in range(blocks) for t in range(tiles)]
    holds: dict[int, tuple[int, int]] = {}
    begun: list[tuple[int, int]] = []

    def copy(at: int) -> None:
        if at < len(walk) and walk[at][2] == 0:
            holds[len(begun) % x_slots] = walk[at][:2]
            begun.append(walk[at][:2])

    for at in range(slots - 1):
        copy(at)
    num_read = 0
    for at, (p, b, t) in enumerate(walk):
        if t == 0:
            assert holds[num_read % x_slots] == (p, b)
            num_read += 1
        copy(at + slots - 1)


@given(
    st.integers(1, 128),
    st.integers(1, 2000),
    st.integers(1, 300),
    st.sampled_from([114, 132]),
    st.sampled_from(list(packed.packings(torch.float16))),
)
def test_divisions_for_wgmma(rows: int, tiles: int, blocks: int, sms: int, made: Packing) -> None:
    made = made._replace(outputs=tiles * TILE, inputs=blocks * BLOCK)
    found = packed_wgmma.tiling(rows, made, sms)
    assert found == packed_wgmma.tiling(found.columns, made, sms)  # not by the rows themselves
    assert found.columns >= rows
    assert found.shares <= blocks
    assert packed_wgmma.num_slots(made, found.columns, found.tiles) >= 3
    assert packed_wgmma.num_bytes(made, found) <= packed_wgmma.MEMORY
    wanted = packed_wgmma._variant(torch.float16, made, found.columns, found.tiles)
    assert wanted in set(packed_wgmma.variants())


@given(
    st.integers(1, 16),
    st.integers(1, 8000),
    st.integers(1, 300),
    st.booleans(),
    st.sampled_from([114, 132]),
    st.sampled_from(list(packed.all_packings(torch.float16))),
)
def test_divisions_for_streams(
    rows: int, tiles: int, blocks: int, gated: bool, sms: int, made: Packing
) -> None:
    tiles += tiles % 2 if gated else 0
    if made.record:
        rows = -(-rows // 2)
        made = made._replace(record="halves") if made.record == "wide" else made
    made = made._replace(outputs=tiles * TILE, inputs=blocks * BLOCK)
    found = packed_stream.tiling(rows, made, gated, sms)
    if found is None:
        assert rows > 8
        assert packed_stream.slot_bytes(made) > 32 << 10
        return
    units = tiles // 2 if gated else tiles
    assert found.share * sms >= units > (found.share - 1) * sms
    assert found.columns >= rows
    assert not gated or found.tiles % 2 == 0
    assert found.columns * found.tiles <= 32, "a thread finishes one output"
    assert found.slots >= 2
    pieces = -(-blocks // packed_stream.WARPS)
    assert min(pieces, 2) <= found.x_slots <= pieces
    assert packed_stream.ALONE <= found.bytes <= packed_stream.MEMORY
    wanted = packed_stream._variant(torch.float16, made, found.columns, found.tiles)
    assert wanted in STREAMS
    with_terms = packed_stream.tiling(rows, made, gated, sms, has_terms=True)
    if rows <= 8 and with_terms is not None:
        wanted = packed_stream._variant(torch.float16, made, found.columns, found.tiles, True)
        assert wanted in STREAMS
        assert with_terms.share == found.share, "sums have the same order"
        assert with_terms.bytes + packed_terms.BYTES <= packed_stream.MEMORY


STREAMS = frozenset(packed_stream.variants())


@given(st.integers(1, 300), st.sampled_from([16, 32, 64, 128, 192, 256, 4096]))
def test_groups_of_a_piece_fit_its_slot(blocks: int, group: int) -> None:
    """The scales that `copy_piece` of packed_stream.cu copies are those that its warps read."""
    inputs = blocks * BLOCK
    code_type: packing.CodeType = "e2m1" if group == 16 else "integers"
    size = packing.group_of(group, inputs, code_type)
    assert size is not None
    made = Packing(4, size, TILE, inputs, torch.float16, False, code_type)
    for first in range(0, blocks, packed_stream.WARPS):
        of_piece = range(first, min(first + packed_stream.WARPS, blocks))
        parts = [block * made.parts + part for block in of_piece for part in range(made.parts)]
        groups = [part * made.group_factor >> 31 for part in parts]
        assert groups[0] == min(groups)
        assert groups[-1] == max(groups) < made.groups
        assert groups[-1] - groups[0] < packed_stream.WARPS * made.parts


@given(
    st.integers(1, 256),
    st.integers(1, 2000),
    st.integers(1, 300),
    st.sampled_from([114, 132]),
    st.sampled_from(list(packed.all_packings(torch.float16))),
    st.booleans(),
)
def test_divisions_for_pipes(
    rows: int, tiles: int, blocks: int, sms: int, made: Packing, scaled: bool
) -> None:
    made = made._replace(outputs=tiles * TILE, inputs=blocks * BLOCK)
    is_scaled = made.scales_numbers or made.record
    scaled = scaled and not is_scaled and made.scale == torch.float16
    found = packed_pipe.tiling(rows, made, scaled, sms)
    assert found is not None
    if rows <= found.columns:  # not by the rows themselves
        assert found == packed_pipe.tiling(found.columns, made, scaled, sms)
    assert found.columns >= min(rows, 128)
    assert found.shares <= blocks
    slots = packed_pipe.num_slots(made, found.columns, found.tiles)
    assert slots >= 2
    assert packed_pipe.num_bytes(made, found) <= packed_pipe.MEMORY
    size = (found.columns, found.tiles)
    assert packed_pipe._variant(torch.float16, made, size, scaled) in PIPES


PIPES = frozenset(packed_pipe.variants())


# ---- which kernels run ----


def spec(rows: int, target: str = "sm_90a", made: Packing = PACKED_4, **around: object) -> Spec:
    x = torch.empty(rows, made.inputs, dtype=torch.bfloat16, device="meta")
    values = torch.empty(made.tiles, made.blocks * 256, dtype=torch.int32, device="meta")
    groups = Groups(made, torch.empty(made.tiles, made.groups, 16, device="meta"))
    return spec_of(x, values, Around(groups=groups, **around))._replace(target=KNOWN[target])


@pytest.mark.parametrize(
    ("target", "rows", "route"),
    [
        ("sm_90a", 1, "norm + GEMM packed_stream"),
        ("sm_90a", 9, "norm + GEMM packed_pipe"),
        ("sm_90a", 64, "norm + GEMM packed_pipe"),
        ("sm_90a", 65, "norm + GEMM pipe_scaled"),
        ("sm_90a", 256, "norm + GEMM pipe_scaled"),
        ("sm_90a", 257, "norm + GEMM unpacked"),
        ("sm_100a", 1, "norm + GEMM packed"),
        ("sm_100a", 128, "norm + GEMM packed"),
        ("sm_100a", 129, "norm + GEMM unpacked"),
    ],
)
def test_routes(target: str, rows: int, route: str) -> None:
    norm = torch.empty(PACKED_4.inputs, dtype=torch.bfloat16, device="meta")
    for more in ({}, {"gate": "silu"}, {"bias": norm}):
        chosen = linear.choose(spec(rows, target, norm=norm, **more))
        assert f"{chosen.path} {chosen.gemm.name}" == route


@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_gpus_with_less_shared_memory_take_all_rows(target: str) -> None:
    for made in (PACKED_4, PACKED_4._replace(bits=8, group=32, scale=torch.float32)):
        for rows, gate in itertools.product((1, 8, 16, 32, 128), ("", "silu")):
            chosen = linear.choose(spec(rows, target, made, gate=gate))
            assert f"{chosen.path} {chosen.gemm.name}" == "GEMM packed"


@pytest.mark.parametrize(
    ("rows", "outputs", "kernel"),
    [
        (1, 6144, "packed_stream"),
        (8, 4096, "packed_stream"),
        (1, 28_672, "packed_pipe"),
        (8, 28_672, "packed_pipe"),
        (1, 40_000, "packed_stream"),  # more CTAs of the other one than run at once
        (9, 4096, None),
    ],
)
def test_routes_of_terms_of_adapters(rows: int, outputs: int, kernel: str | None) -> None:
    wanted = spec(rows, made=PACKED_4._replace(outputs=outputs))
    found = adapted_gemm.choose(wanted, HOPPER)
    assert (None if found is None else found.implementation.name) == kernel
    long = wanted._replace(inputs=40_000, packing=PACKED_4._replace(inputs=40_000))
    assert adapted_gemm.choose(long, HOPPER) is None


@pytest.mark.parametrize(
    ("record", "rows", "kernel"),
    [
        ("shared", 8, "packed_stream"),
        ("halves", 1, "packed_stream"),
        ("wide", 1, "packed_pipe"),
        ("shared", 9, "packed_pipe"),
        ("halves", 256, "packed_pipe"),
        ("pair", 257, "unpacked"),
    ],
)
def test_routes_of_records(record: str, rows: int, kernel: str) -> None:
    bits = 4 if record in ("pair", "shared") else 8
    made = PACKED_4._replace(bits=bits, group=32, scale=torch.float16, record=record)
    norm = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    assert linear.choose(spec(rows, made=made, norm=norm, gate="silu")).gemm.name == kernel
    elsewhere = linear.choose(spec(rows, "sm_100a", made=made, norm=norm)).gemm.name
    assert elsewhere == ("packed" if rows <= 128 else "unpacked")
    taken = {each.gemm.name for each in linear.answers(spec(4, made=made)) if not each.refusal}
    streams = set() if record == "wide" else {"packed_stream"}
    assert taken == {"packed", "packed_pipe", "unpacked"} | streams
    terms = adapted_gemm.choose(spec(8, made=made), HOPPER)
    assert terms is not None
    assert terms.implementation.name == ("packed_pipe" if record == "wide" else "packed_stream")


def test_routes_of_rows_in_e4m3() -> None:
    made, norm = PACKED_4._replace(for_e4m3=True), torch.empty(4096, device="meta").bfloat16()
    for rows in (1, 16, 128, 511):  # from 512 on: test_unpacked_e4m3.py
        for gate, more in (("", ""), ("silu", ""), ("gelu", " + behind")):
            chosen = linear.choose(spec(rows, made=made, norm=norm, gate=gate))
            assert f"{chosen.path} {chosen.gemm.name}" == f"quantise + GEMM{more} pipe_e4m3"
    plus_one = linear.choose(spec(1, made=made, norm=norm, plus_one=True))
    assert str(plus_one.path) == "norm + quantise + GEMM"
    matrix = quantized(Form(group=128), 32, 256)
    meant = replace(matrix, row_type="e4m3")
    names = [
        forms.form_of(each, KNOWN[target], dtype).name  # type: ignore[union-attr]
        for each, target, dtype in (
            (meant, "sm_90a", torch.bfloat16),
            (meant, "sm_90a", torch.float16),
            (meant, "sm_100a", torch.bfloat16),
            (matrix, "sm_90a", torch.bfloat16),
        )
    ]
    assert names == ["kept packed, rows quantised by token"] + 3 * [
        "kept packed, multiplied with 16-bit rows"
    ]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_no_rows_are_taken_by_what_takes_rows(target: str) -> None:
    """The last block of a step has none where no token is sampled."""
    made = {each._replace(group=128) for each in packed.all_packings(torch.bfloat16)}
    made |= {PACKED_4._replace(for_e4m3=True)} if target == "sm_90a" else set()
    norm = torch.empty(PACKED_4.inputs, dtype=torch.bfloat16, device="meta")
    for each, gate in itertools.product(made, ("", "silu", "gelu")):
        for more in ({"norm": norm}, {}):
            assert linear.choose(spec(0, target, each, gate=gate, **more)).gemm.name


def test_gates_of_odd_sizes_follow_the_product() -> None:
    chosen = linear.choose(spec(1, made=PACKED_4._replace(outputs=4080), gate="silu"))
    assert (str(chosen.path), chosen.gemm.name) == ("GEMM + behind", "packed_stream")


def test_nobody_else_takes_packed_weights() -> None:
    taken = {answer.gemm.name for answer in linear.answers(spec(1)) if answer.refusal is None}
    streams = {"packed_stream", "packed_pipe"}
    assert taken == {"packed", "packed_wgmma", "unpacked"} | streams
    nine = {answer.gemm.name for answer in linear.answers(spec(9)) if answer.refusal is None}
    assert nine == {"packed", "packed_wgmma", "unpacked"} | streams
