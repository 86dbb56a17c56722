"""Fused places compute what plain ones do, with stages between product and gate or sum, too."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from fixtures.quant.int8_rows import NAME as INT8_ROWS
from fixtures.quant.int8_rows import int8_rows
from slipstream import quant
from slipstream.fuse.places import FusedGatedLinear, FusedLinearAdd, FusedNormLinear, Gated
from slipstream.fuse.rewrite import Place, fused, rewrite
from slipstream.kernels.elementwise.activation import ACTIVATIONS
from slipstream.kernels.elementwise.eight_bits import Quantized
from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm
from slipstream.kernels.gemm.op import Around, gemm
from slipstream.layers.attention import Attention
from slipstream.layers.decoder import Block, Decoder
from slipstream.layers.dims import Dims
from slipstream.layers.embedding import embedding_and_head
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd, NormLinear
from slipstream.layers.mlp import GatedMLP, GeluMLP, PlainMLP
from slipstream.layers.norm import LayerNorm, Norm, identity
from slipstream.layers.residual import Residual
from slipstream.models.fileless import RandomSource
from slipstream.models.source import Weights
from torch import Tensor

HIDDEN, INNER, ROWS = 64, 96, 128
SCHEMES = ("none", "fp8", INT8_ROWS)
CPU = torch.device("cpu")
DIMS = Dims(101, HIDDEN, INNER, 1, 2, 1, 32, 1e-5)


@pytest.fixture(autouse=True)
def all_schemes() -> Iterator[None]:
    with int8_rows():
        yield


def weights(scheme: str = "none", deterministic: bool = False, seed: int = 0) -> Weights:
    return Weights(RandomSource(CPU, seed), CPU, torch.float32, scheme, deterministic)


def linear(w: Weights, outputs: int, inputs: int = HIDDEN) -> Linear:
    return Linear.read(w, ("a",), (outputs,), inputs, bias=True)


class TwoRanks:
    """Ranks whose parts are the same."""

    def sum(self, x: Tensor) -> Tensor:
        return x + x

    def add_sum(self, values: Tensor, x: Tensor) -> None:
        values += x + x

    def add_sum_norm(self, values: Tensor, x: Tensor, norm: RmsNorm) -> Tensor:
        self.add_sum(values, x)
        return rms_norm(values, *norm)


def run(place: Place, norm: Norm, x: Tensor) -> Tensor:
    """What a place makes of rows; of sums what they are in the end."""
    residual = Residual(x.clone())
    if isinstance(place, LinearAdd):
        rows = x[:, :1].expand(len(x), place.linear.weights[0].shape[1]).contiguous()
        place(rows, residual)
        return residual.values
    if isinstance(place, NormLinear):
        y, scales = place(norm, residual)
        assert scales is None
        return y
    y = place(norm, residual)
    assert isinstance(y, Tensor)
    return y


PLACES: dict[str, Callable[[Weights], Place]] = {
    "norm, linear": lambda w: NormLinear(linear(w, 40)),
    "norm, linear, silu": lambda w: GatedLinear(linear(w, 80), "silu"),
    "norm, linear, gelu": lambda w: GatedLinear(linear(w, 80), "gelu"),
    "linear, residual": lambda w: LinearAdd(linear(w, HIDDEN, INNER)),
    "linear, norm, residual": lambda w: LinearAdd(
        linear(w, HIDDEN, INNER), Norm(w, HIDDEN, 1e-5, plus_one=True)
    ),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("pattern", "is_shared"),
    [*((name, False) for name in PLACES), *((name, True) for name in PLACES if "resid" in name)],
)
def test_a_fused_place_computes_what_a_plain_one_does(
    pattern: str, scheme: str, deterministic: bool, is_shared: bool
) -> None:
    w = weights(scheme, deterministic)
    norm = Norm(w, HIDDEN, 1e-5)
    place = PLACES[pattern](w)
    layer = place.linear
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    without = run(fused(place), norm, x)
    if is_shared:
        layer.ranks = TwoRanks()
    want, got = run(place, norm, x), run(fused(place), norm, x)
    # In e4m3 a fused norm rounds elsewhere; the rest is the same arithmetic.
    tolerance = 0.05 if scheme != "none" and "norm, linear" in pattern else 1e-5
    assert (got - want).abs().max() <= tolerance * want.abs().max()
    assert is_shared != torch.equal(got, without)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("pattern", [name for name in PLACES if name.startswith("norm")])
def test_only_an_rms_norm_is_fused(pattern: str, scheme: str) -> None:
    """Others are computed before the product, of the sum with what waits to be added to it."""
    w = weights(scheme)
    place, add = PLACES[pattern](w), LinearAdd(linear(w, HIDDEN))
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    for norm in (LayerNorm(w, HIDDEN, 1e-5), LayerNorm(w, HIDDEN, 1e-5, False, False), identity):
        wanted, found = Residual(x.clone()), Residual(x.clone())
        add(x, wanted)
        fused(add)(x, found)
        want, got = (p(norm, r) for p, r in ((place, wanted), (fused(place), found)))
        want, got = (y[0] if isinstance(y, tuple) else y for y in (want, got))
        assert (got - want).abs().max() <= (0.02 if scheme != "none" else 1e-5) * want.abs().max()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sum_over_ranks_waits_for_the_next_norm_and_comes_behind_the_bias(scheme: str) -> None:
    w = weights(scheme)
    add, read = fused(LinearAdd(linear(w, HIDDEN))), fused(NormLinear(linear(w, 40)))
    norm, x = Norm(w, HIDDEN, 1e-5), torch.randn(3, HIDDEN)
    y = add.linear(x)
    add.linear.ranks = TwoRanks()
    assert torch.allclose(add.linear(x), 2 * y)
    residual, wanted = Residual(x.clone()), Residual(x + 2 * y)
    add(x, residual)
    assert torch.equal(residual._values, x), "nothing is added yet"
    found, want = read(norm, residual)[0], read(norm, wanted)[0]
    assert (found - want).abs().max() <= (0.02 if scheme != "none" else 1e-5) * want.abs().max()
    assert torch.allclose(residual.values, wanted.values)


def decoder(w: Weights, mlp: type[GatedMLP] = GatedMLP) -> Decoder:
    table = torch.zeros(8, DIMS.head_size)
    block = Block(
        Norm(w, HIDDEN, 1e-5), Attention(w, DIMS, table), Norm(w, HIDDEN, 1e-5), mlp(w, DIMS)
    )
    embedding, head = embedding_and_head(w, DIMS, is_tied=True)
    return Decoder(embedding, [block, replace(block)], Norm(w, HIDDEN, 1e-5), head)


def test_a_rewrite_finds_all_places() -> None:
    made = rewrite(decoder(weights("fp8")))
    attention, mlp = made.blocks[0].attention, made.blocks[0].mlp
    kinds = [type(place) for place in (attention.qkv, attention.out, mlp.gate_up, mlp.down)]
    assert kinds == [FusedNormLinear, FusedLinearAdd, FusedGatedLinear, FusedLinearAdd]
    assert mlp.gate_up.feeds is mlp.down.linear
    assert type(made.head.product) is FusedNormLinear
    assert made.head.product.linear.scheme is quant.named("none")


@pytest.mark.parametrize(
    ("activation", "place"), [("relu", FusedGatedLinear), ("relu, squared", Gated)]
)
def test_a_rewrite_finds_the_places_of_a_plain_mlp(activation: str, place: type) -> None:
    made = decoder(weights("fp8"))
    made.blocks[0] = replace(made.blocks[0], mlp=PlainMLP(weights("fp8"), DIMS, activation))
    mlp = rewrite(made).blocks[0].mlp
    assert [type(each) for each in (mlp.up, mlp.down)] == [place, FusedLinearAdd]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norms_and_activations_are_stages_of_a_gemm(activation: str, bias: bool) -> None:
    """As plain layers compute them, and as the oracle of a GEMM with these stages does."""
    w = weights()
    norm = LayerNorm(w, HIDDEN, 1e-5, has_bias=bias)
    norm.weight = torch.randn(HIDDEN)
    norm.bias = torch.randn(HIDDEN) if bias else None
    layer = PlainMLP(w, DIMS, activation, bias=True)
    x = torch.randn(5, HIDDEN) * 3 + 2
    expected = layer.inner(norm, Residual(x.clone()))
    layer.up = fused(layer.up, layer.down.linear)
    assert torch.equal(layer.inner(norm, Residual(x.clone())), expected)
    stages = {"is_centred": True, "shift": norm.bias, "gate": layer.up.gate}
    around = Around(norm.weight, 1e-5, bias=layer.up.linear.bias, **stages)
    product = gemm.oracle(x, layer.up.linear.matrix.values, around)
    torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize("mlp", [GatedMLP, GeluMLP])
def test_a_gate_is_quantised_for_the_layer_that_reads_it_alone(
    mlp: type[GatedMLP], scheme: str
) -> None:
    layer = rewrite(decoder(weights(scheme), mlp)).blocks[0].mlp
    x = torch.randn(5, HIDDEN)
    norm = Norm(weights(), HIDDEN, 1e-5)
    rows = layer.gate_up(norm, Residual(x.clone()))
    assert isinstance(rows, Quantized) == (mlp is GatedMLP)
    layer.down.linear.ranks = TwoRanks()  # each quantises its part
    assert isinstance(layer.gate_up(norm, Residual(x.clone())), Quantized) == (mlp is GatedMLP)


@pytest.mark.parametrize("first", SCHEMES[1:])
@pytest.mark.parametrize("second", SCHEMES[1:])
def test_a_gate_is_quantised_as_its_reader_takes_it(first: str, second: str) -> None:
    """Two types of 8 bits: the gate's product is not of the second, it is of 16 bits between."""
    up, down = linear(weights(first), 2 * INNER), linear(weights(second, seed=1), HIDDEN, INNER)
    norm, x = Norm(weights(), HIDDEN, 1e-5), torch.randn(5, HIDDEN)
    rows = fused(GatedLinear(up, "silu"), down)(norm, Residual(x.clone()))
    plain = GatedLinear(up, "silu")(norm, Residual(x.clone()))
    assert isinstance(rows, Quantized) == (first == second)
    if isinstance(rows, Quantized):
        assert rows.values.dtype == down.matrix.values.dtype
    found, wanted = Residual(x.clone()), Residual(x.clone())
    fused(LinearAdd(down))(rows, found)
    LinearAdd(down)(plain, wanted)
    assert (found.values - wanted.values).abs().max() <= 0.05 * (wanted.values - x).abs().max()


