"""Parameters that move with the output, against their definitions."""

import math

import numpy as np
import pytest
import torch
from fixtures.guide.real import CHECKPOINT, VOCAB_SIZE, GuidedEngine, ids_of
from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.moving import Mirostat, Reset
from slipstream.kernels.sampling.sample import philox
from slipstream_contract.errors import ContractError
from slipstream_contract.sampling import SamplingParams, check_sampling
from transformers import AutoModelForCausalLM


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.floats(0.1, 1),
    st.floats(0.3, 0.99),
    st.floats(0, 0.5),
)
def test_top_p_decays_from_the_last_reset(
    outputs: list[int], top_p: float, decay: float, least: float
) -> None:
    sampling = SamplingParams(
        max_tokens=9, top_p=top_p, top_p_decay=decay, top_p_min=least, top_p_reset_ids=2
    )
    reset = Reset(sampling)
    expected = top_p
    for number in range(len(outputs) + 1):
        for _ in range(2):  # a row may be run again
            moved = dict(reset.next(outputs[:number]))
            assert moved["top_p"] == pytest.approx(max(expected, least))
            assert moved["top_p_decay"] == 1
        if number < len(outputs):
            expected = top_p if outputs[number] == 2 else expected * decay


@given(st.lists(st.floats(-30, 0), max_size=12), st.floats(0, 9), st.floats(0, 1))
def test_mirostat_follows_the_surprise(log_probs: list[float], tau: float, eta: float) -> None:
    sampling = SamplingParams(max_tokens=9, mirostat=2, mirostat_tau=tau, mirostat_eta=eta)
    mirostat, mu = Mirostat(sampling), 2 * tau
    for number in range(len(log_probs) + 1):
        [(name, epsilon)] = mirostat.next([5] * number)
        assert name == "epsilon_cutoff"
        assert epsilon == pytest.approx(min(1.0, 2.0**-mu))
        if number < len(log_probs):
            mirostat.sampled(-1.0)  # of a row that is run again
            mirostat.next([5] * number)
            mirostat.sampled(log_probs[number])
            mu -= eta * (-log_probs[number] / math.log(2) - tau)


def gumbel(seed: int, number: int) -> np.ndarray:
    bits = philox(torch.tensor([seed]), torch.tensor([number]), VOCAB_SIZE)[0].numpy()
    return -np.log(-np.log(((bits >> 9) + 0.5) * 2.0**-23))


def test_mirostat_of_a_model_is_that_of_its_paper() -> None:
    """Logits of transformers, our noise, and the algorithm as it is written."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    prompt, tau, eta, heat, seed = ids_of("def main("), 3.0, 0.3, 0.8, 11
    engine = GuidedEngine()
    number = engine.submit(
        prompt,
        None,
        mirostat=2,
        mirostat_tau=tau,
        mirostat_eta=eta,
        temperature=heat,
        seed=seed,
        max_tokens=24,
    )
    engine.drain()
    text, mu, differing = list(prompt), 2 * tau, 0
    for i, token_id in enumerate(engine.outputs[number, 0]):
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0, -1].numpy().astype(np.float64)
        scaled = logits / heat
        chances = np.exp(scaled - scaled.max())
        chances /= chances.sum()
        kept = -np.log2(chances) <= mu
        kept[chances.argmax()] = True
        chosen = int(np.where(kept, scaled + gumbel(seed, i), -np.inf).argmax())
        assert chosen == token_id, f"output {i}"
        surprise = -math.log2(chances[chosen] / chances[kept].sum())
        mu -= eta * (surprise - tau)
        differing += int(kept.sum()) < VOCAB_SIZE
        text.append(token_id)
    assert differing > 10, "it never cut"


def test_what_is_not_served_is_named() -> None:
    with pytest.raises(ContractError, match="mirostat is 1, but 2 is served"):
        check_sampling(SamplingParams(max_tokens=1, mirostat=1))
