from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.stages.zoo import llama_bpe, save
from slipstream_contract.errors import ContractError
from slipstream_contract.vocab import TokenBytes
from slipstream_contract.words import unpack_word_list
from slipstream_postprocessing.detokenize import detokenize_batch
from slipstream_preprocessing.batch import encode_batch, with_empty_lists
from slipstream_preprocessing.encode import Encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return Encoder.load(save(llama_bpe(), tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> TokenBytes:
    directory: Path = save(llama_bpe(), tmp_path_factory.mktemp("vocab"))
    return TokenBytes.load(directory)


def strings(*rows: list[str | bytes]) -> Any:
    data = [[item.encode() if isinstance(item, str) else item for item in row] for row in rows]
    return np.array(data, dtype=object)


def ints(*rows: list[int]) -> Any:
    return np.array(rows, np.int32)


def minimal(*texts: str) -> dict[str, Any]:
    return {
        "QUERY": strings(*([text] for text in texts)),
        "REQUEST_OUTPUT_LEN": ints(*([7 + i] for i in range(len(texts)))),
    }


def test_the_outputs_of_a_batch(encoder: Encoder) -> None:
    outputs = encode_batch(encoder, minimal("fox", "the quick brown fox"))
    short, long = encoder.encode("fox"), encoder.encode("the quick brown fox")
    padding = [encoder.pad_id] * (len(long) - len(short))
    assert outputs["INPUT_ID"].tolist() == [short + padding, long]
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[len(short)], [len(long)]]
    assert outputs["REQUEST_OUTPUT_LEN"].tolist() == [[7], [8]]
    assert outputs["OUT_END_ID"].tolist() == [[encoder.end_ids[0]]] * 2
    assert outputs["OUT_PAD_ID"].tolist() == [[encoder.pad_id]] * 2
    assert set(outputs) == {
        "INPUT_ID",
        "REQUEST_INPUT_LEN",
        "REQUEST_OUTPUT_LEN",
        "OUT_END_ID",
        "OUT_PAD_ID",
    }
    assert {value.dtype for value in outputs.values()} == {np.dtype(np.int32)}


def test_given_end_and_pad_ids_win(encoder: Encoder) -> None:
    ids = {"END_ID": ints([-1], [9]), "PAD_ID": ints([4], [5])}
    outputs = encode_batch(encoder, minimal("the fox", "a") | ids)
    assert outputs["OUT_END_ID"].tolist() == [[-1], [9]]
    assert outputs["OUT_PAD_ID"].tolist() == [[4], [5]]
    assert outputs["INPUT_ID"][1, -1] == 5


def test_special_tokens_are_added_as_the_request_says(encoder: Encoder) -> None:
    adds = {"ADD_SPECIAL_TOKENS": np.array([[False], [True]])}
    biased = {
        "EMBEDDING_BIAS_WORDS": strings(["fox"], ["fox"]),
        "EMBEDDING_BIAS_WEIGHTS": np.ones((2, 1), np.float32),
    }
    outputs = encode_batch(encoder, minimal("the fox", "the fox") | adds | biased)
    beginning = encoder.tokenizer.token_to_id("<s>")
    without, with_it = outputs["INPUT_ID"].tolist()
    assert with_it == [beginning, *without[: len(with_it) - 1]] == encoder.encode("the fox")
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[len(with_it) - 1], [len(with_it)]]
    assert outputs["EMBEDDING_BIAS"][:, beginning].tolist() == [0, 1]


def test_a_parameter_stands_for_the_input(encoder: Encoder) -> None:
    name, tensor = "add_special_tokens", {"ADD_SPECIAL_TOKENS": np.array([[False]])}
    expected = encode_batch(encoder, minimal("fox") | tensor)["INPUT_ID"].tolist()
    for value in (False, "false", 0):
        given = {name: value, "temperature": "for the next step"}
        assert encode_batch(encoder, minimal("fox"), given)["INPUT_ID"].tolist() == expected
    with pytest.raises(ContractError, match=r"add_special_tokens is 2, neither true nor false"):
        encode_batch(encoder, minimal("fox"), {name: 2})
    with pytest.raises(ContractError, match=r"add_special_tokens is given as an input and as a"):
        encode_batch(encoder, minimal("fox") | tensor, {name: False})


