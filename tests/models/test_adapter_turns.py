"""What reads and lays out adapters gives the interpreter's lock away, however many modules are."""

import time
from pathlib import Path

import pytest
import torch
from fixtures.models.adapters import draw_pairs, targets_of, write_adapter
from fixtures.models.checkpoints import make_model, make_runner, save
from slipstream.models.adapters.read import read_adapter
from slipstream.models.adapters.workers import start_turn, turn
from slipstream.runner.adapter_pages import Tile, filled, in_a_row


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are made, on a clock by which any turn has lasted a millisecond."""
    made: list[float] = []
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-3
        return now[0]

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "sleep", made.append)
    return made


def test_a_turn_that_is_short_is_not_ended(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_turn()
    turn()
    assert len(pauses) == 1
    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    start_turn()
    monkeypatch.setattr(time, "perf_counter", lambda: now + 4e-4)
    turn()
    assert len(pauses) == 1


def test_each_tensor_each_module_and_each_tile_may_end_a_turn(
    pauses: list[float], tmp_path: Path
) -> None:
    model = make_model("llama")
    targets = make_runner(save(model, tmp_path / "base")).adapters.targets
    assert targets is not None
    pairs = draw_pairs(model, targets_of(model), 3)
    folder = write_adapter(tmp_path / "adapter", pairs, 3)
    pauses.clear()
    with torch.inference_mode():
        read_adapter(folder, targets, torch.float32)
    # Tensors as the header is parsed, as they are checked and named; modules as they are looked at
    # for sizes and whole matrices, scaled, taken out of a block and made a term.
    assert len(pauses) >= (3 * 2 + 6) * len(pairs)
    tiles = [Tile(torch.zeros(16, 32), (16, 32))] * 5
    spots, size = in_a_row([tile.num_bytes for tile in tiles])
    pauses.clear()
    filled(tiles, spots, 1, size)
    assert len(pauses) >= len(tiles)
