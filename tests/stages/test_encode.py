import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from fixtures.stages.zoo import CORPUS, ZOO, byte_level_bpe, llama_bpe, save
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_contract.decoder import UnsupportedTokenizerError
from slipstream_contract.errors import ContractError
from slipstream_contract.vocab import TokenBytes
from slipstream_postprocessing.detokenize import detokenize
from slipstream_preprocessing.batch import encode_batch
from slipstream_preprocessing.encode import Encoder
from slipstream_preprocessing.tokenizer import load_tokenizer, max_text_bytes_per_token
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEXTS = st.one_of(
    st.text(min_size=1, max_size=40),
    st.lists(
        st.sampled_from([*CORPUS, "<s>", "</s>", "<|im_start|>", "<|extra|>", "été", " ", "\n"]),
        min_size=1,
        max_size=4,
    ).map("".join),
)
EXTRA = {"content": "<|extra|>", "special": True, "normalized": False}


@cache
def directory(name: str) -> Path:
    """A tokenizer with one special token that only its configuration knows."""
    tokenizer = ZOO[name]()
    extra = {str(tokenizer.get_vocab_size()): EXTRA}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": extra}
    return save(tokenizer, Path(mkdtemp()), **config)


@cache
def theirs(name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(directory(name))


@cache
def ours(name: str, add_special_tokens: bool = True) -> Encoder:
    return Encoder.load(directory(name), add_special_tokens)


@pytest.mark.parametrize("name", ZOO)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, add_special=st.booleans())
def test_prompts_are_encoded_as_transformers_encodes_them(
    name: str, text: str, add_special: bool
) -> None:
    expected = theirs(name).encode(text, add_special_tokens=add_special)
    try:
        assert ours(name, add_special).encode(text) == expected
    except ContractError:
        assert expected == []


@pytest.mark.parametrize("name", ZOO)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip_special=st.booleans())
def test_texts_are_decoded_as_transformers_decodes_them(
    name: str, data: st.DataObject, skip_special: bool
) -> None:
    tokenizer, vocab = theirs(name), ours(name).vocab
    assert vocab.size == len(tokenizer)
    ids = data.draw(st.lists(st.integers(0, vocab.size - 1), max_size=12))
    expected = tokenizer.decode(
        ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
    )
    if "�" not in expected:  # byte tokens that are no UTF-8: see test_vocab
        assert detokenize(vocab, ids, skip_special=skip_special) == expected


@pytest.mark.parametrize("name", ZOO)
def test_end_and_pad_ids_are_those_of_transformers(name: str) -> None:
    encoder = ours(name)
    assert encoder.end_ids == (theirs(name).eos_token_id,)
    assert encoder.pad_id == encoder.end_ids[0]


def test_end_ids_of_a_checkpoint_with_several(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    save(tokenizer, tmp_path, pad_token="<|im_start|>")
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert Encoder.load(tmp_path).end_ids == (1, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1, 8]}')
    encoder = Encoder.load(tmp_path)
    assert encoder.end_ids == (1, 7, 8)
    assert encoder.pad_id == tokenizer.token_to_id("<|im_start|>")
    (tmp_path / "tokenizer_config.json").unlink()
    assert Encoder.load(tmp_path).end_ids == (7, 1, 8)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").unlink()
    assert Encoder.load(tmp_path).end_ids == ()
    assert Encoder.load(tmp_path).pad_id == 0


@pytest.mark.parametrize("name", [name for name in ZOO if not name.startswith("Word")])
@settings(max_examples=200, deadline=None)
@given(
    word=st.one_of(st.text(min_size=1, max_size=8), st.sampled_from(["\n", "\n\n", " x", "</s>"]))
)
def test_stop_words_are_spelt_byte_for_byte(name: str, word: str) -> None:
    encoder = ours(name)
    try:
        [ids] = encoder.words([word.encode()])
    except ContractError:
        assert name == "Unigram"  # has no byte tokens: some characters cannot be written
        assert any(char not in "".join(CORPUS[:3]) for char in word)
    else:
        assert b"".join(map(encoder.vocab.raw, ids)) == word.encode()


def test_words_of_models_whose_tokens_bring_their_space() -> None:
    encoder = ours("WordPiece")
    spelt = [b"".join(map(encoder.vocab.raw, ids)) for ids in encoder.words(["fox", "</s>"])]
    assert [word.removeprefix(b" ") for word in spelt] == [b"fox", b"</s>"]
    with pytest.raises(ContractError, match="stop_words: '🦊' cannot be written"):
        encoder.words(["🦊"])


def test_words_are_decoded_strictly_and_empty_ones_skipped() -> None:
    encoder = ours("byte-level BPE")
    assert encoder.words([b"", "", b"fox"]) == encoder.words(["fox"])
    assert encoder.bad_words([b"", b"fox"]) == [theirs("byte-level BPE").encode("fox")]
    with pytest.raises(ContractError, match=r"stop_words\[1\] is not valid UTF-8 at byte 2"):
        encoder.words([b"ok", b"no\xff"])


