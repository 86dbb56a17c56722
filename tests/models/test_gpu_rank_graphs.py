"""Graphs of steps with adapters on two ranks that share one GPU give what eager steps give."""

from pathlib import Path

import pytest
from fixtures.models.adapters import draw_pairs, targets_of, write_adapter
from fixtures.models.checkpoints import Driver, Generation, make_model, random_prompts, save
from fixtures.models.one_gpu import OneGpu
from slipstream.runner.ranks import Leader

pytestmark = pytest.mark.gpu
SETTINGS = {
    "device": "cuda",
    "dtype": "float16",
    "kv_cache_tokens": 2048,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "adapter_memory": 64 << 20,
}


def generated(leader: Leader, numbers: list[int]) -> list[Generation]:
    """Sequences in chunks and decodes of the same steps."""
    prompts = random_prompts([5, 30, 1, 11])
    rows = [Generation(prompt, 6, adapter=n) for prompt, n in zip(prompts, numbers, strict=True)]
    driver = Driver(leader)
    while not all(row.is_finished for row in rows):
        driver.step([row for row in rows if not row.is_finished], 16)
    return rows


def test_graphs_with_adapters_of_two_ranks_give_the_tokens_of_eager_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", hidden_size=256, intermediate_size=512)
    ranks = OneGpu(save(model, tmp_path / "base"), **SETTINGS)
    leader, numbers = ranks.leader, [0]
    for rank in (4, 33):
        pairs = draw_pairs(model, targets_of(model), rank, rank, 0.1)
        read = leader.adapters.read(str(write_adapter(tmp_path / str(rank), pairs, rank)))
        numbers.append(leader.adapters.add(read))
    numbers.append(numbers[1])
    found = [generated(leader, numbers) for _ in range(2)]  # captured, and replayed
    assert leader._graphs is not None
    adapted = leader._graphs._adapted
    assert adapted
    assert None not in adapted.values()
    plain = generated(leader, [0] * len(numbers))
    announce = leader._group.announce
    monkeypatch.setattr(leader._group, "announce", lambda *given: announce(*given[:4]))
    monkeypatch.setattr(leader, "_graph", lambda *_: None)
    wanted = generated(leader, numbers)
    ranks.end()
    for rows in found:
        assert [row.outputs for row in rows] == [row.outputs for row in wanted]
        for one, other in zip(rows, wanted, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=0.02)
    assert [row.outputs for row in plain[1:]] != [row.outputs for row in wanted[1:]]
