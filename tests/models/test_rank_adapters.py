"""Adapters of a model on several ranks: each has its part, and all give what one rank gives."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from fixtures.engine.adapted import RANKS, House
from fixtures.models.adapters import (
    Pairs,
    draw_pairs,
    expert_pairs,
    targets_of,
    terms_of,
    write_adapter,
    write_magnitudes,
)
from fixtures.models.checkpoints import (
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drawn_later import DRAWN
from fixtures.models.quantised import model_of
from fixtures.models.rank_adapters import check_same, compare, generated
from fixtures.models.ranks import Group, ranks_of
from fixtures.tiers import quick_of
from fixtures.waiting import wait_for
from safetensors.torch import load_file, save_file
from slipstream.engine.scheduler import Limits
from slipstream.errors import CheckpointError
from slipstream.layers import magnitudes
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.prompt_table import PromptTable

TOLERANCE = 1e-4
FAMILIES = ("llama", "phi3", "gpt2", "gemma2", "gptj", "falcon", "cohere", "olmo2", "gpt_neox")
CASES = {
    f"{family}, {size} ranks": (family, size)
    for i, family in enumerate(FAMILIES)
    for size in (4 - 2 * (i % 2),)
} | {
    "llama, 2 ranks": ("llama", 2),
    "phi3, 4 ranks": ("phi3", 4),
    "deepseek_v3, 2 ranks": ("deepseek_v3", 2),
    "deepseek_v2, 2 ranks": ("deepseek_v2", 2),
}


def with_ends(model: torch.nn.Module, directory: Path, rank: int, seed: int) -> Path:
    """Add terms of head and embedding to an adapter on disk."""
    generator = torch.Generator().manual_seed(seed)
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2:
            continue
        rows, width = weight.shape
        a, b = (torch.randn(n, rank, generator=generator) for n in (width, rows))
        if kind in ("embed_tokens", "wte", "word_embeddings", "embed_in"):
            tensors[f"base_model.model.{name}.lora_embedding_A"] = b.t().contiguous() * 0.1
            tensors[f"base_model.model.{name}.lora_embedding_B"] = a * 0.1
        elif kind == "lm_head" and model.config.model_type != "gpt_neox":  # stored by another name
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.t().contiguous() * 0.1
            tensors[f"base_model.model.{name}.lora_B.weight"] = b * 0.1
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def adapters_of(model: torch.nn.Module, folder: Path) -> list[Path]:
    """Adapters of several ranks and targets; the last has terms of head and embedding."""
    names = targets_of(model)
    asked = [(1, names), (5, names[:1]), (16, names[1:]), (64, names), (3, names)]
    found = []
    for i, (rank, own) in enumerate(asked):
        pairs: Pairs = draw_pairs(model, own, rank, seed=i, size=0.1)
        found.append(write_adapter(folder / str(i), pairs, rank))
    with_ends(model, found[-1], 3, seed=9)
    return found


@pytest.mark.parametrize("case", quick_of(CASES, {"llama, 4 ranks", "phi3, 2 ranks"}))
def test_adapters_of_many_ranks_in_one_batch(case: str, tmp_path: Path) -> None:
    family, size = CASES[case]
    model = make_model(family, **(DRAWN[family](random.Random(1)) if "deepseek" in family else {}))
    compare(save(model, tmp_path / "base"), adapters_of(model, tmp_path), size)


STAGES = {  # of a few families with what differs between stages: (family, stages, ranks of each)
    "llama, 2 stages": ("llama", 2, 1),
    "gpt2, 2 stages of 2": ("gpt2", 2, 2),
    "gemma2, 2 stages": ("gemma2", 2, 1),
    "phi3, 2 stages of 2": ("phi3", 2, 2),
    "deepseek_v3, 2 stages": ("deepseek_v3", 2, 1),
}


@pytest.mark.parametrize("case", quick_of(STAGES, {"llama, 2 stages", "gpt2, 2 stages of 2"}))
def test_each_stage_of_a_pipeline_has_the_terms_of_its_layers(case: str, tmp_path: Path) -> None:
    family, num_stages, size = STAGES[case]
    model = make_model(family, **(DRAWN[family](random.Random(1)) if "deepseek" in family else {}))
    base = save(model, tmp_path / "base")
    compare(base, adapters_of(model, tmp_path), size, num_stages=num_stages)


@pytest.mark.parametrize("how", quick_of(["tables", "fixed", "tables fixed"], {"tables"}))
def test_terms_by_tables_and_in_deterministic_mode(how: str, tmp_path: Path) -> None:
    model = make_model("llama", intermediate_size=192)
    directories = adapters_of(model, tmp_path)[:-1]
    base = save(model, tmp_path / "base")
    compare(base, directories, 2, "tables" in how, deterministic="fixed" in how)


@pytest.mark.rest
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_routed_experts(family: str, tmp_path: Path) -> None:
    base = save(make_model(family), tmp_path / "base")
    runner = make_runner(base)
    directories = []
    for rank, experts in ((4, [0, 1, 2, 3]), (7, [1, 4, 5])):
        _, stored = expert_pairs(runner, experts, rank, ("_proj",))
        directories.append(write_adapter(tmp_path / str(rank), stored, rank))
    compare(base, directories, 2)


BASES = ("bnb-nf4", "bnb-int8", "gptq-v1-4-32", "awq-gemm-32", "modelopt-fp8", "modelopt-int4")


@pytest.mark.parametrize("name", quick_of(BASES, {"bnb-nf4"}))
def test_a_base_that_comes_quantised(name: str, tmp_path: Path) -> None:
    """QLoRA's, and others: ranks have exactly the base's numbers."""
    model = model_of(name, tmp_path)
    compare(tmp_path / "model", adapters_of(model, tmp_path)[:-1], 2)


@pytest.mark.rest
def test_a_base_that_is_quantised_when_it_is_loaded(tmp_path: Path) -> None:
    """Ranks have the base's numbers by `int4`; `int8` and `fp8` have scales of each rank's part."""
    model = make_model("llama")
    base = save(model, tmp_path / "base")
    compare(base, adapters_of(model, tmp_path), 2, quantization="int4")


@pytest.mark.parametrize("how", quick_of(["tables", "fixed", "tables fixed"], {"tables"}))
def test_terms_of_stages_by_tables_and_in_deterministic_mode(how: str, tmp_path: Path) -> None:
    """Three stages, and adapters of which some have nothing."""
    model = make_model("llama", num_hidden_layers=4, intermediate_size=192)
    directories = adapters_of(model, tmp_path)[:-1]
    for name, layers in (("first", (0,)), ("last", (3,)), ("middle", (1, 2))):
        own = {
            key: pair
            for key, pair in draw_pairs(model, targets_of(model), 4, len(name), size=0.1).items()
            if int(key.split(".layers.")[1].split(".")[0]) in layers
        }
        directories.append(write_adapter(tmp_path / name, own, 4))
    base = save(model, tmp_path / "base")
    compare(base, directories, 1, "tables" in how, num_stages=3, deterministic="fixed" in how)


def test_a_stage_keeps_its_layers_alone_and_pages_are_those_of_the_stage_with_most(
    tmp_path: Path,
) -> None:
    model = make_model("llama", num_hidden_layers=5, intermediate_size=192)
    pairs = draw_pairs(model, targets_of(model), 16)
    late = {name: pair for name, pair in pairs.items() if ".layers.0." not in name}
    directory = write_adapter(tmp_path / "a", late, 16)
    group = Group(save(model, tmp_path / "base"), 1, 2)
    wait_for(lambda: len(group.followers) == 1)
    adapters, other = group.leader.adapters, group.followers[0].adapters
    (_, begin), (_, end) = group.plan.model.stage_bounds
    number = adapters.add(adapters.read(str(directory)))
    wait_for(lambda: number in other._loaded or other._loads)
    other.settle(number)
    layers = [
        sorted({int(place.split(".")[2]) for place in terms_of(each._loaded[number])})
        for each in (adapters, other)
    ]
    assert layers == [[*range(1, begin)], [*range(end - begin)]]
    own, of_other = (
        each._own.num_pages(terms_of(each._loaded[number])) for each in (adapters, other)
    )
    assert adapters.pages_of(number) == of_other > own > 0
    group.end()
    assert group.errors == []


def test_a_rank_keeps_its_part_alone(tmp_path: Path) -> None:
    model = make_model("llama", num_key_value_heads=4)
    directory = write_adapter(tmp_path / "a", draw_pairs(model, ["q_proj", "o_proj"], 8), 8)
    base = save(model, tmp_path / "base")
    group = Group(base, 2)
    wait_for(lambda: len(group.followers) == 1)
    adapters, other = group.leader.adapters, group.followers[0].adapters
    number = adapters.add(adapters.read(str(directory)))
    assert not adapters._stored[number].others
    wait_for(lambda: other._loads or number in other._loaded)
    other.settle(number)
    whole = make_runner(base).adapters.read(str(directory)).terms
    parts = [terms_of(each._loaded[number]) for each in (adapters, other)]
    for name, (term,) in whole.items():
        (first,), (second,) = (part[name] for part in parts)
        is_row = name.endswith("o_proj")
        a, b = (
            torch.cat([x, y], int(is_row)) for x, y in zip(first[1:3], second[1:3], strict=True)
        )
        assert torch.equal(a if is_row else first.a, term.a)
        assert torch.equal(first.b if is_row else b, term.b)
    adapters.evict(number)
    adapters.remove(number)
    wait_for(lambda: not other._stored and not other._loaded)
    group.end()
    assert group.errors == []


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2), (1, 1)])
def test_what_others_have_of_an_adapter_keeps_no_memory(
    size: int, num_stages: int, tmp_path: Path
) -> None:
    """Tensors lie among others when they were read; one rank alone folds magnitudes itself."""
    model = make_model("llama", num_key_value_heads=4)
    pairs = draw_pairs(model, ["q_proj", "o_proj"], 8)
    if size * num_stages == 1:
        directory = write_magnitudes(model, pairs, tmp_path / "a")
        runner = make_runner(save(model, tmp_path / "base"))
        terms = runner.adapters.read(str(directory)).terms
    else:
        directory = write_adapter(tmp_path / "a", pairs, 8)
        group = Group(save(model, tmp_path / "base"), size, num_stages)
        wait_for(lambda: len(group.followers) == size * num_stages - 1)
        terms = group.leader.adapters.read(str(directory)).terms
        group.end()
    tensors = [x for (term,) in terms.values() for x in term[1:] if x is not None]
    assert tensors
    assert [x.untyped_storage().nbytes() for x in tensors] == [x.nbytes for x in tensors]


ROUTERS = ("gate", "shared_expert_gate", "kv_b_proj")  # and what is not multiplied alone
MAGNITUDES = {  # parts of inputs and outputs, some filled up by zeros; fused ones; turned ones
    "llama, 2 ranks": ("llama", 2, 1, {"intermediate_size": 200}),
    "llama, 4 ranks": ("llama", 4, 1, {"intermediate_size": 200, "num_key_value_heads": 2}),
    "llama, 2 stages": ("llama", 1, 2, {}),
    "phi3, 2 stages of 2": ("phi3", 2, 2, {}),
    "gpt2, 2 ranks": ("gpt2", 2, 1, {}),
    "qwen2_moe, 2 ranks": ("qwen2_moe", 2, 1, {}),
    "deepseek_v3, 2 stages": ("deepseek_v3", 1, 2, DRAWN["deepseek_v3"](random.Random(1))),
}


@pytest.mark.parametrize("case", quick_of(MAGNITUDES, {"llama, 2 ranks", "phi3, 2 stages of 2"}))
def test_ranks_find_together_how_long_rows_are(case: str, tmp_path: Path) -> None:
    family, size, num_stages, changes = MAGNITUDES[case]
    model = make_model(family, **changes)
    names = [each for each in targets_of(model) if each not in ROUTERS]
    directories = []
    for rank, own in ((3, names), (16, names[1:])):
        pairs = {
            name: pair
            for name, pair in draw_pairs(model, own, rank, seed=rank, size=0.1).items()
            if ".experts." not in name
        }
        if rank == 3 and isinstance(head := getattr(model, "lm_head", None), torch.nn.Linear):
            drawn = torch.Generator().manual_seed(5)
            shapes = (3, head.in_features), (head.out_features, 3)
            a, b = (torch.randn(shape, generator=drawn) * 0.1 for shape in shapes)
            pairs["lm_head"] = a, b
        directories.append(write_magnitudes(model, pairs, tmp_path / str(rank)))
    directories.append(write_adapter(tmp_path / "plain", draw_pairs(model, names[:2], 4), 4))
    compare(save(model, tmp_path / "base"), directories, size, num_stages=num_stages)


def test_magnitudes_behind_the_first_stage_alone_are_folded_by_all(tmp_path: Path) -> None:
    """Rank 0 has nothing of them, but meets the others."""
    model = make_model("llama", intermediate_size=192)
    last = f".layers.{len(model.model.layers) - 1}."
    drawn = draw_pairs(model, targets_of(model), 4, size=0.1)
    own = {name: pair for name, pair in drawn.items() if last in name}
    directories = [write_magnitudes(model, own, tmp_path / "a")]
    base = save(model, tmp_path / "base")
    wanted = generated(make_runner(base), directories, by_tables=False)
    with ranks_of(base, 1, 2) as leader:
        assert leader.adapters.by_tables, "on a processor, of which rank 0 lays adapters out"
        found = generated(leader, directories, by_tables=False)
    check_same(wanted, found)


def test_lengths_are_of_the_terms_that_are_stored(tmp_path: Path) -> None:
    """In 16 bits of an adapter in 32: stages fold bit for bit what one rank folds."""
    model = make_model("llama", intermediate_size=192)
    directory = write_magnitudes(model, draw_pairs(model, targets_of(model), 5), tmp_path / "a")
    base = save(model, tmp_path / "base")
    wanted = make_runner(base, dtype="bfloat16").adapters.read(str(directory)).terms
    with ranks_of(base, 1, 2, dtype="bfloat16") as leader:
        adapters = leader.adapters
        found = adapters._stored[adapters.add(adapters.read(str(directory)))].terms
    assert 0 < len(found) < len(wanted)
    for place, terms in found.items():
        for one, other in zip(terms, wanted[place], strict=True):
            assert all(map(torch.equal, one[1:], other[1:])), place


@pytest.mark.rest
@pytest.mark.parametrize("name", BASES)
def test_rows_of_a_quantised_matrix_are_as_long_as_they_are_multiplied(
    name: str, tmp_path: Path
) -> None:
    model = model_of(name, tmp_path)
    directory = write_magnitudes(model, draw_pairs(model, targets_of(model), 5), tmp_path / "a")
    compare(tmp_path / "model", [directory], 2)


FORMS = ("none", "int8", "int4", "bnb-nf4", "gptq-v1-4-32", "awq-gemm-32", "modelopt-fp8")


@pytest.mark.parametrize("name", quick_of(FORMS, {"int8", "gptq-v1-4-32"}))
def test_a_matrix_in_memory_has_the_rows_that_it_multiplies_by(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its numbers can be had at once, and where rows of ones say what they are."""
    if name in ("none", "int8", "int4"):
        base = save(make_model("llama", intermediate_size=192), tmp_path / "model")
        runner = make_runner(base, quantization=name)
    else:
        model_of(name, tmp_path)
        runner = make_runner(tmp_path / "model")
    assert runner.adapters.targets is not None
    for part in runner.adapters.targets.all():
        if part.linear is None:
            continue
        a, b = torch.randn(3, part.inputs), torch.randn(part.outputs, 3) * 0.1
        found = part.squares(a, b)
        with monkeypatch.context() as patch:
            patch.setattr(magnitudes, "_dense", lambda linear: None)
            wanted = part.squares(a, b)
        assert torch.allclose(found, wanted, rtol=1e-5), part.name


