"""Prefix tuning: keys and values before a prompt, against transformers with them as its past.

PEFT does nothing else with the file that it writes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.models.adapters import key_size, write_prefix
from fixtures.models.checkpoints import Driver, Generation, make_model, make_runner, save
from fixtures.models.ranks import ranks_of
from fixtures.tiers import quick_of
from slipstream.errors import CheckpointError
from slipstream.runner.model_runner import ModelRunner
from torch import Tensor
from transformers import DynamicCache

TOLERANCE = 1e-4
VOCABULARY = 1009
# Rotations in halves, side by side and of a part of a head; none; matrices in one, turned or not;
# heads without kernels of their size; scaled rotations; windows; chunks of attention.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gpt_neox": {},
    "gptj": {},
    "bloom": {},
    "gemma2": {},
    "falcon": {},
    "phi3": {},
    "opt": {},
    "stablelm": {},
    "llama4": {"use_qk_norm": False, "attention_chunk_size": 16},
}


def draw_keys(model: torch.nn.Module, tokens: int, seed: int = 0) -> Tensor:
    layers, heads, size = key_size(model)
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 2 * layers * heads * size, generator=rng)


def expected(model: torch.nn.Module, table: Tensor, tokens: list[int]) -> Tensor:
    """Logits behind the last of the tokens that follow a prefix."""
    layers, heads, size = key_size(model)
    parts = table.view(1, len(table), 2 * layers, heads, size).permute(2, 0, 3, 1, 4)
    past = DynamicCache()
    for layer in range(layers):
        past.update(parts[2 * layer], parts[2 * layer + 1], layer)
    seen = torch.ones(1, len(table) + len(tokens), dtype=torch.long)
    with torch.no_grad():
        given = torch.tensor([tokens])
        return model(given, past_key_values=past, attention_mask=seen).logits[0, -1]


def check_beside_other_rows(
    runner: ModelRunner, model: torch.nn.Module, chunk: int, folder: Path
) -> None:
    """Check the logits of rows with prefixes and of one without, in the same steps."""
    tables = [draw_keys(model, count, seed=count) for count in (1, 9, 20)]
    layers = key_size(model)[0]
    numbers = [
        runner.adapters.add(runner.adapters.read(str(write_prefix(folder / str(i), table, layers))))
        for i, table in enumerate(tables)
    ]
    prompts = [[5, 6, 7], [*range(40, 60)], [3]]
    rows = [Generation([4, 8, 2, 1], 3)]
    rows += [
        Generation([*range(VOCABULARY, VOCABULARY + len(table)), *prompt], 3, adapter=number)
        for prompt, number, table in zip(prompts, numbers, tables, strict=True)
    ]
    driver = Driver(runner, keep_logits=True)
    while not all(row.is_finished for row in rows):
        driver.step(rows, chunk)
    for row, table, prompt in zip(rows[1:], tables, prompts, strict=True):
        for step, logits in enumerate(row.logits):
            wanted = expected(model, table, prompt + row.outputs[:step])
            assert torch.allclose(logits, wanted, atol=TOLERANCE), step
    with torch.no_grad():
        plain = model(torch.tensor([rows[0].prompt])).logits[0, -1]
    assert torch.allclose(rows[0].logits[0], plain, atol=TOLERANCE)


@pytest.mark.parametrize("family", quick_of(FAMILIES, ("llama", "gpt2")))
@pytest.mark.parametrize("chunk", [7, 64])
def test_keys_stand_before_a_prompt_beside_other_rows(
    family: str, chunk: int, tmp_path: Path
) -> None:
    model = make_model(family, **FAMILIES[family])
    runner = make_runner(save(model, tmp_path / "base"))
    check_beside_other_rows(runner, model, chunk, tmp_path)


@pytest.mark.parametrize(
    "case", quick_of([(f, 4 - 2 * (i % 2)) for i, f in enumerate(FAMILIES)], {("gpt2", 2)})
)
def test_each_rank_brings_the_keys_of_its_own_heads(case: tuple[str, int], tmp_path: Path) -> None:
    """More ranks than heads of keys have some of them twice."""
    family, size = case
    model = make_model(family, **FAMILIES[family])
    with ranks_of(save(model, tmp_path / "base"), size) as leader:
        check_beside_other_rows(leader, model, 7, tmp_path)


STAGES = [(family, 2, 1 + i % 2) for i, family in enumerate(FAMILIES)]


@pytest.mark.parametrize("case", quick_of(STAGES, {("llama", 2, 1)}))
def test_each_stage_brings_the_keys_of_its_own_layers(
    case: tuple[str, int, int], tmp_path: Path
) -> None:
    family, num_stages, size = case
    model = make_model(family, **FAMILIES[family])
    with ranks_of(save(model, tmp_path / "base"), size, num_stages) as leader:
        check_beside_other_rows(leader, model, 7, tmp_path)


def test_what_is_no_prefix_of_the_model_is_refused_by_name(tmp_path: Path) -> None:
    model = make_model()
    runner = make_runner(save(model, tmp_path / "base"))
    layers = key_size(model)[0]
    table = draw_keys(model, 4)

    def refusal(table: Tensor, layers: int, **config: object) -> str:
        directory = write_prefix(tmp_path / "bad", table, layers, **config)
        with pytest.raises(CheckpointError) as caught:
            runner.adapters.read(str(directory))
        return str(caught.value)

    assert "no keys and values of" in refusal(table[:, : table.shape[1] // 2].clone(), layers)
    assert "no keys and values of" in refusal(torch.cat([table, table], 1), 2 * layers)
    assert "but adapter_config.json says [5, " in refusal(table, layers, num_virtual_tokens=5)
    assert "holds NaN" in refusal(table / 0, layers)
    assert "num_layers" in refusal(table, layers, num_layers=0)


@pytest.mark.parametrize("family", quick_of(["qwen3", "deepseek_v2"], ["qwen3"]))
def test_keys_that_cannot_be_brought_are_refused(family: str, tmp_path: Path) -> None:
    runner = make_runner(save(make_model(family), tmp_path / "base"))
    directory = write_prefix(tmp_path / "prefix", torch.randn(3, 512), 2)
    with pytest.raises(CheckpointError, match="prefix tuning is not implemented: keys"):
        runner.adapters.read(str(directory))
