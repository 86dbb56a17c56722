"""Tall GEMMs of int8 by tiles of any size, in clusters, too: their CUDA source, emulated, against
the oracle.
"""

import pytest
import torch
from fixtures.kernels.emulation import emulate, on_ctas
from fixtures.tiers import quick_of
from hypothesis import example, given
from hypothesis import strategies as st
from slipstream.kernels.gemm.linear import choose
from slipstream.kernels.gemm.op import Around, Spec, gemm
from slipstream.kernels.gemm.sm90 import tall as module
from slipstream.kernels.gemm.sm90.tall import tall
from slipstream.kernels.gemm.sm90.tall_tiles import CLUSTERS, TallTiling, fastest, tilings
from slipstream.kernels.runtime.registry import Target

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
# Rows of x; outputs, of which the last tile has some; inputs, 384 of which leave one of four CTAs
# without any; tiles.
CASES = {
    "two CTAs": (131, 104, 384, TallTiling(192, 96, 2)),
    "four CTAs": (190, 136, 384, TallTiling(192, 112, 4)),
    "four CTAs, two blocks": (200, 144, 512, TallTiling(256, 144, 4)),
    "alone": (260, 104, 128, TallTiling(192, 96, 1)),
    "alone, two blocks": (270, 120, 256, TallTiling(256, 96, 1)),
}


def drawn(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, Around]:
    """Rows, weights, and scales with a bias."""
    rng = torch.Generator().manual_seed(1)

    def codes(*sizes: int) -> torch.Tensor:
        return torch.randint(-127, 128, sizes, generator=rng, dtype=INT8)

    scales = [torch.rand(size, generator=rng) * 0.01 for size in (rows, outputs)]
    bias = torch.randn(outputs, generator=rng).bfloat16()
    return (
        codes(rows, inputs),
        codes(outputs, inputs),
        Around(rows=scales[0], columns=scales[1], bias=bias),
    )


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    emulate(monkeypatch)
    return monkeypatch


@pytest.mark.parametrize("name", quick_of(CASES, {"two CTAs"}))
def test_products(name: str, emulated: pytest.MonkeyPatch) -> None:
    """Added to a residual: the oracle's bits."""
    rows, outputs, inputs, tiles = CASES[name]
    emulated.setattr(module, "fastest", lambda *_: tiles)
    x, weight, around = drawn(rows, outputs, inputs)
    found = torch.randn(rows, outputs, generator=torch.Generator().manual_seed(2)).bfloat16()
    wanted = gemm.oracle(x, weight, around._replace(residual=found.clone()))
    on_ctas(
        tiles.num_tiles(rows, outputs) * tiles.cluster,
        lambda: tall(x, weight, around._replace(residual=found)),
    )
    assert torch.equal(found, wanted)


def test_gates(emulated: pytest.MonkeyPatch) -> None:
    """By three groups of rows; each in fp16."""
    emulated.setattr(module, "fastest", lambda *_: TallTiling(192, 96))
    x, weight, around = drawn(201, 112, 128)
    around = around._replace(bias=None, gate="silu", out=torch.float16)
    found = tall(x, weight, around)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, gemm.oracle(x, weight, around), atol=1e-3, rtol=2e-3)