@pytest.mark.parametrize("num_stages", [1, 2])
def test_magnitudes_of_a_row_of_zeros_are_refused_on_all_ranks(
    num_stages: int, tmp_path: Path
) -> None:
    """The row is in the last layer, on a later rank: no rank keeps anything of the adapter."""
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[-1].self_attn.q_proj.weight[-1] = 0
    pairs = draw_pairs(model, ["q_proj", "o_proj"], 4)
    name = f"model.layers.{len(model.model.layers) - 1}.self_attn.q_proj"
    pairs[name][1][-1] = 0
    directory = write_magnitudes(model, pairs, tmp_path / "a")
    path = directory / "adapter_model.safetensors"
    found = load_file(path)
    found[f"base_model.model.{name}.lora_magnitude_vector"][-1] = 1.0
    save_file(found, path)
    good = write_adapter(tmp_path / "b", pairs, 4)
    group = Group(save(model, tmp_path / "base"), 2, num_stages)
    wait_for(lambda: len(group.followers) == 2 * num_stages - 1)
    adapters = group.leader.adapters
    with pytest.raises(CheckpointError, match=r"magnitudes \(use_dora\).* infinity .*float32"):
        adapters.add(adapters.read(str(directory)))
    number = adapters.add(adapters.read(str(good)))
    ranks = [each.adapters for each in (group.leader, *group.followers)]
    wait_for(lambda: all(list(each._stored) == [number] for each in ranks))
    group.end()
    assert group.errors == []


