"""Weights in the order of the kernels: a thread reads those of its fragment, each exactly."""

from dataclasses import replace

import pytest
import torch
from fixtures.kernels.packed_cases import FLOATS, FORMS, Form, packed_pair, quantized
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.gemm import linear, packed, packing, unpacked
from slipstream.kernels.gemm.op import Around, Spec, gemm, spec_of
from slipstream.kernels.gemm.packing import BLOCK, TILE, Groups, Packing
from slipstream.kernels.gemm.sm90 import packed_pipe, packed_stream, packed_wgmma
from slipstream.kernels.runtime.registry import CPU, KNOWN, Implementation, Target
from slipstream.quant import forms
from slipstream.quant.matrix import Kind, dequantise
from torch import Tensor

STEPS = BLOCK // 16


def numbers(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Words `[...]` as two numbers each, the first from the lower half, `[..., 2]`."""
    halves = torch.stack([pairs & 0xFFFF, pairs >> 16 & 0xFFFF], -1)
    return halves.to(torch.int32).to(torch.int16).view(dtype).float()


def decoded(words: Tensor, zero: Tensor, bits: int, dtype: torch.dtype, register: int) -> Tensor:
    """What `decode` of codes.cuh makes of a step's words `[..., bits / 4]` i64, `[..., 2]`.

    All sums are exact in the dtype, which is asserted.
    """
    is_fp16 = dtype == torch.float16

    def exact(value: Tensor) -> Tensor:
        assert torch.equal(value.to(dtype).float(), value)
        return value

    if bits == 4:
        magic = 0x64006400 if is_fp16 else 0x43004300
        value = numbers(words[..., 0] >> 4 * register & 0x000F000F | magic, dtype)
        return exact(value - ((1024 if is_fp16 else 128) + zero))
    pair = words[..., register // 2] >> 8 * (register % 2)
    if is_fp16:
        return exact(numbers(pair & 0x00FF00FF | 0x64006400, dtype) - (1024 + zero))
    value = numbers(pair & 0x007F007F | 0x43004300, dtype)
    signed = exact(value + numbers(pair & 0x00800080 ^ 0xC380C380, dtype))
    return exact(signed + (128 - zero))


def decoded_floats(words: Tensor, scale: Tensor, dtype: torch.dtype, register: int) -> Tensor:
    """The same of e2m1, with its scale; subnormal numbers count."""
    place, mask = (9, 0x0E000E00) if dtype == torch.float16 else (6, 0x01C001C0)
    shift = place - 4 * register
    digits = words[..., 0] << shift if shift >= 0 else words[..., 0] >> -shift
    pair = (words[..., 0] << (12 - 4 * register) & 0x80008000) | (digits & mask)
    value = numbers(pair, dtype) * scale
    assert torch.equal(value.to(dtype).float(), value), "the product is no number of the dtype"
    return value


def as_threads_read(values: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Put together what all lanes of all warps get, `[n, k]` fp32, with scales; nothing is read
    that no lane of the kernels reads.
    """
    made = groups.packing
    out = torch.full((made.tiles * TILE, made.blocks * BLOCK), float("nan"))
    quads = values.view(made.tiles, made.blocks, made.bits // 2, 32, 4).long() & 0xFFFFFFFF
    lane = torch.arange(32)
    g, t = lane // 4, lane % 4
    steps_a_quad, words_a_step = STEPS // (made.bits // 2), made.bits // 4
    for tile in range(made.tiles):
        for block in range(made.blocks):
            for step in range(STEPS):
                first = step % steps_a_quad * words_a_step
                words = quads[tile, block, step // steps_a_quad, :, first : first + words_a_step]
                part = step // (STEPS // made.parts)
                group = (block * made.parts + part) * made.group_factor >> 31
                for register in range(4):
                    row = g + 8 * (register % 2)
                    zero = torch.full((32, 1), float(packing.MIDDLE[made.bits]))
                    if groups.zeros is not None:
                        zero = groups.zeros[tile, group, row].float()[:, None]
                    scale = groups.scales[tile, group, row].float()
                    if made.is_float:
                        pair = decoded_floats(words, scale[:, None], dtype, register)
                        scale = torch.ones(32)
                    else:
                        pair = decoded(words, zero, made.bits, dtype, register)
                    column = block * BLOCK + step * 16 + 2 * t + 8 * (register // 2)
                    for j in (0, 1):
                        out[tile * TILE + row, column + j] = pair[:, j] * scale
    assert not out.isnan().any(), "some weight is read by no thread"
    return out[: made.outputs, : made.inputs]


def in_place(weight: Tensor, groups: Groups) -> Tensor:
    """Weights of inputs as they lie, `[n, k]`, back in the place of the inputs."""
    if groups.order is not None:
        weight = torch.empty_like(weight).index_copy_(1, groups.order, weight)
    return weight if groups.factors is None else weight * groups.factors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_threads_read_the_weights_exactly(form: Form, dtype: torch.dtype) -> None:
    matrix, weight = packed_pair(form, 21, 328)
    assert matrix.groups is not None
    read = as_threads_read(matrix.values, matrix.groups, dtype)
    assert torch.equal(read, packing.dense(matrix.values, matrix.groups))
    assert torch.equal(in_place(read, matrix.groups), weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FLOATS, ids=str)
def test_threads_read_floats_exactly(form: Form, dtype: torch.dtype) -> None:
    matrix, weight = packed_pair(form, 21, 328, dtype=dtype)
    assert matrix.groups is not None
    read = as_threads_read(matrix.values, matrix.groups, dtype)
    assert torch.equal(read, packing.dense(matrix.values, matrix.groups))
    assert torch.equal(in_place(read * matrix.scales[:, None], matrix.groups), weight)
    again = unpacked.unpacked.oracle(matrix.values, matrix.groups, dtype, matrix.scales)
    assert torch.equal(again, (read * matrix.scales[:, None]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [each for each in FORMS if each.kind is Kind.W4], ids=str)
def test_zeros_may_be_taken_from_sums(form: Form, dtype: torch.dtype) -> None:
    """What `packed_late` computes: codes with the magic number left in, less their excess."""
    matrix, _ = packed_pair(form, 21, 328)
    assert matrix.groups is not None
    made, base = matrix.groups.packing, 1024 if dtype == torch.float16 else 128
    x = torch.randn(3, made.blocks * BLOCK, generator=torch.Generator().manual_seed(3))
    x[:, made.inputs :] = 0
    x = x.to(dtype).float()
    none = matrix.groups._replace(
        packing=made._replace(inputs=made.blocks * BLOCK, outputs=made.tiles * TILE)
    )
    codes = packing.unpack(matrix.values, none.packing).float() + base
    assert torch.equal(codes.to(dtype).float(), codes)
    y = torch.zeros(3, made.tiles * TILE)
    size = BLOCK // made.parts
    for part in range(made.blocks * made.parts):
        inputs, group = slice(part * size, (part + 1) * size), part * made.group_factor >> 31
        at = x[:, inputs]
        zero = torch.full((made.tiles, TILE), float(packing.MIDDLE[4]))
        if none.zeros is not None:
            zero = none.zeros[:, group].float()
        sums = at @ codes[:, inputs].T - at.sum(1, keepdim=True) * (base + zero).flatten()
        y += sums * none.scales[:, group].float().flatten()
    weight = packing.dense(matrix.values, matrix.groups)
    truth = x[:, : made.inputs].double() @ weight.double().T
    error = (y[:, : made.outputs].double() - truth).abs().max() / truth.abs().max()
    assert error < (1e-4 if dtype == torch.float16 else 2e-5)


def test_floats_whose_scales_are_no_numbers_of_16_bits_are_dequantised() -> None:
    cuda, matrix = KNOWN["sm_90a"], quantized(FLOATS[1], 16, 64)
    found = forms.form_of(matrix, cuda, torch.float16)
    assert found is not None
    assert found.name.startswith("kept packed")
    large = replace(matrix, scales=matrix.scales * 2.0**12)
    assert forms.form_of(large, cuda, torch.float16) is None
    assert forms.form_of(large, cuda, torch.bfloat16) is not None
    between = replace(matrix, scales=matrix.scales * 1.001)
    assert forms.form_of(between, cuda, torch.bfloat16) is None
    assert forms.form_of(matrix, CPU, torch.bfloat16) is None


@given(st.sampled_from([4, 8]), st.integers(1, 50), st.integers(1, 40))
def test_packing_has_an_inverse(bits: int, outputs: int, eighths: int) -> None:
    inputs = 8 * eighths
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    values = packing.pack(codes, bits, packing.MIDDLE[bits])
    made = Packing(bits, BLOCK, outputs, inputs, torch.float16, False)
    assert values.shape == (made.tiles, made.blocks * TILE * BLOCK * bits // 32)
    assert torch.equal(packing.unpack(values, made), codes)
    full = packing.unpack(values, made._replace(outputs=made.tiles * TILE))
    assert (full[outputs:] == packing.MIDDLE[bits]).all()  # a row that is not there is of zeros


@pytest.mark.parametrize("form", [FORMS[1], FORMS[4], FORMS[5], FLOATS[0]], ids=str)
def test_the_oracle_multiplies_with_what_the_checkpoint_stands_for(form: Form) -> None:
    matrix, weight = packed_pair(form, 40, 256)
    x, bias, residual = torch.randn(3, 256), torch.randn(40), torch.randn(3, 40)
    around = Around(bias=bias, residual=residual.clone())
    scales = {"columns": matrix.scales, "groups": matrix.groups}
    y = gemm.oracle(x, matrix.values, around._replace(**scales))
    torch.testing.assert_close(y, residual + x @ weight.T + bias)
    # ... behind a norm by a kernel of its own, which must not be applied twice
    norm = torch.rand(256)
    oracle = Implementation("oracle", gemm.oracle, "cpu")
    normed = around._replace(norm=norm, eps=1e-5, residual=residual.clone())
    y = linear.follow(linear.Route(linear.Path(norms=True), oracle), x, matrix, normed)
    torch.testing.assert_close(y, residual + rms_norm(x, norm, 1e-5) @ weight.T + bias)


def test_what_has_no_packing_is_dequantised() -> None:
    cuda = KNOWN["sm_90a"]
    bf16 = torch.bfloat16

    def is_packed(form: Form, inputs: int, target: Target, dtype: torch.dtype) -> bool:
        found = forms.form_of(quantized(form, 16, inputs), target, dtype)
        return found is not None and found.name.startswith("kept packed")

    assert is_packed(Form(), 256, cuda, bf16)
    assert not is_packed(Form(), 256, cuda, torch.float32)
    assert not is_packed(Form(), 256, CPU, bf16)
    assert not is_packed(Form(group=16), 256, cuda, bf16)
    assert not is_packed(Form(group=96), 192, cuda, bf16)
    assert not is_packed(Form(group=1 << 20), 100, cuda, bf16)


def test_groups_of_rows_and_of_what_does_not_divide() -> None:
    assert packing.group_of(576, 576) == 640  # a row
    assert packing.group_of(32, 576) == 32
    assert packing.group_of(192, 576) == 192
    assert packing.group_of(128, 200) == 128  # the last is shorter
    made = Packing(4, 192, 16, 576, torch.float16, False)
    assert (made.parts, made.groups, made.blocks) == (2, 4, 5)


@given(st.integers(1, 2000), st.integers(1, 64))
def test_parts_find_their_groups(part: int, multiple: int) -> None:
    for group in (32, 64 * multiple, 128 * multiple):
        made = Packing(4, group, 16, BLOCK, torch.float16, False)
        inputs = part * (BLOCK // made.parts)
        assert part * made.group_factor >> 31 == inputs // group
        assert made.group_factor < 1 << 32


# ---- how a product is divided ----

PACKED_4 = Packing(4, 128, 4096, 4096, torch.bfloat16, False)


@given(
    st.integers(1, 32),
    st.integers(1, 4000),
    st.booleans(),
    st.sampled_from([108, 132, 148]),
    st.sampled_from([99, 163, 226]),
    st.sampled_from(list(packed.packings(torch.float16))),
)
def test_tiles_fit_and_cover(
    rows: int, tiles: int, gated: bool, sms: int, kib: int, made: Packing
) -> None:
    tiles += tiles % 2 if gated else 0
    made = made._replace(outputs=tiles * TILE)
    found = packed.tiling(rows, made, gated, sms, kib << 10)
    if found is None:
        assert kib < 226, "a Hopper takes all"
        return
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
    st.sampled_from(list(packed.packings(torch.float16))),
)
def test_divisions_for_streams(
    rows: int, tiles: int, blocks: int, gated: bool, sms: int, made: Packing
) -> None:
    tiles += tiles % 2 if gated else 0
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
    wanted = packed_stream._variant(torch.float16, made, found.columns, found.tiles, False)
    assert wanted in STREAMS


STREAMS = frozenset(packed_stream.variants())


@given(st.integers(1, 300), st.sampled_from([16, 32, 64, 128, 192, 256, 4096]), st.booleans())
def test_groups_of_a_piece_fit_its_slot(blocks: int, group: int, is_float: bool) -> None:
    """The scales that `copy_piece` of packed_stream.cu copies are those that its warps read."""
    inputs = blocks * BLOCK
    size = packing.group_of(group, inputs, is_float or group == 16)
    assert size is not None
    made = Packing(4, size, TILE, inputs, torch.float16, False, group == 16)
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
    st.sampled_from(list(packed.packings(torch.float16))),
    st.booleans(),
)
def test_divisions_for_pipes(
    rows: int, tiles: int, blocks: int, sms: int, made: Packing, scaled: bool
) -> None:
    made = made._replace(outputs=tiles * TILE, inputs=blocks * BLOCK)
    scaled = scaled and not made.is_float and made.scale == torch.float16
    found = packed_pipe.tiling(rows, made, scaled, sms)
    assert found is not None
    assert found == packed_pipe.tiling(min(rows, found.columns), made, scaled, sms)
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
        ("sm_90a", 128, "norm + GEMM packed_pipe"),
        ("sm_90a", 129, "norm + GEMM pipe_scaled"),
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


def test_gates_of_odd_sizes_follow_the_product() -> None:
    chosen = linear.choose(spec(1, made=PACKED_4._replace(outputs=4080), gate="silu"))
    assert (str(chosen.path), chosen.gemm.name) == ("GEMM + behind", "packed_stream")


def test_nobody_else_takes_packed_weights() -> None:
    taken = {answer.gemm.name for answer in linear.answers(spec(1)) if answer.refusal is None}
    streams = {"packed_stream", "stream_late", "packed_pipe"}
    assert taken == {"packed", "packed_late", "packed_wgmma", "unpacked"} | streams
    nine = {answer.gemm.name for answer in linear.answers(spec(9)) if answer.refusal is None}
    assert nine == {"packed", "packed_wgmma", "unpacked"} | streams


def test_dense_is_the_definition() -> None:
    matrix = quantized(Form(has_zeros=True), 40, 256)
    made = forms.make_packed(matrix)
    assert made.groups is not None
    assert torch.equal(packing.dense(made.values, made.groups), dequantise(matrix))
    again = unpacked.unpacked(made.values, made.groups, torch.bfloat16)
    assert torch.equal(again, dequantise(matrix).bfloat16())
    assert quantized(Form(Kind.W8), 4, 64).kind is Kind.W8
