"""A sequence's tokens, by their places."""

import ast
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from slipstream.core import cache_state
from slipstream.core.sequence import Request, Sequence
from slipstream.wire import Submit
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(ids.filter(bool), ids, st.data())
def test_prompt_and_outputs_are_one_row_of_tokens(
    prompt: list[int], outputs: list[int], data: st.DataObject
) -> None:
    request = Request(b"bridge", Submit(0, pack(prompt), SamplingParams(max_tokens=9), 1))
    sequence = Sequence(0, request, 0, pack(prompt), 0, 100, None)
    for token_id in outputs:
        assert sequence.append(token_id, 0.0, 1) is None
    both = prompt + outputs
    assert (sequence.num_known, sequence.num_outputs) == (len(both), len(outputs))
    end = data.draw(st.integers(0, len(both)))
    begin = data.draw(st.integers(0, end))
    assert sequence.ids(begin, end).tolist() == both[begin:end]
    assert sequence.ids(begin, end).typecode == "i"


def test_only_the_cache_changes_what_is_its_own() -> None:
    """No assignment to a field of `sequence.cache` stands outside of `slipstream.kvcache`."""
    package = Path(cache_state.__file__).parents[1]
    fields = set(cache_state.CacheState.__dataclass_fields__)
    writers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            owner = node.value
            is_state = isinstance(owner, ast.Attribute) and owner.attr == "cache"
            if is_state and node.attr in fields:
                writers.add(str(path.relative_to(package).parent))
    assert writers == {"kvcache"}
