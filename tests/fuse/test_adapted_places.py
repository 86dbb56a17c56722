"""Places with adapters on a GPU that notes launches: one kernel a place where a GEMM adds terms."""

import pytest
import torch
from fixtures.kernels.recording import recorded
from slipstream.fuse.adapt import _adapted
from slipstream.fuse.rewrite import fused
from slipstream.kernels.gemm import linear as gemm_linear
from slipstream.kernels.gemm.op import scratch_of
from slipstream.kernels.lora.terms import Table
from slipstream.kernels.runtime.registry import KNOWN
from slipstream.layers.adapted import Delta, StepGroups
from slipstream.layers.linear import GatedLinear, Linear, LinearAdd, NormLinear
from slipstream.layers.norm import Norm
from slipstream.layers.residual import Residual
from slipstream.models.fileless import SizeSource
from slipstream.models.source import Weights

META, HIDDEN = torch.device("meta"), 512


def table(num_rows: int) -> Table:
    def words(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    scratch = scratch_of(48, META)
    return Table(words(3, 2, dtype=torch.int64), words(num_rows), words(num_rows), 48, scratch)


def launches(num_rows: int, scheme: str, plus_one: bool = False) -> dict[str, list[str]]:
    """The kernels of each place of a block in a step of which rows have adapters."""
    w = Weights(SizeSource(), META, torch.bfloat16, scheme, False, target=KNOWN["sm_90a"])
    groups, found = StepGroups(), {}
    groups.tables = {"tokens": table(num_rows)}
    norm = Norm(w, HIDDEN, 1e-5, plus_one)
    places = {
        "qkv": NormLinear(Linear.read(w, ("q", "k", "v"), (512, 128, 128), HIDDEN)),
        "gated": GatedLinear(Linear.read(w, ("g", "u"), (1024, 1024), HIDDEN), "silu"),
        "add": LinearAdd(Linear.read(w, ("d",), (HIDDEN,), 1024)),
    }
    for number, (name, place) in enumerate(places.items()):
        made = _adapted(fused(place), Delta(name, place.linear, groups, "tokens", number))
        rows = torch.empty((num_rows, HIDDEN), dtype=torch.bfloat16, device=META)
        inner = torch.empty((num_rows, 1024), dtype=torch.bfloat16, device=META)
        with recorded() as notes:
            if isinstance(made, LinearAdd):
                made(inner, Residual(rows))
            else:
                made(norm, Residual(rows))
        found[name] = [entry for entry, _ in notes]
    return found


@pytest.fixture(autouse=True)
def choices() -> None:
    gemm_linear._adapted_by.cache_clear()
    gemm_linear._routes.clear()


@pytest.mark.parametrize("scheme", ["none", "fp8"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_few_rows_take_one_launch_a_place(num_rows: int, scheme: str) -> None:
    assert launches(num_rows, scheme) == {name: ["gemv"] for name in ("qkv", "gated", "add")}


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_few_rows_of_packed_weights_take_one_launch_beside_a_norm(num_rows: int) -> None:
    assert launches(num_rows, "int4") == {
        "qkv": ["rms_norm", "packed_stream"],
        "gated": ["rms_norm", "packed_stream"],
        "add": ["packed_stream"],
    }
    more = launches(9, "int4")
    assert more["add"][0::2] == ["shrink", "expand"]


def test_a_norm_that_no_gemm_computes_is_a_launch_before_it() -> None:
    found = launches(1, "none", plus_one=True)
    assert found == {"qkv": ["rms_norm", "gemv"], "gated": ["rms_norm", "gemv"], "add": ["gemv"]}


def test_more_rows_take_a_gemm_and_two_launches_beside_the_norm() -> None:
    """GEMM and `shrink` share a norm, unless a quantiser computes it; `expand` applies gates."""
    assert launches(3, "none") == {
        "qkv": ["rms_norm", "shrink", "skinny", "expand"],
        "gated": ["rms_norm", "shrink", "skinny", "expand_silu"],
        "add": ["shrink", "skinny", "expand"],
    }
    assert launches(3, "fp8") == {
        "qkv": ["rms_norm", "shrink", "norm_quantize", "skinny", "expand"],
        "gated": ["rms_norm", "shrink", "norm_quantize", "skinny", "expand_silu"],
        "add": ["shrink", "quantize", "skinny", "expand"],
    }
