"""GEMMs: the oracle and the CPU against fp64, how matrices are cut for a GPU, who takes what."""

import pytest
import torch
from fixtures.kernels.checking import DTYPES, Judge, short
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slipstream.kernels.gemm import cublaslt
from slipstream.kernels.gemm.linear import answers, choose, linear
from slipstream.kernels.gemm.op import E4M3, INT8, Around, Matrix, Spec, gemm, spec_of
from slipstream.kernels.gemm.sm90 import gemv, skinny, tall
from slipstream.kernels.gemm.sm90.gemv import MAX_SLOTS, PIECE, THREADS, tiling
from slipstream.kernels.gemm.sm90.tall_tiles import TallTiling
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import CPU, KNOWN, Target
from torch import Tensor

CTA_MEMORY = 227 << 10  # of an H100 or H200
MULTIPROCESSOR_MEMORY = 228 << 10
RESERVED = 1 << 10  # by the driver, of each CTA
STATIC = 8192 + 32 + 256  # what gemv.cu takes beside the ring, at least


def rows(n: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator).to(dtype)


def normed(x: Tensor, norm: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def spec(
    num_rows: int,
    outputs: int,
    width: int,
    dtype: torch.dtype,
    weight: torch.dtype | None = None,
    target: Target = KNOWN["sm_90a"],
    **around: object,
) -> Spec:
    """A product as a card sees it, aligned."""
    x = torch.empty(num_rows, width, dtype=dtype, device="meta")
    matrix = torch.empty(outputs, width, dtype=weight or dtype, device="meta")
    return spec_of(x, matrix, Around(**around))._replace(target=target)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(dtype: torch.dtype, with_bias: bool) -> None:
    judge = Judge("linear")
    x, weight, residual = rows(5, 24, dtype, 0), rows(10, 24, dtype, 1), rows(5, 10, dtype, 2)
    norm, bias = rows(1, 24, dtype, 3)[0], rows(1, 10, dtype, 4)[0] if with_bias else None

    def expected(dtype: torch.dtype) -> list[Tensor]:
        values, matrix, factors = x.to(dtype), weight.to(dtype), norm.to(dtype)
        offset = 0 if bias is None else bias.to(dtype)
        plain = values @ matrix.t() + offset
        of_norm = normed(values, factors) @ matrix.t() + offset
        return [plain, of_norm, gated(of_norm), residual.to(dtype) + plain]

    cases = {
        "plain": Around(bias=bias),
        "norm": Around(norm, 1e-6, bias=bias),
        "norm, gate": Around(norm, 1e-6, bias=bias, gate="silu"),
        "residual": Around(bias=bias, residual=residual),
    }
    exact, naive = expected(torch.float64), expected(dtype)
    for i, (name, around) in enumerate(cases.items()):
        sums = [None if around.residual is None else residual.clone() for _ in range(2)]
        outs = [
            gemm.oracle(x, weight, around._replace(residual=sums[0])),
            linear(x, Matrix(weight), around._replace(residual=sums[1])),
        ]
        for out, total in zip(outs, sums, strict=True):
            assert total is None or out is total
            judge.close(name, out, exact[i], naive[i])
    judge.verdict()


def test_weights_of_8_bits_have_a_scale_for_each_row() -> None:
    x, weight = rows(3, 32, torch.bfloat16, 0), rows(6, 32, torch.float32, 1)
    scales = weight.abs().amax(1) / 448
    small = (weight / scales[:, None]).to(E4M3)
    exact = x.double() @ (small.double() * scales[:, None].double()).t()
    judge = Judge("e4m3")
    judge.close("plain", gemm.oracle(x, small, Around(columns=scales)), exact, exact.bfloat16())
    out = gemm.oracle(x, small, Around(columns=scales, gate="silu"))
    judge.close("gated", out, gated(exact), gated(exact).bfloat16())
    judge.verdict()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 2), st.integers(1, 4000), st.sampled_from((1, 2)), st.booleans())