def test_bias_words_are_encoded_with_special_tokens() -> None:
    encoder = ours("Llama-2")
    [fox, nothing] = encoder.bias_words([b"fox", b""])
    assert fox == theirs("Llama-2").encode("fox")
    assert fox[0] == theirs("Llama-2").bos_token_id
    assert nothing == []
    with pytest.raises(ContractError, match=r"embedding_bias_words\[1\] is not valid UTF-8"):
        encoder.bias_words([b"fox", b"\xff"])
    assert encoder.bad_words([b"fox"]) == [fox[1:]]


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    encoder = Encoder.load(directory("byte-level BPE"), max_model_len=64)
    with pytest.raises(ContractError, match=r"30000000 bytes, at least \d+ tokens; .* has 64"):
        encoder.encode("x" * 30_000_000)
    no_text = np.array([[b"\xff" * 30_000_000]], dtype=object)
    with pytest.raises(ContractError, match=r"30000000 bytes"):  # nor decoded
        encode_batch(encoder, {"QUERY": no_text, "REQUEST_OUTPUT_LEN": np.ones((1, 1), np.int32)})
    assert len(encoder.encode("x" * 64)) > 1


@pytest.mark.parametrize("name", ["byte-level BPE", "Llama-2", "WordPiece", "WordLevel"])
def test_of_a_prompt_far_too_long_only_the_beginning_is_tokenised(name: str) -> None:
    """Also where no bound on the bytes of a token is known."""
    encoder = Encoder.load(directory(name), max_model_len=64)
    encoder._bytes_per_token = None
    asked: list[int] = []
    tokenizer = encoder.tokenizer

    class Noting:
        def encode(self, text: str, add_special_tokens: bool) -> object:
            asked.append(len(text))
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    encoder.tokenizer = Noting()  # type: ignore[assignment]
    with pytest.raises(ContractError, match=r"9000000 bytes, its first 512 .* the context has 64"):
        encoder.encode("x = " * 2_250_000)
    assert asked == [512]
    for count in (10, 64):  # few tokens for many characters: not the guess decides
        long = "the " * count
        assert encoder.encode(long) == tokenizer.encode(long).ids


@pytest.mark.parametrize("kind", ["replace", "metaspace", "nfc", "prepend"])
@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("a ▁é\u0301가ᄀ\u1161\u212b\n😀"), min_size=1))
def test_the_bound_on_bytes_per_token_holds(kind: str, text: str) -> None:
    """For the tightest vocabulary there is: every token is one byte of a text."""
    tokenizer, vocab = single_bytes(kind)
    bound = max_text_bytes_per_token(tokenizer, vocab)
    assert vocab.max_token_bytes == 1
    assert bound is not None
    assert len(text.encode()) <= bound * len(tokenizer.encode(text).ids)


@cache
def single_bytes(kind: str) -> tuple[Tokenizer, TokenBytes]:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    spaces = [normalizers.Replace(" ", "▁")]
    match kind:
        case "replace":
            tokenizer.normalizer = spaces[0]
        case "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        case "nfc":
            tokenizer.normalizer = normalizers.NFC()
        case "prepend":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    directory = save(tokenizer, Path(mkdtemp()), bos_token=None, eos_token=None)
    return tokenizer, TokenBytes.load(directory)


def test_no_bound_where_characters_may_vanish() -> None:
    for name in ("WordPiece", "WordLevel", "Unigram"):
        assert ours(name)._bytes_per_token is None
    tokenizer, vocab = single_bytes("nfc")
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.normalizer = normalizers.Strip()
    assert max_text_bytes_per_token(tokenizer, vocab) is None
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("x", lstrip=True)])
    assert max_text_bytes_per_token(tokenizer, vocab) is None


def test_empty_prompts_are_refused() -> None:
    with pytest.raises(ContractError, match="text_input is empty"):
        ours("Llama-2").encode("")


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    encoder = Encoder.load(save(tokenizer, tmp_path))
    assert len(encoder.encode("the quick brown fox, the lazy dog")) > 4
    assert len(encoder.encode("a")) == 1


def test_older_checkpoints_with_their_special_tokens_in_files_of_their_own(tmp_path: Path) -> None:
    tokenizer = llama_bpe()
    save(tokenizer, tmp_path)
    size = tokenizer.get_vocab_size()
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|eot|>"}}')
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|eot|>": size}))
    encoder = Encoder.load(tmp_path)
    assert encoder.end_ids == (size,)
    assert encoder.encode("fox<|eot|>", add_special_tokens=False)[-1] == size
    assert encoder.vocab.visible(size, is_first=False) == b""


def test_tokenizers_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist; compose makes"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedTokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    tokenizer = byte_level_bpe()
    save(tokenizer, tmp_path, added_tokens_decoder={"5000": EXTRA})
    with pytest.raises(UnsupportedTokenizerError, match="as token 5000"):
        load_tokenizer(tmp_path)
