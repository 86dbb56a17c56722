"""Choose the beams of the next step: the algorithm of a beam search, without engine or model.

A beam is a continuation of the prompt; its cumulative log prob is the sum over its tokens. Of every
beam the likeliest tokens are known, which makes candidates. By falling cumulative log prob,

    the first `width` candidates that go on  are the beams of the next step;
    those that end, among the first `width`  join the ended beams, of which the `width` best stay.

The score of an ended beam is its cumulative log prob over its length to the power of the length
penalty; an end id counts in both. A search is over when nothing goes on, or when running beams
cannot become better than the ended ones, as `Beams.early_stopping` defines it. This is the search
of transformers; ties go to the better beam and then to the smaller token id.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import NamedTuple

from slipstream_contract.beams import AT_WIDTH, NEVER, Beams

MAX_CANDIDATES = 64
"""Most tokens of a beam that are looked at."""


class Candidate(NamedTuple):
    """A beam and its next token."""

    beam: int  # its rank, 0 is the best
    token_id: int
    log_prob: float
    cum_log_prob: float


class Step(NamedTuple):
    """What becomes of the beams."""

    running: list[Candidate]  # at most `width`, the best first
    ended: list[Candidate]
    is_over: bool


def num_candidates(beams: Beams, num_end_ids: int) -> int:
    """Return how many tokens of each beam a step needs.

    So many that `width` go on whatever ends of those that end by their id alone.
    """
    return min(MAX_CANDIDATES, max(2 * beams.width, beams.width + num_end_ids))


def score(beams: Beams, cum_log_prob: float, length: int) -> float:
    """Return the score of a beam of `length` tokens."""
    divisor: float = length**beams.length_penalty
    return cum_log_prob / divisor


def candidates(
    beams: Beams,
    cum_log_probs: Sequence[float],
    tops: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> Iterator[Candidate]:
    """Yield all possible next tokens of all beams, the best first, each when it is requested.

    Args:
        beams: how to search.
        cum_log_probs: of each beam, by rank.
        tops: token ids and log probs of each beam's likeliest tokens, the likeliest first, of
            equal ones the smaller id.
    """
    rate = beams.diversity_rate
    # Of each beam, the best that was not yielded: what it is ordered by, the beam, its place.
    heads = []
    for beam, (cum, (_, values)) in enumerate(zip(cum_log_probs, tops, strict=True)):
        if values and values[0] > -inf:
            heads.append((-(cum + values[0]) - rate * beam, beam, 0))
    heapify(heads)
    while heads:
        _, beam, place = heads[0]
        (ids, values), cum = tops[beam], cum_log_probs[beam]
        value = values[place]
        yield Candidate(beam, ids[place], value, cum + value)
        place += 1
        if place < len(values) and (value := values[place]) > -inf:
            heapreplace(heads, (-(cum + value) - rate * beam, beam, place))
        else:
            heappop(heads)


def choose(
    beams: Beams,
    ordered: Iterable[Candidate],
    is_end: Callable[[Candidate], bool],
    ended_scores: Sequence[float],
    length: int,
    most: int,
) -> Step:
    """Return what becomes of the beams.

    Args:
        beams: how to search.
        ordered: `candidates`.
        is_end: whether a candidate ends its beam.
        ended_scores: of the ended beams so far, at most `width`, the best first.
        length: output tokens of a beam, with the candidate's.
        most: `length` at which every candidate ends.
    """
    running: list[Candidate] = []
    ended: list[Candidate] = []
    for rank, each in enumerate(ordered):
        if rank >= beams.width and (length == most or len(running) == beams.width):
            break
        if is_end(each):
            if rank < beams.width:
                ended.append(each)
        elif len(running) < beams.width:
            running.append(each)
    scores = ended_scores
    if ended:
        new = [score(beams, each.cum_log_prob, length) for each in ended]
        scores = sorted([*ended_scores, *new], reverse=True)[: beams.width]
    return Step(running, ended, _is_over(beams, running, scores, length, most))


def _is_over(
    beams: Beams, running: Sequence[Candidate], scores: Sequence[float], length: int, most: int
) -> bool:
    """Return whether nothing goes on, or nothing that does can beat the ended beams."""
    if not running:
        return True
    if len(scores) < beams.width:
        return False
    if beams.early_stopping == AT_WIDTH:
        return True
    is_longest_best = beams.early_stopping == NEVER and beams.length_penalty > 0
    best = score(beams, running[0].cum_log_prob, most if is_longest_best else length)
    return best <= scores[-1]
