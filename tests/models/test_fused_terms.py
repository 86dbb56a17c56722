"""Terms of experts by the kernels' tables: beside torch's, alone and beside other rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.models.adapters import Pairs, draw_pairs, scale_of, terms_of, write_adapter
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.fused_adapters import (
    PARAMETERS,
    SMALL,
    draw_parameters,
    with_parameters,
    write_parameters,
)
from fixtures.models.parity import check_against
from safetensors.torch import load_file
from slipstream.kernels.cpu.native import library
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.step_shape import StepShape

PEFT = Path(__file__).parents[1] / "fixtures/models/peft_experts"
TOLERANCE = 1e-4
needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels of the processor here")


def load(runner: ModelRunner, directory: Path) -> int:
    return runner.adapters.add(runner.adapters.read(str(directory)))


def generate(
    runner: ModelRunner, adapters: list[int], which: list[int] | None = None
) -> list[Generation]:
    """Step sequences of adapters together, or those of `which`; 0: none."""
    prompts = random_prompts([5 + 3 * i for i in range(len(adapters))], 97)
    chosen = range(len(adapters)) if which is None else which
    rows = [Generation(prompts[i], 3, adapter=adapters[i]) for i in chosen]
    driver = Driver(runner, keep_logits=True)
    while not all(row.is_finished for row in rows):
        driver.step(rows, 11)
    return rows


@pytest.mark.parametrize("family", SMALL)
def test_torch_adds_them_where_kernels_do_not(family: str, tmp_path: Path) -> None:
    """As PEFT does: what the tables are held against, too."""
    runner = make_runner(save(make_model(family, **SMALL[family]), tmp_path / "base"))
    runner.adapters.by_tables = False
    recorded = load_file(PEFT / "logits.safetensors")
    ids, number = recorded["ids"].tolist(), load(runner, PEFT / family)
    assert runner.adapters._loaded[number].laid is None
    row = Generation(ids, 1, adapter=number)
    Driver(runner, keep_logits=True).finish([row])
    assert (row.logits[0] - recorded[family][len(ids) - 1]).abs().max() < TOLERANCE


def of_each_expert(model: torch.nn.Module, rank: int) -> Pairs:
    """Gates of even experts, ups of some, of both layers, and last matrices of the others."""
    rng = torch.Generator().manual_seed(rank)
    sizes = {"gate_proj": (24, 32), "up_proj": (24, 32), "down_proj": (32, 24)}
    found: Pairs = {}
    for layer in range(2):
        for expert in range(4):
            kinds = ("gate_proj", "up_proj") if expert % 2 == 0 else ("down_proj", "up_proj")
            for kind in kinds[: 1 + layer]:
                n, k = sizes[kind]
                name = f"model.layers.{layer}.mlp.experts.{expert}.{kind}"
                a = torch.randn(rank, k, generator=rng) * k**-0.5
                found[name] = a, torch.randn(n, rank, generator=rng) * 0.1
    return found


def merge_experts(model: torch.nn.Module, pairs: Pairs, rank: int) -> None:
    """Add terms of single experts to the parameters of all."""
    for name, (a, b) in pairs.items():
        module, expert, kind = name.rsplit(".", 2)
        experts = model.get_submodule(module)
        change = scale_of(rank) * b @ a
        if kind == "down_proj":
            experts.down_proj.data[int(expert)] += change
        else:
            rows = slice(0, 24) if kind == "gate_proj" else slice(24, 48)
            experts.gate_up_proj.data[int(expert), rows] += change


@needs_kernels
@pytest.mark.parametrize("is_fixed", [False, True])
def test_adapters_of_all_experts_and_of_each_in_one_batch(is_fixed: bool, tmp_path: Path) -> None:
    """Ranks of one tile and of two; a row has the same bits alone, whatever adapters are beside."""
    model = make_model("qwen3_moe", **SMALL["qwen3_moe"])
    runner = make_runner(save(model, tmp_path / "base"), deterministic=is_fixed)
    sides, each = draw_parameters(model, PARAMETERS, 17), of_each_expert(model, 3)
    attention = draw_pairs(model, ["q_proj"], 2, size=0.1)
    numbers = [
        load(runner, write_parameters(tmp_path / "all", sides, {}, 17)),
        load(runner, write_adapter(tmp_path / "each", each, 3)),
        load(runner, write_adapter(tmp_path / "attention", attention, 2)),
    ]
    laid = [runner.adapters._loaded[number].laid for number in numbers]
    assert [own is not None and own.expert_address > 0 for own in laid] == [True, True, False]
    chosen = [0, numbers[0], numbers[1], numbers[2], numbers[0], 0, numbers[1]]
    rows = generate(runner, chosen)
    with with_parameters(model, sides, scale_of(17)):
        for row in (rows[1], rows[4]):
            check_against(model, row, TOLERANCE)
    for i in range(7) if is_fixed else ():
        [alone] = generate(runner, chosen, [i])
        assert all(map(torch.equal, alone.logits, rows[i].logits))
    check_against(model, rows[0], TOLERANCE)
    merge_experts(model, each, 3)
    for row in (rows[2], rows[6]):
        check_against(model, row, TOLERANCE)


@needs_kernels
def test_what_is_laid_out_is_what_was_read(tmp_path: Path) -> None:
    """Gate and up of an expert share A; copies for torch are the terms again."""
    model = make_model("mixtral", **SMALL["mixtral"])
    runner = make_runner(save(model, tmp_path / "base"))
    folder = write_parameters(tmp_path / "a", draw_parameters(model, PARAMETERS, 16), {}, 16)
    read = runner.adapters.read(str(folder))
    host = read.host  # type: ignore[attr-defined]
    assert len(host.memory) < 1.2 * read.num_bytes  # 1.35 with an A each
    number = runner.adapters.add(read)
    assert runner.adapters._loaded[number].laid is not None
    found = terms_of(runner.adapters._loaded[number])
    assert found.keys() == read.terms.keys()
    for name, [whole] in read.terms.items():
        assert whole.a is not None
        parts = 2 if "gate_up" in name else 1
        by_expert = [x for a, b in zip(whole.a, whole.b, strict=True) for x in ((a, b),) * parts]
        size = whole.b.shape[1] // parts
        for i, (term, (a, b)) in enumerate(zip(found[name], by_expert, strict=True)):
            assert term.first == i * size
            assert term.a is not None
            assert torch.equal(term.a, a)
            assert torch.equal(term.b, b[i % parts * size :][:size])


@needs_kernels
def test_steps_without_terms_of_experts_look_for_none(tmp_path: Path) -> None:
    """Other adapters' steps are those of before: their tables name no terms of experts."""
    model = make_model("olmoe", **SMALL["olmoe"])
    runner = make_runner(save(model, tmp_path / "base"))
    pairs = draw_pairs(model, ["q_proj"], 3, size=0.1)
    dense = load(runner, write_adapter(tmp_path / "dense", pairs, 3))
    sides = draw_parameters(model, PARAMETERS, 3)
    own = load(runner, write_parameters(tmp_path / "own", sides, {}, 3))
    adapters, shape = runner.adapters, StepShape(4, 4, 4, 4, 0)
    arrays = runner._builder.padding(shape)
    for chosen in ([0, dense, 0, dense], [0, own, own, 0], [own, 0, dense, own]):
        active = adapters.named(set(chosen))
        has_experts = own in chosen
        assert adapters.have_experts(active) == has_experts
        made = adapters.upload(active, np.array(chosen), shape, arrays, keeps_all=True)
        addresses = made.tables["tokens"].experts
        assert (addresses is not None) == has_experts
        if addresses is not None:
            laid = adapters._loaded[own].laid
            assert laid is not None
            wanted = [laid.expert_address if number == own else 0 for number in chosen]
            assert addresses.tolist() == wanted
    # A graph's kernels look for them, whatever its steps have.
    none = adapters.upload({}, np.zeros(4, np.int64), shape, arrays, True, has_experts=True)
    addresses = none.tables["tokens"].experts
    assert addresses is not None
    assert not addresses.any()
