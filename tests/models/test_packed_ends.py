"""Head and embedding that stay packed, through each reader: a model on a CPU with oracles.

Weights of blocks are in 32 bits, so logits are those of transformers with the file's numbers.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.models.adapters import draw_pairs, merged, scale_of, write_adapter, write_prompt
from fixtures.models.checkpoints import (
    Driver,
    Generation,
    make_model,
    make_runner,
    random_prompts,
    rewrite,
    save,
)
from fixtures.models.drafters import SpeculatingDriver, save_eagle3, save_medusa
from fixtures.models.ends_of_gpu import keep_as_on_hopper, packings_of
from fixtures.models.gguf_files import SIZES, unpacked, write_gguf
from fixtures.models.parity import check_against
from fixtures.models.quantised import Tensors, model_of
from fixtures.models.ranks import ranks_of
from fixtures.tiers import quick_of
from safetensors.torch import load_file, save_file
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.errors import CheckpointError
from slipstream.kernels.gemm import unpacked as by_pieces
from slipstream.kernels.gemm.op import PLAIN
from slipstream.kernels.gemm.packing import Packing
from slipstream.layers import packed_rows
from slipstream.runner.model_runner import ModelRunner
from slipstream.wire import Submit
from slipstream_contract.ids import pack
from slipstream_contract.log_probs import LogProbs
from slipstream_contract.sampling import SamplingParams

TOLERANCE = 1e-4
VOCABULARY = 250  # a multiple of no tile, and not of four ranks
HIDDEN = SIZES["hidden_size"]
TIED = {"tie_word_embeddings": True}
# By what is around the ends: nothing; scale and norms; a scale of logits; a cap; positions.
FAMILIES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", TIED),
    "gemma3": ("gemma3", TIED | {"query_pre_attn_scalar": 64}),
    "cohere": ("cohere", TIED),
    "gemma2": ("gemma2", TIED | {"query_pre_attn_scalar": 64, "final_logit_softcapping": 2.0}),
    "gpt2": ("gpt2", {"n_positions": 256}),
}


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_as_on_hopper(monkeypatch)


def made(
    tmp_path: Path, case: str = "llama", embedding: str = "Q4_K", head: str = "Q6_K", **more: object
) -> tuple[torch.nn.Module, Path]:
    """A model and a file of it whose ends are of blocks."""
    family, changes = FAMILIES[case]
    sizes = SIZES | {"vocab_size": VOCABULARY, "tie_word_embeddings": False} | changes | more
    if family == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_head": 4, "n_layer": 2} | changes
    model = make_model(family, **sizes)
    others = {"embed_tokens": embedding, "lm_head": head, "wte": embedding}
    path = write_gguf(model, family, tmp_path / "model.gguf", "F32", others=others)
    return model, unpacked(path, tmp_path / "checkpoint")


def generations(adapters: tuple[int, ...] = (0, 0, 0)) -> list[Generation]:
    prompts = random_prompts([29, 1, 12], VOCABULARY)
    found = zip(prompts, adapters, strict=True)
    return [Generation(prompt, 3 + i, adapter=n) for i, (prompt, n) in enumerate(found)]


def driven(runner: ModelRunner, adapters: tuple[int, ...] = (0, 0, 0)) -> list[Generation]:
    found, driver = generations(adapters), Driver(runner, keep_logits=True)
    while not all(row.is_finished for row in found):
        driver.step(found, 13)
    return found


CASES = [f"{case}{how}" for case in FAMILIES for how in ("", " fixed")]
QUICK = {"llama fixed", "llama, tied", "gemma2"}


@pytest.mark.parametrize("case", quick_of(CASES, QUICK))
def test_logits_are_those_of_the_files_numbers(case: str, tmp_path: Path) -> None:
    name = case.removesuffix(" fixed")
    model, directory = made(tmp_path, name)
    runner = make_runner(directory, deterministic=name != case)
    embedding, head = packings_of(runner)
    is_tied = model.config.tie_word_embeddings
    assert embedding is not None
    assert head is not None
    assert (embedding.record, head.record) == ("shared", "shared" if is_tied else "halves")
    for each in driven(runner):
        check_against(model, each, TOLERANCE)


KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q5_K", "MXFP4")


@pytest.mark.parametrize("kind", quick_of(KINDS, {"Q8_0"}))
def test_all_types_of_blocks(kind: str, tmp_path: Path) -> None:
    model, directory = made(tmp_path, "llama", kind, KINDS[KINDS.index(kind) - 1])
    runner = make_runner(directory)
    assert None not in packings_of(runner)
    for each in driven(runner):
        check_against(model, each, TOLERANCE)


@pytest.mark.parametrize("option", ["none", "Q2_K"])
def test_what_is_dequantised_as_it_is_loaded(option: str, tmp_path: Path) -> None:
    """By `quantization = none`, and types without packed products."""
    kinds = ("Q2_K", "Q2_K") if option == "Q2_K" else ("Q4_K", "Q6_K")
    model, directory = made(tmp_path, "llama", *kinds)
    runner = make_runner(directory, quantization="none" if option == "none" else "auto")
    assert packings_of(runner) == (None, None)
    for each in driven(runner):
        check_against(model, each, TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "llama, tied"])
def test_log_probs_of_prompts(case: str, tmp_path: Path) -> None:
    model, directory = made(tmp_path, case)
    engine = Engine(Limits(4, 16), make_runner(directory), None)
    (prompt,) = random_prompts([40], VOCABULARY)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, values=LogProbs(prompt=3))
    engine.submit(b"a", Submit(0, pack(prompt), sampling, 0))
    found: list[float] = []
    while engine.has_work:
        for tokens in engine.step().get(b"a", []):
            for part in () if tokens.values is None else tokens.values.prompt:
                found += np.frombuffer(part.values, np.float32).tolist()
    with torch.no_grad():
        truth = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    own = truth[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    np.testing.assert_allclose(found, own.numpy(), atol=TOLERANCE)


# ---- adapters ----


def written(directory: Path, **tensors: torch.Tensor) -> Path:
    """An adapter of rank 4 that has these tensors."""
    write_adapter(directory, {}, 4)
    named = {f"base_model.model.{name}": x.contiguous() for name, x in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize("case", ["llama", "llama, tied"])
def test_adapters_of_both_ends(case: str, tmp_path: Path) -> None:
    """Terms of the head, of the embedding with its base beside them, and whole matrices."""
    model, directory = made(tmp_path, case)
    runner = make_runner(directory)
    rng = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng) * 0.2

    embedding, head = model.get_input_embeddings(), model.lm_head
    base, a, b = embedding.weight.detach(), drawn(4, VOCABULARY), drawn(HIDDEN, 4)
    pair, whole = (drawn(4, HIDDEN) * 0.3, drawn(VOCABULARY, 4)), drawn(VOCABULARY, HIDDEN)
    name = "model.embed_tokens"
    terms = {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b}
    wholes = {f"{name}.weight": whole}
    if not case.endswith("tied"):
        wholes["lm_head.weight"] = whole
    directories = [
        write_adapter(tmp_path / "head", {"lm_head": pair}, 4),
        written(tmp_path / "rows", **terms, **{f"{name}.base_layer.weight": base}),
        write_whole(tmp_path / "whole", wholes),
    ]
    numbers = [runner.adapters.add(runner.adapters.read(str(each))) for each in directories]
    plain, *others = driven(runner, (0, 0, 0)), driven(runner, tuple(numbers))
    for each in plain:
        check_against(model, each, TOLERANCE)
    of_head, of_rows, of_whole = others[0]
    own = torch.nn.Parameter(head.weight.detach().clone())
    head.weight = own  # apart from the embedding, as adapters have it
    with merged(model, {"lm_head": pair}, scale_of(4)):
        check_against(model, of_head, TOLERANCE)
    embedding.weight = torch.nn.Parameter(base + scale_of(4) * (b @ a).t())
    check_against(model, of_rows, TOLERANCE)
    embedding.weight = torch.nn.Parameter(whole)
    if not case.endswith("tied"):
        head.weight = torch.nn.Parameter(whole)
    check_against(model, of_whole, TOLERANCE)


def write_whole(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """An adapter of whole matrices."""
    kinds = [name.split(".")[-2] for name in tensors]
    write_adapter(directory, {}, 4, modules_to_save=kinds)
    named = {f"base_model.model.{name}": x.clone() for name, x in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    return directory


def test_another_base_of_the_embedding_is_refused(tmp_path: Path) -> None:
    model, directory = made(tmp_path)
    runner = make_runner(directory)
    base = model.get_input_embeddings().weight.detach().clone()
    base[-1] += base.abs().max()
    name = "model.embed_tokens"
    terms = {f"{name}.lora_embedding_A": torch.ones(4, VOCABULARY)}
    terms[f"{name}.lora_embedding_B"] = torch.ones(HIDDEN, 4)
    path = written(tmp_path / "rows", **terms, **{f"{name}.base_layer.weight": base})
    with pytest.raises(CheckpointError, match=r"base_layer\.weight is not the model's matrix"):
        runner.adapters.read(str(path))


def test_magnitudes_of_the_head(tmp_path: Path) -> None:
    """Lengths are those of rows of the packed matrix with the term added."""
    model, directory = made(tmp_path)
    runner = make_runner(directory)
    pair = draw_pairs(model, ["lm_head"], 4)
    pair = pair or {"lm_head": (torch.randn(4, HIDDEN) * 0.05, torch.randn(VOCABULARY, 4) * 0.2)}
    magnitude = torch.rand(VOCABULARY) + 0.5
    path = write_adapter(tmp_path / "a", pair, 4, use_dora=True)
    tensors = load_file(path / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_magnitude_vector"] = magnitude
    save_file(tensors, path / "adapter_model.safetensors")
    number = runner.adapters.add(runner.adapters.read(str(path)))
    found = driven(runner, (number, 0, number))
    check_against(model, found[1], TOLERANCE)
    a, b = pair["lm_head"]
    whole = model.lm_head.weight.detach() + scale_of(4) * b @ a
    length = whole.norm(dim=1)
    model.lm_head.weight = torch.nn.Parameter(whole * (magnitude / length)[:, None])
    for each in (found[0], found[2]):
        check_against(model, each, TOLERANCE)


@pytest.mark.parametrize("case", ["llama, tied", "gemma3"])
def test_virtual_tokens(case: str, tmp_path: Path) -> None:
    """Rows behind the vocabulary, which a scale of the embedding does not change."""
    model, directory = made(tmp_path, case)
    runner = make_runner(directory)
    table = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2)) * 0.3
    number = runner.adapters.add(runner.adapters.read(str(write_prompt(tmp_path / "p", table))))
    tokens = [VOCABULARY + 4, 7, VOCABULARY, 9, VOCABULARY - 1]
    row = Generation(tokens, 2, adapter=number)
    driver = Driver(runner, keep_logits=True)
    driver.step([row], 64)
    embed = model.get_input_embeddings()
    rows = [
        table[each - VOCABULARY][None] if each >= VOCABULARY else embed(torch.tensor([each]))
        for each in tokens
    ]
    with torch.no_grad():
        truth = model(inputs_embeds=torch.cat(rows)[None]).logits[0, -1]
    assert (row.logits[0] - truth).abs().max() < TOLERANCE


# ---- drafts, ranks, stages ----


DRAFTS = [f"{kind}{share}" for kind in ("draft", "medusa", "eagle3") for share in ("", " ranks")]


@pytest.mark.parametrize("case", quick_of(DRAFTS, {"medusa", "eagle3 ranks"}))
def test_drafts_are_those_of_numbers(case: str, tmp_path: Path) -> None:
    """Drafts come from the model itself, and from modules that read the model's own ends."""
    kind, _, share = case.partition(" ")
    sizes = {"hidden_size": 128, "vocab_size": 1009, "num_hidden_layers": 3}
    model, directory = made(tmp_path, "llama", "Q8_0", "Q5_1", **sizes)
    plain = save(model, tmp_path / "plain")
    if kind == "medusa":
        save_medusa(tmp_path / "drafts", 3, 1, has_outputs=False)
    elif kind == "eagle3":
        save_eagle3(tmp_path / "drafts")
    drafts = plain if kind == "draft" else tmp_path / "drafts"
    options = {"speculation": kind, "draft_checkpoint": str(drafts), "num_draft_tokens": 3}
    wanted, expected = drafted(make_runner(plain, **options))
    if kind == "draft":
        options["draft_checkpoint"] = str(directory)
    if share:
        with ranks_of(directory, 2, **options) as leader:
            found, driver = drafted(leader)
    else:
        found, driver = drafted(make_runner(directory, **options))
    assert found == wanted
    assert driver.drafted.chains == expected.drafted.chains
    assert sum(driver.drafted.proposed) > 0


