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
