"""Bits per byte of a trained candidate, gzip and xz beside it; the choice of the best.

    python evaluate.py DIRECTORY --data data.tar.xz      writes DIRECTORY/figures.json
    python evaluate.py --choose OUTPUT DIRECTORY...      table; keeps the best of them

Every token is scored once, in windows of the whole context that overlap by half, so that a token
beyond the first window sees at least half a context of its own file and nothing of another.
"""

import argparse
import gzip
import json
import lzma
import math
import shutil
import sys
from pathlib import Path

import torch
from card import card
from data import SPLITS, Document, of_split, unpack
from model import Llama, load
from tokenizer import END_OF_TEXT
from tokenizers import Tokenizer
from torch.nn import functional as F

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    'class Stack:\n    """A simple stack."""\n\n    def __init__(self):\n',
    "    def test_append(self):\n",
    "try:\n    with open(filename) as f:\n",
)


@torch.no_grad()
def nats(model: Llama, streams: list[list[int]], device: torch.device, batch: int) -> float:
    """The sum of -ln p over every token of the streams but each one's first."""
    context, stride = model.shape.context, model.shape.context // 2
    pieces = []  # (tokens, index of the first target that counts)
    for stream in streams:
        scored = 1
        while scored < len(stream):
            end = min(len(stream), max(scored + stride, context + 1))
            start = max(0, end - context - 1)
            pieces.append((stream[start:end], scored - start - 1))
            scored = end
    pieces.sort(key=lambda piece: len(piece[0]))
    total = 0.0
    for first in range(0, len(pieces), batch):
        chosen = pieces[first : first + batch]
        width = max(len(tokens) for tokens, _ in chosen)
        token_ids = torch.zeros(len(chosen), width, dtype=torch.int64)
        targets = torch.full((len(chosen), width - 1), -100)
        for row, (tokens, skip) in enumerate(chosen):
            token_ids[row, : len(tokens)] = torch.tensor(tokens)
            targets[row, skip : len(tokens) - 1] = torch.tensor(tokens[skip + 1 :])
        logits = model(token_ids[:, :-1].to(device)).float()
        total += float(
            F.cross_entropy(
                logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=-100,
                reduction="sum",
            )
        )  # fmt: skip
    return total


def bits_per_byte(model: Llama, tokenizer: Tokenizer, texts: list[str], batch: int) -> float:
    """Bits that the model needs for a byte of the texts, each text on its own."""
    device = next(model.parameters()).device
    end = tokenizer.token_to_id(END_OF_TEXT)
    streams = [[end, *encoding.ids] for encoding in tokenizer.encode_batch(texts)]
    num_bytes = sum(len(text.encode()) for text in texts)
    return nats(model, streams, device, batch) / math.log(2) / num_bytes


def packed(texts: list[str]) -> dict[str, float]:
    """Bits per byte of gzip -9 and xz -9, each file alone, and all files as one."""
    contents = [text.encode() for text in texts]
    whole = b"".join(contents)

    def bits(sizes: list[int]) -> float:
        return round(8 * sum(sizes) / len(whole), 3)

    return {
        "gzip_9": bits([len(gzip.compress(content, 9)) for content in contents]),
        "xz_9": bits([len(lzma.compress(content, preset=9)) for content in contents]),
        "gzip_9_one_archive": bits([len(gzip.compress(whole, 9))]),
        "xz_9_one_archive": bits([len(lzma.compress(whole, preset=9))]),
    }


@torch.no_grad()
def complete(model: Llama, tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    """Greedy continuation of the prompt, up to the end of the text."""
    device = next(model.parameters()).device
    token_ids = tokenizer.encode(prompt).ids
    length = len(token_ids)
    for _ in range(num_tokens):
        logits = model(torch.tensor([token_ids], device=device))[0, -1]
        token_id = int(logits.argmax())
        if token_id == tokenizer.token_to_id(END_OF_TEXT):
            break
        token_ids.append(token_id)
    return str(tokenizer.decode(token_ids[length:]))


def check_against_transformers(model: Llama, directory: Path) -> float:
    """The largest difference of a logit from transformers' own model; too large is an error."""
    from transformers import AutoModelForCausalLM

    device = next(model.parameters()).device
    other = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    random = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.shape.vocab_size, (2, 100), generator=random).to(device)
    with torch.no_grad():
        difference = float((model(token_ids) - other(token_ids).logits).abs().max())
    if difference > 0.02:
        raise SystemExit(f"{directory}: a logit differs from transformers' by {difference}")
    return difference


def evaluate(directory: Path, documents: list[Document], every: int, batch: int) -> None:
    """Writes figures.json: bits per byte of each split, compressors, samples."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("highest")
    model = load(directory, device)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    figures: dict[str, object] = json.loads((directory / "training.json").read_text())
    figures["largest_difference_from_transformers"] = check_against_transformers(model, directory)
    for split in SPLITS:
        texts = of_split(documents, split)
        texts = texts[::every] if split == "train" else texts
        figures[f"bits_per_byte_{split}"] = round(bits_per_byte(model, tokenizer, texts, batch), 4)
    figures["compressors"] = packed(of_split(documents, "heldout"))
    figures["model_bytes"] = sum(file.stat().st_size for file in directory.iterdir())
    (directory / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures), flush=True)
    for prompt in PROMPTS:
        print(f"--- {prompt}>>>{complete(model, tokenizer, prompt, 80)}", flush=True)


def choose(directories: list[Path], output: Path) -> None:
    """Prints a table of the candidates and copies the one that is best on validation."""
    rows = []
    for directory in directories:
        if (directory / "figures.json").exists():
            rows.append((json.loads((directory / "figures.json").read_text()), directory))
        else:
            print(f"{directory.name}: no figures", file=sys.stderr)
    rows.sort(key=lambda row: row[0]["bits_per_byte_validation"])
    print(f"{'candidate':10} {'tokens':>12} " + " ".join(f"{split:>16}" for split in SPLITS))
    for figures, directory in rows:
        bits = " ".join(f"{figures[f'bits_per_byte_{split}']:16.4f}" for split in SPLITS)
        print(f"{directory.name:10} {figures['tokens']:12,} {bits}")
    output.mkdir(parents=True, exist_ok=True)
    figures, best = rows[0]
    for file in sorted(best.iterdir()):
        if file.name not in ("training.json", "figures.json"):
            shutil.copy(file, output / file.name)
    (output / "README.md").write_text(card(figures, best.name))
    table = {directory.name: figures for figures, directory in rows}
    (output / "candidates.json").write_text(json.dumps(table, indent=2) + "\n")


def main() -> None:
    """Evaluates one candidate, or chooses between several."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, help="archive of data.py")
    parser.add_argument("--choose", type=Path, help="directory for the best candidate")
    parser.add_argument("--every", type=int, default=1, help="score every Nth training file only")
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.choose:
        choose(arguments.directories, arguments.choose)
        return
    documents = unpack(arguments.data)
    for directory in arguments.directories:
        evaluate(directory, documents, arguments.every, arguments.batch)


if __name__ == "__main__":
    main()
