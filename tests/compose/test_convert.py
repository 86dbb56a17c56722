"""Vocabularies without tokenizer.json encode as their originals, and stream back byte for byte."""

import base64
import json
import random
import shutil
import unicodedata
from pathlib import Path

import pytest
from fixtures.stages.qwen_ranks import QwenRanks, fetch_ranks
from fixtures.stages.zoo import CORPUS
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from slipstream.models.families.phi3small import SILENT
from slipstream_compose.compose import ComposeError
from slipstream_compose.convert import convert_tokenizer, needs_conversion
from slipstream_compose.tokenizer_classes import CLASSES
from slipstream_contract.decoder import BYTE_CHARACTERS
from slipstream_contract.vocab import TokenBytes
from slipstream_preprocessing.chat import ChatTemplate
from slipstream_preprocessing.tokenizer import load_tokenizer
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

NUM_TEXTS = 1000
ROOT = Path(__file__).parents[2]
COMPOSED = {"QWenTokenizer"}  # bring texts into Unicode's composed form first
_UNLIKE = {"\u2581", "\0"}  # characters that vocabularies have another use for


def texts(seed: int) -> list[str]:
    """Draw texts: parts of the corpus, any characters, runs of blanks."""
    rng, letters = random.Random(seed), "".join(CORPUS)
    found = [text for text in CORPUS if not _UNLIKE & set(text)]
    found += ["  a\n\n\tb", f"x{' ' * 201}\r\n", "\n", "\t\t "]
    while len(found) < NUM_TEXTS:
        parts = [
            rng.choice([rng.choice(letters), chr(rng.randrange(1, 0xD800)), " " * rng.randrange(4)])
            for _ in range(rng.randrange(40))
        ]
        if not _UNLIKE & set("".join(parts)):
            found.append("".join(parts))
    return found


def folder(path: Path, tokenizer_class: str, **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config["tokenizer_class"] = tokenizer_class
    config["auto_map"] = {"AutoTokenizer": [f"tokenization.{tokenizer_class}", None]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def streamed(table: TokenBytes, ids: list[int], rng: random.Random) -> str:
    """Return the text of ids that come in pieces of random sizes."""
    data, is_first, at = b"", True, 0
    while at < len(ids):
        size = rng.randrange(1, 4)
        more, is_first = table.join(ids[at : at + size], is_first)
        data, at = data + more, at + size
    return data.decode()


_ICE = CLASSES["ChatGLM1Tokenizer"]
ICE = [*_ICE.special, *(piece for _, piece in _ICE.spelled)]


class Spelled:
    """ChatGLM 1's tokenizer by its published description: pieces stand for lines and blanks."""

    def __init__(self, pieces: SentencePieceProcessor) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        for count in range(80, 1, -1):
            text = text.replace(" " * count, f"<|blank_{count}|>")
        return self.pieces.encode(text)

    def decode(self, ids: list[int]) -> str:
        text = self.pieces.decode(ids).replace("<n>", "\n").replace("<|tab|>", "\t")
        for count in range(2, 81):
            text = text.replace(f"<|blank_{count}|>", " " * count)
        return text


KINDS = {
    "BaichuanTokenizer": {"model_type": "bpe"},
    "InternLMTokenizer": {"model_type": "bpe", "add_dummy_prefix": False},
    "ChatGLMTokenizer": {"model_type": "bpe", "user_defined_symbols": ["<n>"]},
    "ChatGLM1Tokenizer": {"model_type": "unigram", "user_defined_symbols": ICE},
    "ReplitLMTokenizer": {"model_type": "unigram"},
    "InternLM2Tokenizer": {"model_type": "unigram", "remove_extra_whitespaces": True},
}


@pytest.fixture(scope="module", params=KINDS)
def pieces(request, tmp_path_factory) -> tuple[str, Path, SentencePieceProcessor]:
    """A trained SentencePiece model in a checkpoint of a class that transformers lacks."""
    name = request.param
    own = {"num_image_tokens": 0} if name == "ChatGLM1Tokenizer" else {}
    called = name.replace("GLM1", "GLM")
    path = folder(tmp_path_factory.mktemp("spm") / name, called, **own)
    options = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "vocab_size": 700,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    target = path / CLASSES[name].file
    with target.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 4), model_writer=file, **(options | KINDS[name])
        )
    assert needs_conversion(path)
    assert convert_tokenizer(path) == [path / "tokenizer.json"]
    assert not needs_conversion(path)
    original = SentencePieceProcessor(model_file=str(target))
    return name, path, Spelled(original) if CLASSES[name].spelled else original


