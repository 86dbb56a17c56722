"""Virtual tokens: rows of embeddings before a prompt, against transformers' `inputs_embeds`.

PEFT's prompt tuning and P-tuning do nothing else with the file that they write.
"""

from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import draw_pairs, scale_of, write_adapter, write_prompt
from fixtures.models.checkpoints import Driver, Generation, make_model, make_runner, save
from fixtures.tiers import quick_of
from slipstream.errors import CheckpointError
from torch import Tensor

TOLERANCE = 1e-4
VOCABULARY = 1009


def draw_table(rows: int, width: int = 128, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.3


def expected(model: torch.nn.Module, table: Tensor, tokens: list[int]) -> Tensor:
    """Logits behind the last of some tokens; ids behind the vocabulary are rows of the table."""
    embed = model.get_input_embeddings()
    rows = [
        table[each - VOCABULARY][None] if each >= VOCABULARY else embed(torch.tensor([each]))
        for each in tokens
    ]
    with torch.no_grad():
        return model(inputs_embeds=torch.cat(rows)[None]).logits[0, -1]


FAMILIES = ("llama", "gpt2", "opt", "bloom", "gemma2", "gemma3", "mpt", "qwen3_moe")


@pytest.mark.parametrize("family", quick_of(FAMILIES, ("llama", "gpt2")))
@pytest.mark.parametrize("chunk", [7, 64])
def test_rows_stand_anywhere_beside_other_adapters_in_one_batch(
    family: str, chunk: int, tmp_path: Path
) -> None:
    model = make_model(family)
    runner = make_runner(save(model, tmp_path / "base"))
    tables = [draw_table(count, seed=count) for count in (1, 9, 20)]
    kinds = ("PROMPT_TUNING", "P_TUNING", "PROMPT_TUNING")
    numbers = [
        runner.adapters.add(runner.adapters.read(str(write_prompt(tmp_path / str(i), *each))))
        for i, each in enumerate(zip(tables, kinds, strict=True))
    ]
    prompts = [
        [VOCABULARY, 5, 6, 7],
        [*range(VOCABULARY, VOCABULARY + 9), *range(40, 60)],
        [3, VOCABULARY + 19, 8, VOCABULARY, VOCABULARY + 4, 9, VOCABULARY + 19],
    ]
    rows = [Generation([4, 8, 2, 1], 3)]
    rows += [Generation(p, 3, adapter=n) for p, n in zip(prompts, numbers, strict=True)]
    driver = Driver(runner, keep_logits=True)
    while not all(row.is_finished for row in rows):
        driver.step(rows, chunk)
    for row, table in zip(rows, [draw_table(1), *tables], strict=True):
        for step, logits in enumerate(row.logits):
            tokens = row.prompt + row.outputs[:step]
            assert torch.allclose(logits, expected(model, table, tokens), atol=TOLERANCE)


def test_rows_are_as_wide_as_an_embedding_that_is_projected(tmp_path: Path) -> None:
    model = make_model("opt", word_embed_proj_dim=48)
    runner = make_runner(save(model, tmp_path / "base"))
    table = draw_table(4, 48)
    number = runner.adapters.add(runner.adapters.read(str(write_prompt(tmp_path / "x", table))))
    row = Generation([*range(VOCABULARY, VOCABULARY + 4), 5, 6], 1, adapter=number)
    driver = Driver(runner, keep_logits=True)
    while not row.is_finished:
        driver.step([row], 64)
    assert torch.allclose(row.logits[0], expected(model, table, row.prompt), atol=TOLERANCE)
    with pytest.raises(CheckpointError, match=r"\[4, 128\], not \[1 or more, 48\]"):
        runner.adapters.read(str(write_prompt(tmp_path / "bad", draw_table(4))))


def test_what_is_no_table_is_refused_by_name(tmp_path: Path) -> None:
    runner = make_runner(save(make_model(), tmp_path / "base"))
    table = draw_table(4)

    def refusal(**config: object) -> str:
        directory = write_prompt(tmp_path / "bad", config.pop("table", table), **config)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError) as caught:
            runner.adapters.read(str(directory))
        return str(caught.value)

    assert "is [4, 128], but adapter_config.json says [4, 512]" in refusal(kind="PREFIX_TUNING")
    assert "peft_type = 'MULTITASK_PROMPT_TUNING' is not" in refusal(kind="MULTITASK_PROMPT_TUNING")
    assert "num_transformer_submodules = 2" in refusal(num_transformer_submodules=2)
    assert "modules_to_save = ['lm_head'] is not" in refusal(modules_to_save=["lm_head"])
    assert "is [4, 128], but adapter_config.json says [3, 128]" in refusal(num_virtual_tokens=3)
    assert "the rows are [4, 64], not [1 or more, 128]" in refusal(table=draw_table(4, 64))
    assert "holds NaN" in refusal(table=table / 0)
    pairs = draw_pairs(make_model(), ["q_proj"], 2)
    write_adapter(tmp_path / "bad", pairs, 2, peft_type="P_TUNING", lora_alpha=scale_of(2))
    with pytest.raises(CheckpointError, match=r"r = 2 is not implemented"):
        runner.adapters.read(str(tmp_path / "bad"))
