"""DRY against a plain scan: every place, every length, every breaker."""

from math import isclose

from fixtures.engine.hashed import Words
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.dry import MOST, Dry
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

VOCAB_SIZE = 7
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=16)
breakers = st.lists(st.sampled_from([b"a", b"b", b"ab", b"ca", b"bca"]), max_size=2).map(tuple)


def breaks_of(text: list[int], words: tuple[bytes, ...]) -> list[bool]:
    """Return of each token whether a word ends in it, by a search of all bytes before."""
    found, told = [], b""
    for token_id in text:
        ends = []
        for byte in Words().raw(token_id):
            told += bytes([byte])
            ends.append(any(told.endswith(word) for word in words))
        found.append(any(ends))
    return found


def scan(text: list[int], num_prompt: int, sampling: SamplingParams) -> dict[int, float]:
    """Return the penalty of each token, by comparing every two places of the window."""
    size = sampling.dry_penalty_last_n
    first = max(0, num_prompt - size)  # where the words of breakers are first looked for
    breaks = [False] * first + breaks_of(text[first:], sampling.dry_sequence_breakers)
    start, last = max(0, len(text) - size), len(text) - 1
    found: dict[int, float] = {}
    for place in range(start, last):
        length = 0
        while (
            place - length >= start
            and text[place - length] == text[last - length]
            and not breaks[place - length]
            and not breaks[last - length]
        ):
            length += 1
        if length >= sampling.dry_allowed_length and not breaks[place + 1]:
            power = length - sampling.dry_allowed_length
            penalty = sampling.dry_multiplier * sampling.dry_base**power
            if sampling.order == "trtllm":
                penalty *= sampling.penalty_temperature
            token_id = text[place + 1]
            found[token_id] = min(found.get(token_id, 0.0), -min(penalty, MOST))
    return found


samplings = st.builds(
    lambda *args: SamplingParams(
        max_tokens=9,
        dry_multiplier=args[0],
        dry_base=args[1],
        dry_allowed_length=args[2],
        dry_penalty_last_n=args[3],
        dry_sequence_breakers=args[4],
        order=args[5],
        penalty_temperature=args[6],
    ),
    st.sampled_from([0.5, 3.0]),
    st.sampled_from([1.0, 1.75, 1000.0]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 5, 9, 64]),
    breakers,
    st.sampled_from(["vllm", "trtllm"]),
    st.sampled_from([1.0, 0.5]),
)


def same(found: dict[int, float], wanted: dict[int, float]) -> bool:
    return found.keys() == wanted.keys() and all(
        isclose(found[each], wanted[each], rel_tol=1e-9) for each in found
    )


@settings(max_examples=400, deadline=None)
@given(tokens.filter(bool), tokens, tokens, samplings)
def test_penalties_are_those_of_a_scan(
    prompt: list[int], outputs: list[int], drafts: list[int], sampling: SamplingParams
) -> None:
    first = Dry(sampling, pack(prompt), Words())
    rule, other = first.sibling(), first.sibling()
    wanted = scan(prompt + drafts, len(prompt), sampling)
    assert same(dict(other.addends(drafts, [])), wanted), "a sibling's outputs are its own"
    for number in range(len(outputs) + 1):
        known = outputs[:number]
        for more in (drafts, []) if number % 3 else (drafts,):
            wanted = scan(prompt + known + more, len(prompt), sampling)
            assert same(dict(rule.addends(known, more)), wanted)


@settings(max_examples=200, deadline=None)
@given(tokens.filter(bool), st.lists(tokens, max_size=4), samplings)
def test_a_fork_has_the_penalties_of_its_own_outputs(
    prompt: list[int], histories: list[list[int]], sampling: SamplingParams
) -> None:
    rule = Dry(sampling, pack(prompt), Words())
    for outputs in histories:
        rule.fork()
        wanted = scan(prompt + outputs, len(prompt), sampling)
        assert same(dict(rule.addends(outputs, [])), wanted)


def test_a_step_looks_at_the_places_of_its_token_alone() -> None:
    sampling = SamplingParams(max_tokens=9, dry_multiplier=1.0, dry_penalty_last_n=-1)
    outputs = [i % 1000 for i in range(30_000)]
    rule = Dry(sampling, pack([1]), Words())
    for number in range(0, len(outputs), 5000):
        rule.addends(outputs[:number], [])
        assert max(map(len, rule._places.values()), default=0) <= 3 * 9
        assert len(rule._lengths) <= 3
