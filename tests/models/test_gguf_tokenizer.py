"""Tokenizers out of GGUF files encode and decode as the originals; bad ones are refused by name."""

import io
import json
from pathlib import Path

import pytest
from fixtures.models.gguf_files import write_tokenizer
from fixtures.stages.zoo import CORPUS, SPECIAL, byte_level_bpe
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from slipstream.errors import CheckpointError
from slipstream.models.gguf.parts import read_gguf
from slipstream.models.gguf.pretokenizers import PRE_TOKENIZERS
from slipstream.models.gguf.tokenizer import GgufTokenizer
from slipstream_contract.vocab import TokenBytes
from slipstream_preprocessing.chat import ChatTemplate
from slipstream_preprocessing.tokenizer import load_tokenizer
from tokenizers import Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

NORMAL, CONTROL = int(TokenType.NORMAL), int(TokenType.CONTROL)
TEXTS = st.text(st.sampled_from("".join(CORPUS)), max_size=60) | st.sampled_from(CORPUS)
TEXTS |= st.text(max_size=20) | st.sampled_from([f"a{text} b" for text in SPECIAL])
SIMPLE = ("gpt2", ["<s>", "</s>", "a", "b", "ab"], [CONTROL, CONTROL, NORMAL, NORMAL, NORMAL])
MORE = {"ggml__pre": "gpt-2", "ggml__merges": ["a b"]}


def convert(path: Path, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    for name, text in GgufTokenizer(read_gguf(path)).files().items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def simple(folder: Path, **metadata: object) -> Path:
    """A tiny tokenizer; None leaves a key out."""
    keys = {key: value for key, value in (MORE | metadata).items() if value is not None}
    return write_tokenizer(folder / "model.gguf", *SIMPLE, **keys)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    """An original of GPT-2's kind, and what comes of its GGUF file."""
    folder = tmp_path_factory.mktemp("bpe")
    original = byte_level_bpe()
    model = json.loads(original.to_str())["model"]
    added = original.get_added_tokens_decoder()
    size = original.get_vocab_size()
    kinds = [NORMAL] * size
    for token_id, token in added.items():
        kinds[token_id] = CONTROL if token.special else int(TokenType.USER_DEFINED)
    tokens = [added[i].content if i in added else original.id_to_token(i) for i in range(size)]
    merges = [" ".join(pair) for pair in model["merges"]]
    keys = {"ggml__pre": "gpt-2", "ggml__merges": merges}
    path = write_tokenizer(folder / "model.gguf", "gpt2", tokens, kinds, **keys)
    return original, convert(path, folder / "checkpoint")


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_byte_level_as_the_original(byte_level: tuple[Tokenizer, Path], text: str) -> None:
    original, directory = byte_level
    ours = load_tokenizer(directory)
    ids = ours.encode(text).ids
    assert ids == original.encode(text).ids
    assert ours.decode(ids) == original.decode(ids)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def pieces(request, tmp_path_factory) -> tuple[SentencePieceProcessor, Path]:
    """A SentencePiece BPE model, and what comes of its GGUF file."""
    model, folder = io.BytesIO(), tmp_path_factory.mktemp("spm")
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    original = SentencePieceProcessor(model_proto=model.getvalue())
    size = original.get_piece_size()
    kinds = [
        2 if original.is_unknown(i)
        else CONTROL if original.is_control(i)
        else 6 if original.is_byte(i)
        else NORMAL
        for i in range(size)
    ]  # fmt: skip
    path = write_tokenizer(
        folder / "model.gguf",
        "llama",
        [original.id_to_piece(i) for i in range(size)],
        kinds,
        ggml__scores=[original.get_score(i) for i in range(size)],
        ggml__add_space_prefix=request.param,
        ggml__unknown_token_id=original.unk_id(),
        ggml__bos_token_id=original.bos_id(),
    )
    return original, convert(path, folder / "checkpoint")


@settings(max_examples=300, deadline=None)
@given(text=TEXTS.filter(lambda text: "\u2581" not in text and "\0" not in text))
def test_sentence_pieces_as_the_original(
    pieces: tuple[SentencePieceProcessor, Path], text: str
) -> None:
    original, directory = pieces
    ours, bos = load_tokenizer(directory), original.bos_id()
    for special in ("<unk>", "<s>", "</s>"):
        text = text.replace(special, "")
    ids = ours.encode(text).ids
    assert ids == [bos, *original.encode(text)]
    data, _ = TokenBytes.load(directory).join(ids, True)
    assert data.decode() == text


PIECES = {
    "gpt-2": ["It", "'s", " 12", "a", " ", " b"],
    "smollm": ["It", "'s", " ", "1", "2", "a", " b", "3", "\n\n"],
    "llama-bpe": ["It", "'S", " ", "123", "4", " abC", "?!\n", " ", " x"],
    "qwen2": ["It", "'S", " ", "1", "2", "3", " abC", "?!\n", " ", " x"],
    "tekken": ["It", "'S", " ", "1", "2", " ab", "C", "?!/\n", " ", " x"],
    # Marks from ":" to "~" have letters among them, which a word of others is split at.
    "deepseek-llm": [
        "It",
        "'",
        "s",
        " \u00dc",
        "n",
        " ",
        "1234",
        " a",
        "?!",
        "\n",
        "\u4e00\ud55c",
        "  ",
    ],
    "deepseek-coder": ["It", "'", "s", " \u00dcn", " ", "1", "2", " a", "?!", "\n", " b"],
    "deepseek-v3": ["It", "'s", " ", "123", "4", "\u3042\u4e00", "#include", " ?!\n", " ", " x"],
    "hunyuan-dense": ["It", "'s", " ", "123", "4", "\u3042\u4e00", "#include", " ?!\n", " ", " x"],
    "gpt-4o": ["It's", " ", "123", "4", " ab", "C", "?!/\n", " ", " x"],
}


def splits(name: str, text: str) -> list[str]:
    spec = {
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "pre_tokenizer": PRE_TOKENIZERS[name].spec(),
    }
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    return [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PIECES)
def test_pieces(name: str) -> None:
    assert splits(name, "".join(PIECES[name])) == PIECES[name]


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(PRE_TOKENIZERS)), text=TEXTS)
def test_pieces_lose_nothing(name: str, text: str) -> None:
    assert "".join(splits(name, text)) == text


