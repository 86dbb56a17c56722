"""Adapters of parameters in which all experts lie (PEFT's `target_parameters`)."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import Pairs, draw_pairs, merged, scale_of, write_adapter
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drawn_later import DRAWN
from fixtures.models.fused_adapters import (
    PARAMETERS,
    SMALL,
    Sides,
    draw_parameters,
    with_parameters,
    write_parameters,
)
from fixtures.models.parity import check_against
from fixtures.models.rank_adapters import compare
from fixtures.tiers import quick_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from slipstream.config import EngineConfig
from slipstream.errors import CheckpointError
from slipstream.layers.adapted import Term
from slipstream.layers.adapted_experts import divided
from slipstream.models.adapters.read import AdapterWeights
from slipstream.preflight import preflight
from slipstream.runner import group
from slipstream.runner.model_runner import ModelRunner

PEFT = Path(__file__).parents[1] / "fixtures/models/peft_experts"  # by peft 0.21.2, logits too
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
EXPERTS = "base_model.model.model.layers.0.mlp.experts"
GATE_UP, DOWN = f"{EXPERTS}.base_layer.lora_", f"{EXPERTS}.lora_"
TOLERANCE = 1e-4


def load(runner: ModelRunner, directory: Path) -> int:
    return runner.adapters.add(runner.adapters.read(str(directory)))


def generate(runner: ModelRunner, adapters: list[int], vocab: int = 97) -> list[Generation]:
    """Step sequences of several adapters together; 0: none."""
    prompts = random_prompts([5 + 3 * i for i in range(len(adapters))], vocab)
    rows = [Generation(prompt, 3, adapter=n) for prompt, n in zip(prompts, adapters, strict=True)]
    driver = Driver(runner, keep_logits=True)
    while not all(row.is_finished for row in rows):
        driver.step(rows, 11)
    return rows


@pytest.mark.parametrize("family", SMALL)
def test_logits_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """Gates and ups alone; what is down alone; both, with attention and patterns of parameters."""
    base = save(make_model(family, **SMALL[family]), tmp_path / "base")
    runner = make_runner(base)
    recorded = load_file(PEFT / "logits.safetensors")
    ids = recorded["ids"].tolist()
    number = load(runner, PEFT / family)
    for count in range(1, len(ids) + 1):
        row = Generation(ids[:count], 1, adapter=number)
        Driver(runner, keep_logits=True).finish([row])
        assert (row.logits[0] - recorded[family][count - 1]).abs().max() < TOLERANCE
    for ranks in ({}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        preflight(EngineConfig(checkpoint=str(base), adapters=f"own={PEFT / family}", **ranks))


CASES = ("mixtral", "gpt_oss", "qwen3_moe fixed", "gpt_oss fixed", "olmoe", "deepseek_v2")
CASES += ("granitemoe", "qwen2_moe", "phimoe", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe")
ENDS: tuple[tuple[str, ...], ...] = (PARAMETERS[:1], PARAMETERS[1:], PARAMETERS)


@pytest.mark.parametrize("case", quick_of(CASES, ("mixtral", "gpt_oss fixed")))
def test_parameters_of_experts_beside_rows_of_the_base(case: str, tmp_path: Path) -> None:
    """Each alone, and both with attention, in one batch; what B = 0 gives has the base's bits."""
    family, *how = case.split()
    given = DRAWN[family](random.Random(3)) if family == "deepseek_v2" else SMALL.get(family, {})
    model = make_model(family, **(given | {"vocab_size": 97}))
    runner = make_runner(save(model, tmp_path / "base"), deterministic="fixed" in how)
    drawn = [draw_parameters(model, ends, 3, seed=i) for i, ends in enumerate(ENDS)]
    others: list[Pairs] = [{}, {}, draw_pairs(model, ["o_proj"], 3, size=0.1)]
    numbers = [
        load(runner, write_parameters(tmp_path / str(i), *each, 3))
        for i, each in enumerate(zip(drawn, others, strict=True))
    ]
    rows = generate(runner, [0, *numbers, 0])
    for sides, pairs, row in zip([{}, *drawn, {}], [{}, *others, {}], rows, strict=True):
        with with_parameters(model, sides, scale_of(3)), merged(model, pairs, scale_of(3)):
            check_against(model, row, TOLERANCE)
    zeros = {name: (a, torch.zeros_like(b)) for name, (a, b) in drawn[2].items()}
    number = load(runner, write_parameters(tmp_path / "zeros", zeros, {}, 3))
    same, plain = generate(runner, [0, number, number]), generate(runner, [0, 0, 0])
    check_bits(same, plain)
    if "fixed" in how:
        check_bits([rows[0]], plain[:1])


