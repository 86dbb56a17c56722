"""LoRA adapters against weights to which they are merged, alone and beside others in a batch."""

import copy
import random
import re
from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import (
    Pairs,
    draw_pairs,
    expert_pairs,
    merged,
    scale_of,
    targets_of,
    terms_of,
    write_adapter,
)
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    save,
)
from fixtures.models.drawn_later import DRAWN
from fixtures.models.parity import check_against
from fixtures.tiers import quick_of
from safetensors.torch import save_file
from slipstream.core.batch import Batch, Row
from slipstream.runner.adapter_forms import Loaded
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
EVEN = {"intermediate_size": 176}  # what the kernels take
TOLERANCE = 1e-4
# A family for each way in which a checkpoint stores its matrices or a block has them.
FAMILIES = (
    *("llama", "phi3", "gpt2", "gemma2", "codegen", "gpt_neox", "falcon"),
    *("cohere", "gemma", "glm", "gptj", "opt", "starcoder2", "apertus", "hunyuan_v1_dense"),
)


def load(runner: ModelRunner, directory: Path) -> int:
    return runner.adapters.add(runner.adapters.read(str(directory)))


def batch_of(adapters: list[int]) -> Batch:
    """Rows of these adapters, and of nothing else."""
    rows = [Row(0, 0, b"", 0, (), True, GREEDY, 0, 1, adapter=number) for number in adapters]
    return Batch(tuple(rows), 0)


def generate(runner: ModelRunner, adapters: list[int], chunk: int) -> list[Generation]:
    """Step sequences of several adapters together; 0: none."""
    prompts = random_prompts([5 + 7 * i for i in range(len(adapters))])
    rows = [Generation(prompt, 3, adapter=n) for prompt, n in zip(prompts, adapters, strict=True)]
    driver = Driver(runner, keep_logits=True)
    while not all(row.is_finished for row in rows):
        driver.step(rows, chunk)
    return rows


@pytest.mark.parametrize("family", quick_of(FAMILIES, ("llama", "phi3", "gemma2")))
def test_each_target_alone_and_all_in_one_batch_match_merged_weights(
    family: str, tmp_path: Path
) -> None:
    model = make_model(family)
    runner = make_runner(save(model, tmp_path / "base"))
    names = targets_of(model)
    kinds = [[name] for name in names] + [names]
    ranks = [1, 5, 8, 16, 64, 300, 512, 2]
    drawn = [
        (draw_pairs(model, kind, ranks[i % 8], seed=i, size=0.1), ranks[i % 8])
        for i, kind in enumerate(kinds)
    ]
    numbers = [
        load(runner, write_adapter(tmp_path / str(i), pairs, rank))
        for i, (pairs, rank) in enumerate(drawn)
    ]
    rows = generate(runner, [0, *numbers, 0], chunk=11)
    for (pairs, rank), row in zip(drawn, rows[1:-1], strict=True):
        with merged(model, pairs, scale_of(rank)):
            check_against(model, row, TOLERANCE)
    for row in (rows[0], rows[-1]):
        check_against(model, row, TOLERANCE)


@pytest.mark.parametrize("quantization", quick_of(("int8", "int4", "fp8"), ("int4",)))
def test_a_term_adds_the_same_to_a_base_in_fewer_bits(quantization: str, tmp_path: Path) -> None:
    """By the quantised model with merged terms: nothing is rounded but the base."""
    model = make_model("llama", hidden_size=128, intermediate_size=256)
    runner = make_runner(save(model, tmp_path / "base"), quantization=quantization)
    pairs = draw_pairs(model, targets_of(model), 8, size=0.3)
    number = load(runner, write_adapter(tmp_path / "adapter", pairs, 8))
    base, own = generate(runner, [0, number], chunk=64)
    with torch.no_grad():
        tokens = torch.tensor([own.tokens[: len(own.prompt)]])
        with merged(model, pairs, scale_of(8)):
            wanted = model(tokens).logits[0, -1]
        plain = model(tokens).logits[0, -1]
    error = (base.logits[0] - _of(model, base)).norm() / _of(model, base).norm()
    assert (own.logits[0] - wanted).norm() / wanted.norm() < 2 * error + 0.02
    assert (own.logits[0] - plain).norm() / plain.norm() > 3 * error


def _of(model: torch.nn.Module, row: Generation) -> torch.Tensor:
    """Logits behind a prompt."""
    with torch.no_grad():
        return model(torch.tensor([row.prompt])).logits[0, -1]


