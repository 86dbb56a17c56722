"""Trains what drafts for the default model: a model of one layer, Medusa heads, an EAGLE-3 head.

    python drafts.py --output .train/drafts      `make draft`: half an hour on two cores

All three learn on text that the target itself continues from prompts of the training set, and from
its probabilities of each next token (distillation). The embedding and the output layer are the
target's and stay as they are. The same seed, steps and number of threads give the same weights.

What is written is what `--draft-checkpoint` takes, in the layouts that Hugging Face checkpoints of
such drafters have: `draft/`, `medusa/`, `eagle3/`.
"""

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from data import collect, of_split
from draft_modules import Eagle3, MedusaHeads, save_eagle3, save_medusa
from model import Llama, load, rotary_tables, rotate, save
from tokenizer import END_OF_TEXT
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from train import Muon, rate, windows

NUM_HEADS = 4
DRAFT_VOCAB = 2048  # of EAGLE-3: the tokens that the target says most
NUM_STEPS_AHEAD = 3  # of EAGLE-3 in training: it learns from its own hidden states
PROMPT, LENGTH = 64, 256  # tokens


class Generator:
    """The target with a cache of keys and values, for rectangular batches."""

    def __init__(self, model: Llama, batch: int, length: int) -> None:
        shape, device = model.shape, next(model.parameters()).device
        self.model, self.length = model, 0
        self.cos, self.sin = rotary_tables(shape, device)
        sizes = (batch, shape.num_kv_heads, length, shape.head_size)
        self.caches = [
            (torch.zeros(sizes, device=device), torch.zeros(sizes, device=device))
            for _ in range(shape.num_layers)
        ]

    def logits(self, token_ids: Tensor) -> Tensor:
        """Logits [batch, vocab] behind the last of the next tokens [batch, n]."""
        begin, end = self.length, self.length + token_ids.shape[1]
        x = self.model.model.embed_tokens(token_ids)
        for layer, cache in zip(self.model.model.layers, self.caches, strict=True):
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), cache, begin, end)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.length = end
        last = self.model.model.norm(x[:, -1])
        return F.linear(last, self.model.model.embed_tokens.weight)

    def _attend(
        self, attention: nn.Module, x: Tensor, cache: tuple[Tensor, Tensor], begin: int, end: int
    ) -> Tensor:
        size = self.model.shape.head_size
        q, k, v = (
            projection(x).view(len(x), end - begin, -1, size).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = self.cos[begin:end], self.sin[begin:end]
        cache[0][:, :, begin:end], cache[1][:, :, begin:end] = rotate(k, cos, sin), v
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), cache[0][:, :, :end], cache[1][:, :, :end],
            is_causal=begin == 0, enable_gqa=True,
        )  # fmt: skip
        return attention.o_proj(mixed.transpose(1, 2).reshape(len(x), end - begin, -1))


@torch.no_grad()
def continuations(model: Llama, prompts: Tensor, length: int, seed: int) -> Tensor:
    """Prompts [n, p] as the target continues them, [n, length].

    A third of the rows are greedy, a third have temperature 0.7, a third 1.
    """
    random = torch.Generator(prompts.device).manual_seed(seed)
    temperature = torch.tensor([1e-4, 0.7, 1.0], device=prompts.device)
    temperature = temperature[torch.arange(len(prompts), device=prompts.device) % 3, None]
    generator, token_ids = Generator(model, len(prompts), length), prompts
    new = prompts
    while token_ids.shape[1] < length:
        logits = generator.logits(new) / temperature
        uniform = torch.rand(logits.shape, generator=random, device=logits.device)
        new = (logits - torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))).argmax(-1)[:, None]
        token_ids = torch.cat((token_ids, new), 1)
    return token_ids