def check_bits(found: list[Generation], wanted: list[Generation]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.outputs == other.outputs
        assert all(map(torch.equal, one.logits, other.logits))


@pytest.mark.parametrize("case", ["gpt_oss int8", "qwen3_moe int8"])
def test_parameters_of_experts_in_fewer_bits(case: str, tmp_path: Path) -> None:
    """By the model in 32 bits with the terms: nothing is rounded but the base."""
    family, quantization = case.split()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    model = make_model(family, **(SMALL[family] | sizes))
    runner = make_runner(save(model, tmp_path / "base"), quantization=quantization)
    sides = draw_parameters(model, PARAMETERS, 3)
    base, own = generate(runner, [0, load(runner, write_parameters(tmp_path / "a", sides, {}, 3))])
    far = apart(model, base)
    with with_parameters(model, sides, scale_of(3)):
        near = apart(model, own)
    assert near < 2 * far + 0.02
    assert apart(model, own) > 3 * near


@torch.no_grad()
def apart(model: torch.nn.Module, row: Generation) -> float:
    """How far a row's first logits are from the model's."""
    wanted = model(torch.tensor([row.prompt])).logits[0, -1]
    return float((row.logits[0] - wanted).norm() / wanted.norm())


def test_terms_of_all_experts_are_one_of_their_place(tmp_path: Path) -> None:
    """However many experts there are, of which none is looked up; A is what the file has."""
    model = make_model("mixtral", **SMALL["mixtral"])
    runner = make_runner(save(model, tmp_path / "base"))
    sides = draw_parameters(model, PARAMETERS, 5)
    read = runner.adapters.read(str(write_parameters(tmp_path / "a", sides, {}, 5)))
    assert read.rank == 5
    assert "_of_experts" not in vars(runner.adapters.targets)
    assert len(read.terms) == len(sides) == 4
    for place, terms in read.terms.items():
        a, _ = sides[f"{place.rpartition('.')[0]}.{'down' if 'down' in place else 'gate_up'}_proj"]
        assert [torch.equal(term.a.flatten(0, 1), a) for term in terms] == [True]
    assert read.num_bytes == 4 * sum(x.numel() for pair in sides.values() for x in pair)


def test_other_names_of_a_layer_and_of_a_larger_model(tmp_path: Path) -> None:
    """Mixtral's name before transformers 5, and that within a model of images: the same adapter."""
    model = make_model("mixtral", **SMALL["mixtral"])
    runner = make_runner(save(model, tmp_path / "base"))
    sides = draw_parameters(model, PARAMETERS, 2)
    wanted = runner.adapters.read(str(write_parameters(tmp_path / "a", sides, {}, 2)))
    for i, (old, new) in enumerate(((".mlp.", ".block_sparse_moe."), ("model.", LARGER))):
        named = {name.replace(old, new, 1): own for name, own in sides.items()}
        found = runner.adapters.read(str(write_parameters(tmp_path / str(i), named, {}, 2)))
        assert found.terms.keys() == wanted.terms.keys()
        for place, (term,) in found.terms.items():
            assert all(map(torch.equal, term[1:3], wanted.terms[place][0][1:3]))


LARGER = "model.language_model."


def test_another_scaling_of_a_parameter_is_another_adapter(tmp_path: Path) -> None:
    """Digests tell scalings of parameters apart."""
    model = make_model("olmoe", **SMALL["olmoe"])
    runner = make_runner(save(model, tmp_path / "base"))
    sides = draw_parameters(model, PARAMETERS, 2)
    scales = ({}, {"alpha_pattern": {r"1\.mlp\.experts\.down_proj": 9}}, {"use_rslora": True}, {})
    digests = [
        runner.adapters.read(str(write_parameters(tmp_path / str(i), sides, {}, 2, **each))).digest
        for i, each in enumerate(scales)
    ]
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        found = load_file(folder / TENSORS)
        change(found)
        save_file(found, folder / TENSORS)

    return apply


def put(**shapes: tuple[str, tuple[int, ...]]) -> Callable[[Path], object]:
    return tensors(
        lambda found: found.update({name: torch.ones(shape) for name, shape in shapes.values()})
    )


def config(**values: object) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        given = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(given | values))

    return apply


