"""The command `slipstream kernels`: what is printed of a model, and of which configuration."""

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from fixtures.models.checkpoints import make_model, save
from fixtures.quantize import tiny
from slipstream.config import EngineConfig
from slipstream.runner import kernels as printer
from slipstream_client.cli import OneLineParser
from slipstream_serve import kernels


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 512, "intermediate_size": 1024}
    return save(make_model("llama", **sizes), tmp_path_factory.mktemp("kernels"))


def parse(*arguments: str) -> argparse.Namespace:
    parser = OneLineParser()
    kernels.add_parser(parser.add_subparsers())
    return parser.parse_args(["kernels", *arguments])


@pytest.mark.rest
def test_a_reader_that_has_enough_is_no_error(checkpoint: Path) -> None:
    config = msgspec.json.encode(EngineConfig(checkpoint=str(checkpoint)))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "slipstream.runner.kernels"]
    done = subprocess.run(command, input=config, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_empty_architecture_is_not_this_machine(checkpoint: Path, capfd) -> None:
    assert kernels.run(parse("--checkpoint", str(checkpoint), "--architecture", "")) == 2
    assert "--architecture : not one of cpu" in capfd.readouterr().err


def printed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: EngineConfig,
    *arguments: str,
) -> tuple[int, list[str], str]:
    """The exit code, the lines of the table, and stderr."""
    stdin = SimpleNamespace(buffer=io.BytesIO(msgspec.json.encode(config)))
    monkeypatch.setattr(sys, "stdin", stdin)
    code = printer.main([*arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_which_kernel_for_which_matrix_and_why_not_the_others(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(checkpoint=str(checkpoint), dtype="bfloat16")
    arguments = ("--architecture", "sm_90a", "--rows", "1", "64", "256")
    code, lines, _ = printed(monkeypatch, capsys, config, *arguments)
    assert code == 0
    assert lines[0] == "LlamaForCausalLM, bfloat16, on sm_90a, 132 multiprocessors"
    heads = [line for line in lines if not line.startswith(" ")]
    assert [line.split(":")[0] for line in heads[1:]] == ["qkv", "out", "gate_up", "down", "head"]
    assert heads[3] == "gate_up: 2 x [2048, 512] bfloat16: norm, GEMM, silu"
    chosen = [line.split(maxsplit=1) for line in lines if line[:8].strip().isdigit()]
    assert chosen[:3] == [["1", "gemv"], ["64", "norm + skinny"], ["256", "norm + cublaslt"]]
    assert "         not gemv: takes 1 to 2 rows" in lines
    assert "         not cublaslt: norm + cublaslt costs 3, not 2" in lines


def test_of_other_machines_and_schemes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(checkpoint=str(checkpoint), quantization="fp8", dtype="bfloat16")
    for architecture, line in {
        "sm_89": "      3  quantise + cublaslt + behind",
        "sm_90a": "      3  quantise + skinny",
        "cpu": "      3  quantise + torch + behind",
        "sm_80": "      3  none",  # it has no e4m3
    }.items():
        arguments = ("--architecture", architecture, "--rows", "3")
        code, lines, _ = printed(monkeypatch, capsys, config, *arguments)
        assert (code, lines[2]) == (0, line)


def test_packed_weights_are_listed_as_such(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(checkpoint=str(checkpoint), quantization="int4", dtype="bfloat16")
    for architecture, kind, chosen in (
        ("sm_90a", "4 bits by 64, packed", ["packed_stream", "packed_pipe", "pipe_scaled"]),
        ("sm_100a", "4 bits by 64, packed", ["packed", "packed", "unpacked"]),
        ("cpu", "bfloat16", ["torch"] * 3),
    ):
        arguments = ("--architecture", architecture, "--rows", "1", "64", "256")
        code, lines, _ = printed(monkeypatch, capsys, config, *arguments)
        assert code == 0
        assert f"gate_up: 2 x [2048, 512] {kind}: norm, GEMM, silu" in lines
        assert next(line for line in lines if line.startswith("head")).split()[5] == "bfloat16:"
        rows = [line.split()[-1] for line in lines if line[:8].strip().isdigit()]
        assert rows[:3] == chosen


def test_blocks_of_e4m3_and_the_rows_from_which_they_are_multiplied_in_e4m3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tiny.checkpoint(tmp_path / "plain", hidden_size=256, intermediate_size=512, head_dim=64)
    tiny.quantised(plain, tiny.FORMATS["fp8-block"], tmp_path / "blocks")
    config = EngineConfig(checkpoint=str(tmp_path / "blocks"), dtype="bfloat16")
    for architecture, chosen in {
        "sm_90a": ["packed_pipe", "packed_pipe", "unpacked", "unpacked_e4m3 + behind"],
        "sm_100a": ["packed", "packed", "unpacked", "unpacked"],
    }.items():
        arguments = ("--architecture", architecture, "--rows", "16", "64", "256", "512")
        code, lines, _ = printed(monkeypatch, capsys, config, *arguments)
        assert code == 0
        gate_up = lines.index("gate_up: 2 x [1024, 256] e4m3 by 128, packed: norm, GEMM, silu")
        rows = [line.split(maxsplit=1) for line in lines[gate_up:] if line[:8].strip().isdigit()]
        assert [each.split(" + ", 1)[1] for _, each in rows[:4]] == chosen


def test_a_gate_that_no_gemm_fuses_and_random_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(make_model("gemma3", hidden_size=256), tmp_path)
    config = EngineConfig(checkpoint=str(folder), dtype="bfloat16", load_format="random")
    arguments = ("--architecture", "sm_90a", "--rows", "1")
    code, lines, _ = printed(monkeypatch, capsys, config, *arguments)
    assert code == 0
    assert "      1  norm + gemv + gelu" in lines


EXPERTS = {  # of `lines`: what multiplies with gates and ups, and with what follows, by rows
    ("auto", "sm_90a", False): {
        1: ("skinny, tiles of 8 rows", "down_add, tiles of 8 rows"),
        64: ("tiled, tiles of 16 rows", "tiled, tiles of 16 rows + combine"),
        512: ("piped, tiles of 128 rows", "piped, tiles of 128 rows + combine"),
    },
    ("auto", "sm_90a", True): {
        1: ("tiled, tiles of 16 rows", "tiled, tiles of 16 rows + combine"),
        512: ("tiled, tiles of 64 rows", "tiled, tiles of 64 rows + combine"),
    },
    ("auto", "sm_80", False): {
        512: ("tiled, tiles of 64 rows", "tiled, tiles of 64 rows + combine")
    },
    ("int4", "sm_89", False): {
        1: ("packed, tiles of 8 rows", "packed, tiles of 8 rows + combine"),
        512: ("packed, tiles of 32 rows", "packed, tiles of 32 rows + combine"),
    },
    ("fp8", "cpu", False): {1: ("torch", "torch")},
}


@pytest.mark.parametrize("which", EXPERTS, ids=str)
def test_experts_are_listed_with_their_tiles(
    which: tuple[str, str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantization, architecture, deterministic = which
    sizes = {"num_experts": 16, "moe_intermediate_size": 128, "num_experts_per_tok": 2}
    folder = save(make_model("qwen3_moe", hidden_size=128, **sizes), tmp_path)
    config = EngineConfig(
        checkpoint=str(folder),
        load_format="random",
        quantization=quantization,
        dtype="float32" if architecture == "cpu" else "bfloat16",
        deterministic=deterministic,
    )
    rows = [str(each) for each in EXPERTS[which]]
    given = ("--architecture", architecture, "--rows", *rows)
    code, lines, _ = printed(monkeypatch, capsys, config, *given)
    assert code == 0
    up = next(i for i, line in enumerate(lines) if line.startswith("experts gate_up: "))
    down = next(i for i, line in enumerate(lines) if line.startswith("experts down: "))
    assert "16 of [256, 128]" in lines[up]
    assert "16 of [128, 128]" in lines[down]
    for part, place in ((lines[up:down], 0), (lines[down:], 1)):
        chosen = dict(line.split(maxsplit=1) for line in part if line[:8].strip().isdigit())
        assert chosen == {str(each): both[place] for each, both in EXPERTS[which].items()}


def test_what_chooses_experts_and_why_others_do_not_multiply_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(make_model("qwen3_moe", hidden_size=128), tmp_path)
    config = EngineConfig(checkpoint=str(folder), dtype="bfloat16", load_format="random")
    arguments = ("--architecture", "sm_90a", "--rows", "1", "32")
    code, lines, _ = printed(monkeypatch, capsys, config, *arguments)
    assert code == 0
    assert any(line.startswith("router: ") for line in lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("choice: "))
    assert lines[at + 1] == "      1  router"
    assert lines[at + 2] == "     32  norm + GEMM of router + route"
    assert lines[at + 3].startswith("         not router: takes 1 to 8 rows")
    assert "         not packed: takes packed weights" in lines[at:]
    assert "         not skinny: takes tiles of 8 rows, not 16" in lines[at:]
    assert "         not down_add: takes 1 to 8 rows" in lines[at:]


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({}, ("--architecture", "sm_1"), "--architecture sm_1: not one of cpu, sm_80"),
        ({"quantization": "int5"}, (), "quantization = 'int5' is not one of auto, none, fp8"),
        ({"checkpoint": "/nowhere"}, (), "/nowhere: no such directory"),
    ],
)
def test_what_cannot_be_printed(
    changes: dict[str, str],
    arguments: tuple[str, ...],
    words: str,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = EngineConfig(**{"checkpoint": str(checkpoint)} | changes)
    code, lines, error = printed(monkeypatch, capsys, config, *arguments)
    assert (code, lines) == (2, [])
    assert error.startswith("slipstream kernels: ")
    assert words in error
    assert error.count("\n") == 1


def test_the_command_runs_in_the_engines_python(checkpoint: Path, noting_python: Path) -> None:
    line = ("--architecture", "sm_90a", "--rows", "8", "64", "--quantization", "fp8")
    assert kernels.run(parse("--checkpoint", str(checkpoint), *line)) == 3
    arguments, config = json.loads(noting_python.read_text())
    asked = ["--architecture", "sm_90a", "--rows", "8", "64"]
    assert arguments == ["-P", "-m", "slipstream.runner.kernels", *asked]
    assert (config["checkpoint"], config["quantization"]) == (str(checkpoint), "fp8")
