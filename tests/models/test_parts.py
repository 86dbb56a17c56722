"""Parts of quantised matrices: those of all ranks are, number by number, what one rank reads.

Drawn formats, shapes, groups and ranks, of any codes and scales: rounding has no place in this.
"""

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from fixtures.models.gguf_files import SCALES, random_blocks
from fixtures.models.quantised import directory_of
from fixtures.models.stored import FORMATS, Draw, Made, gptq, nf4
from fixtures.tiers import quick_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from slipstream.models.axes import TensorNames
from slipstream.models.cuts import Cuts
from slipstream.models.entries import TensorEntry
from slipstream.models.files import SINGLE
from slipstream.models.gguf.kept import KEPT
from slipstream.models.gguf.types import QUANTISED
from slipstream.models.sharding import part_of_width
from slipstream.models.weights import FileSource, ShapeSource
from slipstream.quant.matrix import dequantise

HOST = torch.device("cpu")
LAYER = "model.layers.0.mlp"
UP, DOWN = f"{LAYER}.up_proj", f"{LAYER}.down_proj"
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([32, 64, 128]))


def names_of(rank: int, size: int, inner: int) -> TensorNames:
    return TensorNames(cuts=Cuts(rank, size, 4, 2, {"inner": inner}, False))


def check(made: Made, module: str, n: int, k: int, size: int) -> list[int]:
    """Compare the parts of all ranks with the whole; return the bytes that each has read."""
    dim = int(module == DOWN)
    inner = (n, k)[dim]
    width = part_of_width(inner, size)
    num_bytes, parts = [], []
    with tempfile.TemporaryDirectory() as folder:
        directory = directory_of(Path(folder), *made, module)
        for rank in range(size):
            names = names_of(rank, size, inner)
            source = FileSource(directory, HOST, names)
            shape = (width, k) if module == UP else (n, width)
            part = source.quantized(module, *shape)
            same = ShapeSource(directory, names).quantized(module, *shape)
            assert part is not None
            assert same is not None
            sizes = [(each.codes.shape, each.scales.shape, each.group) for each in (part, same)]
            assert sizes[0] == sizes[1]
            parts.append(dequantise(part))
            num_bytes.append(source._num_bytes)
        source = FileSource(directory, HOST, TensorNames())
        whole = source.quantized(module, n, k)
    assert whole is not None
    found = torch.cat(parts, dim)
    assert torch.equal(found.narrow(dim, 0, inner), dequantise(whole))
    assert not found.narrow(dim, inner, found.shape[dim] - inner).any()
    return [*num_bytes, source._num_bytes]


FORMS = st.sampled_from(sorted(FORMATS))
RANKS, SEEDS = st.sampled_from([2, 3, 4]), st.integers(0, 2**20)


@given(FORMS, SIZES, RANKS, SEEDS, st.sampled_from([UP, DOWN]))
@settings(deadline=None)
def test_parts_are_those_of_one_rank(
    name: str, sizes: tuple[int, int, int], size: int, seed: int, module: str
) -> None:
    rows, groups, group = sizes
    n, k = 32 * rows, groups * group
    check(FORMATS[name](Draw(seed), n, k, group), module, n, k, size)


@pytest.mark.parametrize("name", quick_of(FORMATS, {"gptq"}))
@pytest.mark.parametrize("module", [UP, DOWN])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_its_bytes(name: str, module: str, size: int) -> None:
    draw = Draw(3)
    draw.of = lambda *values: values[0]  # type: ignore[method-assign]
    n, k = (512, 512) if module == UP else (64, 4096)
    *ranks, whole = check(FORMATS[name](draw, n, k, 32), module, n, k, size)
    more = 4 * 3 * 4 * max(n, k)  # what all ranks have: groups of inputs, scales of rows
    assert max(ranks) < whole / size + more
    assert len(set(ranks)) == 1


