"""Stop words on bytes, wherever tokens end, against a search of the whole text."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.stop import Ending, StopChecker, StopWords
from slipstream.wire import FinishReason
from slipstream_contract.sampling import SamplingParams

letters = st.binary(max_size=6).map(lambda data: bytes(b"ab"[byte % 2] for byte in data))
words = letters.filter(bool)


class Table:
    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens

    def raw(self, token_id: int) -> bytes:
        return self.tokens[token_id]


def make(table: Table, stop_words: tuple[bytes, ...], **options: object) -> StopChecker:
    sampling = SamplingParams(max_tokens=1000, stop_words=stop_words, **options)  # type: ignore[arg-type]
    return StopChecker(sampling, table, 1000)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(letters, max_size=12),
    st.lists(words, min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 4),
)
def test_against_a_search_of_the_whole_text(
    tokens: list[bytes], stop_words: list[bytes], include_stop: bool, min_tokens: int
) -> None:
    table = Table(*tokens)
    checker = make(table, tuple(stop_words), include_stop=include_stop, min_tokens=min_tokens)
    text = b""
    for number, token in enumerate(tokens, start=1):
        before = checker.num_sendable
        ending = checker.take_token(number - 1, number)
        assert checker.num_sendable >= before, "a token was taken back"
        ends = [len(text) + i for i in range(1, len(token) + 1)]
        text += token
        if number > min_tokens:
            for end in ends:
                found = [word for word in stop_words if text[:end].endswith(word)]
                if found:
                    longest = max(found, key=len)
                    assert ending is not None
                    assert ending.stop_reason == longest.decode()
                    want = text[: end if include_stop else end - len(longest)]
                    kept = b"".join(tokens[: checker.num_sendable])
                    assert kept[: len(kept) - checker.drop_bytes] == want
                    if checker.num_sendable:
                        assert checker.drop_bytes <= len(tokens[checker.num_sendable - 1])
                    return
        assert ending is None
        # Exactly what may still become a stop word is held back, in whole tokens.
        tail = 0
        if not include_stop:
            prefixes = {word[:i] for word in stop_words for i in range(1, len(word) + 1)}
            tail = max((len(p) for p in prefixes if text.endswith(p)), default=0)
        kept = len(b"".join(tokens[: checker.num_sendable]))
        assert kept <= len(text) - tail
        if checker.num_sendable < number:
            assert kept + len(tokens[checker.num_sendable]) > len(text) - tail


def test_a_word_that_begins_and_ends_inside_tokens() -> None:
    table = Table(b"Hello wor", b"ld! How", b" are")
    checker = make(table, (b"world",), include_stop=False)
    assert checker.take_token(0, 1) is None
    assert checker.num_sendable == 0
    ending = checker.take_token(1, 2)
    assert ending == Ending(FinishReason.STOP, "world")
    assert (checker.num_sendable, checker.drop_bytes) == (1, 3)  # "Hello "
    kept = make(table, (b"world",), include_stop=True)
    assert kept.take_token(0, 1) is None
    assert kept.num_sendable == 1  # it stays in any case
    assert kept.take_token(1, 2) is not None
    assert (kept.num_sendable, kept.drop_bytes) == (2, 5)  # "Hello world"


def test_a_word_may_be_cut_inside_a_character() -> None:
    snow = "☃".encode()
    table = Table(b"a" + snow[:1], snow[1:2], snow[2:] + b"b")
    checker = make(table, (snow,), include_stop=False)
    assert [checker.take_token(i, i + 1) is not None for i in range(3)] == [False, False, True]
    assert (checker.num_sendable, checker.drop_bytes) == (1, 1)


def test_stop_token_ids_and_end_ids() -> None:
    for include_stop in (True, False):
        checker = make(Table(b"x", b"y"), (), include_stop=include_stop, stop_token_ids=(1,))
        assert checker.take_token(0, 1) is None
        assert checker.take_token(1, 2) == Ending(FinishReason.STOP, 1)
        assert checker.num_sendable == 1 + include_stop
    checker = make(Table(b"x"), (), end_ids=(5,), min_tokens=2)
    assert [checker.is_end(5, number) for number in range(4)] == [False, False, True, True]


def test_many_words_cost_one_transition_a_byte() -> None:
    # The worst case for one-by-one search: every word is a long prefix of the text, and fails late.
    many = tuple(b"a" * 500 + str(number).encode() for number in range(500))
    automaton = StopWords(many)
    begin, state = time.thread_time(), 0
    for byte in b"a" * 200_000:
        state = automaton.advance(state, byte)
    assert automaton.depth[state] == 500
    assert time.thread_time() - begin < 5.0  # 0.04 s; one by one it would be minutes
