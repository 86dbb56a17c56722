"""Steps with drafts beside plain ones: `python benchmarks/speculation.py [--shape S] [--output F]`.

Offline, over random weights. Prints one JSON object, with tokens per second of each case and their
ratio to those of the same requests without speculation:

    nothing repeats     prompt lookup is on, prompts and outputs are random: at least 0.98
    accepted 0.7        each draft is right with probability 0.7 (synthetic): 2.3 at batch 1, 2.0 at
                        8, 1.4 at 32
    repeats             prompt lookup over outputs that repeat: at least 2 at batch 1 and 4

Where a case needs to know what comes next, a bias makes every output the same token, on both sides.
Drafts are then right without a second model, and wrong ones are another token; all is verified by
the steps that serve requests.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import workloads
from engine import build
from shapes import SHAPES
from slipstream import wire
from slipstream.core.drafts import Proposal
from slipstream.core.sequence import Sequence
from slipstream.drafting.costs import StepTimes
from slipstream.drafting.lookup import PromptLookup
from slipstream.drafting.speculator import Speculator
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

TOKEN = 77  # of outputs that repeat
BATCHES = (1, 8, 32, 128, 256)
GOALS = {
    **{("nothing repeats", batch): 0.98 for batch in BATCHES},
    ("accepted 0.7", 1): 2.3,
    ("accepted 0.7", 8): 2.0,
    ("accepted 0.7", 32): 1.4,
    ("repeats", 1): 2.0,
    ("repeats", 4): 2.0,
}


class Synthetic:
    """Drafts of which each is right with probability `right`, where every output is `TOKEN`."""

    def __init__(self, right: float) -> None:
        self._right, self._random = right, random.Random(1)

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Return `k` drafts."""
        drafts = [TOKEN + (self._random.random() >= self._right) for _ in range(k)]
        return Proposal(drafts, "synthetic")

    def release(self, sequence: Sequence) -> None:
        """Hold nothing."""


def engine_of(base: Engine, speculator: Speculator | None, max_rows: int) -> Engine:
    """Return an engine over the same runner."""
    limits = Limits(256, 4096, 4096, kv_cache_reuse=False, max_num_rows=max_rows)
    return Engine(limits, base._runner, None, speculation=speculator)


def rate(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> float:
    """Return tokens per second of decodes: from the end of the last prompt to the first end."""
    for number, prompt in enumerate(prompts):
        engine.submit(b"b", wire.Submit(number, pack(prompt), sampling, time.monotonic_ns()))
    times: list[tuple[float, int]] = []
    started: set[int] = set()
    count, is_over = 0, False
    while engine.has_work:
        for tokens in engine.step().get(b"b", ()):
            started.add(tokens.request)
            count += len(tokens.token_ids)
            is_over |= tokens.finished is not None
        if len(started) == len(prompts) and not is_over:
            times.append((time.perf_counter(), count))
    return (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])


def compare(
    base: Engine,
    make: "type[Synthetic] | type[PromptLookup]",
    arguments: tuple[float, ...],
    prompts: list[list[int]],
    sampling: SamplingParams,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Measure both sides by turns; the medians."""
    plain, drafted, accepted = [], [], []
    times = StepTimes()  # as a server has them that has run for a while
    for _ in range(args.repeat + 1):
        plain.append(rate(engine_of(base, None, 0), prompts, sampling))
        speculator = Speculator(make(*arguments), args.num_draft_tokens, times)
        engine = engine_of(base, speculator, 256)
        drafted.append(rate(engine, prompts, sampling))
        counts = engine._scheduler.draft_counts
        accepted.append(counts.total("accepted_tokens") / max(1, counts.total("drafted_tokens")))
    a, b = statistics.median(plain[1:]), statistics.median(drafted[1:])
    return {
        "plain_tok_s": round(a, 1),
        "tok_s": round(b, 1),
        "ratio": round(b / a, 3),
        "accepted": round(statistics.median(accepted[1:]), 3),
        "lowest_ratio": round(min(y / x for x, y in zip(plain[1:], drafted[1:], strict=True)), 3),
    }


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--num-input", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    options = {"speculation": "lookup", "num_draft_tokens": args.num_draft_tokens}
    base = build(args.shape, args.dtype, 4096, **options)
    sampled = SamplingParams(max_tokens=args.max_tokens, temperature=1.0, seed=5)
    same = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, bias=((TOKEN, 100.0),))
    cases = [("nothing repeats", PromptLookup, (), sampled, args.batches)]
    cases += [("accepted 0.7", Synthetic, (0.7,), same, [b for b in args.batches if b <= 32])]
    cases += [("repeats", PromptLookup, (), same, [b for b in (1, 4) if b <= max(args.batches)])]
    results = []
    for name, make, arguments, sampling, batches in cases:
        for batch in batches:
            prompts = workloads.decode(batch, num_input=args.num_input).prompts
            figures = compare(base, make, arguments, prompts, sampling, args)
            goal = GOALS.get((name, batch))
            results.append({"case": name, "batch": batch, **figures, "goal": goal})
            print(json.dumps(results[-1]), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"shape": args.shape, "device": device, "num_draft_tokens": args.num_draft_tokens}
    print(json.dumps({**about, "cases": results}))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({**about, "cases": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
