"""Trains one candidate within a given number of seconds.

    python train.py CANDIDATE --data DIRECTORY --output DIRECTORY --seconds N

The learning rate follows the clock, not a count of steps: a warm-up, a plateau, then a straight
line to zero at the last second, so that a run always ends annealed, on whatever machine. Matrices
learn by Muon (momentum whose step is made orthogonal by a Newton-Schulz iteration), the embedding
and the norms by AdamW. An epoch cuts the training stream at a fresh random offset, so that no
epoch shows the same windows.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from data import Document, unpack
from model import Llama, Shape, describe, save
from tokenizer import END_OF_TEXT
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Candidate:
    """A shape and the way to train it."""

    shape: Shape
    dropout: float = 0.0
    weight_decay: float = 0.1
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    batch: int = 32
    proper_share: float | None = None
    """Share of a batch that comes from the library proper; None: as the files have it, 40 %."""


CANDIDATES = {
    "base": Candidate(Shape()),
    "dropout": Candidate(Shape(), dropout=0.1),
    "wide": Candidate(Shape(hidden_size=320, num_layers=5, intermediate_size=608)),
    "deep": Candidate(Shape(hidden_size=192, num_layers=11, intermediate_size=480)),
    "dropout20": Candidate(Shape(), dropout=0.2),
    "dropout30": Candidate(Shape(), dropout=0.3),
    "decay": Candidate(Shape(), dropout=0.2, weight_decay=0.3),
    "deep20": Candidate(
        Shape(hidden_size=192, num_layers=11, intermediate_size=480), dropout=0.2
    ),
    "words": Candidate(Shape(vocab_size=3072, intermediate_size=608)),
    "library": Candidate(Shape(), proper_share=0.6),
    "tiny": Candidate(
        Shape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=128,
              context=128),
        batch=4,
    ),
}  # fmt: skip


def is_test(document: Document) -> bool:
    """True for the library's tests, which are more than half of its text."""
    return any(part in ("test", "tests", "idle_test") for part in document.path.split("/"))


def encode(documents: list[Document], tokenizer: Tokenizer) -> Tensor:
    """All documents as one stream [tokens], each begun by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream: list[int] = []
    for encoding in tokenizer.encode_batch([document.text for document in documents]):
        stream.append(end)
        stream.extend(encoding.ids)
    stream.append(end)
    return torch.tensor(stream, dtype=torch.int32)


def windows(stream: Tensor, count: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless batches [count, length] of the stream, an epoch's windows in random order."""
    random = torch.Generator().manual_seed(seed)
    steps = torch.arange(length, device=stream.device)
    waiting = torch.empty(0, dtype=torch.int64)
    while True:
        while len(waiting) < count:
            offset = int(torch.randint(length, (), generator=random))
            starts = torch.arange(offset, len(stream) - length + 1, length)
            waiting = torch.cat((waiting, starts[torch.randperm(len(starts), generator=random)]))
        starts, waiting = waiting[:count], waiting[count:]
        yield stream[starts.to(stream.device)[:, None] + steps].long()


def batches(
    candidate: Candidate, documents: list[Document], tokenizer: Tokenizer, device: torch.device
) -> Iterator[Tensor]:
    """Endless token ids [batch, context + 1]."""
    length = candidate.shape.context + 1
    share = candidate.proper_share
    if share is None:
        return windows(encode(documents, tokenizer).to(device), candidate.batch, length, seed=1)
    library = [document for document in documents if not is_test(document)]
    tests = [document for document in documents if is_test(document)]
    count = round(candidate.batch * share)
    parts = (
        windows(encode(library, tokenizer).to(device), count, length, seed=1),
        windows(encode(tests, tokenizer).to(device), candidate.batch - count, length, seed=2),
    )
    return (torch.cat(pair) for pair in zip(*parts, strict=True))


class Muon:
    """Muon (Jordan et al., 2024): momentum, made orthogonal; same-shaped matrices go together."""

    def __init__(self, matrices: list[nn.Parameter], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for matrix in matrices:
            rows, columns = matrix.shape
            self.groups.setdefault((rows, columns), []).append(matrix)
        self.momentum = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, lr: float, momentum: float = 0.95) -> None:
        """One update of every matrix from its gradient."""
        for shape, group in self.groups.items():
            gradient = torch.stack([matrix.grad for matrix in group])
            average = self.momentum[shape].lerp_(gradient, 1 - momentum)
            update = orthogonal(gradient.lerp(average, momentum))
            update *= -lr * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(group, 1 - lr * self.weight_decay)
            torch._foreach_add_(group, list(update.unbind()))


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly, by five Newton-Schulz steps; in bf16 on a GPU."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