@pytest.mark.parametrize("is_ungated", [False, True])
def test_tilings_have_room_and_are_compiled(is_ungated: bool) -> None:
    """Ring, barriers, columns and sums fit, as the kernel lays them out."""
    variants = set(module.variants())
    for tiles in tilings(is_ungated):
        slots, ctas = tiles.num_slots, max(1, tiles.cluster)
        columns = slots * tiles.slot_bytes + 8 * (slots + slots % 2)
        sent = columns + 2 * 4 * tiles.rows
        assert sent + (16 if ctas > 1 else 0) <= tiles.bytes <= 226 << 10
        kept = tiles.x_rows if ctas > 1 else 64 * tiles.groups
        assert ctas * -(-tiles.rows // 8 // ctas) * 8 * kept * 4 <= slots * tiles.slot_bytes
        assert module._variant(INT8, tiles) in variants
        assert (tiles.cluster in CLUSTERS) == is_ungated


def test_clusters_fill_the_multiprocessors() -> None:
    """GEMMs of an 8B from 129 rows on fill 85 % of them and more, in full waves."""
    for rows in (129, 192, 256, 384, 512, 832, 1024, 2048):
        for inputs, outputs in ((4096, 6144), (4096, 4096), (14336, 4096)):
            tiles = fastest(rows, outputs, inputs // 128, True, 132)
            ctas = tiles.num_tiles(rows, outputs) * tiles.cluster
            assert ctas / (-(-ctas // 132) * 132) > 0.85, (rows, outputs, tiles)
    assert fastest(256, 4096, 112, True, 132).cluster == 4
    assert fastest(2048, 4096, 112, True, 132).cluster == 1


LAUNCHABLE = frozenset(module.variants())


@given(
    rows=st.integers(129, 16384),
    outputs=st.integers(1, 8192).map(lambda count: 16 * count),
    chunks=st.integers(1, 256),
    gate=st.sampled_from(["", "silu"]),
    target=st.sampled_from([Target("cuda", "sm_90a", count) for count in (132, 114, 78, 16)]),
)
@example(rows=129, outputs=16, chunks=1, gate="", target=Target("cuda", "sm_90a", 132))
def test_every_product_of_129_rows_and_more_has_tiles(
    rows: int, outputs: int, chunks: int, gate: str, target: Target
) -> None:
    """The tall GEMM is chosen for int8, by tiles that are compiled, in clusters where there is no
    gate; on a part of a GPU, too.
    """
    made = product(rows, outputs, 128 * chunks, gate, target)
    assert choose(made).gemm.name == "tall"
    is_ungated, count = not gate, target.multiprocessors
    tiles = module.tiling(INT8, rows, outputs, chunks, is_ungated, count)
    assert module._variant(INT8, tiles) in LAUNCHABLE
    assert (tiles.cluster > 0) == is_ungated


def product(rows: int, outputs: int, inputs: int, gate: str, target: Target) -> Spec:
    """Return a product of int8 with its scales."""
    return Spec(
        *(rows, inputs, outputs, INT8, INT8, torch.bfloat16),
        *("", "both", False, gate, False, True, True, True, True, target),
    )


@pytest.mark.parametrize("rows", [129, 256, 512])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 576), (1536, 576), (576, 3072)])
def test_small_matrices_wait_for_no_second_wave(rows: int, inputs: int, outputs: int) -> None:
    """Each multiprocessor has a tile at most; the model says as much as launches alone take."""
    for is_ungated in (True, False):
        tiles = fastest(rows, outputs, -(-inputs // 128), is_ungated, 132)
        assert tiles.num_tiles(rows, outputs) * max(1, tiles.cluster) <= 132
        assert tiles.clocks(rows, outputs, -(-inputs // 128), 132) < 17_000  # 10 us


def test_they_are_of_int8_with_scales() -> None:
    """From 129 rows on; of multiples of 128 inputs, and with a gate of 16 outputs."""
    target = Target("cuda", "sm_90a", 132)
    made = product(256, 4096, 4096, "", target)
    assert module.takes(made) is None
    assert module.takes(made._replace(residual=True)) is None
    assert module.takes(made._replace(out=torch.float16)) is None
    assert module.takes(made._replace(scales="")) == "makes SiLU gates alone"
    assert "below 129 rows" in str(module.takes(made._replace(rows=128)))
    assert "multiples of 128 bytes" in str(module.takes(made._replace(inputs=4032)))
    assert module.takes(made._replace(outputs=4104)) is None
    assert "of 16 outputs" in str(module.takes(made._replace(outputs=4104, gate="silu")))
    assert choose(made._replace(rows=128)).gemm.name == "skinny"
    assert choose(made._replace(x=E4M3, weight=E4M3)).gemm.name == "cublaslt"