def test_tilings_fit(num_rows: int, pieces: int, itemsize: int, is_gated: bool) -> None:
    width = pieces * PIECE
    row_bytes = width * itemsize
    tiles = tiling(num_rows, width, row_bytes, is_gated)
    if tiles is None:
        assert width > (28672 if num_rows == 1 else 14336) or (is_gated and row_bytes > 51200)
        return
    assert tiles.rows == num_rows
    assert tiles.chunks * THREADS * PIECE >= width
    assert width > tiles.chunks // 2 * THREADS * PIECE, "pieces of the first half are inside"
    assert tiles.slot_rows % tiles.group == 0
    assert tiles.slot_rows % (2 if is_gated else 1) == 0
    assert tiles.slot_rows * tiles.rows <= THREADS, "a batch holds at least one slot"
    assert 2 <= tiles.num_slots <= MAX_SLOTS
    used = tiles.bytes(row_bytes) + STATIC
    assert tiles.num_slots * tiles.slot_rows * row_bytes <= tiles.bytes(row_bytes)
    assert used + 96 <= CTA_MEMORY
    assert (tiles.ctas + 1) * (used + RESERVED) > MULTIPROCESSOR_MEMORY


def test_a_cpu_multiplies_by_torch() -> None:
    on_cpu = spec(1, 64, 64, torch.bfloat16, target=CPU)
    assert choose(on_cpu).gemm.name == "torch"
    assert {answer.refusal for answer in answers(on_cpu)[1:]} == {
        "runs on cuda",
        "takes weights in tiles",
    }


@pytest.mark.parametrize(
    ("rows", "outputs", "dtype", "refusal"),
    [
        (1, 264, torch.bfloat16, None),
        (16, 264, torch.bfloat16, None),
        (128, 264, torch.float16, None),
        (129, 264, torch.bfloat16, "1 to 128 rows"),
        (64, 70_000, torch.bfloat16, None),
        (65, 70_000, torch.bfloat16, "in several waves"),
        (17, 263, torch.bfloat16, "multiples of 8 outputs"),
        (1, 264, E4M3, None),
        (129, 264, E4M3, "1 to 128 rows"),
        (128, 264, INT8, None),
        (17, 264, torch.float32, "fp16, bf16, e4m3 or int8"),
    ],
)
def test_what_is_skinny(rows: int, outputs: int, dtype: torch.dtype, refusal: str | None) -> None:
    why = skinny.takes(spec(rows, outputs, 512, dtype))
    assert why is None if refusal is None else refusal in str(why)


NORM = torch.empty(512, dtype=torch.bfloat16)
LAYER_NORM = {"norm": NORM, "shift": NORM, "is_centred": True}
SCALES = torch.empty(28672)


@pytest.mark.parametrize(
    ("rows", "around", "weight", "route"),
    [
        (1, {"norm": NORM}, None, "gemv"),
        (2, {"norm": NORM, "gate": "silu"}, None, "gemv"),
        (2, {"norm": NORM, "plus_one": True}, None, "norm + gemv"),
        (1, LAYER_NORM | {"gate": "every gelu, by tanh"}, None, "gemv"),
        (2, LAYER_NORM | {"gate": "every silu"}, None, "gemv + behind"),
        (2, LAYER_NORM, E4M3, "gemv"),  # the others take three kernels
        (3, LAYER_NORM | {"gate": "every relu"}, None, "norm + skinny + behind"),
        (256, LAYER_NORM | {"gate": "every relu"}, None, "norm + cublaslt + behind"),
        (3, {"norm": NORM}, None, "norm + skinny"),
        (3, {"norm": NORM, "gate": "silu"}, None, "norm + skinny"),
        (168, {"norm": NORM, "gate": "silu"}, None, "norm + cublaslt + behind"),
        (169, {"norm": NORM, "gate": "silu"}, None, "norm + skinny"),
        (256, {"norm": NORM, "gate": "silu"}, None, "norm + tall"),
        (256, {"norm": NORM}, None, "norm + cublaslt"),
        (1, {"norm": NORM}, E4M3, "gemv"),
        (2, {"norm": NORM}, E4M3, "quantise + skinny"),  # faster than gemv's
        (128, {"norm": NORM, "gate": "silu"}, E4M3, "quantise + skinny"),
        (129, {"norm": NORM}, E4M3, "quantise + cublaslt + behind"),
        (256, {"norm": NORM, "gate": "silu"}, E4M3, "quantise + tall"),
        (129, {"norm": NORM, "plus_one": True}, E4M3, "norm + quantise + cublaslt + behind"),
        (1, {"norm": NORM, "gate": "silu"}, INT8, "gemv"),
        (2, {"norm": NORM}, INT8, "quantise + skinny"),
        (129, {"norm": NORM}, INT8, "quantise + tall"),
        (129, {"norm": NORM, "gate": "silu"}, INT8, "quantise + tall"),
        (2048, {"norm": NORM, "gate": "silu"}, INT8, "quantise + tall"),  # 4 bytes an output else
        (2048, {"norm": NORM, "gate": "silu"}, E4M3, "quantise + cublaslt + behind"),
    ],
)
def test_routes_of_a_hopper(
    rows: int, around: dict[str, object], weight: torch.dtype | None, route: str
) -> None:
    around = around if weight is None else around | {"columns": SCALES}
    path, chosen = choose(spec(rows, 28672, 512, torch.bfloat16, weight, **around))
    assert str(path).replace("GEMM", chosen.name) == route