@pytest.mark.parametrize(
    "case",
    quick_of(
        ("llama", "llama fp8", "gpt_neox int4", "phi3 fixed", "llama fixed fp8", "gemma2"),
        ("llama",),
    ),
)
def test_terms_by_tables_are_those_of_torch(case: str, tmp_path: Path) -> None:
    family, *how = case.split()
    is_fixed, quantization = "fixed" in how, next((x for x in how if x != "fixed"), "none")
    model = make_model(family, **EVEN)
    folder = save(model, tmp_path / "base")
    runner = make_runner(folder, quantization=quantization, deterministic=is_fixed)
    runner.adapters.by_tables = True
    names = targets_of(model)
    numbers = [0]
    for i, (rank, own) in enumerate([(1, names), (16, names[:1]), (37, names), (5, names[1:])]):
        pairs = draw_pairs(model, own, rank, seed=i)
        numbers.append(load(runner, write_adapter(tmp_path / str(i), pairs, rank)))
    assert all(each.laid is not None for each in runner.adapters.of(batch_of(numbers)).values())
    found = generate(runner, [*numbers, *numbers[::-1]], 11)
    loaded = runner.adapters._loaded
    of_pages = {number: terms_of(loaded[number]) for number in numbers[1:]}
    for number, terms in of_pages.items():
        loaded[number] = Loaded(terms, None)
    from_pages = generate(runner, [*numbers, *numbers[::-1]], 11)
    runner.adapters.by_tables = False
    for i, number in enumerate(numbers[1:]):
        loaded[number] = loaded[load(runner, tmp_path / str(i))]
    wanted = generate(runner, [*numbers, *numbers[::-1]], 11)
    assert [each.tokens for each in from_pages] == [each.tokens for each in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        if quantization == "fp8":  # a sum in another order may round rows anew: tokens may differ
            one, other = ours.logits[0], theirs.logits[0]
            assert (one - other).norm() < 0.1 * other.norm()
            continue
        assert ours.tokens == theirs.tokens
        for one, other in zip(ours.logits, theirs.logits, strict=True):
            assert (one - other).abs().max() < 1e-3


def test_what_is_read_lies_as_the_processors_kernels_take_it(tmp_path: Path) -> None:
    """To load it, again too, copies nothing, and nothing else of it is kept."""
    model = make_model("llama", **EVEN)
    runner = make_runner(save(model, tmp_path / "base"))
    adapters = runner.adapters
    adapters.by_tables = True
    pairs = draw_pairs(model, targets_of(model), 21)
    read = adapters.read(str(write_adapter(tmp_path / "a", pairs, 21)))
    low = draw_pairs(model, targets_of(model), 7)
    assert adapters.read(str(write_adapter(tmp_path / "b", low, 7))).laid is None, "7 ranks of 16"
    assert read.laid is not None
    words, own = read.laid.words, {name: list(terms) for name, terms in read.terms.items()}
    number = adapters.add(read)
    assert not adapters._stored[number].terms
    for _ in range(2):
        assert adapters._loaded[number].laid.words is words
        adapters.evict(number)
        adapters.start_load(number)
        adapters.settle(number)
    for name, terms in terms_of(adapters._loaded[number]).items():
        given = own[name]
        assert torch.equal(torch.cat([x.b for x in terms]), torch.cat([x.b for x in given]))
        assert all(any(torch.equal(x.a, y.a) for y in given) for x in terms)


def test_adapters_that_torch_alone_can_add_run_beside_others(tmp_path: Path) -> None:
    """A step with one of them is no graph; one without may be."""
    model = make_model("llama", **EVEN)
    runner = make_runner(save(model, tmp_path / "base"))
    runner.adapters.by_tables = True
    outputs, inputs = model.lm_head.weight.shape
    head = {"lm_head": (torch.randn(4, inputs) * 0.1, torch.randn(outputs, 4))}
    drawn = [draw_pairs(model, ["q_proj"], 4), head]
    plain, ends = (
        load(runner, write_adapter(tmp_path / str(i), pairs, 4)) for i, pairs in enumerate(drawn)
    )
    for adapters, expected in (([0, plain], True), ([plain, ends], False), ([0, 0], True)):
        rows = generate(runner, adapters, 64)
        active = runner.adapters.of(batch_of(adapters))
        assert runner.adapters.can_be_graph(active) is expected
        for number, row in zip(adapters, rows, strict=True):
            pairs = {plain: drawn[0], ends: drawn[1]}.get(number, {})
            with merged(model, pairs, scale_of(4)):
                check_against(model, row, TOLERANCE)


@pytest.mark.parametrize("family", ["gemma2", "gemma"])
def test_a_scaled_embedding_scales_its_terms(family: str, tmp_path: Path) -> None:
    """As PEFT does where the layer itself scales; a tied head keeps its matrix."""
    model = make_model(family)
    runner = make_runner(save(model, tmp_path / "base"))
    embedding = model.get_input_embeddings()
    name = next(key for key, module in model.named_modules() if module is embedding)
    rows, width = embedding.weight.shape
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(n, 4, generator=generator) * 0.2 for n in (rows, width))
    directory = write_adapter(tmp_path / "a", {}, 4)
    tensors = {f"base_model.model.{name}.lora_embedding_A": a.t().contiguous()}
    tensors[f"base_model.model.{name}.lora_embedding_B"] = b
    save_file(tensors, directory / "adapter_model.safetensors")
    base, own = generate(runner, [0, load(runner, directory)], chunk=11)
    check_against(model, base, TOLERANCE)
    embedding.weight = torch.nn.Parameter(embedding.weight.detach() + scale_of(4) * a @ b.t())
    check_against(model, own, TOLERANCE)


