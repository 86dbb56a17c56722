"""The help of `slipstream compose` against the code that it describes."""

import argparse
import math
from pathlib import Path

import msgspec
import pytest
import torch
from slipstream import config
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.cache import kv_format
from slipstream.kernels.elementwise import eight_bits
from slipstream.kernels.runtime import jit
from slipstream.runner.plan import resolve
from slipstream_compose import cli

NOT_OFFERED = {"device", "load_format", "cuda_graphs"}  # for tests and benchmarks


def options() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    cli.add_parser(commands)
    return {action.dest: action for action in commands.choices["compose"]._actions}


def test_every_field_of_the_engine_is_an_option_with_its_own_help() -> None:
    offered = options()
    fields = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    assert fields.keys() - offered.keys() - {"model"} == NOT_OFFERED  # `model` is --model-name
    for name in fields.keys() & offered.keys() - {"checkpoint", "kv_cache_reuse"}:
        assert str(offered[name].help).endswith(config.help_of(name))
        default = fields[name]
        if isinstance(default, int) and default:
            assert f"(default: {default})" in config.help_of(name)
    assert offered["model_name"].help == config.help_of("model")


def test_adapters_of_a_file_as_vllm_has_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    file = tmp_path / "multi_lora.json"

    def read(content: str) -> str:
        file.write_text(content)
        given = ["compose", "--checkpoint", "c", "--output", "o", "--adapters", str(file)]
        adapters: str = parser.parse_args(given).adapters
        return adapters

    assert read('{"sql": "/a/sql", "chat": "b"}') == f"sql=/a/sql,chat={tmp_path / 'b'}"
    for wrong in ("{", "[]", '{"a": 1}', '{"a": ""}', '{"a=b": "c"}', '{"a": "b,c"}'):
        with pytest.raises(SystemExit):
            read(wrong)
        assert "multi_lora.json" in capsys.readouterr().err


def test_what_an_attention_window_needs_on_a_gpu() -> None:
    text = config.help_of("attention_window")
    assert "CPU" not in text
    assert "--kv-cache-dtype auto" in text
    widest = max(size for size in jit.HEAD_SIZES if not jit.has_large_heads(size))
    assert f"heads of at most {widest} " in text


def test_what_fp8_needs_of_a_gpu() -> None:
    major, minor = eight_bits.MIN_CAPABILITY
    assert f"compute capability {major}.{minor} or newer" in config.help_of("quantization")


def test_how_much_more_a_quantised_cache_holds() -> None:
    def gain(dtype: torch.dtype) -> float:
        ratios = [2 * size / kv_format.row_size(dtype, size) for size in jit.HEAD_SIZES]
        return math.floor(10 * min(ratios)) / 10

    text = config.help_of("kv_cache_dtype")
    assert f"in 8 bits at least {gain(torch.int8)} times" in text
    assert f"in 4 bits {gain(torch.uint8)} times" in text
    assert set(config.KV_CACHE_DTYPES) == {"auto", *kv_format.FORMATS}


def test_after_how_many_seconds_a_step_may_hang() -> None:
    lowest = config.MIN_STUCK_AFTER_S
    assert config.help_of("stuck_after_s").endswith(f"; {lowest} to 86400 (default: 60)")
    with pytest.raises(ConfigError, match=f"stuck_after_s = {lowest - 1} is below {lowest}"):
        resolve(EngineConfig(checkpoint="", stuck_after_s=lowest - 1))