def test_word_lists(encoder: Encoder) -> None:
    words = {
        "STOP_WORDS_DICT": strings(["fox", "", "\n"], ["", "", ""]),
        "BAD_WORDS_DICT": strings([""], ["dog"]),
    }
    outputs = encode_batch(encoder, minimal("a", "b") | words)
    stop, bad = outputs["STOP_WORDS_IDS"], outputs["BAD_WORDS_IDS"]
    assert stop.dtype == bad.dtype == np.int32
    assert stop.shape[:2] == bad.shape[:2] == (2, 2)
    assert unpack_word_list(stop[0]) == encoder.words(["fox", "\n"])
    assert unpack_word_list(stop[1]) == unpack_word_list(bad[0]) == []
    assert unpack_word_list(bad[1]) == encoder.bad_words(["dog"])


@pytest.mark.parametrize("name", ["STOP_WORDS_DICT", "BAD_WORDS_DICT"])
def test_empty_words_are_no_words(encoder: Encoder, name: str) -> None:
    outputs = encode_batch(encoder, minimal("a") | {name: strings([""])})
    assert not {"STOP_WORDS_IDS", "BAD_WORDS_IDS"} & set(outputs)


def test_clients_have_lists_of_no_words(encoder: Encoder) -> None:
    """As NVIDIA's model sends them; words that are there stay."""
    outputs = with_empty_lists(encode_batch(encoder, minimal("a", "b c")))
    for name in ("STOP_WORDS_IDS", "BAD_WORDS_IDS"):
        assert outputs[name].dtype == np.int32
        assert [unpack_word_list(row) for row in outputs[name]] == [[], []]
    bias = outputs["EMBEDDING_BIAS"]
    assert (bias.shape, bias.dtype) == ((2, 0), np.float32)
    words = {name: strings(["fox"]) for name in ("STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")}
    given = minimal("a") | words | {"EMBEDDING_BIAS_WEIGHTS": np.ones((1, 1), np.float32)}
    expected = encode_batch(encoder, given)
    assert {name: with_empty_lists(expected)[name] is expected[name] for name in expected} == (
        dict.fromkeys(expected, True)
    )


def test_weights_of_several_words_add_up(encoder: Encoder) -> None:
    given = {
        "EMBEDDING_BIAS_WORDS": strings(["fox", "fox"]),
        "EMBEDDING_BIAS_WEIGHTS": np.array([[1.5, -4]], np.float32),
    }
    bias = encode_batch(encoder, minimal("a") | given)["EMBEDDING_BIAS"]
    assert bias.dtype == np.float32
    assert bias.shape == (1, encoder.vocab.size)
    [ids] = encoder.bias_words(["fox"])
    assert {int(i): float(bias[0, i]) for i in np.flatnonzero(bias)} == dict.fromkeys(ids, -2.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"QUERY": strings([""])}, "text_input is empty"),
        ({"QUERY": strings([b"a\xffb"])}, "text_input is not valid UTF-8 at byte 1"),
        ({"QUERY": strings(["a", "b"])}, r"text_input has shape \[1, 2\], not \[B, 1\]"),
        ({"REQUEST_OUTPUT_LEN": ints([1], [2])}, r"max_tokens has shape \[2, 1\], not \[1, 1\]"),
        ({"STOP_WORDS_DICT": strings(["a"], ["b"])}, r"stop_words has shape \[2, 1\]"),
        ({"STOP_WORDS_DICT": strings([b"\xe4"])}, r"stop_words\[0\] is not valid UTF-8"),
        (
            {"STOP_WORDS_DICT": strings(["a"] * 5000)},
            "stop_words has 5000 words, at most 1024 are served",
        ),
        ({"BAD_WORDS_DICT": strings(["a" * 5000])}, "bad_words has a word of 5000 bytes"),
        ({"BAD_WORDS_DICT": strings(["a", b"\xe4"])}, r"bad_words\[1\] is not valid UTF-8"),
        (
            {"EMBEDDING_BIAS_WORDS": strings(["a"])},
            "embedding_bias_weights has 0 values for 1 embedding_bias_words",
        ),
        (
            {
                "EMBEDDING_BIAS_WORDS": strings(["a"]),
                "EMBEDDING_BIAS_WEIGHTS": np.array([[np.nan]], np.float32),
            },
            "embedding_bias_weights\\[0\\] is nan",
        ),
        ({"DECODER_QUERY": strings(["x"])}, "decoder_text_input is not supported yet"),
        ({"IMAGE_URL": strings(["http://x"])}, "IMAGE_URL is not supported yet"),
        ({"IMAGE_BYTES": np.zeros((1, 1, 2, 2, 3), np.uint8)}, "IMAGE_BYTES is not supported yet"),
        (
            {"PROMPT_TABLE_EXTRA_ID": np.array([[3], [4]], np.uint64)},
            "prompt_table_extra_id has shape \\[2, 1\\], not \\[1, 1\\]",
        ),
    ],
)
def test_bad_input_is_named(encoder: Encoder, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=f"INVALID_ARGUMENT: {message}"):
        encode_batch(encoder, minimal("a") | changed)


