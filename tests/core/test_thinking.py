"""The end of thinking: against the text of the tokens, and of real tokenizers."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from slipstream.core.thinking import Thinking, find_thinking
from slipstream_contract.vocab import TokenBytes
from slipstream_preprocessing.tokenizer import load_tokenizer

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
tokens = st.lists(st.integers(0, 2), max_size=12)


@given(tokens, st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_the_end_is_that_of_the_first_marker(outputs: list[int], marker: list[int]) -> None:
    thinking = Thinking("m", tuple(marker))
    at = "".join(map(str, outputs)).find("".join(map(str, marker)))
    expected = None if at < 0 else at + len(marker)
    assert thinking.end_of(outputs) == expected
    for start in range(len(outputs) if expected is None else expected):
        assert thinking.end_of(outputs, start) == expected


@given(tokens, st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_the_next_tokens_spell_the_marker(outputs: list[int], marker: list[int]) -> None:
    thinking, made = Thinking("m", tuple(marker)), list(outputs)
    if thinking.end_of(made) is not None:
        return
    for _ in marker:
        made.append(thinking.next_of(made))
        if thinking.end_of(made) is not None:
            break
    assert thinking.end_of(made) == len(made)


def test_a_checkpoint_without_a_marker_has_none() -> None:
    vocab = TokenBytes.load(CHECKPOINT)
    assert find_thinking(CHECKPOINT, vocab) is None


def test_a_marker_of_several_tokens_is_what_spells_it() -> None:
    vocab = TokenBytes.load(CHECKPOINT)
    found = find_thinking(CHECKPOINT, vocab, "# end of thought")
    assert found is not None
    assert len(found.marker) > 1
    assert b"".join(map(vocab.raw, found.marker)) == b"# end of thought"


def test_a_marker_that_is_a_token_is_that_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    tokenizer.add_tokens(["</think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocab = TokenBytes.load(tmp_path)
    token_id = tokenizer.token_to_id("</think>")
    assert find_thinking(tmp_path, vocab) == Thinking("</think>", (token_id,))
    assert find_thinking(tmp_path, vocab, "def") == Thinking(
        "def", tuple(tokenizer.encode("def").ids)
    )