def drafted(runner: ModelRunner) -> tuple[list[list[int]], SpeculatingDriver]:
    """Tokens of some prompts, and what has drafted."""
    driver, greedy = SpeculatingDriver(runner, 3), SamplingParams(max_tokens=1, temperature=0.0)
    prompts = random_prompts([37, 1, 9])
    rows = [Generation(prompt, 7 + i, greedy, seed=i) for i, prompt in enumerate(prompts)]
    driver.finish(rows, 13)
    return [row.outputs for row in rows], driver


def test_heads_that_draft_share_the_models_matrix(tmp_path: Path) -> None:
    _, directory = made(tmp_path)
    save_medusa(tmp_path / "drafts", 2, 1, HIDDEN, VOCABULARY, has_outputs=False)
    options = {"speculation": "medusa", "draft_checkpoint": str(tmp_path / "drafts")}
    runner = make_runner(directory, num_draft_tokens=2, **options)
    heads = runner._drafting.drafter._heads
    own = runner._model.head.product.linear.weights
    assert [each.weights is own for each in heads._outputs] == [True, True]


SHARES = {"2 ranks": (2, 1), "4 ranks": (4, 1), "2 stages": (1, 2), "2 ranks of 2 stages": (2, 2)}


@pytest.mark.parametrize("case", ["llama", "llama, tied"])
@pytest.mark.parametrize("share", quick_of(SHARES, {"4 ranks"}))
def test_ranks_have_rows_of_both_ends(case: str, share: str, tmp_path: Path) -> None:
    """Four ranks of 63 rows: behind the last one's 61 come zeros. Stages: the first has both."""
    size, stages = SHARES[share]
    model, directory = made(tmp_path, case)
    with ranks_of(directory, size, stages) as leader:
        embedding, head = packings_of(leader)
        assert embedding is not None
        assert head is not None
        assert embedding.outputs == head.outputs == {1: 250, 2: 125, 4: 63}[size]
        found = driven(leader)
    for each in found:
        check_against(model, each, TOLERANCE)


