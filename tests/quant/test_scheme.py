"""A scheme is one file: this one is made up, and a model is served in it."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from slipstream import quant
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.gemm.op import Matrix
from slipstream.layers.linear import Linear
from slipstream.models.fileless import RandomSource
from slipstream.models.source import Weights
from slipstream.quant.scheme import MatrixSource, Scheme
from slipstream.runner.plan import resolve
from torch import Tensor


class Halves(NamedTuple):
    """Two matrices whose sum the weights are."""

    coarse: Tensor
    fine: Tensor


class Split(Scheme):
    """Weights as a sum of two bfloat16: 16 of fp32's 24 bits, which no GEMM here takes."""

    name = "split"

    def detects(self, w: MatrixSource, names: Sequence[str]) -> bool:
        return all(w.has(f"{name}.coarse") for name in names)

    def read(
        self, w: MatrixSource, names: Sequence[str], outputs: Sequence[int], inputs: int
    ) -> Halves:
        if self.detects(w, names):
            halves = [
                w.stacked([f"{name}.{half}" for name in names], outputs, inputs)
                for half in Halves._fields
            ]
            return Halves(*(half.bfloat16() for half in halves))
        weight = w.stacked([f"{name}.weight" for name in names], outputs, inputs).float()
        coarse = weight.bfloat16()
        return Halves(coarse, (weight - coarse.float()).bfloat16())

    def matmul(self, x: Tensor, weights: Halves, bias: Tensor | None) -> Tensor:
        y = x.float() @ (weights.coarse.float() + weights.fine.float()).T
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def check(self, sizes: Mapping[str, int], device: torch.device, dtype: torch.dtype) -> None:
        if dtype == torch.float16:
            raise ConfigError("quantization = 'split' needs more exponents than float16 has")


@pytest.fixture
def split() -> Iterator[Split]:
    scheme = Split()
    quant.register(scheme)
    yield scheme
    quant.unregister(scheme.name)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.usefixtures("split")
def test_a_model_is_served_in_a_made_up_scheme(
    family: str, deterministic: bool, tmp_path: Path
) -> None:
    model = make_model(family, attention_bias=True) if family == "llama" else make_model(family)
    directory = save(model, tmp_path)
    prompts = random_prompts([37, 1, 90])
    settings = {"deterministic": deterministic}
    plain, ours = (
        make_runner(directory, quantization=name, **settings) for name in ("none", "split")
    )
    block = ours._model.blocks[0]
    assert isinstance(block.mlp.down.linear.weights, Halves)
    assert isinstance(ours._model.head.product.linear.weights, Matrix)
    outputs = []
    for runner in (plain, ours):
        generations = [Generation(prompt, 8) for prompt in prompts]
        Driver(runner).finish(generations, chunk=37)
        outputs.append([generation.outputs for generation in generations])
    assert outputs[0] == outputs[1]


@pytest.mark.usefixtures("split")
def test_it_is_configured_as_any_other(tmp_path: Path) -> None:
    directory = save(make_model(), tmp_path)
    config = EngineConfig(checkpoint=str(directory), device="cpu", quantization="split")
    plan = resolve(config)
    assert "split weights" in plan.banner(100)
    with pytest.raises(ConfigError, match="more exponents"):
        resolve(EngineConfig(checkpoint=str(directory), quantization="split", dtype="float16"))
    with pytest.raises(ConfigError, match=r"'int5' is not one of auto, none, .*split"):
        resolve(EngineConfig(checkpoint=str(directory), quantization="int5"))


class Stored(RandomSource):
    """A checkpoint that comes in the made-up scheme, but for one matrix."""

    def has(self, name: str) -> bool:
        return not name.startswith("plain")


def test_a_checkpoint_that_comes_in_a_scheme_says_so(split: Split) -> None:
    cpu = torch.device("cpu")
    w = Weights(Stored(cpu), cpu, torch.float32, "none")
    stored = Linear.read(w, ("a", "b"), (8, 8), 16)
    assert stored.scheme is split
    assert isinstance(stored.weights, Halves)
    assert stored(torch.ones(2, 16)).shape == (2, 16)
    assert Linear.read(w, ("plain",), (8,), 16).scheme is quant.named("none")


def test_names_need_no_torch() -> None:
    program = (
        "import sys; from slipstream.quant import names; print(names(), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{quant.names()} False\n"
    assert quant.names()[:2] == ("auto", "none")
