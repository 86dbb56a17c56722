"""Profiles: modelled steps are near recorded ones, and the choice follows from the costs."""

import json
import re
from collections import defaultdict

import msgspec
import pytest
import torch
from fixtures.quantize import tiny
from fixtures.scripts import scripts
from fixtures.tiers import quick_of
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.profiles import (
    CARDS,
    GOALS,
    Card,
    Profile,
    Split,
    StepModel,
    best_of_splits,
    profile_of,
    profiles,
    select,
    splits_of,
)
from slipstream.runner.matrices import weight_bytes, weight_parts
from slipstream.runner.memory import num_blocks
from slipstream.runner.plan import settle
from slipstream_client import cli
from slipstream_compose.profile import table
from slipstream_serve.server import repository_root

RESULTS = repository_root() / "benchmarks" / "results"
CHECKPOINT = repository_root() / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
FAMILIES = ["families", "driving", "engine", "limits", "shapes", "workloads"]
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


def step_model(config: EngineConfig, card: Card) -> StepModel:
    plan = settle(config, torch.device("cuda", 0))
    return StepModel(plan, card, weight_parts(config, plan.model, plan.dtype, card.target))


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
@pytest.mark.parametrize("name", ["H100", "H200"])
def test_modelled_steps_are_within_15_percent_of_recorded_ones(recorded_shape, name, quantization):
    table = json.loads((RESULTS / f"step-{name.lower()}.json").read_text())
    prefix = "fp8-" if quantization == "fp8" else ""
    measured = {row["row"]: row["ours"] for row in table["rows"] if row["ours"]}
    model = step_model(
        msgspec.structs.replace(recorded_shape, quantization=quantization), CARDS[name]
    )
    compared = [row for row in ROWS if prefix + row in measured]
    assert compared or (name, quantization) == ("H100", "fp8")
    for row in compared:
        assert model.step_ms(*ROWS[row]) == pytest.approx(measured[prefix + row], rel=0.15), row
    if quantization == "auto":  # 32 tokens behind 128
        for rows, ms in table["pareto"]["ours"].items():
            assert model.step_ms(int(rows), 144) == pytest.approx(ms, rel=0.15), rows


def columns(name: str, first: int) -> list[list[str]]:
    """Return the lines of a recorded table, below its names of columns."""
    lines = (RESULTS / name).read_text().splitlines()[first:]
    return [line.split() for line in lines[: lines.index("")]]


@pytest.mark.parametrize("row", columns("2026-11-29-families-h200.txt", 2), ids=lambda row: row[0])
def test_a_step_of_another_family_is_within_15_percent_of_the_recorded_one(tmp_path, row):
    name, ms, read, *_ = row
    with scripts(repository_root() / "benchmarks", FAMILIES) as found:
        (tmp_path / "config.json").write_text(json.dumps(found.families.FAMILIES[name]))
    model = step_model(EngineConfig(checkpoint=str(tmp_path), load_format="random"), CARDS["H200"])
    context = 128 + 256 // 2
    assert sum(model.read_bytes(1, context)) == pytest.approx(1e9 * float(read), rel=0.03)
    assert model.step_ms(1, context) == pytest.approx(float(ms), rel=0.15)


@pytest.mark.parametrize(
    "shape", [pytest.param("qwen3-30b-a3b", marks=pytest.mark.rest), "mixtral-8x7b"]
)
def test_a_step_of_a_mixture_reads_the_experts_that_its_rows_choose(tmp_path, shape):
    rows = [row for row in columns("2026-11-30-mixtures-h200.txt", 2) if row[0] == shape]
    assert [row[2] for row in rows] == ["1", "32", "128"]
    quantization = "fp8" if rows[0][1] == "fp8" else "auto"
    config = msgspec.structs.replace(shape_of(shape, tmp_path), quantization=quantization)
    model = step_model(config, CARDS["H200"])
    for _, _, count, dense, experts, cache, *_, ms, _ in rows:
        context = 128 + 128 // 2
        read = model.read_bytes(int(count), context)
        assert read[0] == pytest.approx(1e9 * (float(dense) + float(cache)), rel=0.03)
        assert read[1] == pytest.approx(1e9 * float(experts), rel=0.01)
        assert model.step_ms(int(count), context) == pytest.approx(float(ms), rel=0.15)