def test_sentence_pieces_encode_as_the_original(pieces) -> None:
    name, path, original = pieces
    ours, known = load_tokenizer(path), CLASSES[name]
    prefix = [ours.token_to_id(token) for token in known.prefix]
    prefix += [original.bos_id()] if known.adds_bos else []
    suffix = [ours.token_to_id(token) for token in known.suffix]
    table, rng = TokenBytes.load(path), random.Random(1)
    more = ["<n>a<|blank_2|>\n"] if known.spelled else []
    for text in texts(seed=0) + more:
        for special in ("<unk>", "<s>", "</s>"):
            text = text.replace(special, "")
        ids = ours.encode(text).ids
        assert ids == prefix + original.encode(text) + suffix, text
        own = ids[len(prefix) : len(ids) - len(suffix)]
        assert streamed(table, ids, rng) == original.decode(own), text


def trained_ranks(pattern: str, path: Path) -> Tokenizer:
    """Train a byte-level BPE whose ids are ranks, and write it in tiktoken's form."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 4, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet)
    )
    byte_of = {character: byte for byte, character in BYTE_CHARACTERS.items()}
    lines = []
    for token, rank in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        data = bytes([byte_of[character] for character in token])
        lines.append(f"{base64.b64encode(data).decode()} {rank}\n")
    path.write_text("".join(lines))
    return tokenizer


@pytest.mark.parametrize("name", [name for name, each in CLASSES.items() if each.pattern])
def test_ranks_encode_as_the_original(name: str, tmp_path: Path) -> None:
    known = CLASSES[name]
    path = folder(tmp_path / "model", name)
    original = trained_ranks(known.pattern, path / known.file)
    if not known.special:
        names = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|user|>"]
        size = original.get_vocab_size()
        numbered = {
            str(i): {"content": text, "special": True} for i, text in enumerate(names, size)
        }
        folder(path, name, added_tokens_decoder=numbered)
    convert_tokenizer(path)
    ours, table, rng = load_tokenizer(path), TokenBytes.load(path), random.Random(1)
    prefix = [ours.token_to_id(token) for token in known.prefix]
    assert None not in prefix
    for text in texts(seed=1):
        ids = ours.encode(text).ids
        text = unicodedata.normalize("NFC", text) if name in COMPOSED else text
        assert ids == prefix + original.encode(text).ids, text
        assert streamed(table, ids[len(prefix) :], rng) == text


@pytest.mark.rest
def test_qwens_own_vocabulary(tmp_path: Path) -> None:
    """As published: 151,643 ranks, of which texts use many."""
    path = folder(tmp_path / "model", "QWenTokenizer")
    file = fetch_ranks()
    original = QwenRanks(file)
    shutil.copy(file, path)
    convert_tokenizer(path)
    ours, table, rng = load_tokenizer(path), TokenBytes.load(path), random.Random(1)
    assert ours.token_to_id("<|endoftext|>") == len(original.ranks) == 151643
    pages = [page.read_text() for page in sorted(ROOT.glob("docs/*.md"))]
    pages = [page.replace("<|", "< |") for page in pages]  # which name special tokens
    seen: set[int] = set()
    for text in texts(seed=3) + pages:
        ids = ours.encode(text).ids
        assert ids == original.encode(text), text
        assert streamed(table, ids, rng) == unicodedata.normalize("NFC", text)
        seen.update(ids)
    assert len(seen) > 8000


def test_special_tokens_have_the_published_ids(tmp_path: Path) -> None:
    known = CLASSES["QWenTokenizer"]
    path = folder(tmp_path / "model", "QWenTokenizer")
    (path / "generation_config.json").write_text('{"chat_format": "chatml"}')
    size = trained_ranks(known.pattern, path / known.file).get_vocab_size()
    assert [each.name for each in convert_tokenizer(path)] == [
        "tokenizer.json",
        "chat_template.jinja",
    ]
    ours = load_tokenizer(path)
    # As behind Qwen's own 151,643 ranks: 151643 ends a text, 151644 and 151645 are of chats.
    assert [ours.token_to_id(token) for token in known.special[:3]] == [size, size + 1, size + 2]
    assert ours.token_to_id("<|extra_204|>") == size + 207
    text = ChatTemplate.load(path).render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_special_tokens_of_phi3_small_have_the_published_ids(tmp_path: Path) -> None:
    """Behind 100,256 ranks; those that stand for nothing are never said (models/families)."""
    known = CLASSES["Phi3SmallTokenizer"]
    path = folder(tmp_path / "model", "Phi3SmallTokenizer")
    more = 100256 - trained_ranks(known.pattern, path / known.file).get_vocab_size()
    convert_tokenizer(path)
    ours = load_tokenizer(path)
    published = {"<|endoftext|>": 100257, "<|system|>": 100261, "<|assistant|>": 100263}
    published |= {"<|end|>": 100266, "<|endofprompt|>": 100276, "<|dummy_id_86|>": 100351}
    assert {name: ours.token_to_id(name) + more for name in published} == published
    said = {"<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"}
    silent = [ours.token_to_id(name) + more for name in known.special if name not in said]
    assert tuple(sorted(silent)) == SILENT
    ids = ours.encode("<|user|>\nHi<|end|>\n<|assistant|>\n").ids
    assert [i + more for i in ids if i + more >= 100256] == [100262, 100266, 100263]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("YQ== 0\nwrong\n", "line 2 is no token"),
        ("YQ== 0\nYg== 2\n", "are not 0, 1, 2"),
        ("YQ== 0\n", "byte 0 has no token"),
    ],
)
def test_broken_ranks_are_named(data: str, words: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "model", "QWenTokenizer")
    (path / "qwen.tiktoken").write_text(data)
    with pytest.raises(ComposeError, match=words):
        convert_tokenizer(path)
    assert not (path / "tokenizer.json").exists()


def test_a_model_of_another_vocabulary_has_no_prefix_to_begin_with(tmp_path: Path) -> None:
    known = CLASSES["ChatGLM4Tokenizer"]
    path = folder(tmp_path / "model", "ChatGLM4Tokenizer")
    trained_ranks(known.pattern, path / known.file)
    with pytest.raises(ComposeError, match=r"'\[gMASK\]', which begins every text"):
        convert_tokenizer(path)


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory as those of OPT are: GPT-2's files, and a token before every text."""
    directory = folder(tmp_path_factory.mktemp("opt"), "GPT2Tokenizer", add_bos_token=True)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {f"{each}_token": "</s>" for each in ("bos", "eos", "unk")}
    del config["auto_map"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    keys = {"architectures": ["OPTForCausalLM"], "model_type": "opt"}
    (directory / "config.json").write_text(json.dumps(keys))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(directory))
    return directory


def test_two_files_of_gpt2(two_files: Path) -> None:
    """Ids are those of the file's merges; streams give texts back byte for byte."""
    assert needs_conversion(two_files)
    assert convert_tokenizer(two_files) == [two_files / "tokenizer.json"]
    plain = Tokenizer(BPE.from_file(*(str(two_files / x) for x in ("vocab.json", "merges.txt"))))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ours, bytes_of = load_tokenizer(two_files), TokenBytes.load(two_files)
    for text in texts(5)[:300]:
        if "<" in text:
            continue  # may spell a special token
        ids = ours.encode(text).ids
        assert ids == [2, *plain.encode(text).ids]
        assert bytes_of.join(ids, True)[0].decode() == text


@pytest.mark.parametrize(
    ("name", "content"),
    [("vocab.json", "[1]"), ("vocab.json", "{"), ("merges.txt", "x"), ("merges.txt", "q z\n")],
)
def test_two_files_that_are_wrong(two_files: Path, tmp_path: Path, name: str, content: str) -> None:
    for file in two_files.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(ComposeError, match=r"vocab\.json cannot be made a tokenizer\.json"):
        convert_tokenizer(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
