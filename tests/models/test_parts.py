"""Parts of quantised matrices: those of all ranks are, number by number, what one rank reads.

Drawn formats, shapes, groups and ranks, of any codes and scales: rounding has no place in this.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.models.gguf_files import SCALES, random_blocks
from fixtures.models.quantised import Tensors, directory_of
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from slipstream.models.axes import TensorNames
from slipstream.models.cuts import Cuts
from slipstream.models.entries import TensorEntry
from slipstream.models.files import SINGLE
from slipstream.models.formats.module import num_words
from slipstream.models.gguf.kept import KEPT
from slipstream.models.gguf.types import QUANTISED
from slipstream.models.sharding import part_of_width
from slipstream.models.weights import FileSource, ShapeSource
from slipstream.quant.matrix import dequantise

HOST = torch.device("cpu")
LAYER = "model.layers.0.mlp"
UP, DOWN = f"{LAYER}.up_proj", f"{LAYER}.down_proj"
Made = tuple[Tensors, dict[str, Any]]


class Draw:
    """Sizes and values of a matrix."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def of(self, *values: Any) -> Any:
        return values[self.random.integers(len(values))]

    def words(self, *shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=self.torch).to(torch.int32)

    def bytes(self, *shape: int, most: int = 256) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=self.torch).to(torch.uint8)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return (torch.rand(shape, generator=self.torch) + 0.5).to(dtype)

    def e4m3(self, *shape: int) -> torch.Tensor:
        return (self.floats(*shape, dtype=torch.float32) * 9 - 9).to(torch.float8_e4m3fn)

    def places(self, inputs: int, group: int) -> torch.Tensor:
        """Groups of inputs, in their order or in another."""
        order = self.of(np.arange(inputs), self.random.permutation(inputs))
        return torch.from_numpy(order // group).to(torch.int32)


def awq(draw: Draw, n: int, k: int, group: int, version: str) -> Made:
    config = {"quant_method": "awq", "version": version, "group_size": group, "bits": 4}
    groups = k // group
    if version == "gemm":
        qweight, zeros, scales = (k, n // 8), (groups, n // 8), (groups, n)
    else:
        multiple = {64: 2, 32: 4}.get(group, 1)
        width = -(-num_words(groups, 4) // multiple) * multiple
        qweight, zeros, scales = (n, k // 8), (n, width), (n, width * 8)
    tensors = {"qweight": draw.words(*qweight), "qzeros": draw.words(*zeros)}
    return tensors | {"scales": draw.floats(*scales)}, config


def gptq(draw: Draw, n: int, k: int, group: int) -> Made:
    bits, version = draw.of(2, 3, 4, 8), draw.of("gptq", "gptq_v2")
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": True}
    groups = k // group
    return {
        "qweight": draw.words(num_words(k, bits), n),
        "qzeros": draw.words(groups, num_words(n, bits)),
        "scales": draw.floats(groups, n),
        "g_idx": draw.places(k, group),
    }, config | {"checkpoint_format": version}


def _compressed(weights: dict[str, Any], tensors: Tensors) -> Made:
    group = {"targets": ["Linear"], "weights": weights}
    return tensors, {"quant_method": "compressed-tensors", "config_groups": {"g": group}}


def packed(draw: Draw, n: int, k: int, group: int) -> Made:
    bits, is_dense, symmetric = draw.of(3, 4, 5, 8), draw.of(True, False), draw.of(True, False)
    by = draw.of(("group", group), ("channel", k))
    groups = k // by[1]
    tensors = {
        "weight_packed": draw.words(n, num_words(k, bits, is_dense)),
        "weight_scale": draw.floats(n, groups),
        "weight_shape": torch.tensor([n, k]),
    }
    if not is_dense and bits in (3, 5):  # words have bits that no value needs
        tensors["weight_packed"] &= (1 << (32 // bits * bits)) - 1
    if not symmetric:
        tensors["weight_zero_point"] = draw.words(num_words(n, bits), groups)
    if by[0] == "group":
        tensors["weight_g_idx"] = draw.places(k, group)
    own = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": by[0]}
    return _compressed(own | {"group_size": group if by[0] == "group" else None}, tensors)


def integers(draw: Draw, n: int, k: int, group: int) -> Made:
    own = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}
    codes = {"weight": draw.bytes(n, k).view(torch.int8)}
    zeros = {"weight_zero_point": draw.bytes(n, 1, most=9).to(torch.int8)}
    return _compressed(own, codes | zeros | {"weight_scale": draw.floats(n, 1)})


def e4m3(draw: Draw, n: int, k: int, group: int) -> Made:
    strategy = draw.of("tensor", "channel", "block")
    block = [draw.of(16, 128), group]
    shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // block[0]), -(-k // block[1]))}
    own = {"num_bits": 8, "type": "float", "strategy": strategy}
    own |= {"block_structure": block if strategy == "block" else None}
    scales = {"weight_scale": draw.floats(*shape[strategy], dtype=torch.float32)}
    return _compressed(own, {"weight": draw.e4m3(n, k)} | scales)


def nvfp4(draw: Draw, n: int, k: int, group: int) -> Made:
    own = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    outer = {"weight_global_scale": draw.floats(1, dtype=torch.float32)}
    tensors = {"weight_packed": draw.bytes(n, k // 2), "weight_scale": draw.e4m3(n, k // 16)}
    return _compressed(own, tensors | outer)


def mxfp4(draw: Draw, n: int, k: int, group: int) -> Made:
    own = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    tensors = {"weight_packed": draw.bytes(n, k // 2)}
    return _compressed(own, tensors | {"weight_scale": draw.bytes(n, k // 32, most=140)})


def modelopt(draw: Draw, n: int, k: int, group: int) -> Made:
    kind = draw.of("FP8", "FP8_PB_WO", "W8A16", "W4A16_AWQ", "NVFP4", "MXFP4")
    config = {"quant_method": "modelopt", "quant_algo": kind}
    factors = {"pre_quant_scale": draw.floats(k)}
    if kind == "W4A16_AWQ":
        tensors = {"weight": draw.bytes(n // 2, k), "weight_scale": draw.floats(n, k // group)}
        return tensors | factors, config | {"group_size": group}
    if kind in ("NVFP4", "MXFP4"):
        size = 16 if kind == "NVFP4" else 32
        scales = draw.e4m3(n, k // 16) if size == 16 else draw.bytes(n, k // 32, most=140)
        second = {"weight_scale_2": draw.floats(1, dtype=torch.float32)}
        tensors = {"weight": draw.bytes(n, k // 2), "weight_scale": scales} | second
        return tensors, config | {"group_size": size}
    blocks = (-(-n // 128), -(-k // 128))
    shape = {"FP8": (), "FP8_PB_WO": blocks, "W8A16": (n,)}[kind]
    codes = draw.bytes(n, k).view(torch.int8) if kind == "W8A16" else draw.e4m3(n, k)
    return {"weight": codes, "weight_scale": draw.floats(*shape)} | factors, config


def fine_grained(draw: Draw, n: int, k: int, group: int) -> Made:
    block = [draw.of(16, 128), group]
    scales = draw.floats(-(-n // block[0]), -(-k // block[1]), dtype=torch.float32)
    config = {"quant_method": "fp8", "weight_block_size": block}
    return {"weight": draw.e4m3(n, k), "weight_scale_inv": scales}, config


def eight(draw: Draw, n: int, k: int, group: int) -> Made:
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    codes = draw.bytes(n, k).view(torch.int8)
    return {"weight": codes, "SCB": draw.floats(n, dtype=torch.float32)}, config


def nf4(draw: Draw, n: int, k: int, group: int) -> Made:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    block, size = draw.of(64, 128), 4
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "shape": [n, k]}
    blocks = -(-n * k // block)
    tensors = {"weight": draw.bytes(n * k // 2, 1), "weight.quant_map": draw.floats(16)}
    if draw.of(True, False):
        state |= {"nested_blocksize": size, "nested_offset": 0.25}
        tensors["weight.absmax"] = draw.bytes(blocks)
        tensors["weight.nested_quant_map"] = draw.floats(256, dtype=torch.float32)
        tensors["weight.nested_absmax"] = draw.floats(-(-blocks // size), dtype=torch.float32)
    else:
        tensors["weight.absmax"] = draw.floats(blocks, dtype=torch.float32)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors | {"weight.quant_state.bitsandbytes__nf4": text}, config


FORMATS: dict[str, Callable[[Draw, int, int, int], Made]] = {
    "awq, gemm": lambda *at: awq(*at, "gemm"),
    "awq, gemv": lambda *at: awq(*at, "gemv"),
    "gptq": gptq,
    "pack-quantized": packed,
    "int-quantized": integers,
    "float-quantized": e4m3,
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
    "modelopt": modelopt,
    "fp8 of Hugging Face": fine_grained,
    "bitsandbytes, 8 bits": eight,
    "bitsandbytes, nf4": nf4,
}
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


WHOLE = {  # what is read whole by inputs: blocks of scales go on over rows
    ("bitsandbytes, nf4", DOWN),
}


@pytest.mark.parametrize("name", quick_of(FORMATS, {"gptq"}))
@pytest.mark.parametrize("module", [UP, DOWN])
def test_a_rank_reads_its_bytes(name: str, module: str) -> None:
    draw = Draw(3)
    draw.of = lambda *values: values[0]  # type: ignore[method-assign]
    n, k = (512, 512) if module == UP else (64, 4096)
    *ranks, whole = check(FORMATS[name](draw, n, k, 32), module, n, k, 4)
    more = 4 * 3 * 4 * max(n, k)  # what all ranks have: groups of inputs, scales of rows
    if (name, module) in WHOLE:
        assert ranks == [whole] * 4
    else:
        assert max(ranks) < whole / 4 + more
        assert len(set(ranks)) == 1


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
@given(st.integers(1, 5), st.sampled_from([32, 96, 128]), RANKS, SEEDS, st.booleans())
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
    found = []
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
    whole = found.pop()
    together = torch.cat(found, 2 if is_down else 1)
    assert torch.equal(together.narrow(2 if is_down else 1, 0, k if is_down else n), whole)
