"""Weights in the order of the kernels: a thread reads those of its fragment, each exactly."""

import itertools
from dataclasses import replace

import pytest
import torch
from fixtures.kernels.packed_cases import BLOCKS, FLOATS, FORMS, Form, packed_pair, quantized
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.elementwise.norm import rms_norm
from slipstream.kernels.gemm import linear, packing, unpacked
from slipstream.kernels.gemm.op import Around, gemm
from slipstream.kernels.gemm.packing import BLOCK, TILE, Groups, Packing
from slipstream.kernels.runtime.registry import CPU, KNOWN, Implementation, Target
from slipstream.quant import forms
from slipstream.quant.matrix import E4M3, Kind, QuantMatrix, dequantise
from slipstream.quant.rounding import rounded8
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


def decoded_e4m3(words: Tensor, dtype: torch.dtype, register: int) -> Tensor:
    """The same of e4m3; subnormal numbers count."""
    place, digits = (1, 0x3F803F80) if dtype == torch.float16 else (4, 0x07F007F0)
    word, is_second = words[..., register // 2], register % 2 == 1
    spread = word >> place if is_second else word << (8 - place)
    pair = spread & digits | (word if is_second else word << 8) & 0x80008000
    value = numbers(pair, dtype) * 2.0 ** (8 if dtype == torch.float16 else 120)
    assert torch.equal(value.to(dtype).float(), value), "the product is no number of the dtype"
    return value


def decoded_floats(words: Tensor, scale: Tensor, dtype: torch.dtype, register: int) -> Tensor:
    """The same of e2m1, with its scale; subnormal numbers count."""
    place, mask = (9, 0x0E000E00) if dtype == torch.float16 else (6, 0x01C001C0)
    shift = place - 3 * register
    digits = words[..., 0] << shift if shift >= 0 else words[..., 0] >> -shift
    pair = (words[..., 0] << (3 - (register ^ 1)) & 0x80008000) | (digits & mask)
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
                    if made.code_type == "e2m1":
                        pair = decoded_floats(words, scale[:, None], dtype, register)
                        scale = torch.ones(32)
                    elif made.code_type == "e4m3":
                        pair = decoded_e4m3(words, dtype, register)
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


def test_threads_read_e4m3_exactly() -> None:
    """What `decode_e4m3` of codes.cuh makes of a lane's words, in place of A of m64n8k32."""
    matrix = quantized(Form(group=64), 21, 320)
    made = forms.make_packed_e4m3(matrix)
    assert made.groups is not None
    sizes = made.groups.packing
    assert torch.equal(packing.dense(made.values, made.groups), dequantise(matrix))
    below = [0xD0, 0xCE, 0xCC, 0xCA, 0xC8, 0xC4, 0xC0, 0xB8]
    above = [0x00, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E]
    table = torch.tensor(below + above, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(table, torch.arange(-8.0, 8.0))
    read = torch.full((sizes.tiles * TILE, sizes.blocks * BLOCK), float("nan"))
    words = made.values.view(sizes.tiles, sizes.blocks, 2, 32, 4).long()
    for tile, block, step, lane in itertools.product(
        range(sizes.tiles), range(sizes.blocks), range(STEPS), range(32)
    ):
        word = int(words[tile, block, step // 4, lane, step % 4]) & 0xFFFFFFFF
        for nibble in range(8):
            row = tile * TILE + lane // 4 + 8 * (nibble // 4)
            column = block * BLOCK + step * 16 + lane % 4 * 4 + nibble % 4
            read[row, column] = table[word >> 4 * nibble & 15]
    assert torch.equal(
        read[:21, :320] * matrix.scales.float().repeat_interleave(64, 1), dequantise(matrix)
    )


@pytest.mark.parametrize("has_more", [False, True], ids=["plain", "order, factors"])
def test_rows_in_e4m3_are_rounded_behind_norm_order_and_factors(has_more: bool) -> None:
    form = Form(group=64, has_order=has_more, has_factors=has_more)
    matrix = quantized(form, 40, 256)
    made, norm, x = forms.make_packed_e4m3(matrix), torch.rand(256) + 0.5, torch.randn(3, 256)
    assert made.groups is not None
    route = linear.Route(
        linear.Path(quantises=True), Implementation("oracle", _without_arrangement, "cpu")
    )
    bias, residual = torch.randn(40).bfloat16(), torch.randn(3, 40).bfloat16()
    around = Around(norm=norm.bfloat16(), eps=1e-5, bias=bias, residual=residual.clone())
    y = linear.follow(route, x.bfloat16(), made, around)
    if has_more:
        rows = rms_norm(x.bfloat16(), norm.bfloat16(), 1e-5)
        rounded = eight_bits.quantize(packing.arranged(rows, made.groups))
    else:
        rounded = eight_bits.norm_quantize(x.bfloat16(), norm.bfloat16(), 1e-5)
    values = rounded.values.float() * rounded.scales[:, None]
    weight = packing.dense(made.values, made.groups)
    expected = (residual.float() + values @ weight.T + bias.float()).bfloat16()
    torch.testing.assert_close(y.float(), expected.float(), rtol=0.01, atol=0.01)
    exact = (x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm) @ dequantise(matrix).T
    off = (y.float() - residual.float() - bias.float() - exact).norm() / exact.norm()
    assert off < 0.06  # three bits of each number of a row


def _without_arrangement(x: Tensor, weight: Tensor, around: Around) -> Tensor:
    """The oracle, as a kernel for rows of e4m3: these come as codes lie."""
    assert around.groups is not None
    plain = around.groups._replace(order=None, factors=None)
    return gemm.oracle(x, weight, around._replace(groups=plain))


@pytest.mark.parametrize("inputs", [168, 176, 177])
def test_torch_multiplies_by_whole_sixteens_of_inputs_alone(inputs: int) -> None:
    matrix = rounded8(torch.randn(8, inputs).bfloat16())
    form = forms.form_of(matrix, CPU, torch.bfloat16)
    assert (form is not None and "torch" in form.name) == (inputs % 16 == 0)


def test_floats_whose_scales_are_no_numbers_of_16_bits_are_dequantised() -> None:
    cuda, matrix = KNOWN["sm_90a"], quantized(FLOATS[1], 16, 64)
    found = forms.form_of(matrix, cuda, torch.float16)
    assert found is not None
    assert found.name.startswith("kept packed")
    small = replace(matrix, scales=matrix.scales * 2.0**-30)
    assert forms.form_of(small, cuda, torch.float16) is None
    assert forms.form_of(small, cuda, torch.bfloat16) is not None
    for power, dtypes in ((9, ()), (10, (torch.float16, torch.bfloat16))):  # 2^128 is above fp32
        large = replace(matrix, scales=torch.full_like(matrix.scales, 2.0**power))
        for dtype in (torch.float16, torch.bfloat16):
            assert (forms.form_of(large, cuda, dtype) is None) == (dtype in dtypes)
    between = replace(matrix, scales=matrix.scales * 1.001)
    assert forms.form_of(between, cuda, torch.bfloat16) is None
    assert forms.form_of(matrix, CPU, torch.bfloat16) is None


@given(st.sampled_from([4, 8]), st.integers(1, 50), st.integers(1, 40), st.booleans())
def test_packing_has_an_inverse(bits: int, outputs: int, eighths: int, for_e4m3: bool) -> None:
    inputs, for_e4m3 = 8 * eighths, for_e4m3 and bits == 4
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    values = packing.pack(codes, bits, packing.MIDDLE[bits], for_e4m3)
    made = Packing(bits, BLOCK, outputs, inputs, torch.float16, False, for_e4m3=for_e4m3)
    assert values.shape == (made.tiles, made.blocks * TILE * BLOCK * bits // 32)
    assert torch.equal(packing.unpack(values, made), codes)
    full = packing.unpack(values, made._replace(outputs=made.tiles * TILE))
    assert (full[outputs:] == packing.MIDDLE[bits]).all()  # a row that is not there is of zeros


@given(st.integers(1, 50), st.integers(1, 40))
def test_digits_and_signs_of_e2m1_lie_apart(outputs: int, eighths: int) -> None:
    codes = torch.randint(0, 16, (outputs, 8 * eighths), dtype=torch.uint8)
    values = packing.pack_e2m1(codes)
    made = Packing(4, 32, outputs, 8 * eighths, torch.bfloat16, False, "e2m1")
    assert torch.equal(packing.unpack(values, made), codes)
    nibbles, words = packing.pack(codes, 4, 0), values.long()
    for i in range(4):
        digits, sign = words >> 3 * i & 0x70007, words >> (12 + (i ^ 1)) & 0x10001
        assert torch.equal(digits | sign << 3, nibbles.long() >> 4 * i & 0xF000F)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[4], FORMS[5], BLOCKS, FLOATS[0]], ids=str)
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


def test_e4m3_stays_packed_in_groups_on_any_gpu() -> None:
    def form(
        target: str, dtype: torch.dtype, made: Form = BLOCKS, inputs: int = 256, **more: object
    ) -> str:
        matrix = replace(quantized(made, 16, inputs), **more)  # type: ignore[arg-type]
        found = forms.form_of(matrix, KNOWN[target], dtype)
        return "dequantised" if found is None else found.name

    packed, by_row = "kept packed, multiplied with 16-bit rows", Form(Kind.F8, 1 << 20)
    for target in ("sm_80", "sm_90a", "sm_100a"):
        for dtype in (torch.float16, torch.bfloat16):
            assert form(target, dtype) == packed
            assert form(target, dtype, Form(Kind.F8, 64)) == packed
    by_token = "kept packed, rows of long prompts quantised by token"
    meant = {"row_type": "e4m3"}
    assert form("sm_90a", torch.bfloat16, **meant) == by_token
    assert form("sm_90a", torch.bfloat16, Form(Kind.F8, 256), 512, **meant) == by_token
    assert form("sm_90a", torch.bfloat16, Form(Kind.F8, 64), **meant) == packed
    assert form("sm_90a", torch.bfloat16, inputs=264, **meant) == packed
    assert form("sm_90a", torch.bfloat16, inputs=32_784, **meant) == packed
    assert form("sm_90a", torch.float16, **meant) == packed
    assert form("sm_80", torch.bfloat16, **meant) == packed
    products = "e4m3 products, rows quantised by token"
    for dtype in (torch.float16, torch.bfloat16):
        assert form("sm_90a", dtype, by_row, **meant) == products
        assert form("sm_80", dtype, by_row, **meant) == packed  # which has no such products
        assert form("sm_90a", dtype, by_row) == packed  # as it asks for rows as they are
    assert form("sm_90a", torch.float32) == "dequantised"
    assert form("sm_90a", torch.bfloat16, Form(Kind.F8, 96)) == "dequantised"
    assert form("sm_90a", torch.bfloat16, Form(Kind.F8, 16)) == "dequantised"
    assert form("sm_90a", torch.bfloat16, outer=torch.ones(16)) == "dequantised"
    zeros = torch.zeros(16, 2, dtype=torch.int8)
    assert form("sm_90a", torch.bfloat16, zeros=zeros) == "dequantised"
    assert forms.form_of(quantized(BLOCKS, 16, 256), CPU, torch.bfloat16) is None
    assert str(packed_pair(BLOCKS, 16, 256)[0].groups.packing) == "e4m3 by 128, packed"  # type: ignore[union-attr]


@given(st.integers(1, 3), st.sampled_from([32, 128, 1 << 20]), st.integers(1, 40), st.data())
def test_a_nan_of_e4m3_is_its_group_s(
    rows: int, group: int, eighths: int, data: st.DataObject
) -> None:
    """The group's scale has it, so that no kernel need look for it."""
    inputs = 8 * eighths
    codes = torch.zeros(rows, inputs, dtype=torch.uint8)
    row, at = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, inputs - 1))
    codes[row, at] = data.draw(st.sampled_from([0x7F, 0xFF]))
    size = min(group, inputs)
    scales = torch.ones(rows, -(-inputs // size))
    matrix = QuantMatrix(Kind.F8, codes.view(E4M3), scales, size, inputs)
    made = forms.make_packed(matrix)
    assert made.groups is not None
    expected = torch.ones(rows, scales.shape[1])
    expected[row, at // size] = float("nan")
    found = packing.by_row(made.groups.scales, made.groups.packing)
    assert torch.equal(found.isnan(), expected.repeat_interleave(size, 1)[:, :inputs].isnan())
    product, wanted = (
        torch.ones(1, inputs) @ each.T
        for each in (packing.dense(made.values, made.groups), dequantise(matrix))
    )
    assert torch.equal(product.isnan(), wanted.isnan())


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


def test_dense_is_the_definition() -> None:
    matrix = quantized(Form(has_zeros=True), 40, 256)
    made = forms.make_packed(matrix)
    assert made.groups is not None
    assert torch.equal(packing.dense(made.values, made.groups), dequantise(matrix))
    again = unpacked.unpacked(made.values, made.groups, torch.bfloat16)
    assert torch.equal(again, dequantise(matrix).bfloat16())
    assert quantized(Form(Kind.W8), 4, 64).kind is Kind.W8