@torch.no_grad()
def features(model: Llama, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's states [b, n, 3 h] before layers low, middle and high, the last one behind its
    norm [b, n, h], and its probabilities [b, n, vocab].
    """
    count = model.shape.num_layers
    wanted = (2, count // 2, count - 3)
    cos, sin = rotary_tables(model.shape, token_ids.device)
    cos, sin = cos[: token_ids.shape[1]], sin[: token_ids.shape[1]]
    x, taken = model.model.embed_tokens(token_ids), {}
    for number, layer in enumerate(model.model.layers):
        taken[number] = x
        x = layer(x, cos, sin)
    last = model.model.norm(x)
    logits = F.linear(last, model.model.embed_tokens.weight)
    return torch.cat([taken[number] for number in wanted], -1), last, logits.softmax(-1)


def distance(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Mean cross entropy [..., v] with the target's probabilities, in nats."""
    return -(probabilities * logits.log_softmax(-1)).sum(-1).mean()


class Drafters(nn.Module):
    """What is trained, and the loss of each on a batch."""

    def __init__(self, target: Llama, draft_ids: Tensor) -> None:
        super().__init__()
        self.target = [target]  # no part of what is trained
        shape = target.shape
        self.draft = Llama(replace(shape, num_layers=1))
        self.draft.model.embed_tokens.weight = target.model.embed_tokens.weight
        self.draft.model.layers[0].load_state_dict(target.model.layers[0].state_dict())
        self.draft.model.norm.load_state_dict(target.model.norm.state_dict())
        self.medusa = MedusaHeads(NUM_HEADS, shape.hidden_size)
        self.eagle3 = Eagle3(shape, draft_ids, target.model.embed_tokens.weight)

    def losses(self, token_ids: Tensor, random: torch.Generator) -> dict[str, Tensor]:
        """Losses by drafter, on [batch, n] tokens."""
        taps, last, probabilities = features(self.target[0], token_ids)
        head = self.target[0].model.embed_tokens.weight
        found = {"draft": distance(self.draft(token_ids), probabilities)}
        ahead = NUM_HEADS
        places = torch.randperm(token_ids.shape[1] - ahead, generator=random)[:64]
        medusa = [
            distance(F.linear(hidden, head), probabilities[:, places + 1 + number])
            for number, hidden in enumerate(self.medusa(last[:, places]))
        ]
        found["medusa"] = torch.stack(medusa).mean()
        states = self.eagle3.steps(taps, token_ids, NUM_STEPS_AHEAD)
        wanted = probabilities[..., self.eagle3.draft_ids]
        wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=1e-6)
        eagle = [
            distance(logits, wanted[:, 1 + number : 1 + number + logits.shape[1]])
            for number, logits in enumerate(states)
        ]
        found["eagle3"] = torch.stack(eagle).mean()
        return found


def train(drafters: Drafters, texts: Tensor, num_steps: int, batch: int, seed: int) -> None:
    """Trains all three side by side; a line every 20 steps."""
    drafters.target[0].requires_grad_(requires_grad=False)
    trained = [p for p in drafters.parameters() if p.requires_grad]
    muon = Muon([p for p in trained if p.ndim == 2], weight_decay=0.02)
    adam = torch.optim.AdamW([p for p in trained if p.ndim == 1], lr=2e-3, weight_decay=0.0)
    random = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for number in range(num_steps):
        rows = torch.randint(len(texts), (batch,), generator=random)
        losses = drafters.losses(texts[rows], random)
        torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, 1.0)
        factor = rate(number / num_steps)
        for group in adam.param_groups:
            group["lr"] = 2e-3 * factor
        adam.step()
        muon.step(0.02 * factor)
        adam.zero_grad(set_to_none=True)
        for parameter in trained:
            parameter.grad = None
        if number % 20 == 0:
            line = ", ".join(f"{name} {float(loss.detach()):.3f}" for name, loss in losses.items())
            print(f"step {number} of {num_steps}, {time.perf_counter() - start:.0f} s: {line}",
                  flush=True)  # fmt: skip


def prompts_of(tokenizer: Tokenizer, library: Path, count: int, seed: int) -> Iterator[Tensor]:
    """Batches of 128 prompts [128, PROMPT] from the training set, `count` in all."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    texts = of_split(collect(library), "train")
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        stream += [end, *encoding.ids]
    cut = windows(torch.tensor(stream, dtype=torch.int32), 128, PROMPT, seed)
    for _ in range(count // 128):
        yield next(cut)


def main() -> None:
    """Makes the text, trains, writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", type=Path, required=True, help="the default model's checkpoint")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1024, help=f"of {LENGTH} tokens each")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=6, help="texts of a step")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load(arguments.target, device)
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    library = Path(sysconfig.get_path("stdlib"))
    parts = []
    for prompts in prompts_of(tokenizer, library, arguments.texts, arguments.seed):
        seed = arguments.seed + len(parts)
        parts.append(continuations(target, prompts.to(device), LENGTH, seed))
        print(f"{len(parts) * 128} of {arguments.texts} texts", flush=True)
    texts = torch.cat(parts)
    counts = torch.bincount(texts[:, PROMPT:].flatten(), minlength=target.shape.vocab_size)
    draft_ids = counts.argsort(descending=True, stable=True)[:DRAFT_VOCAB].sort().values
    drafters = Drafters(target, draft_ids).to(device)
    train(drafters, texts, arguments.steps, arguments.batch, arguments.seed)
    end = tokenizer.token_to_id(END_OF_TEXT)
    save(drafters.draft, arguments.output / "draft", end)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (arguments.output / "draft" / file).write_bytes((arguments.target / file).read_bytes())
    save_medusa(drafters.medusa, arguments.output / "medusa")
    save_eagle3(drafters.eagle3, arguments.output / "eagle3")
    print(json.dumps({"texts": len(texts), "tokens": texts.numel(), "steps": arguments.steps}))


if __name__ == "__main__":
    main()