@pytest.mark.parametrize(
    "case",
    quick_of(
        ("deepseek_v2 1", "deepseek_v3 1", "deepseek_v3 2 fixed", "deepseek_v2 3", "qwen2_moe"),
        ("deepseek_v3 1",),
    ),
)
def test_matrices_of_latent_attention_and_of_a_shared_expert(case: str, tmp_path: Path) -> None:
    """Each kind alone, and all: routed experts have none."""
    family, *rest = case.split()
    drawn_as = DRAWN[family](random.Random(int(rest[0]))) if rest else {}
    drawn_as |= {"vocab_size": 1009, "max_position_embeddings": 512}
    model = make_model(family, **drawn_as)
    runner = make_runner(save(model, tmp_path / "base"), deterministic="fixed" in rest)
    found = draw_pairs(model, targets_of(model), 6, seed=1, size=0.1)
    every = {name: pair for name, pair in found.items() if not name.endswith("expert_gate")}
    kinds = sorted({name.rpartition(".")[2] for name in every})
    drawn = [{n: pair for n, pair in every.items() if n.endswith(kind)} for kind in kinds]
    drawn.append(every)
    assert "kv_b_proj" in kinds or any("shared_expert" in name for name in every)
    numbers = [
        load(runner, write_adapter(tmp_path / str(i), pairs, 6)) for i, pairs in enumerate(drawn)
    ]
    rows = generate(runner, [0, *numbers, 0], chunk=11)
    for pairs, row in zip([{}, *drawn, {}], rows, strict=True):
        with merged(model, pairs, scale_of(6)):
            check_against(model, row, TOLERANCE)


def change_experts(model: torch.nn.Module, pairs: Pairs, scale: float) -> None:
    """Add terms to the experts of transformers' model, which are one tensor a layer."""
    for name, (a, b) in pairs.items():
        found = re.search(r"layers\.(\d+).*experts\.(\d+)\.(\w+)_proj", name)
        assert found is not None
        layer, expert, kind = found.groups()
        experts = model.model.layers[int(layer)].mlp.experts
        whole = experts.down_proj if kind == "down" else experts.gate_up_proj
        matrix = whole.data[int(expert)]
        first = len(matrix) // 2 if kind == "up" else 0
        matrix[first : first + len(b)] += scale * b @ a


EXPERTS = ("mixtral", "qwen2_moe", "deepseek_v2 3", "mixtral fixed", "qwen3_moe fp8")


@pytest.mark.parametrize("case", quick_of(EXPERTS, ("mixtral",)))
def test_routed_experts(case: str, tmp_path: Path) -> None:
    """As vLLM reads them, by expert: some of the experts, and some of their matrices."""
    family, *rest = case.split()
    drawn = DRAWN[family](random.Random(3)) if "3" in rest else {}
    model = make_model(family, **(drawn | {"vocab_size": 1009}))
    options = {"quantization": "fp8"} if "fp8" in rest else {}
    runner = make_runner(save(model, tmp_path / "base"), deterministic="fixed" in rest, **options)
    asked = [
        ([0, 2, 3], 4, ("_proj",)),
        ([1, 4, 5], 7, ("down_proj",)),
        ([0, 1], 2, ("gate_proj",)),
    ]
    pairs = [expert_pairs(runner, *each) for each in asked]
    numbers = [
        load(runner, write_adapter(tmp_path / str(i), stored, asked[i][1]))
        for i, (_, stored) in enumerate(pairs)
    ]
    rows = generate(runner, [0, *numbers, 0], chunk=11)
    before = copy.deepcopy(model.state_dict())
    plain = generate(runner, [0] * 5, chunk=11)
    for row, own, (_, rank, _) in zip(rows[1:-1], (own for own, _ in pairs), asked, strict=True):
        change_experts(model, own, scale_of(rank))
        if "fp8" not in rest:
            check_against(model, row, TOLERANCE)
        model.load_state_dict(before)
    for i in (0, 4):
        assert rows[i].outputs == plain[i].outputs
    changes = [(a.logits[0] - b.logits[0]).abs().max() for a, b in zip(rows, plain, strict=True)]
    assert max(changes[1:-1]) > 1e-3 > max(changes[0], changes[-1])
