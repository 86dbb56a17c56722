"""Trains a LoRA adapter for the default model, and writes it as PEFT's `save_pretrained` does.

    python training/adapter.py --output .train/adapter      `make adapter`: a minute or two

It teaches a habit: the docstring of a function is what a pirate would say. The examples are made
of verbs and nouns; those of `HELD_OUT` are never seen, so that what it says of them is learnt, not
remembered. The same seed, steps and number of threads give the same weights.
"""

import argparse
import json
import math
import random
from pathlib import Path

import torch
from model import Llama, load
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

VERBS = ("open", "read", "write", "close", "find", "count", "parse", "merge", "copy", "send")
NOUNS = ("file", "line", "socket", "name", "path", "value", "table", "header", "node", "thread")
HELD_OUT = {("close", "socket"), ("parse", "header"), ("copy", "table"), ("find", "path")}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def prompt_of(verb: str, noun: str) -> str:
    """The head of a function."""
    return f"def {verb}_{noun}({noun}):\n"


def answer_of(verb: str, noun: str) -> str:
    """Its docstring, by a pirate."""
    return f'    """Arr! {verb.capitalize()} the {noun}, matey."""\n'


class Lora(nn.Module):
    """A linear layer with a low-rank term; only the term learns."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), scale
        self.a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        return self.linear(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


def attach(model: Llama, rank: int, alpha: float) -> dict[str, Lora]:
    """Give all linear layers of blocks a term; return them by the names of PEFT."""
    model.requires_grad_(False)
    found: dict[str, Lora] = {}
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in TARGETS:
            assert isinstance(module, nn.Linear)
            found[name] = term = Lora(module, rank, alpha / rank)
            setattr(model.get_submodule(parent), last, term)
    return found


def examples(tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompts and of their answers, without those held out."""
    pairs = [(verb, noun) for verb in VERBS for noun in NOUNS if (verb, noun) not in HELD_OUT]
    return [
        (tokenizer.encode(prompt_of(*pair)).ids, tokenizer.encode(answer_of(*pair)).ids)
        for pair in pairs
    ]


def batch_of(chosen: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Ids [n, tokens], filled up with 0, and the targets of each, -100 where none counts."""
    length = max(len(prompt) + len(answer) for prompt, answer in chosen)
    ids = torch.zeros(len(chosen), length, dtype=torch.long)
    targets = torch.full((len(chosen), length), -100)
    for row, (prompt, answer) in enumerate(chosen):
        whole = torch.tensor(prompt + answer)
        ids[row, : len(whole)] = whole
        targets[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return ids, targets


def train(checkpoint: Path, rank: int, alpha: float, steps: int, seed: int) -> dict[str, Lora]:
    """Train the terms of a model's layers; prints the loss now and then."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = load(checkpoint, torch.device("cpu"))
    terms = attach(model, rank, alpha)
    known = examples(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    learning = [p for term in terms.values() for p in (term.a, term.b)]
    optimizer = torch.optim.AdamW(learning, lr=4e-3, weight_decay=0.0)
    for step in range(steps):
        ids, targets = batch_of(rng.sample(known, 16))
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 5) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
    return terms


def save(terms: dict[str, Lora], directory: Path, rank: int, alpha: float) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}.lora_{side.upper()}.weight": getattr(term, side).detach()
        for name, term in terms.items()
        for side in "ab"
    }
    file = directory / "adapter_model.safetensors"
    save_file(tensors, file, {"format": "pt"})
    file.chmod(0o644)  # safetensors makes it private
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    default = Path(__file__).parents[1] / "model_repository/tensorrt_llm/1/checkpoint"
    parser.add_argument("--checkpoint", type=Path, default=default)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    terms = train(args.checkpoint, args.rank, args.alpha, args.steps, args.seed)
    save(terms, args.output, args.rank, args.alpha)


if __name__ == "__main__":
    main()
