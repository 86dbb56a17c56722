"""Tall GEMMs of int8 by tiles of any size, in clusters, too: their CUDA source, emulated, against
the oracle.
"""

import pytest
import torch
from fixtures.kernels.emulation import emulate, on_ctas
from fixtures.tiers import quick_of
from slipstream.kernels.gemm.linear import choose
from slipstream.kernels.gemm.op import Around, Spec, gemm
from slipstream.kernels.gemm.sm90 import tall as module
from slipstream.kernels.gemm.sm90.tall import tall
from slipstream.kernels.gemm.sm90.tall_tiles import CLUSTERS, TallTiling, fastest, tilings
from slipstream.kernels.runtime.registry import Target

INT8 = torch.int8
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
    monkeypatch.setattr(module, "tiles_int8", True)
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
        assert module._variant(INT8, tiles, is_ungated) in variants
        assert (tiles.cluster in CLUSTERS) == is_ungated


def test_clusters_fill_the_multiprocessors() -> None:
    """Of an 8B, from 129 rows on: 85 % of them and more, in full waves."""
    for rows in (129, 192, 256, 384, 512, 832, 1024, 2048):
        for inputs, outputs in ((4096, 6144), (4096, 4096), (14336, 4096)):
            tiles = fastest(rows, outputs, inputs // 128, True, 132)
            ctas = tiles.num_tiles(rows, outputs) * tiles.cluster
            assert ctas / (-(-ctas // 132) * 132) > 0.85, (rows, outputs, tiles)
    assert fastest(256, 4096, 112, True, 132).cluster == 4
    assert fastest(2048, 4096, 112, True, 132).cluster == 1


@pytest.mark.parametrize("gate", ["", "silu"])
def test_they_are_taken_where_that_is_on(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 129 rows on, of int8 alone."""
    target = Target("cuda", "sm_90a", 132)

    def chosen(rows: int, dtype: torch.dtype = INT8) -> str:
        spec = Spec(
            *(rows, 4096, 6144, dtype, dtype, torch.bfloat16),
            *("", "both", False, gate, False, True, True, True, True, target),
        )
        return choose(spec).gemm.name

    counts = (128, 129, 256, 512)
    assert [chosen(rows) for rows in counts] == ["skinny", *["cublaslt"] * 3]
    monkeypatch.setattr(module, "tiles_int8", True)
    assert [chosen(rows) for rows in counts] == ["skinny", *["tall"] * 3]
    assert chosen(256, torch.float8_e4m3fn) == "cublaslt"
