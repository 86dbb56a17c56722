"""Several rows of one sequence in a step compute what steps of one row each do, on both devices."""

import json
import random
from pathlib import Path

import pytest
import torch
from fixtures.models.checkpoints import DEVICES, GREEDY
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch, Row
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
NUM_DRAFTS = 5


def runner_of(folder: Path, device: str, **options: object) -> ModelRunner:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    settings = {
        "device": device,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "load_format": "random",
        "kv_cache_tokens": 8192,
        "block_size": 8,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "speculation": "lookup",
        "num_draft_tokens": 7,
    }
    config = EngineConfig(checkpoint=str(folder), **(settings | options))  # type: ignore[arg-type]
    return ModelRunner(resolve(config))


def rows_of(
    number: int, table: list[int], token_ids: list[int], start: int, is_new: bool
) -> list[Row]:
    return [
        Row(number, number, [token_id], start + i, (table,), True, GREEDY, 0, 1 + i, is_new=is_new)
        for i, token_id in enumerate(token_ids)
    ]


@pytest.mark.parametrize("has_chunk", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"deterministic": True}, {"kv_cache_dtype": "int8", "block_size": 16}],
    ids=["plain", "deterministic", "int8"],
)
def test_rows_of_a_sequence_are_steps_of_one(
    tmp_path: Path, device: str, options: dict[str, object], has_chunk: bool
) -> None:
    """Two sequences with drafts across a block's border, one without, of lengths that differ.

    A chunk of a fourth, the last one of its prompt, may be beside them.
    """
    runner, rng = runner_of(tmp_path, device, **options), random.Random(3)
    starts = [61, 9, 140] if device == "cpu" else [61, 9, 2040]
    counts = [NUM_DRAFTS + 1, NUM_DRAFTS + 1, 1]
    chunk = [rng.randrange(512) for _ in range(30)]
    texts = [[rng.randrange(512) for _ in range(s + NUM_DRAFTS + 1)] for s in starts]
    blocks = iter(rng.sample(range(runner.num_blocks), runner.num_blocks))
    size = runner.block_size
    tables = [[next(blocks) for _ in range(-(-len(text) // size))] for text in texts]
    for number, (text, start, table) in enumerate(zip(texts, starts, tables, strict=True)):
        for begin in range(0, start, 200):
            part = text[begin : min(start, begin + 200)]
            row = Row(number, number, part, begin, (table,), False, GREEDY, 0, 0)
            runner.run(Batch((row,), 0))
    table = [next(blocks) for _ in range(-(-len(chunk) // size))]
    last = Row(3, 3, chunk[10:], 10, (table,), True, GREEDY, 0, 0)
    if has_chunk:
        runner.run(Batch((Row(3, 3, chunk[:10], 0, (table,), False, GREEDY, 0, 0),), 0))
    before = runner._cache.clone()
    alone: list[torch.Tensor] = []
    for number, (text, start, table) in enumerate(zip(texts, starts, tables, strict=True)):
        for row in rows_of(number, table, text[start : start + counts[number]], start, False):
            alone.append(runner.logits(Batch((row,), 1)).clone())
    if has_chunk:
        alone.append(runner.logits(Batch((last,), 0)).clone())
    want = torch.cat(alone)
    with torch.inference_mode():
        runner._cache.copy_(before)  # without what those steps wrote
    rows = [
        row
        for number, (text, start, table) in enumerate(zip(texts, starts, tables, strict=True))
        for row in rows_of(number, table, text[start : start + counts[number]], start, False)
    ]
    chunks = [last] if has_chunk else []
    batch = Batch((*rows, *chunks), len(rows), num_drafts=2 * NUM_DRAFTS)
    got = runner.logits(batch).clone()
    if options.get("deterministic"):
        assert torch.equal(got, want)
    else:
        bound = 1e-4 if device == "cpu" else 0.06
        assert (got - want).abs().max() <= bound * want.abs().max()
    for _ in range(3):  # as a graph, where there are any
        sampled = runner.run(batch)
        top = got.topk(2, dim=-1)
        for place, token_id in enumerate(sampled.token_ids):
            is_near = float(top.values[place, 0] - got[place, token_id]) <= 0.06
            assert token_id == int(top.indices[place, 0]) or is_near