def test_another_architecture_has_what_is_not_hoppers() -> None:
    found = answers(spec(1, 264, 512, torch.bfloat16, target=KNOWN["sm_89"]))
    assert found[0].gemm.name == "cublaslt"
    why = {answer.gemm.name: answer.refusal for answer in found[1:]}
    assert why == {
        "C++": "runs on cpu",
        "gemv": "needs sm_90a",
        "skinny": "needs sm_90a",
        "tall": "needs sm_90a",
        "packed": "takes packed weights",
        "packed_stream": "needs sm_90a",
        "packed_pipe": "needs sm_90a",
        "pipe_scaled": "needs sm_90a",
        "pipe_e4m3": "needs sm_90a",
        "packed_wgmma": "needs sm_90a",
        "unpacked": "takes packed weights",
        "unpacked_e4m3": "needs sm_90a",
        "torch": "runs on cpu",
    }


def test_what_nobody_takes_is_refused_with_all_reasons() -> None:
    with pytest.raises(KernelError, match=r"GEMM: cublaslt takes rows and .*; GEMM: gemv takes"):
        choose(spec(4, 264, 512, torch.float32, torch.bfloat16))
    assert cublaslt.takes(spec(4, 264, 512, E4M3, target=KNOWN["sm_80"])) == "has no e4m3 on sm_80"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("kind", [E4M3, INT8], ids=str)
def test_rows_of_8_bits_say_what_outputs_are(kind: torch.dtype, dtype: torch.dtype) -> None:
    """e4m3 is scaled to bf16 alone: of fp16 the next kernel scales, also without a residual."""
    x, weight = (torch.empty(n, 512, dtype=kind, device="meta") for n in (16, 264))
    scales = {"rows": torch.empty(16), "columns": torch.empty(264)}
    residual = torch.empty(16, 264, dtype=dtype)
    for stages in ({"out": dtype}, {"residual": residual}):
        found = spec_of(x, weight, Around(**scales, **stages))._replace(target=KNOWN["sm_90a"])
        assert found.out == dtype
        is_behind = (kind, dtype) == (E4M3, torch.float16)
        assert choose(found).path.scales == is_behind


def test_weights_of_int8_are_multiplied_on_older_gpus_too() -> None:
    target = KNOWN["sm_80"]
    for n in (1, 16, 256):
        norm = {"norm": NORM, "columns": SCALES, "gate": "silu"}
        path, chosen = choose(spec(n, 264, 512, torch.bfloat16, INT8, target, **norm))
        assert str(path).replace("GEMM", chosen.name) == "quantise + cublaslt + behind"
    odd = spec(4, 262, 512, INT8, target=target)
    assert cublaslt.takes(odd) == "takes multiples of 4 inputs and outputs of int8"


VARIANTS = frozenset(skinny.variants())


