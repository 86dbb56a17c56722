"""Texts to calibrate with and to measure on, cut into pieces of the same length.

The default texts come with Python: half of its language reference (`pydoc_data.topics`) and sources
of its library to calibrate with, the other half and other sources to measure on. They are English
and Python, not a sample of the web: name your own text for a model that does something else.
"""

import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from slipstream.errors import CheckpointError, ConfigError
from tokenizers import Tokenizer
from torch import Tensor

# Neither is in the other, nor are those to measure on in the default model's training data.
CALIBRATION = ("argparse.py", "ast.py", "configparser.py", "difflib.py", "statistics.py")
MEASURED = ("csv.py", "fractions.py", "heapq.py", "sched.py", "shlex.py", "textwrap.py")
_LEAST_PIECE = 16  # tokens
_LONG = 40  # characters of a line that is in two texts only if one repeats the other


def default_texts(is_measured: bool) -> list[str]:
    """Return the texts to measure on, or those to calibrate with; none is in both."""
    library = Path(sysconfig.get_path("stdlib"))
    names = MEASURED if is_measured else CALIBRATION
    sources = [(library / name).read_text() for name in names if (library / name).is_file()]
    every = [topics[name] for name in sorted(topics)]
    words, others = every[int(is_measured) :: 2], every[1::2]
    if not is_measured:  # some topics repeat others
        seen = set().union(*map(_long_lines, others))
        words = [text for text in words if not _long_lines(text) & seen]
    return [text for part in _mixed(words, sources) for text in part]


def _long_lines(text: str) -> set[str]:
    return {line for line in text.splitlines() if len(line.strip()) >= _LONG}


def _mixed(words: list[str], sources: list[str]) -> list[tuple[str, ...]]:
    """Put a source behind every so many words."""
    step = -(-len(words) // max(1, len(sources)))
    parts = [tuple(words[at : at + step]) for at in range(0, len(words), step)]
    return [(*part, *sources[i : i + 1]) for i, part in enumerate(parts)]


def read_texts(path: Path) -> list[str]:
    """Read a text, or a `.jsonl` file each of whose lines has a `text`; raises `ConfigError`."""
    try:
        whole = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    if path.suffix != ".jsonl":
        return [whole]
    texts: list[str] = []
    for number, line in enumerate(whole.split("\n"), 1):  # others may be within a text
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(f"{path}: line {number} is no object with a string `text`")
        try:
            text.encode()
        except UnicodeEncodeError:
            wrong = "half of a pair of surrogates, which is no letter"
            raise ConfigError(f"{path}: line {number}: `text` has {wrong}") from None
        texts.append(text)
    return texts


def tokenizer_of(directory: Path) -> Tokenizer:
    """Return a checkpoint's tokenizer; raises `CheckpointError` if it has none."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: no tokenizer.json, which texts need, to calibrate and to measure; "
            "--no-measure measures nothing"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # of no type of its own
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def check_ids(found: Tensor, vocab_size: int, directory: Path) -> None:
    """Raise `CheckpointError` for tokens of a tokenizer of another model."""
    if int(found.max()) >= vocab_size:
        raise CheckpointError(
            f"{directory / 'tokenizer.json'}: makes token {int(found.max())} of a text, but the "
            f"model has {vocab_size}: it is another model's"
        )


def pieces(
    tokenizer: Tokenizer, texts: Sequence[str], length: int, most: int, where: str
) -> Tensor:
    """Cut texts into pieces of `length` tokens, `[s, length]`, evenly chosen if more than `most`.

    Each starts with the tokens that the tokenizer puts before a text. Raises `ConfigError` where
    `where` holds less than one piece.
    """
    first = _prefix(tokenizer)
    size = length - len(first)
    if size < _LEAST_PIECE:
        raise ConfigError(
            f"--sample-length {length}: a piece has at least {len(first) + _LEAST_PIECE} tokens"
        )
    ids = [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False).ids]
    found = [first + ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    if not found:
        raise ConfigError(f"{where}: {len(ids)} tokens, a piece needs {size}")
    count = min(most, len(found))
    return torch.tensor([found[i * len(found) // count] for i in range(count)])


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens before every text."""
    alone: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode("a").ids
    for at in range(len(whole) - len(alone) + 1):
        if whole[at : at + len(alone)] == alone:
            return whole[:at]
    return []
