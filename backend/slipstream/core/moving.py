"""Parameters of sampling that move with the output: they are another number for each token.

    Reset      top-p that decays, and is whole again behind a token (TensorRT-LLM)
    Mirostat   a cut of surprising tokens that keeps the mean surprise near a target (mirostat 2,
               Basu et al., 2021)

Each is a function of the tokens before, so that its sequence `needs_every_token`. What it says of a
row travels as `Row.moved`: fields of the device's record and their values.
"""

from collections.abc import Sequence
from math import log
from typing import Protocol

from slipstream_contract.sampling import SamplingParams

Moved = tuple[tuple[str, float], ...]


class Moving(Protocol):
    """What moves the parameters of one sequence."""

    def next(self, outputs: Sequence[int]) -> Moved:
        """Return what holds for the output after these."""

    def sampled(self, log_prob: float) -> None:
        """Note the log prob of a sample among the tokens that were kept; it may be void yet."""


def moves(sampling: SamplingParams) -> bool:
    """Return whether parameters depend on the tokens before."""
    return sampling.mirostat == 2 or (sampling.top_p_reset_ids >= 0 and sampling.top_p_decay < 1)


def moving_of(sampling: SamplingParams) -> Moving | None:
    """Return what moves the parameters of a sequence; None: nothing does."""
    if not moves(sampling):
        return None
    return Mirostat(sampling) if sampling.mirostat else Reset(sampling)


class Reset:
    """Top-p as it decays from the last token that sets it back."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._num_read = 0  # outputs
        self._first = 0  # number of the output at which it is whole

    def next(self, outputs: Sequence[int]) -> Moved:
        """Return top-p of the output after these; the device's own decay is off."""
        for number in range(self._num_read, len(outputs)):
            if outputs[number] == self._sampling.top_p_reset_ids:
                self._first = number + 1
        self._num_read = len(outputs)
        power = len(outputs) - self._first
        top_p = self._sampling.top_p * self._sampling.top_p_decay**power
        return ("top_p", max(top_p, self._sampling.top_p_min)), ("top_p_decay", 1.0)

    def sampled(self, log_prob: float) -> None:
        """Do nothing: the token says all."""


class Mirostat:
    """The bound on surprise in bits, `mu`: it starts at twice the target."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._target = sampling.mirostat_tau
        self._rate = sampling.mirostat_eta
        self._mu = 2 * self._target
        self._num_read = 0  # outputs that have moved it
        self._surprise = 0.0  # of the last sample

    def next(self, outputs: Sequence[int]) -> Moved:
        """Return the least probability of a token that is kept; the likeliest always is."""
        assert len(outputs) - self._num_read <= 1, "an output whose surprise nobody told"
        if len(outputs) > self._num_read:
            self._mu -= self._rate * (self._surprise - self._target)
            self._num_read = len(outputs)
        return (("epsilon_cutoff", min(1.0, 2.0 ** -max(self._mu, -1000.0))),)

    def sampled(self, log_prob: float) -> None:
        """Note the surprise of a sample."""
        self._surprise = -log_prob / log(2)
