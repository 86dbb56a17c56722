"""GEMMs of experts by tiles, by their CUDA sources run on a CPU, against their oracles."""

import pytest
import torch
from fixtures.kernels.emulation import emulate
from fixtures.kernels.expert_cases import Case, Sizes, make_case
from fixtures.tiers import quick_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slipstream.kernels.experts.grouped import TILE_ROWS, down, gate_up
from slipstream.kernels.experts.sm90 import piped
from slipstream.kernels.experts.spec import Gate

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
EIGHTS = st.integers(1, 36).map(lambda count: 8 * count)
SIXTEENS = st.integers(1, 18).map(lambda count: 16 * count)
# Kernels, rows of a tile, and whether weights are e4m3, which `piped` has none of.
TILES = [("tiled", rows, fp8) for fp8 in (False, True) for rows in TILE_ROWS]
TILES += [("piped", rows, False) for rows in piped.TILE_ROWS]


def check(patch: pytest.MonkeyPatch, case: Case, rows: int, is_piped: bool) -> None:
    """Compare gated values and outputs with the oracles' in fp32, within a rounding."""
    emulate(patch)
    patch.setattr(piped, "runs_on", lambda *_: is_piped)
    routed = case.routed(rows)
    bounds = {"rtol": ROUNDING[case.x.dtype], "atol": 1e-4}
    up = (case.gate_up.values, case.gate_up, routed, case.gate)
    inner = gate_up.launcher(case.x, *up)
    torch.testing.assert_close(inner.float(), gate_up.oracle(case.x.float(), *up), **bounds)
    out = (case.down.values, case.down, routed)
    found = down.launcher(inner, *out)
    torch.testing.assert_close(found.float(), down.oracle(inner.float(), *out), **bounds)


@pytest.mark.parametrize(
    "tile", quick_of(TILES, [("tiled", 16, True), ("piped", 32, False)]), ids=str
)
def test_tiles(monkeypatch: pytest.MonkeyPatch, tile: tuple[str, int, bool]) -> None:
    """Full, short and no tiles; outputs and a width that end within a box; a ring of two slots."""
    kernel, rows, fp8 = tile
    monkeypatch.setattr(piped, "num_slots", lambda *_: 2)
    sizes = Sizes(3, 2, 656 if fp8 else 336, 144)
    case = make_case(rows, sizes, torch.bfloat16, fp8, bias=rows == 16, seed=rows)
    check(monkeypatch, case, rows, kernel == "piped")


@pytest.mark.rest
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 50), st.integers(0, 2**31 - 1))
@pytest.mark.parametrize(
    ("is_piped", "fp8"), [(True, False), (False, True)], ids=["piped", "tiled, e4m3"]
)
def test_drawn_layers(
    monkeypatch: pytest.MonkeyPatch,
    is_piped: bool,
    fp8: bool,
    data: st.DataObject,
    num_rows: int,
    seed: int,
) -> None:
    rows = data.draw(st.sampled_from((piped.TILE_ROWS if is_piped else TILE_ROWS)[:2]))
    widths = SIXTEENS if fp8 else EIGHTS
    experts = data.draw(st.integers(1, 5))
    top_k = data.draw(st.integers(1, experts))
    sizes = Sizes(experts, top_k, data.draw(widths), data.draw(widths))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16]))
    gate, bias = data.draw(st.sampled_from(list(Gate))), data.draw(st.booleans())
    case = make_case(num_rows, sizes, dtype, fp8, bias, gate, seed=seed)
    check(monkeypatch, case, rows, is_piped)