# ---- many rows, memory ----


def test_many_rows_are_multiplied_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of 16 bits, as a GPU does from 257 rows on (129 elsewhere)."""
    model, directory = made(tmp_path)
    runner = make_runner(directory)
    linear = runner._model.head.product.linear
    groups = linear.weights.groups
    assert groups is not None
    x = torch.randn(300, HIDDEN).bfloat16()
    around = PLAIN._replace(groups=groups, bias=torch.randn(VOCABULARY).bfloat16())
    whole = by_pieces.by_16_bits(x, linear.weights.values, around)
    sizes = []
    real = by_pieces.unpacked

    def noted(values: torch.Tensor, *given: object) -> torch.Tensor:
        sizes.append(len(values))
        return real(values, *given)

    monkeypatch.setattr(by_pieces, "unpacked", noted)
    monkeypatch.setattr(by_pieces, "PIECE", 100 * HIDDEN)
    pieces = by_pieces.by_16_bits(x, linear.weights.values, around)
    assert sizes == [6, 6, 4]
    torch.testing.assert_close(pieces, whole, rtol=0.01, atol=0.01)
    expected = x.float() @ model.lm_head.weight.detach().t() + around.bias.float()
    torch.testing.assert_close(pieces.float(), expected, rtol=0.02, atol=0.02)


def test_pieces_are_whole_tiles() -> None:
    """A vocabulary of 128,256 tokens is cut; what a gate or a sum follows stays whole."""

    def at_once(outputs: int, inputs: int, are_alone: bool = True) -> int:
        sizes = (outputs, inputs, torch.float16, False)
        return by_pieces.outputs_at_once(Packing(8, 32, *sizes, record="halves"), are_alone)

    assert at_once(128_256, 4096) == 32_768
    assert at_once(128_256, 4096, are_alone=False) == 128_256
    assert at_once(28_672, 4096) == 28_672
    assert at_once(262_144, 5376) == (1 << 27) // (5376 * 16) * 16
    assert at_once(64, 1 << 26) == 16


def test_no_step_makes_all_rows_of_either_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, directory = made(tmp_path, "llama, tied")

    def never(*given: object) -> torch.Tensor:
        raise AssertionError("a whole matrix was made")

    monkeypatch.setattr(packed_rows, "unpacked", never)
    options = {"speculation": "draft", "draft_checkpoint": str(directory), "num_draft_tokens": 2}
    runner = make_runner(directory, **options)
    for each in driven(runner):
        check_against(model, each, TOLERANCE)
    assert runner._model.embedding.table is runner._model.head.table


# ---- heads of other formats ----

HEADS = {  # how a GPU keeps them: rows of a head are never rounded to e4m3
    "awq-gemm-32": "4 bits by 32, packed",
    "gptq-v1-4-32": "4 bits by 32, packed",
    "gptq-v2-8-64": "8 bits by 64, packed",
    "modelopt-int4": "4 bits by 32, packed",
    "modelopt-int8": "8 bits by a row, packed",
    "modelopt-fp8": "e4m3 by a row, packed",
    "modelopt-nvfp4": "e2m1 by 16, packed",
    "bnb-int8": "8 bits by a row, packed",
    "bnb-nf4": "None",
}


@pytest.mark.parametrize("case", quick_of(HEADS, {"awq-gemm-32", "modelopt-fp8"}))
def test_quantised_heads_of_other_formats(case: str, tmp_path: Path) -> None:
    """The head is a copy of a block's matrix; the embedding stays in 16 bits."""
    model = model_of(case, tmp_path)
    directory, of_block = tmp_path / "model", "model.layers.0.mlp.up_proj."

    def head(tensors: Tensors) -> None:
        tensors.pop("lm_head.weight", None)
        for name in [each for each in tensors if each.startswith(of_block)]:
            tensors[f"lm_head.{name.removeprefix(of_block)}"] = tensors[name].clone()

    rewrite(directory, head)
    model.lm_head.weight = torch.nn.Parameter(model.model.layers[0].mlp.up_proj.weight.detach())
    runner = make_runner(directory)
    embedding, kept = packings_of(runner)
    assert (embedding, str(kept)) == (None, HEADS[case])
    generation = Generation(random_prompts([40], 256)[0], 3)
    Driver(runner, keep_logits=True).finish([generation], 13)
    with torch.no_grad():
        truth = model(torch.tensor([generation.tokens])).logits[0, len(generation.prompt) - 1 : -1]
    error = (torch.stack(generation.logits) - truth).abs().max() / truth.abs().max()
    assert error < 2 * TOLERANCE  # rows of blocks have 16 bits
    table, ids = runner._model.head.table, torch.tensor([3, 200, 3])
    torch.testing.assert_close(table.rows(ids), model.lm_head.weight.detach()[ids])
