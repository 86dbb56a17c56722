"""Checkpoints of e4m3 in blocks, as `slipstream quantize` writes them: kept in 8 bits on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fixtures.kernels.packed_cases import BLOCKS, quantized
from fixtures.models.checkpoints import Driver, Generation, make_runner, random_prompts
from fixtures.quantize import tiny
from slipstream.config import EngineConfig
from slipstream.fuse.rewrite import places
from slipstream.kernels.gemm import linear
from slipstream.kernels.gemm.op import Matrix, Spec, gemm
from slipstream.kernels.gemm.packing import dense
from slipstream.kernels.runtime.registry import KNOWN, Implementation
from slipstream.models import source
from slipstream.models.decoder import build
from slipstream.models.hf import read_config
from slipstream.models.source import Weights
from slipstream.models.weights import FileSource
from slipstream.quant.forms import form_of
from slipstream.quant.matrix import dequantise
from slipstream.quant.parts import inputs_of
from slipstream.runner.matrices import weight_bytes
from slipstream_quantize.opened import Opened

HOST = torch.device("cpu")
# Blocks that end within a matrix, by outputs and by inputs.
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "head_dim": 64}
PACKED = "e4m3 by 128, packed"


class Written(NamedTuple):
    directory: Path
    opened: Opened  # the weights that were meant


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("blocks")
    plain = tiny.checkpoint(folder / "plain", **SIZES, max_position_embeddings=1024)
    recipe = tiny.FORMATS["fp8-block"]
    return Written(folder / "blocks", tiny.quantised(plain, recipe, folder / "blocks"))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_a_gpu_keeps_what_was_meant_in_8_bits(target: str, written: Written) -> None:
    """Fused: q, k and v are one matrix, gate and up another."""
    config = read_config(written.directory)
    files = FileSource(written.directory, HOST, config.tensors)
    weights = Weights(files, HOST, torch.bfloat16, target=KNOWN[target])
    found = list(places(build(config, weights, max_model_len=8)))
    found = [(name, place.linear.weights) for name, place in found if name != "head"]
    assert len(found) == 8
    probes = iter(written.opened.probes)
    for _, matrix in found:
        probe = next(probes)
        assert isinstance(matrix, Matrix)
        assert matrix.groups is not None
        assert str(matrix.groups.packing) == PACKED
        assert matrix.groups.packing.can_round_rows == (target == "sm_90a")
        kept = dense(matrix.values, matrix.groups)
        torch.testing.assert_close(kept, probe.values.float(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("begin", "group"), [(128, 128), (64, 64), (96, 32)])
def test_inputs_of_a_rank_may_begin_within_a_block(begin: int, group: int) -> None:
    """Groups are smaller then; of such no row is rounded."""
    part = inputs_of(replace(quantized(BLOCKS, 48, 512), row_type="e4m3"), begin, 256)
    form = form_of(part, KNOWN["sm_90a"], torch.bfloat16)
    assert form is not None
    made = form.make(part)
    assert isinstance(made, Matrix)
    assert made.groups is not None
    assert made.groups.packing.group == group
    assert made.groups.packing.can_round_rows == (group == 128)
    assert torch.equal(dense(made.values, made.groups), dequantise(part))


def bytes_on(directory: Path, target: str, quantization: str = "auto") -> int:
    config = EngineConfig(checkpoint=str(directory), quantization=quantization)
    return weight_bytes(config, read_config(directory), torch.bfloat16, KNOWN[target])


def test_bytes_are_half_of_16_bits(written: Written) -> None:
    """Beside a byte a weight, padded to whole blocks, is a scale of fp32 for 128 of them."""
    plain = bytes_on(written.directory, "sm_90a", "none")
    count, kept = 0, 0
    for probe in written.opened.probes:
        outputs, inputs = probe.values.shape
        count += outputs * inputs
        blocks = -(-inputs // 128)
        kept += -(-outputs // 16) * 16 * blocks * (128 + 4)
    for target in ("sm_80", "sm_90a"):
        assert bytes_on(written.directory, target) == plain - 2 * count + kept
    assert bytes_on(written.directory, "cpu") == plain


def logits(directory: Path, count: int, chunk: int, dtype: str = "bfloat16") -> torch.Tensor:
    """Of the token behind a prompt."""
    generation = Generation(random_prompts([count], 256)[0], 1)
    runner = make_runner(directory, dtype=dtype, max_model_len=1024)
    Driver(runner, keep_logits=True).finish([generation], chunk)
    return generation.logits[0].double()


@pytest.mark.parametrize(
    ("count", "chunk", "rounds", "kernels"),
    [
        (41, 8, False, {8: "packed_stream", 1: "packed_stream"}),
        (600, 600, True, {600: "unpacked_e4m3"}),
    ],
    ids=["few rows", "many"],
)
def test_logits_are_those_of_the_dequantised_model(
    count: int,
    chunk: int,
    rounds: bool,
    kernels: dict[int, str],
    written: Written,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels of a Hopper are chosen, and their oracles run. With few rows the error is that of
    16 bits; many are rounded to e4m3.
    """
    exact = logits(written.directory, count, chunk, "float32")
    wanted = logits(written.directory, count, chunk)
    monkeypatch.setattr(source, "target_of", lambda device: KNOWN["sm_90a"])
    chosen, choose = {}, linear.choose

    def on_hopper(spec: Spec) -> linear.Route:
        route = choose(spec._replace(target=KNOWN["sm_90a"]))
        if spec.packing is not None:
            chosen[spec.rows] = route.gemm.name
        return linear.Route(route.path, Implementation("oracle", gemm.oracle, "cpu"))

    monkeypatch.setattr(linear, "_routes", {})
    monkeypatch.setattr(linear, "choose", on_hopper)
    linear._are_rounded.cache_clear()
    found = logits(written.directory, count, chunk)
    linear._are_rounded.cache_clear()
    assert kernels.items() <= chosen.items()
    most = 0.15 * exact.norm() if rounds else 1.2 * (wanted - exact).norm()
    assert (found - exact).norm() <= most
