"""Terms that torch adds in deterministic mode: a row's bits beside its bits at another place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slipstream.kernels.lora.add import times
from slipstream.layers.adapted import Group, StepGroups, Term
from slipstream.layers.adapted_heads import AdaptedHeads

ROWS, HEADS = 128, 3
sizes = st.integers(1, 40)


@given(st.integers(1, 200), sizes, st.integers(1, 60))
def test_terms_of_a_layer(inputs: int, outputs: int, first: int) -> None:
    x, w = torch.randn(ROWS, inputs), torch.randn(outputs, inputs)
    assert torch.equal(times(x, w, is_fixed=True)[first:], times(x[first:], w, is_fixed=True))


@given(sizes, sizes, sizes, sizes, st.booleans(), st.integers(1, 60))
def test_terms_of_matrices_of_heads(
    keys: int, values: int, latent: int, rank: int, of_keys: bool, first: int
) -> None:
    """As merged weights have them within rounding, too."""
    a, b = torch.randn(rank, latent), torch.randn(HEADS * (keys + values), rank)
    inputs, outputs = (keys, latent) if of_keys else (latent, values)
    groups, given = StepGroups(), ("kv_b", "tokens", (keys, values), of_keys)

    def changed(x: torch.Tensor, is_fixed: bool) -> torch.Tensor:
        name, which, rows, side = given

        def zeros(x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(len(x), HEADS, outputs)

        heads = AdaptedHeads(zeros, name, groups, which, rows, side, is_fixed)
        groups.tokens = [Group({name: [Term(0, a, b)]}, torch.arange(len(x)))]
        return heads(x)

    x = torch.randn(ROWS, HEADS, inputs)
    found = changed(x, is_fixed=True)
    assert torch.equal(found[first:], changed(x[first:], is_fixed=True))
    whole = (b @ a).view(HEADS, keys + values, latent)
    if of_keys:
        wanted = torch.einsum("nhk,hkl->nhl", x, whole[:, :keys])
    else:
        wanted = torch.einsum("nhl,hvl->nhv", x, whole[:, keys:])
    for each in (found, changed(x, is_fixed=False)):
        assert torch.allclose(each, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.rest
def test_processors_without_avx512() -> None:
    """MKL's GEMMs for AVX2 sum by a row's place where those for AVX-512 do not."""
    chosen = [str(Path(__file__)), "-k", "test_terms_of", "--tier", "quick"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *chosen]
    env = os.environ | {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