@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize("other", SCHEMES[1:])
def test_an_unscaled_sum_waits_for_a_norm_of_another_type(scheme: str, other: str) -> None:
    add = fused(LinearAdd(linear(weights(scheme), HIDDEN)))
    read, norm = fused(NormLinear(linear(weights(other), 40))), Norm(weights(), HIDDEN, 1e-5)
    x = torch.randn(5, HIDDEN)
    early, late = Residual(x.clone()), Residual(x.clone())
    add(x, early)
    add(x, late)
    assert not torch.equal(early.values, x)
    assert torch.equal(read(norm, early)[0], read(norm, late)[0])
    assert torch.equal(late.values, early.values)


def test_an_unscaled_sum_waits_for_the_next_norm() -> None:
    w = weights("fp8")
    norm = Norm(w, HIDDEN, 1e-5)
    add, read = fused(LinearAdd(linear(w, HIDDEN))), fused(NormLinear(linear(w, 40)))
    x = torch.randn(5, HIDDEN)
    early, late = Residual(x.clone()), Residual(x.clone())
    add(x, early)
    add(x, late)
    assert torch.equal(late._values, x), "nothing is added yet"
    assert not torch.equal(early.values, x)
    assert torch.equal(read(norm, early)[0], read(norm, late)[0])
    assert torch.equal(late.values, early.values)