def test_pattern_of_qwen2_is_that_of_transformers() -> None:
    assert PRE_TOKENIZERS["qwen2"].pattern == PRETOKENIZE_REGEX


def test_start_and_end_of_a_text(tmp_path: Path) -> None:
    both = {"ggml__bos_token_id": 0, "ggml__eos_token_id": 1}
    cases = [
        ({}, ["ab"]),
        (both, ["ab"]),
        (both | {"ggml__add_bos_token": True}, ["<s>", "ab"]),
        (both | {"ggml__pre": "llama-bpe"}, ["<s>", "ab"]),
        (both | {"ggml__pre": "llama-bpe", "ggml__add_bos_token": False}, ["ab"]),
        (both | {"ggml__add_bos_token": True, "ggml__add_eos_token": True}, ["<s>", "ab", "</s>"]),
    ]
    for number, (keys, expected) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        directory = convert(simple(folder, **keys), folder / "checkpoint")
        assert load_tokenizer(directory).encode("ab").tokens == expected
        assert load_tokenizer(directory).encode("ab", add_special_tokens=False).tokens == ["ab"]


def test_ends_of_an_answer(tmp_path: Path) -> None:
    tokens = ["<|im_end|>", "</s>", "a", "<|eot_id|>", "<|end|>"]
    kinds = [CONTROL, CONTROL, NORMAL, CONTROL, NORMAL]  # the last is text like any other
    keys = {"ggml__pre": "gpt-2", "ggml__merges": ["a a"], "ggml__eos_token_id": 1}
    path = write_tokenizer(tmp_path / "a.gguf", "gpt2", tokens, kinds, **keys)
    assert GgufTokenizer(read_gguf(path)).end_ids() == [1, 3, 0]
    path = write_tokenizer(
        tmp_path / "b.gguf",
        "gpt2",
        tokens,
        kinds,
        **keys,
        ggml__eot_token_id=2,
        ggml__eom_token_id=0,
    )
    assert GgufTokenizer(read_gguf(path)).end_ids() == [1, 2, 0, 3]


def test_chat_templates(tmp_path: Path) -> None:
    path = simple(
        tmp_path,
        ggml__bos_token_id=0,
        chat_template="{{ bos_token }}{{ messages[0].content }}",
        chat_templates=["tool_use"],
        chat_template__tool_use="{{ tools[0].name }}",
    )
    template = ChatTemplate.load(convert(path, tmp_path / "checkpoint"))
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages) == "<s>x"
    assert template.render(messages, tools=[{"name": "f"}]) == "f"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"ggml__pre": "superbpe"},
            "'tokenizer.ggml.pre' = 'superbpe' is not served; one of gpt-2",
        ),
        ({"ggml__pre": None}, "'tokenizer.ggml.pre' = None is not served"),
        ({"ggml__merges": None}, "tokenizer.ggml.merges is no list of texts"),
        ({"ggml__merges": ["a c"]}, "tokenizer.ggml.merges: 'a c' is no two tokens"),
        ({"ggml__bos_token_id": 5}, "'tokenizer.ggml.bos_token_id' = 5 is none of 5 tokens"),
        ({"ggml__add_bos_token": True}, "'tokenizer.ggml.add_bos_token' = True but bos_token_id"),
        ({"ggml__add_bos_token": 1}, "'tokenizer.ggml.add_bos_token' = 1 is neither true nor"),
        ({"chat_template": 7}, "'tokenizer.chat_template' = 7 is no text"),
        (
            {"chat_template": "x", "chat_templates": ["../up"]},
            "'tokenizer.chat_templates' = ['../up'] has a name of another kind: '../up'",
        ),
    ],
)
def test_refused_by_name(keys: dict[str, object], words: str, tmp_path: Path) -> None:
    path = simple(tmp_path, **keys)
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "checkpoint")
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("model", "tokens", "kinds", "words"),
    [
        ("bert", ["a"], [1], "'tokenizer.ggml.model' = 'bert' is not served; gpt2 and llama are"),
        ("gpt2", ["a", "a"], [1, 1], "tokenizer.ggml.tokens has a token twice"),
        ("gpt2", ["a", "b"], [1, 9], "tokenizer.ggml.token_type holds 9, not 1 to 6"),
        ("gpt2", ["a", "b"], [1], "tokenizer.ggml.token_type is no type for each of its tokens"),
        ("llama", ["a", "b"], [1, 1], "tokenizer.ggml.scores is no score for each of its tokens"),
    ],
)
def test_bad_lists(
    model: str, tokens: list[str], kinds: list[int], words: str, tmp_path: Path
) -> None:
    path = write_tokenizer(tmp_path / "model.gguf", model, tokens, kinds, ggml__pre="gpt-2")
    with pytest.raises(CheckpointError) as caught:
        convert(path, tmp_path / "checkpoint")
    assert words in str(caught.value)
