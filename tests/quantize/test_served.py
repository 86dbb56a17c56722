"""vLLM serves what we write: log probs of its own loader and kernels, kept, beside ours."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import Driver, Generation, make_runner, rewrite
from fixtures.quantize import served, tiny
from fixtures.quantize.vllm_serves import PROMPTS
from safetensors.torch import load_file

# Nats, over all tokens. vLLM computes in bfloat16, which costs 0.012 in the model of 16 bits. Rows
# that are rounded to 8 bits, as vLLM's are, differ from rows in 16 bits, as ours are on a CPU.
MOST = {"original": 0.02, "int4": 0.02, "int4-symmetric": 0.02, "int8-sq": 0.05, "fp8": 0.1}
APART = 0.25  # of models whose weights are others, as the schemes' are by their rounding


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a format; `original`: in 16 bits."""
    folder = tmp_path_factory.mktemp("served")
    original = served.original(folder)

    @cache
    def made(name: str) -> Path:
        if name != "original":
            tiny.quantised(original, served.SERVED[name], folder / name)
        return folder / name

    return made


def off(name: str, directory: Path) -> float:
    """Return the mean distance of the log probs of a directory from what vLLM made of a format."""
    generations = [Generation(prompt, 1) for prompt in PROMPTS]
    Driver(make_runner(directory), keep_logits=True).finish(generations)
    logits = torch.stack([each.logits[0] for each in generations])
    return float((logits.log_softmax(-1) - load_file(served.LOG_PROBS)[name]).abs().mean())


@pytest.mark.parametrize("name", MOST)
def test_vllm_computes_what_we_compute(name: str, written: Callable[[str], Path]) -> None:
    """`fixtures/quantize/served.py` says how the fixture is made again."""
    assert off(name, written(name)) <= MOST[name]


@pytest.mark.parametrize("name", ["int4", "int4-symmetric", "int8-sq", "fp8"])
def test_another_reading_would_be_seen(name: str, written: Callable[[str], Path]) -> None:
    """Scales of the rows above, and with them other weights, are far from what vLLM computes."""

    def moved(tensors: dict[str, torch.Tensor]) -> None:
        for part in [each for each in tensors if each.endswith("weight_scale")]:
            tensors[part] = tensors[part].roll(1, 0)

    directory = written(name)
    path = directory / "model.safetensors"
    kept = path.read_bytes()
    rewrite(directory, moved)
    try:
        assert off(name, directory) > APART
    finally:
        path.write_bytes(kept)
