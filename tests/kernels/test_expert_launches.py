"""The kernels that a layer of experts launches on a GPU, in order, by rows."""

import pytest
import torch
from fixtures.kernels import recording
from fixtures.kernels.recording import recorded
from slipstream.kernels.experts import grouped, packed, table
from slipstream.kernels.experts.grouped import ExpertMatrix, expert_matrix, tile_rows
from slipstream.kernels.experts.route import Routed, most_tiles
from slipstream.kernels.experts.spec import Routing, Score
from slipstream.kernels.experts.table import ExpertProduct
from slipstream.kernels.gemm.op import Matrix
from slipstream.kernels.gemm.packing import Packing
from slipstream.kernels.lora.terms import Table
from slipstream.kernels.runtime.registry import KNOWN, Target
from slipstream.layers import experts
from slipstream.layers.adapted import Group, StepGroups, Term
from slipstream.layers.adapted_experts import ExpertTerms
from slipstream.layers.dims import ExpertsConfig
from slipstream.layers.experts import Experts
from slipstream.layers.norm import LayerNorm, Norm, RowNorm
from slipstream.layers.residual import Residual
from slipstream.models.fileless import RandomSource, SizeSource
from slipstream.models.source import Weights
from slipstream.quant.forms import form_of_experts
from slipstream.quant.matrix import Kind, QuantMatrix, RowType
from torch import Tensor

META, CPU = torch.device("meta"), torch.device("cpu")
HIDDEN, CONFIG = 2048, ExpertsConfig(Routing(128, 8, normalises=True), 768)
ROUTES = {1: ["route_rows"], 16: ["route_once"], 17: ["choose", "place"]}


class _NoPairs(ExpertTerms):
    """Terms of experts that nobody has chosen: choices have no numbers here."""

    def _add_groups(self, x: Tensor, routed: Routed, products: Tensor) -> None:
        """Change nothing."""


def launches(
    num_rows: int,
    scheme: str,
    deterministic: bool = False,
    config: ExpertsConfig = CONFIG,
    hidden: int = HIDDEN,
    groups: StepGroups | None = None,
    norm: RowNorm | None = None,
) -> list[tuple[str, str]]:
    """Names and arguments of a layer, by default of Qwen3-30B-A3B's shape."""
    with recorded() as notes:
        w = Weights(SizeSource(), META, torch.bfloat16, scheme, deterministic)
        layer = Experts(w.at("mlp"), config, hidden)
        norm = norm or Norm(w.at("norm"), hidden, 1e-6)
        if groups is not None:
            layer.adapt = _NoPairs(layer, "mlp", groups, "tokens")
        notes.clear()
        layer(norm, Residual(torch.empty(num_rows, hidden, dtype=torch.bfloat16, device=META)))
    return notes


@pytest.mark.parametrize("scheme", ["none", "fp8"])
@pytest.mark.parametrize("num_rows", [16, 17, 128, 2048])
def test_six_or_seven_kernels_of_fixed_shapes(num_rows: int, scheme: str) -> None:
    notes = launches(num_rows, scheme)
    names = [name for name, _ in notes]
    rows = tile_rows(8 * num_rows, 128, scheme == "fp8")
    kernel = "skinny" if rows == 8 else "tiled"
    route = ROUTES.get(num_rows, ROUTES[17])
    assert names[0] == "rms_norm"
    assert names[2:] == [*route, kernel, kernel, "combine"]
    tiles = most_tiles(8 * num_rows, 128, rows)
    up, down = (arguments for _, arguments in notes[-3:-1])
    outputs = (8, 16) if rows == 8 else (64, 128)
    assert f" ({768 // outputs[0]}, {tiles}) " in up
    assert f" ({2048 // outputs[1]}, {tiles}) " in down
    assert all(f"FP8={int(scheme == 'fp8')}" in each for each in (up, down))


