"""Commands that take a checkpoint take a GGUF file: `slipstream kernels` and `slipstream tune`."""

import argparse
from pathlib import Path

import pytest
from fixtures.models.checkpoints import make_model
from fixtures.models.gguf_files import SIZES, write_gguf
from slipstream.errors import CheckpointError
from slipstream_serve import kernels


def run(path: Path) -> int:
    parser = argparse.ArgumentParser()
    kernels.add_parser(parser.add_subparsers())
    arguments = ["kernels", "--checkpoint", str(path), "--architecture", "sm_90a"]
    return kernels.run(parser.parse_args([*arguments, "--rows", "1"]))


@pytest.mark.rest
def test_the_table_of_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(make_model("qwen3", **SIZES), "qwen3", tmp_path / "model.gguf", "Q4_0")
    assert run(path) == 0
    assert "Qwen3ForCausalLM, bfloat16, on sm_90a" in capfd.readouterr().out


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.gguf: no such file"):
        run(tmp_path / "absent.gguf")