@pytest.mark.rest
def test_steps_of_a_mixture_in_4_bits_are_within_15_percent_of_the_recorded_ones(tmp_path):
    """Compare the last recording, whose rows chose as many experts as are counted, but 128 rows."""
    text = (RESULTS / "2026-11-30-mixtures-h200.txt").read_text()
    rows = re.findall(r"^qwen3-30b-a3b +int4 +(\d+) .* ([\d.]+) +[\d.]+%$", text, re.MULTILINE)
    recorded = [(int(count), float(ms)) for count, ms in rows[-3:-1]]
    assert [count for count, _ in recorded] == [1, 32]
    config = shape_of("qwen3-30b-a3b", tmp_path)
    model = step_model(msgspec.structs.replace(config, quantization="int4"), CARDS["H200"])
    for count, ms in recorded:
        assert model.step_ms(count, 128 + 128 // 2) == pytest.approx(ms, rel=0.15)


def test_experts_in_8_bits_are_read_as_other_matrices_in_8_bits(tmp_path):
    """No card has been measured with them."""
    config = shape_of("mixtral-8x7b", tmp_path)
    plain, packed = (
        step_model(msgspec.structs.replace(config, quantization=scheme), CARDS["H200"])
        for scheme in ("auto", "int8")
    )
    whole, experts = plain.read_bytes(32, 128)[1], packed.read_bytes(32, 128)[1]
    assert experts == pytest.approx(whole / 2, rel=0.02)
    least = 1e3 * experts / (0.74 * CARDS["H200"].read)
    assert 1.0 < packed.step_ms(32, 128) / least < 1.5


def test_experts_in_e4m3_take_longer_where_their_rows_stay(tmp_path):
    """In deterministic mode, and not where weights alone have fewer bits."""
    config = msgspec.structs.replace(shape_of("mixtral-8x7b", tmp_path), quantization="fp8")
    fixed = msgspec.structs.replace(config, deterministic=True)
    rounded, kept = (step_model(each, CARDS["H200"]) for each in (config, fixed))
    assert rounded.read_bytes(128, 192) == kept.read_bytes(128, 192)
    assert kept.step_ms(128, 192) > 1.3 * rounded.step_ms(128, 192)
    plan, target = settle(config, torch.device("cuda", 0)), CARDS["H200"].target
    parts = weight_parts(config, plan.model, plan.dtype, target)
    assert parts.rounded_experts == parts.expert_elements > 45e9
    for scheme in ("auto", "int8", "w8a8"):
        other = msgspec.structs.replace(config, quantization=scheme)
        assert weight_parts(other, plan.model, plan.dtype, target).rounded_experts == 0


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8", "w8a8"])
def test_a_step_of_fewer_bits_is_within_15_percent_of_the_recorded_one(
    recorded_shape, quantization
):
    model = step_model(
        msgspec.structs.replace(recorded_shape, quantization=quantization), CARDS["H200"]
    )
    name = f"2026-11-30-schemes{'-int8' if quantization == 'w8a8' else ''}-h200.txt"
    [row] = [row for row in columns(name, 4) if row[0] == quantization]
    for count, ms in zip((1, 16, 64, 128), row[1:5], strict=True):  # 256 tokens behind 128
        assert model.step_ms(count, 256) == pytest.approx(float(ms), rel=0.15), count


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_ranks_is_within_15_percent_of_the_recorded_one(recorded_shape, ranks):
    config = msgspec.structs.replace(recorded_shape, tensor_parallel=ranks)
    model = step_model(config, CARDS["H200"])
    table = (RESULTS / "2026-11-29-ranks-2-h200.txt").read_text().partition("\nrows ")[2]
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +0\.\d+ ", table, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "32", "128"]
    for count, of_two, of_one in rows:  # 128 tokens behind 128
        ms = float(of_two if ranks == 2 else of_one)
        assert model.step_ms(int(count), 192) == pytest.approx(ms, rel=0.15), count


def test_a_step_of_a_larger_model_on_ranks_is_within_15_percent_of_the_recorded_one(tmp_path):
    text = (RESULTS / "2026-11-29-ranks-2-h200.txt").read_text()
    found = re.search(r"^70B shape, fp8.*: ([\d.]+), ([\d.]+) and ([\d.]+) ms", text, re.MULTILINE)
    assert found is not None
    config = shape_of("llama-3.3-70b", tmp_path)
    config = msgspec.structs.replace(config, tensor_parallel=2, quantization="fp8")
    model = step_model(config, CARDS["H200"])
    for count, ms in zip((1, 32, 128), found.groups(), strict=True):
        assert model.step_ms(count, 192) == pytest.approx(float(ms), rel=0.15), count


def test_gemms_of_4_bits_are_within_15_percent_of_recorded_ones(recorded_shape):
    """Recorded are the chosen kernels of each matrix, with rows in 16 bits; 32 layers have each."""
    config = msgspec.structs.replace(recorded_shape, quantization="int4")
    model, measured = step_model(config, CARDS["H200"]), defaultdict[int, float](float)
    for line in (RESULTS / "2026-11-28-packed-weights-h200.txt").read_text().splitlines():
        if match := re.match(r" *\d+ +(\d+) \*(packed|pipe_scaled)\w* +([\d.]+)", line):
            measured[int(match[1])] += 32 * 1e-6 * float(match[3])
    assert list(measured) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for rows, seconds in measured.items():
        assert model.packed_s(rows) == pytest.approx(seconds, rel=0.15), rows


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_the_cache_is_what_the_engine_makes_of_the_rest(recorded_shape, cache):
    config = msgspec.structs.replace(recorded_shape, kv_cache_dtype=cache, max_num_seqs=1024)
    card, plan = CARDS["H100"], settle(config, torch.device("cuda", 0))
    found = profile_of(config, card)
    blocks = num_blocks(plan, int(card.memory) - found.weight_bytes - 2_000_000_000)
    assert found.cache_tokens == plan.tokens_of(blocks)
    assert found.cache_tokens == pytest.approx(
        0.9 * (84.9e9 - 16.06e9 - 2e9) / found.token_bytes, rel=1e-3
    )


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


def test_throughput_on_an_h200_is_what_a_full_engine_was_recorded_with(recorded_shape):
    """The rows of saturation: precision, cache, sequences and tokens of a step."""
    options = select(profiles(recorded_shape, CARDS["H200"]), "throughput").options("throughput")
    said = (RESULTS / "2026-11-30-saturation-h200.txt").read_text().splitlines()[0]
    assert f"{options['quantization']} weights, {options['kv_cache_dtype']} cache" in said
    assert f"{options['max_num_seqs']:,} sequences" in said
    assert f"{options['max_num_batched_tokens']:,} tokens a step" in said


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
    config, card = shape_of("llama-3.3-70b", tmp_path), CARDS["L40S"]
    found = best_of_splits(config, card, 2, "latency")
    kept = {each.split: each.quantization for each in found}
    assert kept == {Split(2): "int4", Split(1, 1, 2): "fp8", Split(1, 2): "fp8"}
    best = select(found, "latency")
    assert best.split == Split(1, 2)  # a token comes soonest, and accuracy is kept
    assert best.options("latency")["tensor_parallel"] == 2
    assert all(each.weight_bytes < 45e9 for each in found if not each.refused)


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


@pytest.mark.parametrize("goal", quick_of(GOALS, {"latency"}))
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


def test_rows_in_int8_are_reckoned_and_chosen_by_no_goal(recorded_shape):
    """An H200 alone has timed them; weights are read as fast as those of 16 bits, and take half."""
    card, found = CARDS["A100"], {}
    for scheme in ("auto", "int8", "w8a8"):
        config = msgspec.structs.replace(recorded_shape, quantization=scheme)
        found[scheme] = profile_of(config, card)
    plain, packed, ours = found.values()
    assert [each.is_reckoned for each in found.values()] == [False, False, True]
    assert ours.weight_bytes == pytest.approx(packed.weight_bytes, rel=0.01)
    assert ours.one_ms < packed.one_ms < plain.one_ms
    model = step_model(msgspec.structs.replace(recorded_shape, quantization="w8a8"), card)
    assert model.step_ms(2048, 256) < 0.75 * step_model(recorded_shape, card).step_ms(2048, 256)
    assert "reckoned: no A100 has timed int8" in table([ours], card)[-1]
    config = msgspec.structs.replace(recorded_shape, quantization="w8a8")
    of_hoppers = [profile_of(config, CARDS[name]) for name in ("H100", "H200")]
    assert [each.is_reckoned for each in of_hoppers] == [True, False]
    for goal in GOALS:
        assert select([plain, ours], goal) == plain


@pytest.mark.parametrize("name", ["fp8", "int8-sq"])
def test_a_checkpoint_in_8_bits_costs_what_its_scheme_at_load_costs(name, tmp_path):
    plain = tiny.checkpoint(tmp_path / "plain", hidden_size=256, head_dim=64)
    tiny.quantised(plain, tiny.FORMATS[name], tmp_path / "made")
    at_load = {"fp8": "fp8", "int8-sq": "w8a8"}[name]
    configs = [
        EngineConfig(checkpoint=str(tmp_path / "made"), dtype="bfloat16"),
        EngineConfig(checkpoint=str(plain), dtype="bfloat16", quantization=at_load),
    ]
    made, loaded = (step_model(each, CARDS["H200"]) for each in configs)
    for rows in (1, 10**6):
        assert made.step_ms(rows, 64) == pytest.approx(loaded.step_ms(rows, 64), rel=0.01)
