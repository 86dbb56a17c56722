"""The tokenizer: byte-level BPE over the training split.

    python tokenizer.py data.tar.xz DIRECTORY [--size 4096]

Writes tokenizer.json and tokenizer_config.json, which transformers and `tokenizers` load. Every
byte has a token, so every text has an encoding and no text is unknown. Words are cut where people
stop typing: after a newline, after indentation, after a dot or a bracket. A prompt that ends there
is encoded as training has seen it, which the patterns of general models do not give.
"""

import argparse
import json
from pathlib import Path

from data import of_split, unpack
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
"""Stands between two files in training; a model that emits it has finished the file."""

PATTERN = "|".join(
    (
        r"(?m:^)[ \t]+",  # indentation, whole
        r"\n+",
        r" ?[\p{L}_]+",  # a name, with the space before it
        r" ?\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}_]+",  # marks
        r"[^\S\n]+(?!\S)",  # other space, less one for what follows
        r"\s+",
    )
)


def train(texts: list[str], size: int) -> Tokenizer:
    """A tokenizer of exactly `size` tokens, the special one first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Writes tokenizer.json and the configuration that transformers reads beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Trains on an archive of `data.py`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--context", type=int, default=2048)
    arguments = parser.parse_args()
    texts = of_split(unpack(arguments.archive), "train")
    tokenizer = train(texts, arguments.size)
    save(tokenizer, arguments.directory, arguments.context)
    sample = texts[:: max(1, len(texts) // 200)]
    num_tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(sample))
    num_bytes = sum(len(text.encode()) for text in sample)
    print(f"{tokenizer.get_vocab_size()} tokens, {num_bytes / num_tokens:.2f} bytes a token")


if __name__ == "__main__":
    main()