@example(100, 6248, 56, 131)  # an odd one has no partner
@example(128, 4096, 224, 132)
@example(65, 7000, 224, 132)  # tiles of 128 rows would come in two waves
@given(
    st.integers(1, 128),
    st.integers(1, 20_000).map(lambda n: 8 * n),
    st.integers(4, 500),
    st.integers(60, 148),
)
def test_tiles_of_skinny(num_rows: int, num_weight_rows: int, chunks: int, num_sms: int) -> None:
    """They cover the matrix in full waves, fit, and depend on the groups of rows of x alone."""
    tiles = skinny.tiling(num_rows, num_weight_rows, chunks, num_sms)
    assert tiles.rows in skinny.TILE_ROWS
    assert tiles.groups == 1 + (num_rows > 64)
    waves = -(-num_weight_rows // (num_sms // tiles.cluster * skinny.TILE_ROWS[-1]))
    num_tiles = -(-num_weight_rows // tiles.rows)
    assert num_tiles * tiles.cluster <= num_sms * max(waves, 1)
    assert skinny._variant(torch.bfloat16, tiles) in VARIANTS
    assert tiles.num_slots >= 3
    assert tiles.bytes + RESERVED <= CTA_MEMORY
    own = 2 * -(-(tiles.rows // 16) // tiles.cluster)  # pieces of eight columns, at most
    part = own * 128 * tiles.groups * 16  # four sums of each thread
    ring, sent = tiles.num_slots * tiles.slot_bytes, (tiles.cluster - 1) * part
    slots = ring + 16 * tiles.num_slots + 16 + 8 * tiles.rows  # scales and biases of columns
    assert slots <= tiles.bytes
    if tiles.cluster == 4 and tiles.groups == 2:  # sums come to where the slots were
        assert part + sent <= ring
    else:  # a CTA's own do
        assert part <= ring
        assert slots + sent <= tiles.bytes
    least, most = (1, 64) if tiles.groups == 1 else (65, 128)
    for rows in (least, most):
        assert skinny.tiling(rows, num_weight_rows, chunks, num_sms) == tiles


def test_where_power_is_the_limit_tiles_are_large() -> None:
    tiles = skinny.SkinnyTiling
    assert skinny.tiling(64, 4096, 224, 132) == tiles(64, 1, 2)
    assert skinny.tiling(65, 4096, 224, 132) == tiles(144, 2, 4)  # down of Llama-3.1-8B
    assert skinny.tiling(65, 8192, 448, 132) == tiles(128, 2, 2)  # of 70B
    assert skinny.tiling(65, 4096, 64, 132) == tiles(64, 2, 2)  # too few steps


@pytest.mark.parametrize(
    ("rows", "outputs", "width", "dtype", "is_taken"),
    [
        (192, 28672, 512, torch.bfloat16, False),
        (193, 28672, 512, torch.bfloat16, True),
        (256, 28672, 512, torch.float16, True),
        (257, 28672, 512, torch.bfloat16, False),  # two tiles of rows, one of them nearly empty
        (480, 28672, 512, torch.bfloat16, True),
        (832, 28672, 512, torch.bfloat16, False),
        (960, 28672, 512, torch.float16, True),
        (4096, 28672, 512, torch.bfloat16, True),
        (4096, 28672, 512, E4M3, False),
        (384, 28672, 4096, torch.bfloat16, False),
        (4096, 32768, 512, torch.bfloat16, False),  # of 128 x 256 outputs
        (256, 28672, 520, torch.bfloat16, False),
        (256, 28680, 512, torch.bfloat16, False),
        (256, 29568, 512, torch.bfloat16, True),  # a tile of 224 for each multiprocessor
        (256, 29584, 512, torch.bfloat16, False),
        (256, 21136, 512, torch.bfloat16, True),  # of 176
        (256, 21120, 512, torch.bfloat16, False),
        (256, 28672, 512, torch.float32, False),
    ],
)
def test_what_is_tall(
    rows: int, outputs: int, width: int, dtype: torch.dtype, is_taken: bool
) -> None:
    gate = {"gate": "silu"}
    if dtype == E4M3:
        gate |= {"rows": torch.empty(rows), "columns": torch.empty(outputs)}
    product = spec(rows, outputs, width, dtype, **gate)
    assert (tall.takes(product) is None) == is_taken
    assert tall.takes(product._replace(gate="")) == "makes SiLU gates alone"
    if is_taken:
        tiles = tall.tiling(dtype, rows, outputs, 0, False, 132)
        assert tiles == TallTiling(256, tall.tile_rows(outputs, 132))
        assert tall._variant(dtype, tiles) in set(tall.variants())
        assert tiles.num_slots >= 3
        assert tiles.bytes + RESERVED <= CTA_MEMORY
        assert tiles.rows // 8 * 256 * 16 <= tiles.num_slots * tiles.slot_bytes  # half the sums


def test_gemv_scales_weights_of_8_bits_alone() -> None:
    assert gemv.takes(spec(1, 264, 512, torch.bfloat16, E4M3, columns=SCALES)) is None
    assert (
        gemv.takes(spec(1, 264, 512, torch.bfloat16, E4M3)) == "scales weights of 8 bits, by column"
    )