def test_hopper_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CTA has 256 weight rows of a tile; deterministic mode keeps the other kernel."""
    for module in (grouped, experts):
        monkeypatch.setattr(module, "target_of", lambda _: KNOWN["sm_90a"])
    for num_rows, rows in ((200, 32), (512, 48), (700, 64), (2048, 128)):
        up, down = (each for each in launches(num_rows, "none")[-3:-1])
        assert (up[0], down[0]) == ("piped", "piped")
        tiles = most_tiles(8 * num_rows, 128, rows)
        assert f"ROWS={rows}" in up[1]
        assert f" ({768 // 128}, {tiles}) 384" in up[1]
        assert f" ({2048 // 256}, {tiles}) 384" in down[1]
    assert [name for name, _ in launches(64, "none")].count("tiled") == 2
    names = [name for name, _ in launches(512, "none", deterministic=True)]
    assert names.count("tiled") == 2


def test_rows_beside_e4m3_are_rounded_on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """In front of either GEMM, each by a CTA a multiprocessor; 16 bits have none."""
    for module in (grouped, experts):
        monkeypatch.setattr(module, "target_of", lambda _: KNOWN["sm_90a"])
    for num_rows, rows in ((32, 16), (128, 32), (512, 64)):
        made = launches(num_rows, "fp8")
        names = [name for name, _ in made]
        assert names[-5:] == ["gather_quantize", "streamed", "quantize", "streamed", "combine"]
        assert all(f"ROWS={rows}" in text for name, text in made if name == "streamed")
        assert "streamed" not in [name for name, _ in launches(num_rows, "none")]
    assert "streamed" not in [name for name, _ in launches(512, "fp8", deterministic=True)]
    w = Weights(SizeSource(), META, torch.bfloat16, "fp8")
    how = torch.bfloat16, True, 32, KNOWN["sm_90a"], False
    matrix = Experts(w.at("mlp"), CONFIG, HIDDEN).gate_up
    (taken, _), *others = table.answers(ExpertProduct(128, 8, matrix, *how))
    assert taken == "streamed"
    assert dict(others)["piped"] == dict(others)["tiled"] == "streamed takes tiles of all sizes"


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("scheme", ["none", "fp8"])
def test_the_table_says_what_is_launched(
    architecture: str, deterministic: bool, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, top_k = KNOWN[architecture], CONFIG.routing.top_k
    for module in (grouped, experts):
        monkeypatch.setattr(module, "target_of", lambda _: target)
    w = Weights(SizeSource(), META, torch.bfloat16, scheme, deterministic)
    layer = Experts(w.at("mlp"), CONFIG, HIDDEN)
    counts = (128, 256, 512, 2048) if deterministic else (1, 8, 9, 16, 64, 200, 512, 700, 2048)
    for num_rows in counts:
        tile = layer.tile_rows(num_rows, target, deterministic)
        said, known = [], set()
        for matrix, is_gated in ((layer.gate_up, True), (layer.down, False)):
            how = torch.bfloat16, is_gated, tile, target, deterministic
            (name, refusal), *others = table.answers(ExpertProduct(num_rows, top_k, matrix, *how))
            assert refusal is None
            assert all(reason for _, reason in others)
            said.append(name)
            known |= {name, *(other for other, _ in others)}
        done = [name for name, _ in launches(num_rows, scheme, deterministic)]
        assert [name for name in done if name in known][-2:] == said


def kept_matrix(
    kind: Kind, group: int, count: int, outputs: int, inputs: int, row_type: RowType = ""
) -> ExpertMatrix:
    """Weights of all experts as a GPU keeps them, without numbers."""
    rows, columns = count * outputs, inputs if kind in (Kind.W8, Kind.F8) else inputs // 2
    dtype = torch.float8_e4m3fn if kind is Kind.F8 else torch.uint8
    codes = torch.empty(rows, columns, dtype=dtype, device=META)
    scales = torch.empty(rows, -(-inputs // group), dtype=torch.bfloat16, device=META)
    matrix = QuantMatrix(kind, codes, scales, group, inputs, row_type=row_type)
    form = form_of_experts(matrix, count, Target("cuda", "sm_90a"), torch.bfloat16)
    assert form is not None
    made = form.make(matrix)
    assert isinstance(made, Matrix)
    return expert_matrix(made, count, None)


def of_packed(num_rows: int, kinds: tuple[Kind | None, Kind | None]) -> list[tuple[str, str]]:
    """Launches of a layer whose first and last weights are packed by 32 or, of None, are not."""
    count, inner = CONFIG.routing.num_experts, CONFIG.inner_size
    sizes = (2 * inner, HIDDEN), (HIDDEN, inner)
    first, last = (
        None if kind is None else kept_matrix(kind, 32, count, *size)
        for kind, size in zip(kinds, sizes, strict=True)
    )
    return of_matrices(num_rows, first, last)


def of_matrices(
    num_rows: int,
    first: ExpertMatrix | None,
    last: ExpertMatrix | None,
    deterministic: bool = False,
) -> list[tuple[str, str]]:
    """Launches of a layer with these weights, or, of None, with weights of 16 bits."""
    with recorded() as notes:
        w = Weights(SizeSource(), META, torch.bfloat16, "none", deterministic)
        layer = Experts(w.at("mlp"), CONFIG, HIDDEN)
        layer.gate_up, layer.down = first or layer.gate_up, last or layer.down
        notes.clear()
        x = torch.empty(num_rows, HIDDEN, dtype=torch.bfloat16, device=META)
        layer(Norm(w.at("norm"), HIDDEN, 1e-6), Residual(x))
    return notes


@pytest.mark.parametrize(
    ("kinds", "largest"), [((Kind.W4, Kind.W4), 32), ((Kind.W8, Kind.F4), 32), ((Kind.F4,) * 2, 64)]
)
def test_packed_weights_have_one_kernel(kinds: tuple[Kind, Kind], largest: int) -> None:
    """For steps of all sizes; four warps share out a unit where tiles are of eight rows."""
    for num_rows, rows in ((1, 8), (64, 8), (128, 16), (300, 32), (2048, largest)):
        notes = of_packed(num_rows, kinds)
        assert [name for name, _ in notes][-3:] == ["packed", "packed", "combine"]
        tiles = most_tiles(8 * num_rows, 128, rows)
        up, down = (arguments for _, arguments in notes[-3:-1])
        units = 1 if rows == 8 else 4
        assert f" ({48 // units}, {tiles}) 128 " in up
        assert f" ({64 // units}, {tiles}) 128 " in down
        assert all(f"ROWS={rows} SPLIT={4 // units}" in each for each in (up, down))


@pytest.mark.parametrize(("rows", "ctas"), [(8, 4), (16, 3)])
@pytest.mark.parametrize(
    "packing",
    [
        Packing(4, 128, 1536, 2048, torch.bfloat16, False),
        Packing(8, 128, 1536, 2048, torch.float32, False, "e4m3"),
        Packing(4, 32, 5760, 2880, torch.bfloat16, False, "e2m1"),
    ],
    ids=str,
)
def test_rings_leave_a_multiprocessor_of_hopper_its_warps(
    packing: Packing, rows: int, ctas: int
) -> None:
    """Two warps a scheduler leave it idle; and a step's bytes are on their way at any time."""
    slots = packed.num_slots(packing, rows)
    assert slots >= 2
    ring = slots * packed.slot_bytes(packing, rows)
    places = rows * (8 + 8 + 4)
    assert ctas * (ring + places + 1024) <= 228 << 10  # the driver has 1 KB of each CTA


