"""`--ignore`: what it names stays as it is, in the file, in its configuration and for readers."""

import json
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import Driver, Generation, make_runner
from fixtures.quantize import tiny
from safetensors.torch import load_file
from slipstream.errors import ConfigError
from slipstream.layers.residual import Residual
from slipstream_client.cli import main
from slipstream_convert.writer import Writer
from slipstream_quantize.ignored import ignored
from slipstream_quantize.job import Job, Report, write
from slipstream_quantize.opened import Opened, Running
from slipstream_quantize.recipe import settled

TEXT = torch.arange(4 * 64).view(4, 64) * 7 % 256
QKV = ["a.0.q", "a.0.k", "a.0.v"]
GROUPS = [QKV, ["a.0.down"], ["a.1.q", "a.1.k", "a.1.v"], ["a.1.down"]]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENTS = {"q_lora_rank": 48, "kv_lora_rank": 32, "v_head_dim": 16, "qk_nope_head_dim": 16}
_LATENTS |= {"qk_rope_head_dim": 16, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], []),
        (["lm_head"], []),  # which stays anyway
        (["down"], ["a.0.down", "a.1.down"]),
        (["0.down"], ["a.0.down"]),
        (["a.0"], [*QKV, "a.0.down"]),
        (["re:.*down$"], ["a.0.down", "a.1.down"]),
        (["re:a\\.1\\.[qkv]", "a.0.down"], ["a.0.down", "a.1.q", "a.1.k", "a.1.v"]),
    ],
)
def test_what_is_named(patterns: list[str], expected: list[str]) -> None:
    assert ignored(patterns, GROUPS, ["lm_head"]) == expected


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["dow"], r"--ignore dow: names no linear layer; there are 0\.q, 0\.k, 0\.v, 0\.down, "),
        (["re:down"], "--ignore re:down: names no linear layer"),  # from the beginning of a name
        (["re:("], r"--ignore re:\(: no regular expression: missing \)"),
        (["a.0.q"], r"names a\.0\.q but not a\.0\.k: both are of one GEMM"),
        (["a"], "names all linear layers, so there is nothing to quantise"),
    ],
)
def test_what_is_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ignored(patterns, GROUPS, ["lm_head"])


@pytest.mark.parametrize(
    ("family", "scheme", "pattern"),
    [
        ("llama", "awq-gptq", "down_proj"),
        ("llama", "awq", "gate_proj up_proj"),  # into whose rows scales would move
        ("llama", "fp8-block", "layers.0"),
        ("phi3", "int8-sq", "qkv_proj"),  # one matrix there, three in the decoder
        ("gpt2", "int4", "re:.*attn.c_proj"),
        ("nemotron", "int8-sq", "down_proj"),  # norms of 1 + what is stored
        ("qwen3_moe", "int4", "layers.0.mlp"),
        ("youtu", "int4", "q_a_proj kv_a_proj_with_mqa"),
    ],
)
def test_what_is_read_is_what_was_meant(
    family: str, scheme: str, pattern: str, tmp_path: Path
) -> None:
    own: dict[str, object] = {"num_key_value_heads": 4, "intermediate_size": 128}
    own |= {"qwen3_moe": _EXPERTS, "gpt2": {"n_inner": 96}, "youtu": _LATENTS}.get(family, {})
    directory = tiny.checkpoint(tmp_path / "original", family, **own)
    opened = Opened(directory, "cpu", "bfloat16", pattern.split())
    probes = list(opened.probes)
    recipe = settled(scheme, None, opened.has_experts, [p.values.shape[1] for p in probes])
    writer, output = Writer(tmp_path / "out"), tmp_path / "out"
    Job(opened, recipe, TEXT if recipe.needs_text else None, writer).run()
    write(opened, directory, recipe, Report("", {}), writer)
    before, after = (
        load_file(directory / "model.safetensors"),
        load_file(output / "model.safetensors"),
    )
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    key = "modules_to_not_convert" if scheme == "fp8-block" else "ignore"
    assert opened.ignored
    assert set(opened.ignored) <= set(config[key])
    for name in opened.ignored:
        kept = before[f"{name}.weight"]
        assert torch.equal(after[f"{name}.weight"].float(), kept.bfloat16().float())
    quantised = {name for probe in probes for name in probe.names}
    assert not {opened.names.stored(name) for name in quantised} & set(opened.ignored)
    for probe in probes:
        probe.rounding = None
    generation = Generation(TEXT[0, :40].tolist(), 1)
    runner = make_runner(output, quantization="none", dtype="float32")
    Driver(runner, keep_logits=True).finish([generation])
    with torch.inference_mode():
        sums = next(Running(opened, TEXT[:1, :40]).sums())[1]
        wanted = opened.decoder.logits(Residual(sums)).float()[-1]
    assert (generation.logits[0] - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def test_groups_are_those_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs of 96 have no groups of 64; without them there are."""
    directory = tiny.checkpoint(tmp_path / "original", "llama")
    how = ["quantize", "--checkpoint", str(directory), "--device", "cpu", "--scheme", "int4"]
    assert main([*how, "--output", str(tmp_path / "all"), "--no-measure"]) == 0
    more = ["--ignore", "down_proj", "--no-measure"]
    assert main([*how, "--output", str(tmp_path / "some"), *more]) == 0
    assert "2 matrices stay as they are (--ignore)" in capsys.readouterr().out
    groups = {}
    for name in ("all", "some"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
        groups[name] = weights["group_size"]
    assert groups == {"all": 32, "some": 64}
    report = json.loads((tmp_path / "some" / "quantize_report.json").read_text())
    assert report["ignored"] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]


@pytest.mark.parametrize(
    ("family", "own", "pattern", "named"),
    [
        ("qwen3_moe", _EXPERTS, "experts.1", r"experts\.1\.gate_proj"),
        ("youtu", _LATENTS, "q_a_proj", r"q_a_proj"),  # one GEMM in vLLM
    ],
)
def test_a_part_of_a_gemm_or_mixture_is_refused(
    family: str, own: dict[str, object], pattern: str, named: str, tmp_path: Path
) -> None:
    directory = tiny.checkpoint(tmp_path, family, **own)
    with pytest.raises(ConfigError, match=rf"{named} but not .*one mixture"):
        Opened(directory, "cpu", "bfloat16", [pattern])
