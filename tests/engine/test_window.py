"""Windows and sinks: what may be forgotten, in how few blocks, and that nobody ever misses it."""

from engine.counting import seen_by
from engine.test_machine import Machine
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from slipstream.engine.window import Window


@st.composite
def windows(draw: st.DrawFn, num_ahead: int) -> Window:
    size = draw(st.integers(2, 12))
    has_gaps = draw(st.booleans())
    return Window(size, draw(st.integers(0, size - 2)) if has_gaps else 0, num_ahead, has_gaps)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(0, 60))
def test_what_is_forgotten(data: st.DataObject, block_size: int, num_tokens: int) -> None:
    """Whole blocks that no later token sees; all but what `most_blocks` has room for."""
    window = data.draw(windows(data.draw(st.integers(1, 20))))
    forgotten = window.forgotten(num_tokens, block_size)
    later = range(num_tokens, num_tokens + window.size + 1)
    needed = {i // block_size for position in later for i in seen_by(position, window)}
    assert needed.isdisjoint(forgotten)
    num_all = -(-(num_tokens + window.num_ahead) // block_size)
    num_held = num_all - len(forgotten)
    assert num_held <= (window.most_blocks(block_size) or 0)


class Windowed(Machine):
    """The machine of `test_machine`, for sequences that see a part of themselves."""

    @initialize(
        data=st.data(),
        block_size=st.integers(1, 4),
        num_blocks=st.integers(0, 10),
        num_seqs=st.integers(1, 6),
        num_tokens=st.integers(1, 30),
        max_in_flight=st.integers(1, 2),
        long_prompt_tokens=st.sampled_from([1024, 12]),
        is_reused=st.booleans(),
    )
    def begin(
        self,
        data: st.DataObject,
        block_size: int,
        num_blocks: int,
        num_seqs: int,
        num_tokens: int,
        max_in_flight: int,
        long_prompt_tokens: int,
        is_reused: bool,
    ) -> None:
        window = data.draw(windows(max_in_flight * num_tokens))
        sizes = (block_size, num_blocks, num_seqs, num_tokens, 8, 120, max_in_flight)
        super().begin(*sizes, long_prompt_tokens, is_reused, window)


TestWindowed = Windowed.TestCase
TestWindowed.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
