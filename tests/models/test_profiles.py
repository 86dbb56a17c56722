"""Profiles: modelled steps are near recorded ones, and the choice follows from the costs."""

import json

import msgspec
import pytest
import torch
from fixtures.scripts import scripts
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.profiles import (
    CARDS,
    GOALS,
    Profile,
    Split,
    StepModel,
    best_of_splits,
    profile_of,
    select,
    splits_of,
)
from slipstream.runner.matrices import weight_bytes
from slipstream.runner.plan import settle
from slipstream_client import cli
from slipstream_serve.server import repository_root

RESULTS = repository_root() / "benchmarks" / "results"
CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
ROWS = {
    "decode-bs1": (1, 256),
    "decode-bs32": (32, 256),
    "decode-bs128": (128, 256),
    "decode-bs256": (256, 192),
    "long-context": (16, 16_384),
}


@pytest.fixture(scope="module")
def recorded_shape(tmp_path_factory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("shape")
    with scripts(repository_root() / "benchmarks", ["shapes"]) as found:
        found.shapes.write_config("llama-3.1-8b", folder)
    return EngineConfig(checkpoint=str(folder), load_format="random")


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@pytest.mark.parametrize("name", ["H100", "H200"])
def test_modelled_steps_are_within_15_percent_of_recorded_ones(recorded_shape, name, quantization):
    table = json.loads((RESULTS / f"step-{name.lower()}.json").read_text())
    prefix = "fp8-" if quantization == "fp8" else ""
    measured = {row["row"]: row["ours"] for row in table["rows"] if row["ours"]}
    config = msgspec.structs.replace(recorded_shape, quantization=quantization)
    plan = settle(config, torch.device("cuda", 0))
    card = CARDS[name]
    model = StepModel(plan, card, weight_bytes(config, plan.model, plan.dtype, card.target))
    compared = [row for row in ROWS if prefix + row in measured]
    assert compared or (name, quantization) == ("H100", "fp8")
    for row in compared:
        assert model.step_ms(*ROWS[row]) == pytest.approx(measured[prefix + row], rel=0.15), row


def made(weights: str, cache: str, one_ms: float, rows: int, many_ms: float) -> Profile:
    return Profile(weights, cache, 1, 1, 1.0, one_ms, rows, many_ms)


def test_the_best_is_chosen_and_fewer_bits_only_if_they_must():
    plain, fp8 = made("auto", "auto", 5.0, 100, 20.0), made("fp8", "auto", 3.0, 100, 20.1)
    int4 = made("int4", "auto", 1.0, 200, 10.0)
    assert select([plain, fp8, int4], "latency") == fp8
    assert select([plain, fp8, int4], "throughput") == plain  # equal within 3 %: as stored
    no = [Profile("auto", "auto", refused="no room")]
    assert select([*no, int4], "latency") == int4
    with pytest.raises(ConfigError, match="no room"):
        select(no, "latency")
    with pytest.raises(ConfigError, match="goal = 'cheap' is not one of latency, throughput"):
        select([plain], "cheap")


def test_throughput_lets_in_as_many_sequences_as_have_room():
    full, half = (Profile("fp8", "fp8", cache_tokens=n) for n in (2_000_000, 300_000))
    assert full.options("throughput")["max_num_seqs"] == 1024
    assert half.options("throughput")["max_num_seqs"] == 576  # 585 with 512 tokens each
    assert "max_num_seqs" not in full.options("latency")


@pytest.mark.parametrize("count", [1, 2, 6, 8, 16])
def test_every_gpu_is_used_and_no_engine_has_more_than_eight(count):
    found = splits_of(count)
    assert len(set(found)) == len(found)
    assert Split(count) in found
    for each in found:
        assert each.replicas * each.tensor * each.pipeline == count
        assert each.tensor * each.pipeline <= 8


def shape_of(name: str, folder) -> EngineConfig:
    with scripts(repository_root() / "benchmarks", ["shapes"]) as found:
        found.shapes.write_config(name, folder)
    return EngineConfig(checkpoint=str(folder), load_format="random")


@pytest.mark.rest
def test_what_no_gpu_holds_goes_over_several(tmp_path):
    config, card = shape_of("llama-3.3-70b", tmp_path), CARDS["H100"]
    found = best_of_splits(config, card, 2, "latency")
    kept = {each.split: each.quantization for each in found}
    assert kept == {Split(2): "int4", Split(1, 1, 2): "fp8", Split(1, 2): "fp8"}
    best = select(found, "latency")
    assert best.split == Split(1, 2)  # a token comes soonest, and accuracy is kept
    assert best.options("latency")["tensor_parallel"] == 2
    assert all(each.weight_bytes < 72e9 for each in found if not each.refused)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 4), (2, 2)])
def test_a_rank_costs_what_its_engine_will_have(recorded_shape, tensor, pipeline):
    """Memory is that of the fullest rank, as its plan has it."""
    found = profile_of(recorded_shape, CARDS["H200"], Split(1, tensor, pipeline))
    config = msgspec.structs.replace(
        recorded_shape, tensor_parallel=tensor, pipeline_parallel=pipeline
    )
    plans = [settle(config, torch.device("cuda", 0), rank) for rank in range(tensor * pipeline)]
    target = CARDS["H200"].target
    weights = [weight_bytes(config, each.model, each.dtype, target) for each in plans]
    assert found.weight_bytes == max(weights)
    alone = profile_of(recorded_shape, CARDS["H200"])
    assert sum(weights) == pytest.approx(alone.weight_bytes, rel=0.02)
    assert (found.one_ms < alone.one_ms) == (tensor > 1)


@pytest.mark.parametrize("goal", GOALS)
def test_the_command_prints_costs_and_the_options_of_compose(goal, capsys):
    words = ["profile", "select", "--checkpoint", str(CHECKPOINT), "--gpus", "H100", "H100"]
    assert cli.main([*words, "--goal", goal]) == 0
    out = capsys.readouterr().out
    assert "2 replicas" in out
    assert f"{goal}: weights " in out
    assert f"--max-num-batched-tokens {2048 if goal == 'latency' else 8192}" in out
    assert ("--max-num-seqs 1024" in out) == (
        goal == "throughput"
    )  # a small model: all that can be
    assert cli.main(["profile", "list", "--checkpoint", str(CHECKPOINT), "--gpus", "A100"]) == 0
    assert "refused: A100 has no fp8" in capsys.readouterr().out


def test_compose_takes_a_profile_and_an_operators_options_go_before_it(tmp_path, capsys):
    words = ["compose", "--checkpoint", str(CHECKPOINT), "--output", str(tmp_path / "models")]
    words += ["--profile", "auto", "--gpus", "A100", "--max-num-batched-tokens", "1024"]
    assert cli.main(words) == 0
    assert "profile for throughput on A100" in capsys.readouterr().out
    settings = json.loads((tmp_path / "models/tensorrt_llm/1/model.json").read_text())["engine"]
    assert settings["max_num_batched_tokens"] == 1024
    if not torch.cuda.is_available():
        assert cli.main([*words[:5], "--profile", "auto"]) == 1
        assert "gpus: none is here; name one with --gpus" in capsys.readouterr().err
