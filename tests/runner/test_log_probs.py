"""Log probs through the runner: those of the model's own logits, of the rows that ask for them."""

import random
from pathlib import Path

import msgspec
import pytest
import torch
from fixtures.models.checkpoints import DEVICES, make_model, make_runner, ragged_batch, save
from slipstream.core.batch import Batch, Row, TopMode
from slipstream.runner.model_runner import ModelRunner
from slipstream_contract.sampling import SamplingParams


@pytest.fixture(scope="module", params=DEVICES)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = save(make_model("llama"), tmp_path_factory.mktemp("tops"))
    return make_runner(directory, device=request.param, kv_cache_tokens=2048, block_size=16)


def with_tops(batch: Batch, changes: dict[int, dict[str, object]]) -> Batch:
    """Change rows of a batch, by their numbers."""
    rows = tuple(
        msgspec.structs.replace(row, samples=True, **changes.get(i, {}))
        for i, row in enumerate(batch.rows)
    )
    return Batch(rows, batch.num_decodes)


@pytest.mark.parametrize("num_decodes", [0, 3])
def test_tops_are_of_the_rows_that_ask(runner: ModelRunner, num_decodes: int) -> None:
    sizes = [(1, 9), (1, 20), (1, 3), (12, 5), (7, 0)][0 if num_decodes else 3 :]
    batch, _ = ragged_batch(runner, random.Random(3), sizes, num_decodes)
    last = len(batch.rows) - 1
    hot = SamplingParams(max_tokens=1, temperature=0.5, top_k=7, seed=4)
    wanted = {
        0: {"num_top": 5, "sampling": hot, "seed": 4},
        last: {"num_top": 3, "sampling": hot, "top_mode": int(TopMode.PROCESSED)},
    }
    batch = with_tops(batch, wanted)
    logits = runner.logits(batch).cpu()
    sampled = runner.run(batch)
    numbers = [row for row in batch.rows if row.samples]
    assert sampled.tops.keys() == {0, len(numbers) - 1}
    first, processed = sampled.tops[0], sampled.tops[len(numbers) - 1]
    raw = logits[0].log_softmax(-1)
    assert first.token_ids == raw.topk(5).indices.tolist()
    assert first.log_probs == pytest.approx(raw.topk(5).values.tolist(), abs=1e-4)
    assert first.log_prob == pytest.approx(float(raw[sampled.token_ids[0]]), abs=1e-4)
    assert first.rank == 1 + int((raw > raw[sampled.token_ids[0]]).sum())
    scaled = logits[-1] / 0.5
    kept = scaled.topk(7)
    cut = kept.values.log_softmax(-1)
    assert processed.token_ids == kept.indices[:3].tolist()
    assert processed.log_probs == pytest.approx(cut[:3].tolist(), abs=1e-4)
    assert processed.rank <= 7
    assert isinstance(batch.rows[0], Row)
    assert runner.run(Batch(batch.rows, num_decodes, may_have_tops=False)).tops == {}


def test_counted_penalties_are_those_before_the_sample(tmp_path: Path) -> None:
    runner = make_runner(save(make_model("llama"), tmp_path), kv_cache_tokens=512, block_size=16)
    batch, _ = ragged_batch(runner, random.Random(5), [(9, 0)], 0)
    row = batch.rows[0]
    penal = SamplingParams(max_tokens=3, temperature=0.0, presence_penalty=2.0)
    changes = {
        "sampling": penal, "num_top": 4, "top_mode": int(TopMode.PROCESSED),
        "history": row.token_ids, "num_prompt": 9, "num_outputs": 0,
    }  # fmt: skip
    batch = with_tops(batch, {0: changes})
    log_probs = runner.logits(batch)[0].log_softmax(-1)
    sampled = runner.run(batch)
    top = sampled.tops[0]
    assert top.token_ids == log_probs.topk(4).indices.tolist(), "the sample is not penalised yet"
    assert top.log_probs == pytest.approx(log_probs.topk(4).values.tolist(), abs=1e-4)
    assert top.log_prob == pytest.approx(sampled.log_probs[0], abs=1e-5)
    torch.testing.assert_close(log_probs[sampled.token_ids[0]].item(), top.log_prob)
