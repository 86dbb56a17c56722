"""Parts of adapters on their way to other ranks: no step waits for a whole one."""

from pathlib import Path

import pytest
from fixtures.models.adapters import draw_pairs, targets_of, write_adapter
from fixtures.models.checkpoints import Driver, Generation, make_model, random_prompts, save
from fixtures.models.ranks import ranks_of
from slipstream.runner import group as group_of_ranks
from slipstream.runner.group import AdapterPart, Frame, Joined, Message


def test_parts_go_to_other_ranks_with_steps_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no step waits for a whole adapter, which is loaded when all of it is there."""
    model = make_model("llama", num_key_value_heads=4)
    directory = write_adapter(tmp_path / "a", draw_pairs(model, targets_of(model), 8), 8)
    base = save(model, tmp_path / "base")
    sent: list[list[int]] = [[]]  # bytes of pieces, before each step

    def note(joined: Joined, message: Message) -> None:
        if isinstance(message, AdapterPart):
            sent[-1].append(memoryview(message.terms).nbytes)
        if isinstance(message, Frame):
            sent.append([])
        send(joined, message)

    send = Joined.send
    monkeypatch.setattr(Joined, "send", note)
    monkeypatch.setattr(group_of_ranks, "_STEP_BYTES", 20_000)
    with ranks_of(base, 2) as leader:
        adapters = leader.adapters
        number = adapters.store(adapters.read(str(directory)))
        assert sent == [[]]
        adapters.start_load(number)
        driver, rows = (
            Driver(leader),
            [Generation(prompt, 99) for prompt in random_prompts([5], 200)],
        )
        while adapters._ranks.is_giving(number):
            driver.step(rows, 8)
        assert len(sent) > 4
        for pieces in sent:  # what is beyond is the last piece
            assert sum(pieces[:-1]) < 20_000
        other = adapters.store(adapters.read(str(directory)))
        adapters.start_load(other)
        loaded = dict(adapters.take_loaded())  # there is no time now
        assert other not in loaded
        assert adapters._ranks.is_giving(other)
        while len(loaded) < 2:
            loaded |= dict(adapters.take_loaded(60.0))
        assert loaded == {number: None, other: None}
        third = adapters.store(adapters.read(str(directory)))
        adapters.remove(third)  # before a piece was sent
        adapters.remove(number)
