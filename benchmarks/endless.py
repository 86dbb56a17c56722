"""An endless stream in constant memory: what a token costs after a million others.

    python benchmarks/endless.py [--output FILE] [--tokens N] [--window N] [--sinks N] [--only ...]

One request whose prompt is so long goes through scheduler, cache and model, in chunks, and the loss
of every token is taken; a token sees the same whatever the chunk. The text is a tenth of that long,
held out of the model's training, and repeats: so tenths differ by nothing but what came before. The
loss of a tenth leaves out its beginning, as long as the window, which at first is not full.

    sinks     the first tokens stay, positions are those in the cache
    window    without sinks
    distant   sinks at their true distance, which grows and grows

A FILE that is there is added to.
"""

import argparse
import itertools
import json
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quality import CHECKPOINT, heldout
from slipstream.config import EngineConfig
from slipstream.core.batch import Batch, Sampled
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.layers.streaming import Streaming
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import Submit
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from tokenizers import Tokenizer
from torch import Tensor

CHUNK = 256


class Distant(Streaming):
    """Without the paper's positions."""

    def places(self, positions: Tensor) -> Tensor:
        """Their own."""
        return positions


@dataclass
class Done:
    """A step that has been computed."""

    sampled: Sampled

    def wait(self) -> Sampled:
        """Return the step's tokens."""
        return self.sampled


class Judge(ModelRunner):
    """A runner that keeps the loss of every token, in nats."""

    tokens: list[int]
    losses: Tensor

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Any:
        """Compute a step; what it samples does not matter."""
        shape = self._builder.layout.shape_of(batch)._replace(num_samples=batch.num_tokens)
        inputs = self._stage(self._builder.build(batch, shape, 0, 0))
        every = torch.arange(batch.num_tokens)
        inputs = inputs._replace(sample_rows=every, sample_starts=inputs.query_starts)
        log_probs = self._forward(shape, inputs).float().log_softmax(-1)
        (row,) = batch.rows
        begin, end = row.start + 1, min(row.start + 1 + len(row.token_ids), len(self.tokens))
        targets = torch.tensor(self.tokens[begin:end])[:, None]
        self.losses[begin:end] = -log_probs[: end - begin].gather(1, targets)[:, 0]
        return Done(Sampled([0] * row.samples, [0.0] * row.samples, [True] * row.samples))


def text(checkpoint: Path, length: int) -> list[int]:
    """The first tokens of the held-out modules, one after the other."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    found: list[int] = []
    for path in heldout():
        found += tokenizer.encode(path.read_text(), add_special_tokens=False).ids
    if len(found) < length:
        raise SystemExit(f"the held-out modules have {len(found)} tokens, {length} are needed")
    return found[:length]


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Stream one text one way."""
    config = EngineConfig(
        checkpoint=str(args.checkpoint),
        device="cpu",
        attention_window=args.window,
        sink_tokens=0 if name == "window" else args.sinks,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=1,
    )
    judge = Judge(resolve(config))
    if name == "distant":
        assert judge._streaming is not None
        judge._streaming.__class__ = Distant
    length = args.tokens // 10
    judge.tokens = list(
        itertools.islice(itertools.cycle(text(args.checkpoint, length)), 10 * length)
    )
    judge.losses = torch.zeros(len(judge.tokens))
    engine = Engine(Limits(1, CHUNK, long_prompt_tokens=1 << 30), judge, None)
    engine.submit(
        b"", Submit(0, pack(judge.tokens), SamplingParams(max_tokens=1, temperature=0.0), 1)
    )
    blocks, memory, begin = [], [], time.monotonic()
    while engine.has_work:
        engine.step()
        status = engine.status()
        if status.running:
            blocks.append(status.kv_blocks_total - status.kv_blocks_free)
            memory.append(resident())
    tenths = [float(tenth[args.window :].mean()) for tenth in judge.losses.split(length)]
    full = blocks[2 * (args.window // CHUNK + 1) : -2]  # at the end it asks for no more
    return {
        "tokens": len(judge.tokens),
        "seconds": round(time.monotonic() - begin, 1),
        "loss of each tenth, nats a token": [round(loss, 5) for loss in tenths],
        "last tenth over first": round(tenths[-1] / tenths[0], 5),
        "blocks, least and most once full": [min(full), max(full)],
        "resident MB, after a tenth and at the end": [memory[len(memory) // 10], memory[-1]],
    }


def resident() -> int:
    """Return the resident memory of this process, MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sinks", type=int, default=4)
    names = ("sinks", "window", "distant")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    setting = {
        "window": args.window,
        "sinks": args.sinks,
        "cores": len(os.sched_getaffinity(0)),
    }
    figures: dict[str, Any] = {}
    if args.output is not None and args.output.is_file():
        figures = json.loads(args.output.read_text())
    figures["setting"] = setting
    for name in args.only:
        figures[name] = measure(name, args)
        print(name, json.dumps(figures[name]), flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