def without(*names: str) -> Callable[[Path], object]:
    return tensors(lambda found: [found.pop(name) for name in names])


A, B = "A.weight", "B.weight"
OF_ONE = {"a": (f"{EXPERTS}.3.w1.lora_{A}", (3, 32)), "b": (f"{EXPERTS}.3.w1.lora_{B}", (24, 3))}
OLD = EXPERTS.replace("mlp", "block_sparse_moe")
TWICE = {
    "a": (f"{OLD}.lora_{A}", (12, 24)),
    "b": (f"{OLD}.lora_{B}", (32, 12)),
    "c": (f"{OLD}.base_layer.lora_{A}", (12, 32)),
    "d": (f"{OLD}.base_layer.lora_{B}", (48, 12)),
}
OF_OLD = {key: (name.replace("mlp", "block_sparse_moe"), x) for key, (name, x) in OF_ONE.items()}
NORM = "base_model.model.model.norm.lora_"
MLP = EXPERTS.removesuffix(".experts")
DENSE = {"a": (f"{MLP}.lora_{A}", (3, 24)), "b": (f"{MLP}.lora_{B}", (32, 3))}
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "another parameter": (
        config(target_parameters=["q_proj.weight"]),
        r"target_parameters = .*q_proj.weight.* is not implemented; .* gate_up_proj or down_proj",
    ),
    "a bias of experts": (config(target_parameters=["gate_up_proj_bias"]), "is not implemented"),
    "a router": (config(target_parameters=["gate.weight"]), "is not implemented"),
    "no list": (config(target_parameters="down_proj"), "target_parameters = 'down_proj' is not"),
    "many names": (config(target_parameters=["x.down_proj"] * 5000), "5000 names, at most 4096"),
    "dropout": (config(lora_dropout=0.1), "lora_dropout = 0.1 is not implemented beside"),
    "turned": (config(fan_in_fan_out=True), "fan_in_fan_out = True is not implemented beside"),
    "biases": (config(lora_bias=True), "lora_bias = True is not implemented beside"),
    "magnitudes": (config(use_dora=True), "use_dora = True is not implemented beside"),
    "no names": (config(target_parameters=None), "target_parameters .* names none of model.layers"),
    "names of other layers": (
        config(target_parameters=["9.mlp.experts.down_proj", "9.mlp.experts.gate_up_proj"]),
        "names none of model.layers.0.mlp.experts",
    ),
    "a name that ends so": (config(target_parameters=["s.down_proj"]), "names none of model"),
    "one name of two": (
        config(target_parameters=["down_proj"]),
        r"experts.base_layer has a term, but target_parameters .* names down_proj of",
    ),
    "one term of two": (without(DOWN + A, DOWN + B), r"0.mlp.experts.lora_A.weight is missing"),
    "no A": (without(GATE_UP + A), "experts.base_layer.lora_A.weight is missing"),
    "no B": (without(DOWN + B), "experts.lora_B.weight is missing"),
    "another rank": (config(r=4), "0.mlp.experts.down_proj has rank 3, but .* says 4"),
    "a rank of a parameter": (
        config(rank_pattern={"gate_up_proj": 2}),
        "experts.gate_up_proj has rank 3, but .* says 2",
    ),
    "no rank fits": (
        put(a=(DOWN + A, (13, 24)), b=(DOWN + B, (32, 13))),
        r"down_proj: A and B are \[13, 24\] and \[32, 13\]: no rank fits both, times 4 experts",
    ),
    "two ranks": (put(a=(DOWN + A, (8, 24))), "no rank fits both, times 4 experts"),
    "ranks of 0": (put(a=(DOWN + A, (0, 24)), b=(DOWN + B, (32, 0))), "has rank 0"),
    "by expert": (put(a=(DOWN + A, (4, 3, 24))), "no rank fits both"),
    "other inputs": (put(a=(DOWN + A, (12, 25))), "which give no 32 outputs of 24 inputs$"),
    "other outputs": (put(b=(GATE_UP + B, (47, 12))), "which give no 48 outputs of 32 inputs$"),
    "exchanged": (
        put(a=(DOWN + A, (12, 32)), b=(DOWN + B, (24, 12))),
        "give no 32 outputs of 24 inputs; PEFT before 0.20 may have exchanged them",
    ),
    "too large": (
        put(a=(DOWN + A, (4 * 512 + 1, 32))),
        r"lora_A.weight is \[2049, 32\], more than the 65536 numbers",
    ),
    "too large for a module": (
        put(a=(f"{NORM}{A}", (513, 97))),
        r"norm.lora_A.weight is \[513, 97\], more than the 49664 numbers",
    ),
    "an embedding's": (put(a=(f"{DOWN}embedding_A", (3, 32))), "experts has rows_a beside a term"),
    "a bias": (put(a=(f"{DOWN}B.bias", (32,))), r"experts has a bias \(lora_bias\)"),
    "a magnitude": (put(a=(f"{DOWN}magnitude_vector", (32,))), "has magnitude beside a term"),
    "three parameters": (
        put(a=(f"{EXPERTS}.base_layer.base_layer.lora_{A}", (12, 24))),
        "base_layer.base_layer has a term, but target_parameters",
    ),
    "of one expert, too": (put(**OF_ONE), "experts.3.w1' is none that adapters change"),
    "of one expert by its name": (
        put(**OF_OLD),
        "experts.3.w1' is of one expert, but model.layers.0.mlp.experts.* of all experts",
    ),
    "by another name": (
        put(**TWICE),
        r"mlp.experts is model.layers.0.block_sparse_moe.experts by another name",
    ),
    "a dense layer": (put(**DENSE), "layers.0.mlp' is none that adapters change here"),
    "NaN": (tensors(lambda found: found[DOWN + B][5, 7].fill_(torch.nan)), "down: B, .* holds NaN"),
    "infinity": (
        tensors(lambda found: found[GATE_UP + A][11].fill_(torch.inf)),
        "gate_up: A, .* infinity",
    ),
}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Sides]:
    model = make_model("mixtral", **SMALL["mixtral"])
    runner = make_runner(save(model, tmp_path_factory.mktemp("base")))
    return runner, draw_parameters(model, PARAMETERS, 3)


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_adapter_is_refused_by_name(
    case: str, mixtral: tuple[ModelRunner, Sides], tmp_path: Path
) -> None:
    (runner, sides), (change, why) = mixtral, BAD[case]
    folder = write_parameters(tmp_path / "x", sides, {}, 3, target_parameters=list(PARAMETERS))
    runner.adapters.read(str(folder))
    change(folder)
    with pytest.raises(CheckpointError, match=why) as refusal:
        runner.adapters.read(str(folder))
    assert str(refusal.value).startswith((str(folder), "target_parameters has"))