def rate(progress: float) -> float:
    """The learning rate's factor at `progress` in [0, 1] of the time: up, level, down to zero."""
    if progress < 0.02:
        return progress / 0.02
    return min(1.0, max(0.0, (1 - progress) / 0.7))


class Step:
    """Forward, backward and update of one batch, compiled where the machine can compile."""

    def __init__(self, candidate: Candidate, model: Llama, device: torch.device) -> None:
        self.candidate, self.model, self.device = candidate, model, device
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        embedding = [model.model.embed_tokens.weight]
        self.muon = Muon(matrices, candidate.weight_decay)
        self.adam = torch.optim.AdamW(
            [
                {"params": embedding, "weight_decay": candidate.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=candidate.adam_lr,
            betas=(0.9, 0.95),
            fused=device.type == "cuda",
        )

    def gradients(self, token_ids: Tensor) -> Tensor:
        """Fills `.grad` from a batch [batch, context + 1]; returns the mean loss in nats."""
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.model.hidden(token_ids[:, :-1])
            loss = self.loss(hidden, self.model.model.embed_tokens.weight, token_ids[:, 1:])
        loss.backward()
        return loss.detach()

    @staticmethod
    def loss(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the tied output layer."""
        logits = F.linear(hidden, embedding).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def compile(self, token_ids: Tensor) -> None:
        """Compiles layer and loss and warms them up; on failure says so and stays eager."""
        torch._dynamo.config.recompile_limit = 64
        try:
            for layer in self.model.model.layers:
                layer.compile()
            self.loss = torch.compile(Step.loss)  # type: ignore[method-assign]
            for _ in range(3):
                self.gradients(token_ids)
        except Exception as error:
            print(f"not compiled: {type(error).__name__}: {str(error)[:200]}", flush=True)
            for layer in self.model.model.layers:
                layer._compiled_call_impl = None
            self.loss = Step.loss  # type: ignore[method-assign]
        self.model.zero_grad(set_to_none=True)

    def update(self, factor: float) -> None:
        """Applies the gradients with both optimisers at `factor` of their rates."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.candidate.adam_lr * factor
        self.adam.step()
        self.muon.step(self.candidate.muon_lr * factor)
        self.model.zero_grad(set_to_none=True)


def train(
    candidate: Candidate, data: Iterator[Tensor], device: torch.device, seconds: float
) -> tuple[Llama, dict[str, float]]:
    """The trained model, and what the run was."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Llama(candidate.shape, candidate.dropout).to(device).train()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{describe(candidate.shape)}: {num_parameters:,} parameters", flush=True)
    step = Step(candidate, model, device)
    if device.type == "cuda":
        step.compile(next(data))
    start, num_steps, average = time.perf_counter(), 0, 0.0
    num_tokens = candidate.batch * candidate.shape.context
    while (progress := (time.perf_counter() - start) / seconds) < 1:
        loss = float(step.gradients(next(data)))  # waits for the device: the clock is true
        step.update(rate(progress))
        num_steps += 1
        average = loss if num_steps == 1 else 0.98 * average + 0.02 * loss
        if num_steps % 100 == 0:
            speed = num_steps * num_tokens / (time.perf_counter() - start)
            print(f"{progress:6.1%} step {num_steps} loss {average:.4f} {speed:,.0f} tok/s",
                  flush=True)  # fmt: skip
    figures = {
        "parameters": num_parameters,
        "steps": num_steps,
        "tokens": num_steps * num_tokens,
        "seconds": round(time.perf_counter() - start, 1),
        "last_loss_nats": round(average, 4),
    }
    return model, figures


def main() -> None:
    """Trains and writes the checkpoint with its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("candidate", choices=CANDIDATES)
    parser.add_argument("--data", type=Path, required=True, help="data.tar.xz and tokenizer-N/")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300)
    arguments = parser.parse_args()
    candidate = CANDIDATES[arguments.candidate]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = arguments.data / f"tokenizer-{candidate.shape.vocab_size}"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = unpack(arguments.data / "data.tar.xz")
    documents = [document for document in documents if document.split == "train"]
    data = batches(candidate, documents, tokenizer, device)
    model, figures = train(candidate, data, device, arguments.seconds)
    save(model, arguments.output, tokenizer.token_to_id(END_OF_TEXT))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (arguments.output / file).write_bytes((folder / file).read_bytes())
    (arguments.output / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
