"""`slipstream tune`, all but the measuring: whose products, what is printed and what is kept."""

import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from fixtures.models.checkpoints import FAMILIES, make_model, save
from fixtures.quantize import tiny
from slipstream.config import EngineConfig
from slipstream.kernels.elementwise.eight_bits import PRODUCTS
from slipstream.kernels.gemm import cublaslt_groups, search, tiles, trials, tuning
from slipstream.kernels.gemm.cublaslt_api import Algorithm, GemmShape
from slipstream.kernels.gemm.linear import choose
from slipstream.kernels.gemm.tuning import Choices, Machine, Product
from slipstream.kernels.runtime.registry import CPU, KNOWN, Target
from slipstream.layers.dims import ExpertsConfig
from slipstream.models.decoder import build
from slipstream.models.fileless import RandomSource
from slipstream.models.hf import read_config
from slipstream.models.source import Weights
from slipstream.runner import tune
from slipstream.runner.idle_tuning import covering_rows
from slipstream.runner.matrices import Weight, weights_of
from slipstream.runner.plan import resolve

MACHINE = Machine(gpu="NVIDIA H200", num_sms=132, driver=13000, cublaslt=130100)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(tie_word_embeddings=False), tmp_path_factory.mktemp("tune") / "tiny")


def matrices_of(experts: ExpertsConfig, hidden: int, num_layers: int) -> Counter[tuple[int, ...]]:
    """What layers of experts read."""
    count, inner = experts.routing.num_experts, experts.inner_size
    found: list[tuple[int, ...]] = [(count + experts.shared_gated, hidden)]
    if experts.is_fused:  # three dimensions count twice
        found += 2 * [(count, hidden, 2 * inner), (count, inner, hidden)]
        found += [(count, 2 * inner), (count, hidden)]
    else:
        found += [(2 * count * inner, hidden), (count * hidden, inner)]
    if shared := experts.shared_size:
        found += [(2 * shared, hidden), (hidden, shared)]
    return Counter(found * num_layers)


