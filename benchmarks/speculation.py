"""Steps with drafts beside plain ones: `python benchmarks/speculation.py [--shape S] [--output F]`.

Offline, over random weights. Prints one JSON object, with tokens per second of each case and their
ratio to those of the same requests without speculation:

    nothing repeats     prompts and outputs are random, and so are the weights of drafters that
                        have any, so that no draft is right: at least 0.98 with each drafter
    accepted 0.7        each draft is right with probability 0.7 (synthetic): 2.3 at batch 1, 2.0 at
                        8, 1.4 at 32
    repeats             prompt lookup over outputs that repeat: at least 2 at batch 1 and 4

Where a case needs to know what comes next, a bias makes every output the same token, on both sides.
Drafts are then right without a second model, and wrong ones are another token; all is verified by
the steps that serve requests.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import random_drafts
import torch
import workloads
from engine import build
from msgspec.structs import replace
from shapes import SHAPES
from slipstream import wire
from slipstream.core.drafts import Drafter, Proposal
from slipstream.core.sequence import Sequence
from slipstream.drafting.forced import WithForced
from slipstream.drafting.lookup import PromptLookup
from slipstream.drafting.speculator import Speculator
from slipstream.drafting.suffix import SuffixDrafts
from slipstream.engine.device_drafts import DeviceDrafts
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

TOKEN = 77  # of outputs that repeat
DRAFTERS = ("lookup", "suffix", *random_drafts.NAMES)
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


def engine_of(
    base: Engine,
    speculator: Speculator | None,
    device_drafts: DeviceDrafts | None = None,
) -> Engine:
    """Return an engine over the same runner."""
    max_rows = 0 if speculator is None else 256
    limits = Limits(256, 4096, 4096, kv_cache_reuse=False, max_num_rows=max_rows)
    return Engine(limits, base._runner, None, speculation=speculator, device_drafts=device_drafts)


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
    plain: Engine,
    drafted: Engine,
    prompts: list[list[int]],
    sampling: SamplingParams,
    repeat: int,
) -> dict[str, float]:
    """Measure both sides by turns; the medians. The first turn is for what a server has learned."""
    rates: list[tuple[float, float]] = []
    for turn in range(repeat + 1):
        own = replace(sampling, seed=turn)  # else the texts of one turn are those of the next
        rates.append((rate(plain, prompts, own), rate(drafted, prompts, own)))
    counts = drafted._scheduler.draft_counts
    a, b = (statistics.median(side) for side in zip(*rates[1:], strict=True))
    accepted = counts.total("accepted_tokens") / max(1, counts.total("drafted_tokens"))
    return {
        "plain_tok_s": round(a, 1),
        "tok_s": round(b, 1),
        "ratio": round(b / a, 3),
        "accepted": round(accepted, 3),
        "lowest_ratio": round(min(y / x for x, y in rates[1:]), 3),
    }


class Bench:
    """The engines of one run, and its cases."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.cases = args, list[dict[str, object]]()
        self.base = self._build("lookup")
        self.sampled = SamplingParams(max_tokens=args.max_tokens, temperature=1.0)
        self.same = SamplingParams(
            max_tokens=args.max_tokens, temperature=0.0, bias=((TOKEN, 100.0),)
        )

    def _build(self, speculation: str, **options: object) -> Engine:
        args = self.args
        tokens = max(args.batches) * (args.num_input + args.max_tokens + 64)
        options |= {"speculation": speculation, "num_draft_tokens": args.num_draft_tokens}
        return build(args.shape, args.dtype, 4096, kv_cache_tokens=tokens, **options)

    def run(
        self, case: str, name: str, drafted: Engine, sampling: SamplingParams, batch: int
    ) -> None:
        """Measure a case at a batch size, print and keep it."""
        prompts = workloads.decode(batch, num_input=self.args.num_input).prompts
        plain = engine_of(self.base, None)
        figures = compare(plain, drafted, prompts, sampling, self.args.repeat)
        goal = GOALS.get((case, batch))
        self.cases.append({"case": case, "drafter": name, "batch": batch, **figures, "goal": goal})
        print(json.dumps(self.cases[-1]), flush=True)

    def host(self, drafter: Drafter) -> Engine:
        """Return an engine over the plain runner, with drafts made on the host."""
        return engine_of(self.base, Speculator(drafter, self.args.num_draft_tokens))

    def nothing_repeats(self, name: str) -> None:
        """Measure a drafter that is never right."""
        batches = self.args.batches
        if name in random_drafts.NAMES:
            with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
                random_drafts.write_draft(name, self.args.shape, Path(directory))
                base = self._build(name, draft_checkpoint=directory)
            most = min(self.args.num_draft_tokens, 4)
            for batch in batches:
                drafts = DeviceDrafts(name, most, has_cache=name != "medusa")
                drafted = engine_of(base, Speculator(WithForced(drafts), most), drafts)
                self.run("nothing repeats", name, drafted, self.sampled, batch)
            del base, drafted, drafts
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()
            return
        for batch in batches:
            made = PromptLookup() if name == "lookup" else SuffixDrafts()
            self.run("nothing repeats", name, self.host(made), self.sampled, batch)

    def right(self) -> None:
        """Measure drafts that are right, by chance or always."""
        for batch in (b for b in self.args.batches if b <= 32):
            self.run("accepted 0.7", "synthetic", self.host(Synthetic(0.7)), self.same, batch)
        for batch in (b for b in (1, 4) if b <= max(self.args.batches)):
            self.run("repeats", "lookup", self.host(PromptLookup()), self.same, batch)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=SHAPES)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--num-input", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--drafters", nargs="*", default=DRAFTERS, choices=DRAFTERS)
    parser.add_argument("--only-wrong", action="store_true", help="leave out drafts that are right")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    for name in args.drafters:
        bench.nothing_repeats(name)
    if not args.only_wrong:
        bench.right()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"shape": args.shape, "device": device, "num_draft_tokens": args.num_draft_tokens}
    print(json.dumps({**about, "cases": bench.cases}))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({**about, "cases": bench.cases}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
