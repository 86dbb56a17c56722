"""The orders of operations, each against a plain definition."""

import pytest
import torch
from fixtures.kernels.sampling import draw_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from slipstream.core.batch import Row
from slipstream.core.edits import NO_CONTEXT, EditPlan, Edits
from slipstream.kernels.sampling.sample import count_tokens
from slipstream.runner.sampling_rows import histories, pack_row, sampling_arrays
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams


@pytest.mark.parametrize("order", ["vllm", "trtllm"])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=9, max_size=9),
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.lists(st.integers(0, 8), max_size=6),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([1.0, 1.3]),
    st.sampled_from([0.0, 0.75, -0.25]),
    st.sampled_from([0.0, 0.5]),
    st.dictionaries(st.integers(0, 8), st.sampled_from([1.5, -2.0]), max_size=3),
)
def test_order_of_operations(
    order: str,
    halves: list[int],
    prompt: list[int],
    output: list[int],
    temperature: float,
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    """Greedy over what each contract samples from, written as that contract does it."""
    sampling = SamplingParams(
        max_tokens=9,
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        bias=tuple(bias.items()),
        order=order,
        penalty_temperature=temperature,
    )
    want = []
    for token_id, half in enumerate(halves):
        logit = half / 2 + bias.get(token_id, 0.0)
        if order == "trtllm":
            logit /= temperature
        if token_id in prompt + output:
            logit = logit / repetition if logit > 0 else logit * repetition
        counted = prompt + output if order == "trtllm" else output
        if count := counted.count(token_id):
            logit -= presence + frequency * count
        want.append(logit)
    counts = torch.zeros((1, 9), dtype=torch.int16)
    row = Row(0, 0, pack([0]), 0, ([0],), True, sampling, 1, len(output), num_prompt=len(prompt))
    history = histories((replace(row, history=pack(prompt + output)),))
    assert history is not None
    count_tokens(counts, *map(torch.from_numpy, history))
    packed = Edits(EditPlan(sampling, pack(prompt), NO_CONTEXT)).pack(output)
    arrays = sampling_arrays([pack_row(sampling, 1, 0)], [len(output)], [packed])
    rows, edits = (torch.from_numpy(array.copy()) for array in arrays)
    token = int(draw_rows(torch.tensor([[x / 2 for x in halves]]), rows, edits, counts).token_ids)
    assert want[token] == pytest.approx(max(want), abs=1e-5)
