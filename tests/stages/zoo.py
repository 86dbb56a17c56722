"""Tokenizers of every family that can be streamed, trained in a second on a few lines of text."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

CORPUS = [
    "def main(argv: list[str]) -> int:\n    return 0 if argv else 1\n",
    "The quick brown fox doesn't jump over the lazy dog. It's we've, they're, I'm; do not!",
    "Größe, naïve café, Cafe\u0301 - élève, Ångström, e\u0301\u0323, ñandú, Žižek",
    "你好、世界。日本語のテキスト、한국어 텍스트, 漢字かな交じり文",
    "emoji 😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 family; math ∑∀x∈∅; العربية עברית हिन्दी ไทย",
    "  leading spaces,\ttabs\tand   runs    of     spaces \n\n newlines \r\n end",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|tool call|>"]


def byte_level_bpe(prefix_space: bool = False) -> Tokenizer:
    """GPT-2's kind: every byte is a character, pieces are merged from there."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens(["added word", "été"])  # one with a space, one that looks like bytes
    return tokenizer


def llama_bpe() -> Tokenizer:
    """Llama-2's kind: SentencePiece BPE with byte tokens, one leading space taken off again."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=620,
        special_tokens=["<unk>", *SPECIAL, *byte_tokens],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS[:3] * 4, trainer)
    tokenizer = _without_special(tokenizer, set(byte_tokens))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def gemma_bpe() -> Tokenizer:
    """Gemma's kind: as Llama-2's, but no space is put in front and none is taken off."""
    tokenizer = llama_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram(byte_fallback: bool = True) -> Tokenizer:
    """SentencePiece Unigram with Metaspace, and byte tokens if asked for."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(CORPUS[:3] * 4, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = [(piece, score) for piece, score in model["vocab"]]
    if byte_fallback:
        vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    metaspace: Any = decoders.Metaspace()
    tokenizer.decoder = (
        decoders.Sequence([metaspace, decoders.ByteFallback(), decoders.Fuse()])
        if byte_fallback
        else metaspace
    )
    return tokenizer


def word_piece(cleanup: bool = True) -> Tokenizer:
    """BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=["[UNK]", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def word_level() -> Tokenizer:
    """Whole words and no decoder: pieces are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


ZOO: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level_bpe,
    "byte-level BPE, prefix space": lambda: byte_level_bpe(prefix_space=True),
    "Llama-2": llama_bpe,
    "Gemma": gemma_bpe,
    "Unigram": lambda: unigram(byte_fallback=False),
    "Unigram, byte fallback": unigram,
    "WordPiece": word_piece,
    "WordPiece, no cleanup": lambda: word_piece(cleanup=False),
    "WordLevel": word_level,
}


def save(tokenizer: Tokenizer, directory: Path, **config: Any) -> Path:
    """A tokenizer directory as a checkpoint holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def cut(items: list[int], sizes: Iterator[int]) -> Iterator[list[int]]:
    """The items in chunks of the given sizes, the rest in one: at least one chunk."""
    start = 0
    for size in sizes:
        if start + size >= len(items):
            break
        yield items[start : start + size]
        start += size
    yield items[start:]


def _without_special(tokenizer: Tokenizer, contents: set[str]) -> Tokenizer:
    """Byte tokens belong to the vocabulary but are no special tokens."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in contents]
    return Tokenizer.from_str(json.dumps(spec))