def outcome(runner: ModelRunner, folder: Path) -> tuple[AdapterWeights | None, str]:
    """What was read, or why not; any other exception is the bug looked for."""
    try:
        return runner.adapters.read(str(folder)), ""
    except CheckpointError as error:
        return None, str(error)


NAMES = [f"{side}{end}" for side in (GATE_UP, DOWN) for end in (A, B)]
NAMES += [f"{EXPERTS}.3.w1.lora_{A}", f"{OLD}.lora_{B}", f"{EXPERTS}.base_layer.weight"]
SHAPES = st.lists(st.sampled_from([0, 1, 4, 11, 12, 24, 32, 48]), max_size=3)
ENDINGS = st.sampled_from([*PARAMETERS, "0.mlp.experts.down_proj", "experts.gate_up_proj", "x", ""])


@settings(max_examples=100)
@given(
    tensors=st.dictionaries(st.sampled_from(NAMES), st.none() | SHAPES, max_size=3),
    names=st.none() | ENDINGS | st.lists(ENDINGS | st.integers(), max_size=3),
    rank=st.sampled_from([1, 2, 3]),
)
def test_whatever_a_file_has_of_experts_is_read_or_refused_by_name(
    tensors: dict[str, list[int] | None],
    names: object,
    rank: int,
    mixtral: tuple[ModelRunner, Sides],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    runner, sides = mixtral
    folder = tmp_path_factory.getbasetemp() / "drawn"
    write_parameters(folder, sides, {}, rank, target_parameters=names)
    found = load_file(folder / TENSORS)
    for name, shape in tensors.items():
        found.pop(name, None)
        if shape is not None:
            found[name] = torch.ones(shape)
    save_file(found, folder / TENSORS)
    read, refusal = outcome(runner, folder)
    if read is None:
        assert str(folder) in refusal
        return
    row = Generation([1, 2, 3], 1, adapter=runner.adapters.add(read))
    Driver(runner, keep_logits=True).finish([row])
    assert row.logits[0].isfinite().all()
    runner.adapters.remove(row.adapter)


@pytest.mark.parametrize(
    ("family", "version", "is_read"),
    [
        *(("mixtral", version, False) for version in (None, "0.18.1", "0.19.0", 3)),
        *(("mixtral", version, True) for version in ("0.20.0", "0.21.2.dev0", "1.0")),
        *(("gpt_oss", version, True) for version in (None, "0.17.1", "0.18.0", "0.20.0")),
        ("gpt_oss", "0.19.1", False),
    ],
)
def test_sides_of_a_square_matrix_are_known_by_the_version(
    family: str, version: object, is_read: bool, tmp_path: Path
) -> None:
    """PEFT 0.20 exchanged A and B of most; which are which its shapes do not say there."""
    model = make_model(family, **(SMALL[family] | {"intermediate_size": 32}))
    runner = make_runner(save(model, tmp_path / "base"))
    sides = draw_parameters(model, PARAMETERS[1:], 2)
    folder = write_parameters(tmp_path / "a", sides, {}, 2, peft_version=version)
    if is_read:
        assert runner.adapters.read(str(folder)).rank == 2
        return
    with pytest.raises(CheckpointError, match=r"peft_version .* is below 0.20 or missing"):
        runner.adapters.read(str(folder))


def test_experts_of_gpt_oss_by_themselves(tmp_path: Path) -> None:
    """By names of other classes: gate, up and down of an expert, each alone."""
    model = make_model("gpt_oss", **SMALL["gpt_oss"])
    runner = make_runner(save(model, tmp_path / "base"))
    rng = torch.Generator().manual_seed(1)
    name = "model.layers.1.mlp.experts.2"
    kinds = {"gate_proj": (24, 32), "up_proj": (24, 32), "down_proj": (32, 24)}
    pairs = {
        f"{name}.{kind}": (torch.randn(2, k, generator=rng), torch.randn(n, 2, generator=rng))
        for kind, (n, k) in kinds.items()
    }
    number = load(runner, write_adapter(tmp_path / "a", pairs, 2))
    _, row = generate(runner, [0, number])
    changes = [(scale_of(2) * b @ a).t() for a, b in pairs.values()]
    experts = model.model.layers[1].mlp.experts
    experts.gate_up_proj.data[2, :, ::2] += changes[0]
    experts.gate_up_proj.data[2, :, 1::2] += changes[1]
    experts.down_proj.data[2] += changes[2]
    check_against(model, row, TOLERANCE)


PARTS = {  # ranks and stages; widths that ranks do not divide get zeros behind them
    "mixtral, 2 ranks": ("mixtral", 2, 1, {}),
    "gpt_oss, 4 ranks": ("gpt_oss", 4, 1, {"intermediate_size": 50, "num_key_value_heads": 2}),
    "gpt_oss, 2 stages": ("gpt_oss", 1, 2, {}),
    "qwen3_moe, 2 stages of 2": ("qwen3_moe", 2, 2, {}),
}


@pytest.mark.parametrize("case", quick_of(PARTS, {"mixtral, 2 ranks", "gpt_oss, 4 ranks"}))
def test_parameters_of_all_experts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come in pieces of some experts each."""
    monkeypatch.setattr(group, "_STEP_BYTES", 4096)
    family, size, num_stages, changes = PARTS[case]
    model = make_model(family, **changes)
    pairs = draw_pairs(model, ["q_proj"], 3, size=0.1)
    directories = []
    for i, (ends, others) in enumerate(((PARAMETERS, pairs), (PARAMETERS[:1], {}))):
        sides = draw_parameters(model, ends, 3, seed=i)
        directories.append(write_parameters(tmp_path / str(i), sides, others, 3))
    compare(save(model, tmp_path / "base"), directories, size, num_stages=num_stages)


@given(count=st.integers(1, 40), rank=st.integers(1, 5), most=st.integers(1, 4000))
def test_pieces_of_a_term_are_all_of_it(count: int, rank: int, most: int) -> None:
    rng = torch.Generator().manual_seed(count)
    a, b = torch.randn(count, rank, 7, generator=rng), torch.randn(count, 6, rank, generator=rng)
    pieces = list(divided(Term(12, a, b), most))
    assert torch.equal(torch.cat([x for each in pieces if (x := each.a) is not None]), a)
    assert torch.equal(torch.cat([each.b for each in pieces]), b)
    first = 12
    for each in pieces:
        assert each.first == first
        first += 6 * len(each.b)
        assert each.num_bytes <= most or len(each.b) == 1
    plain = Term(5, a[0], b[0])
    assert list(divided(plain, most)) == [plain]
