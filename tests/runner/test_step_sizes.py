"""Steps of decodes and prompts that leave no rows idle."""

from hypothesis import given
from hypothesis import strategies as st
from slipstream.runner.graphs import Buckets
from slipstream.runner.step_shape import StepShape


@given(
    max_num_seqs=st.integers(2, 300),
    max_num_tokens=st.integers(16, 4096),
    num_decodes=st.integers(1, 300),
    num_tokens=st.integers(2, 3000),
)
def test_a_filled_step_is_computed_by_what_computes_a_smaller_one(
    max_num_seqs: int, max_num_tokens: int, num_decodes: int, num_tokens: int
) -> None:
    buckets = Buckets(max_num_seqs, max_num_tokens)

    def computed(size: int) -> tuple[StepShape | None, int]:
        rows = num_decodes + size
        found = buckets.find(StepShape(rows, num_decodes + 1, num_decodes, num_decodes + 1, size))
        return found, -(-rows // 128) if found is None else found.num_tokens

    filled = buckets.sizes.filled(num_decodes, num_tokens)
    assert filled >= num_tokens
    assert computed(filled) == computed(num_tokens)
    assert computed(filled + 1) != computed(num_tokens)


@given(
    max_num_seqs=st.integers(1, 300),
    max_num_tokens=st.integers(16, 4096),
    num_decodes=st.integers(0, 300),
    num_tokens=st.integers(1, 3000),
)
def test_whole_tokens_leave_no_rows_idle_and_no_more_of_them_would(
    max_num_seqs: int, max_num_tokens: int, num_decodes: int, num_tokens: int
) -> None:
    sizes = Buckets(max_num_seqs, max_num_tokens).sizes
    whole = sizes.whole(num_decodes, num_tokens)
    assert whole <= num_tokens
    assert whole <= 0 or sizes.filled(num_decodes, whole) == whole
    more = range(max(1, whole + 1), num_tokens + 1)
    assert all(sizes.filled(num_decodes, each) != each for each in more)


@given(st.integers(2, 257), st.integers(16, 576), st.data())
def test_where_a_step_has_few_tokens_each_with_decodes_and_prompts_has_a_graph(
    max_num_seqs: int, max_num_tokens: int, data: st.DataObject
) -> None:
    buckets = Buckets(max_num_seqs, max_num_tokens)
    decodes = data.draw(st.integers(1, min(max_num_seqs, max_num_tokens - 1) - 1 or 1))
    tokens = data.draw(st.integers(1, max_num_tokens - decodes))
    rows = decodes + 1
    assert buckets.find(StepShape(decodes + tokens, rows, decodes, rows, tokens)) is not None