# Of latent attention the output alone is a place that is tuned.
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in LATENT])
def test_matrices_are_those_of_the_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_model(family, tie_word_embeddings=False), tmp_path / family)
    config = EngineConfig(checkpoint=str(folder), device="cpu")
    plan = resolve(config)
    made: Counter[tuple[int, ...]] = Counter()
    stacked = Weights.stacked

    def count(
        self: Weights,
        names: Sequence[str],
        rows: Sequence[int],
        *rest: int,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        made.update([(sum(rows), *rest)] * len(rest))
        return stacked(self, names, rows, *rest, dtype=dtype)

    monkeypatch.setattr(Weights, "stacked", count)
    cpu = torch.device("cpu")
    build(plan.model, Weights(RandomSource(cpu), cpu, plan.dtype), plan.max_model_len)
    monkeypatch.undo()
    dims, axes = plan.model.dims, plan.model.axes
    if axes.experts is not None:  # nothing is tuned of these
        made -= matrices_of(axes.experts, dims.hidden_size, dims.num_layers)
    # The embedding multiplies nothing, nor does a table of positions.
    made -= Counter([(dims.vocab_size, dims.hidden_size)])
    if axes.learned_positions:
        rows = plan.model.max_positions + axes.position_offset
        made -= Counter([(rows, dims.hidden_size)])
    for options in ({}, {"load_format": "random"}):
        asked = msgspec.structs.replace(config, **options)
        expected: Counter[tuple[int, ...]] = Counter()
        for weight in weights_of(asked, plan.model, plan.dtype, CPU):
            expected[weight.outputs, weight.inputs] += weight.count
        assert made == expected


def test_fp8_leaves_the_head_alone(checkpoint: Path) -> None:
    config = EngineConfig(checkpoint=str(checkpoint), device="cpu", quantization="fp8")
    weights = weights_of(config, read_config(checkpoint), torch.bfloat16, KNOWN["sm_90a"])
    assert not any(tune.adds_in_product(weight) for weight in weights)  # scales come between
    types = {weight.name: weight.dtype for weight in weights}
    assert types.pop("head") == torch.bfloat16
    assert set(types.values()) == {torch.float8_e4m3fn}


@dataclass(frozen=True)
class FakeOperands:
    inputs: int
    outputs: int
    dtype: torch.dtype
    adds: bool = False
    x_scales: str = ""

    random = classmethod(lambda cls, *sizes: cls(*sizes))

    @property
    def sizes(self) -> tuple[int, int]:
        return self.inputs, self.outputs

    def shape(self, rows: int) -> GemmShape:
        types = self.dtype, PRODUCTS.get(self.dtype, self.dtype)
        return GemmShape(rows, *self.sizes, *types, (0, 0, 0), 16, self.adds, self.x_scales)


def set_target(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(tune, "target_of", lambda device: target)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which every kernel found takes as many microseconds as there are rows."""

    def found(operands: FakeOperands, rows: int) -> trials.Found:
        return trials.Found(Algorithm(bytes([rows % 256] * 64), 0), rows * 1e-6, 1.25 * rows * 1e-6)

    def on_a_gpu(config: EngineConfig) -> SimpleNamespace:
        plan = resolve(msgspec.structs.replace(config, device="cpu"))
        device = torch.device("cuda", 0)
        return SimpleNamespace(
            model=plan.model,
            config=config,
            dtype=torch.bfloat16,
            device=device,
            max_num_batched_tokens=4096,
            max_num_seqs=256,
        )

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "resolve", on_a_gpu)
    monkeypatch.setattr(trials, "Operands", FakeOperands)
    monkeypatch.setattr(search, "search", found)
    monkeypatch.setattr(tiles, "describe", lambda algorithm: "64x32 swizzle 1")
    monkeypatch.setattr(Machine, "of", staticmethod(lambda device: MACHINE))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    set_target(monkeypatch, KNOWN["sm_80"])


def run(monkeypatch: pytest.MonkeyPatch, config: bytes, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(config)))
    return tune.main([*arguments])


@pytest.mark.usefixtures("gpu")
def test_what_is_found_is_kept(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = msgspec.json.encode(EngineConfig(checkpoint=str(checkpoint)))
    assert run(monkeypatch, config, "--rows", "64", "16", "64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 5 * 2 + 2 + 1
    qkv = " ".join(lines[2].split())
    assert qkv.startswith("qkv 16 20.00 16.00 20.0% ")
    assert qkv.endswith(" 64x32 swizzle 1")
    assert lines[-3].split() == ["step", "16", str(9 * 20.0), str(9 * 16.0), "20.0%"]
    assert lines[-1].startswith(str(tuning.path(MACHINE)))
    choices = Choices(tuning.load(MACHINE))
    head = Product(128, 1009, "bfloat16", "bfloat16", adds=False)
    assert choices.find(head, 64) == bytes([64] * 64)
    adding = [choice.product for choice in tuning.load(MACHINE) if choice.product.adds]
    assert {product.outputs for product in adding} == {128}  # to the residual sum
    assert len(adding) == 2 * 2


@pytest.mark.usefixtures("gpu")
def test_what_runs_by_our_own_kernels_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_target(monkeypatch, KNOWN["sm_90a"])
    folder = save(make_model(hidden_size=256, tie_word_embeddings=False), tmp_path / "tiny")
    config = msgspec.json.encode(EngineConfig(checkpoint=str(folder)))
    assert run(monkeypatch, config, "--rows", "16", "160") == 0
    outputs = [choice.product.outputs for choice in tuning.load(MACHINE) if choice.rows == 16]
    assert sorted(outputs) == [256, 354, 1009]  # 177 inputs, and no multiples of 8 outputs
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["160"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_rows_of_cublaslt_between_those_of_our_own_kernels_have_a_choice(
    dtype: torch.dtype,
) -> None:
    """Idle times measure numbers of rows that serve fewer, too: of gates and ups these may be
    cuBLASLt's where that number is not, which is measured nevertheless, without the gate.
    """
    sizes, target = (28672, 4096, dtype, torch.bfloat16), KNOWN["sm_90a"]
    matrix = Weight("gate_up", "", *sizes, "norm", bias=False, gate="silu", adds=False)
    counts = range(9, 513)
    by_cublaslt = [n for n in counts if choose(matrix.spec(n, target)).gemm.name == "cublaslt"]
    assert bool(by_cublaslt) == (dtype != torch.int8)  # whose rows are skinny, or tall from 129 on
    measured = [n for n in covering_rows(512) if tune.runs_by_cublaslt(matrix, n, target)]
    for count in by_cublaslt:
        assert any(count <= n <= tuning.reach(count) for n in measured), count


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("target", "expected"), [("sm_80", {32, 640}), ("sm_90a", {32})])
def test_weights_of_int8_are_tuned_with_the_rows_that_cublaslt_multiplies(
    target: str, expected: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer than 32 are multiplied as 32, as there are no kernels for 16; on a Hopper many fill
    tiles of our own.
    """
    set_target(monkeypatch, KNOWN[target])
    sizes = {"hidden_size": 384, "head_dim": 64, "intermediate_size": 11264}
    folder = save(make_model(tie_word_embeddings=False, **sizes), tmp_path / "tiny")
    config = msgspec.json.encode(EngineConfig(checkpoint=str(folder), quantization="w8a8"))
    assert run(monkeypatch, config, "--rows", "8", "16", "24", "32", "640") == 0
    found = [each for each in tuning.load(MACHINE) if each.product.outputs == 2 * 11264]
    assert {(each.product.dtype, each.product.out_dtype) for each in found} == {("int8", "int32")}
    assert {each.rows for each in found} == expected


@pytest.mark.usefixtures("gpu")
def test_packed_weights_are_tuned_where_they_are_put_into_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_target(monkeypatch, KNOWN["sm_90a"])
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1001}
    folder = save(make_model(tie_word_embeddings=False, **sizes), tmp_path / "tiny")
    config = msgspec.json.encode(EngineConfig(checkpoint=str(folder), quantization="int4"))
    assert run(monkeypatch, config, "--rows", "16", "320") == 0
    rows = {choice.product.outputs: choice.rows for choice in tuning.load(MACHINE)}
    assert rows.pop(1001) == 320  # the head, which runs by cuBLASLt with 16 rows, too
    assert set(rows.values()) == {320}
    assert {choice.product.dtype for choice in tuning.load(MACHINE)} == {"bfloat16"}
    lines = capsys.readouterr().out.splitlines()
    said = "gate_up  4 bits by 64, packed: tuned where it is put into 16 bits again"
    assert said in lines
    assert [choice.rows for choice in tuning.load(MACHINE)].count(16) == 1


@pytest.mark.usefixtures("gpu")
def test_packed_weights_for_e4m3_are_tuned_where_they_are_put_into_e4m3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_target(monkeypatch, KNOWN["sm_90a"])

    def plan_of(rows: int, *sizes: int) -> SimpleNamespace:
        return SimpleNamespace(shape=SimpleNamespace(x_scales="blocks"))

    monkeypatch.setattr(cublaslt_groups, "plan_of", plan_of)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1001}
    folder = save(make_model(tie_word_embeddings=False, **sizes), tmp_path / "tiny")
    config = msgspec.json.encode(EngineConfig(checkpoint=str(folder), quantization="w4a8"))
    assert run(monkeypatch, config, "--rows", "16", "320", "513", "1024") == 0
    found = [each for each in tuning.load(MACHINE) if each.product.outputs != 1001]  # the head
    assert {each.rows for each in found} == {516, 1024}  # as many as a GEMM computes
    kinds = {(each.product.dtype, each.product.out_dtype, each.product.x_scales) for each in found}
    assert kinds == {("float8_e4m3fn", "bfloat16", "blocks")}
    assert not any(each.product.adds for each in found)
    lines = capsys.readouterr().out.splitlines()
    assert "gate_up  4 bits by 128, packed for e4m3: tuned where it is put into e4m3" in lines


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of e4m3 in blocks of 128 x 128."""
    folder, sizes = tmp_path_factory.mktemp("blocks"), {"hidden_size": 256, "head_dim": 64}
    plain = tiny.checkpoint(folder / "plain", intermediate_size=512, **sizes)
    tiny.quantised(plain, tiny.FORMATS["fp8-block"], folder / "blocks")
    return folder / "blocks"


@pytest.mark.usefixtures("gpu")
def test_blocks_of_e4m3_are_tuned_in_16_bits_and_in_e4m3(
    blocks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_target(monkeypatch, KNOWN["sm_90a"])

    def plan_of(rows: int, *sizes: int) -> SimpleNamespace:
        return SimpleNamespace(shape=SimpleNamespace(x_scales="blocks"))

    monkeypatch.setattr(cublaslt_groups, "plan_of", plan_of)
    config = msgspec.json.encode(EngineConfig(checkpoint=str(blocks)))
    assert run(monkeypatch, config, "--rows", "16", "320", "1024") == 0
    found = {
        (each.rows, each.product.dtype, each.product.x_scales)
        for each in tuning.load(MACHINE)
        if (each.product.outputs, each.product.inputs) == (1024, 256)  # gate and up
    }
    assert found == {(320, "bfloat16", ""), (1024, "float8_e4m3fn", "blocks")}
    said = "gate_up  e4m3 by 128, packed: tuned where it is put into e4m3 or 16 bits again"
    assert said in capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("gpu")
def test_rows_of_graphs_and_full_steps_are_the_default(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, msgspec.json.encode(EngineConfig(checkpoint=str(checkpoint)))) == 0
    rows = {choice.rows for choice in tuning.load(MACHINE)}
    assert rows >= {8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512}
    assert min(rows) == 8
    assert {number for number in rows if number > 512} == {1024, 2048, 4096}


@pytest.mark.usefixtures("gpu")
def test_what_was_found_before_an_interrupt_is_kept(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(operands: FakeOperands, rows: int) -> trials.Found:
        if operands.sizes[1] == 1009:
            raise KeyboardInterrupt
        return trials.Found(Algorithm(bytes(64), 0), 1e-6, 1e-6)

    monkeypatch.setattr(search, "search", interrupted)
    config = msgspec.json.encode(EngineConfig(checkpoint=str(checkpoint)))
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, config, "--rows", "8")
    assert len(tuning.load(MACHINE)) == 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"device": "cpu"}, "there is no NVIDIA GPU to tune for"),
        ({"dtype": "int8"}, "dtype = 'int8'"),
        ({"typo": 1}, "typo"),
    ],
)
@pytest.mark.rest
def test_what_cannot_be_tuned(config: dict[str, object], said: str, checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "slipstream.runner.tune"],
        input=json.dumps({"checkpoint": str(checkpoint)} | config),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("slipstream tune: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