def test_missing_input_is_named(encoder: Encoder) -> None:
    for name, known_as in {"QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens"}.items():
        inputs = minimal("a")
        del inputs[name]
        with pytest.raises(ContractError, match=f"{known_as} is missing"):
            encode_batch(encoder, inputs)


def test_the_id_of_a_prompt_table_is_repeated_for_each_token(encoder: Encoder) -> None:
    given = {"PROMPT_TABLE_EXTRA_ID": np.array([[2**63]], np.uint64)}
    outputs = encode_batch(encoder, minimal("a few words") | given)
    found = outputs["OUT_PROMPT_TABLE_EXTRA_IDS"]
    assert found.dtype == np.uint64
    assert found.tolist() == [[2**63] * outputs["INPUT_ID"].shape[1]]


def test_neutral_values_of_later_work_are_accepted(encoder: Encoder) -> None:
    neutral = {
        "DECODER_QUERY": strings([""]),
        "EMBEDDING_BIAS_WORDS": strings([""]),
        "EMBEDDING_BIAS_WEIGHTS": np.zeros((1, 1), np.float32),
        "IMAGE_BYTES": np.zeros((1, 0, 1, 1, 1), np.uint8),
    }
    outputs = encode_batch(encoder, minimal("a") | neutral)
    assert "INPUT_ID" in outputs
    assert "EMBEDDING_BIAS" not in outputs


def test_rows_of_a_response_are_cut_to_their_lengths(encoder: Encoder, vocab: TokenBytes) -> None:
    fox, dog = encoder.encode("fox"), encoder.encode("lazy dog")
    tokens = np.full((1, 2, len(dog)), encoder.pad_id, np.int32)
    tokens[0, 0, : len(fox)], tokens[0, 1] = fox, dog
    lengths = ints([len(fox), len(dog)])
    assert detokenize_batch(vocab, tokens, lengths) == ["fox", "lazy dog"]
    assert detokenize_batch(vocab, tokens, lengths, skip_special=False)[0] == "<s> fox"
    assert detokenize_batch(vocab, ints([]), ints([0])) == [""]


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (ints([1, 2]), ints([3]), "SEQUENCE_LENGTH is 3, TOKENS_BATCH has 2"),
        (ints([1, 2]), ints([-1]), "SEQUENCE_LENGTH is -1"),
        (ints([1, 2]), ints([1, 1]), "SEQUENCE_LENGTH has 2 values for 1 rows"),
        (ints([1, -2]), ints([2]), "negative id -2"),
    ],
)
def test_responses_that_do_not_fit_are_refused(
    vocab: TokenBytes, tokens: Any, lengths: Any, message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        detokenize_batch(vocab, tokens, lengths)


def test_padding_may_hold_anything(vocab: TokenBytes) -> None:
    assert detokenize_batch(vocab, ints([-1, 2**31 - 1]), ints([0])) == [""]
    assert detokenize_batch(vocab, ints([2**31 - 1]), ints([1])) == [""]  # beyond the vocabulary