def test_blocks_that_go_on_over_rows_are_read_in_part_with_all_scales() -> None:
    """nf4: 96 inputs a row, of which 64 have a scale."""
    draw = Draw(5)
    draw.of = lambda *values: values[-1]  # type: ignore[method-assign]
    made = nf4(draw, 64, 96, 32)
    state = json.loads(bytes(made[0]["weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert 96 % state["blocksize"]
    assert state["blocksize"] % 96
    *ranks, whole = check(made, DOWN, 64, 96, 2)
    codes = 64 * 96 // 2
    assert made[0]["weight"].nbytes == codes
    # Inputs 0 .. 48 end within a group of 32.
    assert ranks == [whole - codes + codes * 2 // 3] * 2


@given(st.integers(1, 40), st.integers(3, 150), RANKS, SEEDS)
@settings(deadline=None, max_examples=10)
@example(32, 97, 2, 0)
def test_halves_of_bytes_are_read_in_part(pairs: int, k: int, size: int, seed: int) -> None:
    """nf4: odd rows of an odd number of inputs begin within a byte."""
    n = 2 * pairs
    made = nf4(Draw(seed), n, k, 32)
    state = json.loads(bytes(made[0]["weight.quant_state.bitsandbytes__nf4"].tolist()))
    *ranks, whole = check(made, DOWN, n, k, size)
    unit = math.gcd(k, state["blocksize"])
    unit = unit if k % 2 else math.lcm(2, unit)
    most = min(k, part_of_width(k, size) + 2 * (unit - 1))
    codes = n * k // 2
    assert made[0]["weight"].nbytes == codes
    assert max(ranks) <= whole - codes + pairs * min(k, most + 1)


def test_inputs_that_are_sorted_are_read_in_part_with_all_scales() -> None:
    draw = Draw(5)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    tensors, _ = gptq(draw, 64, 256, 32)
    tensors |= {"qweight": draw.words(32, 64), "qzeros": draw.words(8, 8)}
    tensors["g_idx"] = torch.from_numpy(draw.random.permutation(256) // 32).to(torch.int32)
    *ranks, whole = check((tensors, config), DOWN, 64, 256, 2)
    scales, places = 8 * 64 * 2 + 8 * 8 * 4, 256 * 4
    codes = 32 * 64 * 4
    assert whole == codes + scales + places
    assert ranks == [codes // 2 + scales + places // 2] * 2


@pytest.mark.rest
@given(st.sampled_from(sorted(SCALES)), RANKS, st.sampled_from([0, 1, 4]), st.booleans(), SEEDS)
@settings(deadline=None)
def test_blocks_of_gguf_files(kind: str, size: int, heads: int, is_kept: bool, seed: int) -> None:
    """Packed where a GEMM takes them, and dequantised as they are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        draw, n, k = Draw(seed), 64, 1024
        module, inner = draw.of((UP, n), (DOWN, k))
        blocks = random_blocks(draw.random, kind, n, k)
        path = directory_of(Path(folder), {}, {}) / "data"
        path.write_bytes(blocks.tobytes())
        entry = TensorEntry(path, kind, (n, k), 0, blocks.size, paired_heads=heads)
        shape, dim = ((n, k), 0) if module == UP else ((n, k), 1)
        width = part_of_width(inner, size)
        unit = QUANTISED[kind].elements if dim else n // (heads or n)
        found = []
        for rank in range(size + 1):
            names = TensorNames() if rank == size else names_of(rank, size, inner)
            source = FileSource(path.parent, HOST, names)
            source._entries[f"{module}.weight"] = entry
            own = list(shape)
            own[dim] = inner if rank == size else width
            if is_kept and kind in KEPT:
                matrix = source.quantized(module, *own)
                assert matrix is not None
                found.append(dequantise(matrix))
            else:
                found.append(torch.empty(*own))
                source.fill([f"{module}.weight"], found[-1:])
            if rank < size and inner % (size * unit) == 0:
                assert source._num_bytes == blocks.size // size
        whole = found.pop()
        assert torch.equal(torch.cat(found, dim).narrow(dim, 0, inner), whole)


@pytest.mark.rest
@given(st.integers(1, 5), st.sampled_from([32, 96, 128, 256]), RANKS, SEEDS, st.booleans())
@settings(deadline=None)
def test_experts_in_one_tensor(
    experts: int, inner: int, size: int, seed: int, is_down: bool
) -> None:
    """OpenAI's: gate and up in turns, of all experts under one another."""
    draw, hidden, width = Draw(seed), 64, part_of_width(inner, size)
    name = f"{LAYER}.experts.{'down_proj' if is_down else 'gate_up_proj'}"
    n, k = (hidden, inner) if is_down else (2 * inner, hidden)
    tensors = {
        "blocks": draw.bytes(experts, n, k // 32, 16),
        "scales": draw.bytes(experts, n, k // 32, most=140),
    }
    widths = {"expert": inner, "both of expert": 2 * inner}
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    found, num_bytes = [], []
    with tempfile.TemporaryDirectory() as folder:
        directory = directory_of(Path(folder), {}, config)
        save_file({f"{name}_{p}": each for p, each in tensors.items()}, directory / SINGLE)
        for rank in range(size + 1):
            cuts = None if rank == size else Cuts(rank, size, 4, 2, widths, False, experts)
            own = inner if rank == size else width
            shape = (hidden, own) if is_down else (2 * own, hidden)
            source = FileSource(directory, HOST, TensorNames(cuts=cuts))
            matrix = source.quantized(name, experts * shape[0], shape[1])
            assert matrix is not None
            found.append(dequantise(matrix).view(experts, *shape))
            num_bytes.append(source._num_bytes)
    whole = found.pop()
    unit = 32 if is_down else 1
    if inner % (size * unit) == 0:
        assert num_bytes == [num_bytes[-1] // size] * size + num_bytes[-1:]
    assert max(num_bytes[:-1]) <= num_bytes[-1]
    together = torch.cat(found, 2 if is_down else 1)
    assert torch.equal(together.narrow(2 if is_down else 1, 0, k if is_down else n), whole)