def table_of(rows: int, seed: int) -> PromptTable:
    drawn = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    return PromptTable(rows, 64, drawn.half().numpy().tobytes(), ())


def answers(house: House, seed: int, num_stages: int = 1) -> list[list[int]]:
    """Requests of adapters, of a name that is loaded again, of tables, and what is cached."""
    house.restart(Limits(8, 16, num_stages=num_stages))
    house.load(*RANKS)
    found: list[list[int]] = []
    prompts = random_prompts([30, 9, 21])
    for turn in range(3):
        asked = [house.submit(prompts[0], name) for name in ("a", "", "b", "c")]
        asked += [house.submit(prompts[1], table_of(4, turn % 2))]
        asked += [house.submit(prompts[2], table_of(17, 2))]
        if turn == 1:
            house.write("a", 6, seed)
            house.load("a")
            house.store.unload("b")
        house.asker.drain()
        found += [house.asker.answers[number, 0].token_ids for number in asked]
        if turn == 1:
            house.load("b")
        house.store.check_integrity()
    return found


RANKS_OF = {"2 ranks": (2, 1), "2 stages": (1, 2), "4 ranks": (4, 1), "2 stages of 2": (2, 2)}


@pytest.mark.parametrize("name", quick_of(RANKS_OF, {"2 stages"}))
def test_requests_loads_and_caches_do_not_know(name: str, tmp_path: Path) -> None:
    """Reload, unload, tables of requests, preemption, host memory, and a pool of few pages."""
    options = {"kv_cache_tokens": 200, "kv_cache_host_bytes": 1 << 19, "adapter_memory": 1 << 19}
    alone = House(tmp_path / "one", **options)
    wanted = answers(alone, 7)
    size, num_stages = RANKS_OF[name]
    with ranks_of_house(tmp_path, size, options, num_stages) as house:
        assert answers(house, 7, num_stages) == wanted
        assert house.asker.engine.figures().counters["prefix_hits"] > 0
    assert wanted[0] != wanted[12], "the name has other weights"


@contextmanager
def ranks_of_house(
    folder: Path, size: int, options: dict[str, object], num_stages: int
) -> Iterator[House]:
    """A house whose runner leads ranks."""
    with ExitStack() as stack:

        def make(path: Path, **given: object) -> ModelRunner:
            return stack.enter_context(ranks_of(path, size, num_stages, **given))

        yield House(folder / "many", make, **options)
