"""`slipstream quantize` on a GPU: the errors of its layers are those of a CPU, as are its files."""

import json
from pathlib import Path

import pytest
from fixtures.quantize import tiny
from safetensors.torch import load_file
from slipstream_client.cli import main
from slipstream_quantize.recipe import RECIPES

pytestmark = pytest.mark.gpu
TEXT = "".join(f"{i} bottles of ink stand on the wall, {i * i} of them full.\n" for i in range(99))
SIZES = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("scheme", RECIPES)
def test_a_gpu_makes_what_a_cpu_makes(scheme: str, family: str, tmp_path: Path) -> None:
    directory = tiny.checkpoint(tmp_path / "original", family, **SIZES)
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--measure", str(tmp_path / "text.txt"), "--dtype", "bfloat16"]
    if RECIPES[scheme].needs_text:
        options += ["--calibration", str(tmp_path / "text.txt"), "--samples", "16"]
        options += ["--sample-length", "64"]
    reports = []
    for device in ("cpu", "cuda"):
        where = ["--checkpoint", str(directory), "--output", str(tmp_path / device)]
        assert main(["quantize", *where, "--scheme", scheme, "--device", device, *options]) == 0
        reports.append(json.loads((tmp_path / device / "quantize_report.json").read_text()))
    cpu, gpu = reports
    for name, error in cpu["errors"].items():
        assert gpu["errors"][name] == pytest.approx(error, rel=0.3, abs=1e-6)
    assert gpu["bits_per_byte_after"] == pytest.approx(cpu["bits_per_byte_after"], rel=0.02)
    files = [load_file(tmp_path / device / "model.safetensors") for device in ("cpu", "cuda")]
    shapes = [{name: (x.shape, x.dtype) for name, x in tensors.items()} for tensors in files]
    assert shapes[0] == shapes[1]
