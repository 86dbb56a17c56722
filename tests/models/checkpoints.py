"""Random-weight checkpoints by transformers, the oracle they come from, and a driver of steps."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch, Row
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.models.registry import family_of, supported
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import FinishReason, Submit
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

_CLASSES = {family_of(name).name: getattr(transformers, name) for name in supported()}
FAMILIES = {name: (model.config_class, model) for name, model in _CLASSES.items()}
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
        ],
    ),
]
_SIZES = {
    "vocab_size": 1009,
    "hidden_size": 128,
    "intermediate_size": 177,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(family: str = "llama", **overrides: object) -> torch.nn.Module:
    """A transformers model in fp32 whose every parameter matters: biases and norms are random."""
    config_class, model_class = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        model = model_class(config_class(**(_SIZES | overrides)))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.data.normal_(1.0, 0.2)
            else:
                parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model.float().eval()


def save(model: torch.nn.Module, directory: Path, shard: str = "1GB") -> Path:
    """Write it as transformers does, in one file or in shards of at most `shard`."""
    model.save_pretrained(directory, max_shard_size=shard)
    return directory


def edit_config(directory: Path, *removed: str, **changes: object) -> None:
    """Change keys of config.json."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in removed}))


def make_runner(directory: Path, **overrides: object) -> ModelRunner:
    """A runner as the engine makes it, on the CPU in fp32 unless told otherwise."""
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_tokens": 8192, "block_size": 8}
    return ModelRunner(resolve(EngineConfig(checkpoint=str(directory), **(settings | overrides))))


def ragged_batch(
    runner: ModelRunner, rng: random.Random, sizes: list[tuple[int, int]], num_decodes: int
) -> tuple[Batch, list[int]]:
    """Rows of (tokens, tokens before them), of which chunks sample or not; and whose blocks, in no
    order, are left.
    """
    blocks = list(range(runner.num_blocks))
    rng.shuffle(blocks)
    rows = []
    for i, (count, start) in enumerate(sizes):
        size = -(-(start + count) // runner.block_size)
        tables = range(runner.window.num_tables)
        owned = tuple([blocks.pop() for _ in range(size)] for _ in tables)
        token_ids = [rng.randrange(1009) for _ in range(count)]
        samples = i < num_decodes or rng.random() < 0.6
        rows.append(Row(i, i, token_ids, start, owned, samples, GREEDY, 0, 1))
    return Batch(tuple(rows), num_decodes), blocks


@dataclass
class Generation:
    """One request on its way through a runner."""

    prompt: list[int]
    num_outputs: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    outputs: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    num_computed: int = 0
    tables: tuple[list[int], ...] = ()

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs

    def blocks(self) -> list[int]:
        return [block for table in self.tables for block in table]

    @property
    def is_decode(self) -> bool:
        return self.num_computed == len(self.tokens) - 1 and bool(self.outputs)

    @property
    def is_finished(self) -> bool:
        return len(self.outputs) == self.num_outputs


class Driver:
    """Steps a runner as the engine does: decodes first, then chunks; blocks in no order."""

    def __init__(self, runner: ModelRunner, seed: int = 0, keep_logits: bool = False) -> None:
        self.runner = runner
        self.keep_logits = keep_logits
        self.free = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self.free)

    def step(self, generations: list[Generation], chunk: int) -> None:
        """One batch: a token of each decode, `chunk` tokens of each prefill."""
        active = sorted(
            (g for g in generations if not g.is_finished), key=lambda g: not g.is_decode
        )
        rows = tuple(self._row(i, g, chunk) for i, g in enumerate(active))
        batch = Batch(rows, num_decodes=sum(g.is_decode for g in active))
        logits = self.runner.logits(batch) if self.keep_logits else None
        sampled = self.runner.run(batch)
        samplers = [g for g, row in zip(active, rows, strict=True) if row.samples]
        for g, row in zip(active, rows, strict=True):
            g.num_computed += len(row.token_ids)
        for i, g in enumerate(samplers):
            assert sampled.is_finite[i]
            g.outputs.append(sampled.token_ids[i])
            g.log_probs.append(sampled.log_probs[i])
            if logits is not None:
                g.logits.append(logits[i].float().cpu())

    def _row(self, number: int, g: Generation, chunk: int) -> Row:
        token_ids = g.tokens[g.num_computed :][: 1 if g.is_decode else chunk]
        end = g.num_computed + len(token_ids)
        g.tables = g.tables or tuple([] for _ in range(self.runner.window.num_tables))
        for table in g.tables:
            while len(table) * self.runner.block_size < end:
                table.append(self.free.pop())
        return Row(
            sequence_id=number,
            slot=number,
            token_ids=token_ids,
            start=g.num_computed,
            tables=tuple(map(list, g.tables)),
            samples=end == len(g.tokens),
            sampling=g.sampling,
            seed=g.seed,
            num_outputs=len(g.outputs),
        )

    def preempt(self, g: Generation) -> None:
        """Take the blocks away; all tokens so far are computed again, in other blocks."""
        self.free[:0] = g.blocks()
        g.tables, g.num_computed = (), 0

    def finish(self, generations: list[Generation], chunk: int = 1 << 20) -> None:
        """Step until all have their tokens, then free the blocks."""
        while not all(g.is_finished for g in generations):
            self.step(generations, chunk)
        for g in generations:
            self.free.extend(g.blocks())


@dataclass
class Answer:
    """What the engine told of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None


class Asker:
    """Submits requests to an engine, steps it, and collects what it tells."""

    def __init__(self, runner: ModelRunner, limits: Limits) -> None:
        self.engine = Engine(limits, runner, None)
        self.answers: dict[tuple[int, int], Answer] = {}

    def submit(self, prompt: list[int], sampling: SamplingParams) -> int:
        number = len(self.answers)
        self.engine.submit(b"asker", Submit(number, pack(prompt), sampling, 1))
        for index in range(sampling.n):
            self.answers[number, index] = Answer()
        return number

    def step(self) -> None:
        for tokens in self.engine.step().get(b"asker", ()):
            answer = self.answers[tokens.request, tokens.index]
            answer.token_ids += tokens.token_ids
            answer.log_probs += tokens.log_probs
            answer.reason = tokens.finished and tokens.finished.reason

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
            assert self.engine.fatal is None, self.engine.fatal
        self.engine.check_integrity()
        assert all(answer.reason is not None for answer in self.answers.values())


def random_prompts(lengths: list[int], vocab_size: int = 1009, seed: int = 0) -> list[list[int]]:
    """Token ids drawn evenly."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
