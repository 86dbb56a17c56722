"""A step's arrays for the sampling kernels, and results that two steps share."""

import numpy as np
import torch
from slipstream.core.edits import EDIT
from slipstream.kernels.sampling.sample import CHOSEN, EDIT_WORDS, ROW, ROW_WORDS
from slipstream.runner.sampler import Results, SamplingInputs, make_counts, sample_tokens
from slipstream.runner.sampling_rows import pack_row, sampling_arrays
from slipstream_contract.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


def test_rows_hold_every_parameter() -> None:
    sampling = SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=2**31 - 1,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        typical_p=0.875,
        xtc_probability=0.5,
        xtc_threshold=0.125,
        top_n_sigma=1.5,
        top_p_min=0.25,
    )
    edits = EDIT.pack(3, 1.0) + EDIT.pack(9, -2.0)
    packed = [pack_row(GREEDY, 7, 1), pack_row(sampling, 2**64 - 3, 4)]
    arrays = sampling_arrays(packed, [0, 12], [b"", edits], num_rows=3, first_result=8)
    assert arrays.rows.shape == (3, ROW_WORDS)
    assert arrays.edits.shape == (2, EDIT_WORDS)
    first, second, padding = arrays.rows.view(ROW)[:, 0]
    assert (first["temperature"], first["slot"], first["seed"], first["result"]) == (0, 1, 7, 8)
    assert first["first_edit"] == first["end_edit"] == 0
    assert ROW.itemsize % 16 == 0
    chosen = {field: second[field].item() for field in CHOSEN}
    assert chosen == {field: getattr(sampling, name) for field, name in CHOSEN.items()}
    own = ("slot", "seed", "number", "result", "first_edit", "end_edit")
    assert [second[field].item() for field in own] == [4, -3, 12, 9, 0, 2]
    assert padding["result"] == -1


def test_two_steps_write_to_two_halves() -> None:
    device = torch.device("cpu")
    results, counts = Results(6, device), make_counts(2, 4, device)
    logits = torch.eye(4)[:3]
    for first, rows in ((0, [0, 1, 2]), (3, [2, 0])):
        packed = [pack_row(GREEDY, 0, n) for n in rows]
        arrays = sampling_arrays(packed, [0] * len(rows), [b""] * len(rows), 3, first)
        inputs = SamplingInputs(*(torch.from_numpy(np.array(a)) for a in arrays))
        sample_tokens(logits[[*rows, 0][:3]], inputs, counts, results)
    assert results.read(0, 3)[0] == [0, 1, 2]
    assert results.read(3, 2)[0] == [2, 0]
    assert results.read(3, 2)[2] == [True, True]
    assert results.read(5, 1)[2] == [False], "padding draws nothing"
    assert int(counts.abs().sum()) == 0