def test_layers_of_which_a_part_is_packed() -> None:
    """Tiles are such as all kernels have; the last one adds to the sum if it is not packed."""
    for num_rows, kinds, names in (
        (1, (Kind.W4, None), ["route_rows", "packed", "down_add"]),
        (1, (None, Kind.W4), ["route_rows", "skinny", "packed", "combine"]),
        (2048, (Kind.F4, None), ["packed", "tiled", "combine"]),
        (2048, (None, Kind.W8), ["tiled", "packed", "combine"]),
    ):
        notes = of_packed(num_rows, kinds)
        assert [name for name, _ in notes][-len(names) :] == names


@pytest.mark.parametrize(
    ("row_types", "group", "names"),
    [
        (("e4m3", "e4m3"), 4096, ["gather_quantize", "streamed", "quantize", "streamed"]),
        (("", "e4m3"), 4096, ["packed", "quantize", "streamed"]),
        (("e4m3", ""), 4096, ["gather_quantize", "streamed", "packed"]),
        (("", ""), 4096, ["packed", "packed"]),
        (("e4m3", "e4m3"), 128, ["packed", "packed"]),  # blocks
        (("e4m3", "none"), 4096, ["gather_quantize", "streamed", "piped"]),  # 16 bits
        (("none", "e4m3"), 4096, ["tiled", "quantize", "streamed"]),
    ],
    ids=str,
)
def test_rows_are_rounded_beside_e4m3_that_asks_for_it(
    row_types: tuple[str, str], group: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper, each matrix by itself; not of weights alone or blocks, nor deterministically."""
    for module in (grouped, experts):
        monkeypatch.setattr(module, "target_of", lambda _: KNOWN["sm_90a"])
    count, inner = CONFIG.routing.num_experts, CONFIG.inner_size
    sizes = (2 * inner, HIDDEN), (HIDDEN, inner)
    first, last = (
        None if each == "none" else kept_matrix(Kind.F8, min(group, size[1]), count, *size, each)
        for each, size in zip(row_types, sizes, strict=True)
    )
    found = [name for name, _ in of_matrices(128, first, last)]
    assert found[-len(names) - 1 :] == [*names, "combine"]
    assert found[-len(names) - 2] == "place"
    fixed = [name for name, _ in of_matrices(128, first, last, deterministic=True)]
    assert not {"gather_quantize", "quantize", "streamed", "piped"} & {*fixed}


def test_deterministic_mode_has_one_kernel() -> None:
    for num_rows in (128, 256, 2048):
        names = [name for name, _ in launches(num_rows, "none", deterministic=True)]
        assert names.count("tiled") == 2
        assert "skinny" not in names[-3:]


@pytest.mark.parametrize("num_rows", [1, 17, 128])
def test_groups_are_chosen_by_a_variant_of_the_same_kernels(num_rows: int) -> None:
    """The shape of DeepSeek V3 takes no launch more than without groups."""
    routing = Routing(256, 8, Score.SIGMOID, True, 2.5, groups=8, top_groups=4)
    config = ExpertsConfig(routing, 2048, shared_size=2048, corrected=True)
    notes = launches(num_rows, "fp8", config=config)
    names = [name for name, _ in notes]
    routes = [name for name in names if name in ("route_rows", "route_once", "choose", "place")]
    assert routes == ROUTES.get(num_rows, ROUTES[17])
    ours = [arguments for name, arguments in notes if name == routes[0]]
    assert all("VALUES=8" in each and "GROUPED=1" in each for each in ours)
    assert not any("GROUPED=1" in each for _, each in launches(num_rows, "fp8"))


@pytest.mark.parametrize("scheme", ["none", "fp8"])
def test_a_row_takes_three_kernels(scheme: str) -> None:
    """The norm and the router are one with the choice, the sum with the last GEMM."""
    notes = launches(1, scheme)
    assert [name for name, _ in notes] == ["route_rows", "skinny", "down_add"]
    assert " (8,) 512 " in notes[0][1]
    assert " (128,) 512 " in notes[2][1]


def test_what_the_kernels_of_a_few_rows_leave_to_others() -> None:
    """Tiles of more rows, more rows, deterministic mode, a router of 4.5 MB."""
    larger = ExpertsConfig(Routing(512, 8), 64)
    for num_rows, config, deterministic, names in (
        (8, CONFIG, False, ["route_rows", "tiled", "tiled", "combine"]),
        (9, CONFIG, False, ["route_once", "tiled", "tiled", "combine"]),
        (128, CONFIG, True, ["choose", "place", "tiled", "tiled", "combine"]),
        (1, larger, False, ["route_rows", "skinny", "down_add"]),
    ):
        notes = launches(num_rows, "none", deterministic, config)
        assert [name for name, _ in notes][-len(names) :] == names
    wide = launches(1, "none", config=ExpertsConfig(Routing(512, 8), 64), hidden=4608)
    assert [name for name, _ in wide][-3:] == ["route_once", "skinny", "down_add"]


def test_other_norms_and_gpus_keep_the_router_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer norm; a GPU without clusters, where one CTA would read the whole router."""
    w = Weights(SizeSource(), META, torch.bfloat16, "none", False)
    notes = launches(1, "none", norm=LayerNorm(w.at("norm"), HIDDEN, 1e-6))
    assert [name for name, _ in notes][-4:] == ["gemv", "route_once", "skinny", "down_add"]
    monkeypatch.setattr(recording, "TEAM", 1)
    assert launches(1, "none")[0][0] == "rms_norm"


def test_the_shared_expert_comes_before_the_products() -> None:
    """So the last kernel has its outputs and its gate, and no other comes behind."""
    config = ExpertsConfig(Routing(60, 4), 1408, shared_size=5632, shared_gated=True)
    names = [name for name, _ in launches(1, "none", config=config)]
    assert names[0] == "route_rows"
    assert names[-2:] == ["skinny", "down_add"]
    assert "combine" not in names


@pytest.mark.parametrize("place", ["", "attention.q_proj", "mlp.experts.down"])
def test_products_stay_apart_only_where_an_adapter_changes_them(place: str) -> None:
    """A layer is ready for adapters whether or not a step has any."""
    groups = StepGroups()
    if place:
        term = Term(0, torch.empty(4, 768, device=META), torch.empty(HIDDEN, 4, device=META))
        groups.tokens = [Group({place: [term]}, torch.empty(1, device=META))]
    names = [name for name, _ in launches(1, "none", groups=groups)]
    apart, whole = ["skinny", "skinny", "combine"], ["skinny", "down_add"]
    assert names == ["route_rows", *(apart if "experts" in place else whole)]


@pytest.mark.parametrize("num_rows", [1, 32, 128])
def test_terms_of_all_pairs_take_five_kernels(num_rows: int) -> None:
    """Whatever experts and adapters there are; none where no adapter of the step has terms here."""
    groups, size = StepGroups(), num_rows
    none = torch.empty(0, 2, dtype=torch.int64, device=META)
    rows = torch.empty(size, dtype=torch.int32, device=META)
    table = Table(none, rows, rows, 48)
    groups.tables = {"tokens": table}
    plain = [name for name, _ in launches(num_rows, "none", groups=groups)]
    assert plain == [name for name, _ in launches(num_rows, "none")]
    addresses = torch.empty(size, dtype=torch.int64, device=META)
    groups.tables = {"tokens": table._replace(experts=addresses)}
    notes = launches(num_rows, "none", groups=groups)
    kernel = "tiled" if num_rows > 6 else "skinny"
    both = ["group_pairs", "shrink", "expand_new", kernel, kernel, "shrink", "expand", "combine"]
    assert [name for name, _ in notes][-8:] == both
    of_kernels = [arguments for name, arguments in notes if name == kernel]
    assert ["TERMS=1" in each for each in of_kernels] == [True, False]


@pytest.mark.parametrize("has_out_norm", [False, True])
@pytest.mark.parametrize(
    "shared", [{}, {"shared_size": 64}, {"shared_size": 64, "shared_gated": 1}]
)
def test_a_layer_is_the_same_by_either_kernels(
    monkeypatch: pytest.MonkeyPatch, shared: dict[str, int], has_out_norm: bool
) -> None:
    """By the oracles of both: all that they are given is in its place."""
    config = ExpertsConfig(Routing(12, 3, normalises=True, factor=50.0), 32, **shared)
    w = Weights(RandomSource(CPU), CPU, torch.bfloat16, "none", False)
    norm, out_norm = (Norm(w.at(name), 64, 1e-6, plus_one=True) for name in ("norm", "out_norm"))
    layer = Experts(w.at("mlp"), config, 64, out_norm if has_out_norm else None)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for is_few in (False, True):
        monkeypatch.setattr(experts, "takes_router", lambda *_, is_few=is_few: is_few)
        monkeypatch.setattr(experts, "takes_down", lambda *_, is_few=is_few: is_few)
        found.append(x.clone())
        layer(norm, Residual(found[-1]))
    plain, few = found
    torch.testing.assert_close(few, plain, rtol=2**-6, atol=2**-6)
    assert (few - x).abs().max() > 0.2
