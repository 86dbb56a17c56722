"""The draw of one token a row at Llama-3.1's vocabulary, from logits of two shapes."""

from collections.abc import Callable

import numpy as np
import torch
from slipstream.kernels.sampling.sample import MAX_COUNT, count_tokens
from slipstream.runner.sampler import Results, SamplingInputs, sample_tokens
from slipstream.runner.sampling_rows import history_arrays, pack_row, sampling_arrays
from slipstream_contract.sampling import SamplingParams
from timing import DTYPE, VOCAB, Result, measure

SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "all, penalties": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "presence_penalty": 0.5,
    },
    "top-k, top-p, penalties": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
    },
}


def flat(n: int) -> torch.Tensor:
    """Thousands of tokens share the mass."""
    return (torch.randn(n, VOCAB, device="cuda") * 3).to(DTYPE)


def peaked(n: int) -> torch.Tensor:
    """Make logits like those of text: a few dozen tokens well above the others."""
    logits = torch.randn(n, VOCAB, device="cuda") * 2
    logits[:, torch.randperm(VOCAB)[:40]] = torch.linspace(20, 8, 40, device="cuda")
    return logits.to(DTYPE)


def make_draw(
    n: int, fields: dict[str, float], make_logits: Callable[[int], torch.Tensor]
) -> Callable[[], object]:
    """A draw of `n` rows that is ready to be launched."""
    sampling = SamplingParams(max_tokens=1, **fields)
    packed = [pack_row(sampling, seed, seed) for seed in range(n)]
    arrays = sampling_arrays(packed, range(n), [b""] * n)
    inputs = SamplingInputs(*(torch.from_numpy(np.array(a)).cuda() for a in arrays))
    counts = torch.randint(0, 50, (n, VOCAB), dtype=torch.int16, device="cuda")
    counts *= (counts < 2).to(torch.int16)
    logits, results = make_logits(n), Results(n, torch.device("cuda"))
    assert int(counts.max()) < MAX_COUNT
    return lambda: sample_tokens(logits, inputs, counts, results)


def counting() -> Result:
    """A prompt of 8,192 tokens that is counted anew."""
    prompt = torch.randint(0, VOCAB, (8192,)).tolist()
    arrays = [torch.from_numpy(a).cuda() for a in history_arrays([(0, prompt, 8000)])]

    def make() -> Callable[[], object]:
        counts = torch.zeros((1, VOCAB), dtype=torch.int16, device="cuda")
        return lambda: count_tokens(counts, *arrays)

    return measure("count_tokens", "8192", make, VOCAB * 2, 0)


def cases() -> list[Result]:
    """Their times."""
    results = [counting()]
    for name, make_logits in (("flat", flat), ("peaked", peaked)):
        for n in (1, 16, 64, 200, 256):
            for case, fields in SAMPLINGS.items():
                if name == "peaked" and n in (16, 64):
                    continue
                has_penalties = "penalties" in case
                num_bytes = n * VOCAB * (4 if has_penalties else 2)
                results.append(
                    measure(
                        "sample",
                        f"{n} {name} {case}",
                        lambda n=n, f=fields, m=make_logits: make_draw(n, f, m),
                        num_bytes,
                        0,
                    )
                )
    return results
