"""What a step with beams costs the host: `python benchmarks/beam_host.py`, no GPU needed.

16 searches of 4 beams beside 64 plain rows, on a device that takes no time: schedule, staging
arrays, reading of the likeliest tokens, the choice among them, forks, commit. The likeliest tokens
are those of random logits: `flat` ones, among which most beams lose their place in every step, and
`peaked` ones, among which most go on as they are. Prints medians, in milliseconds a step: of all
that the host does, and of the part for which the device waits, from the end of a step until the
next one is launched. With `--profile`, where the time goes.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time

import numpy as np
import torch
from host import Drawn, Nothing
from slipstream.core.batch import Batch, Sampled
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.kernels.sampling.top_log_probs import ASK
from slipstream.runner.log_probs import Tops, asks_of
from slipstream.wire import Submit
from slipstream_contract.beams import Beams
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

VOCAB_SIZE, NUM_INPUT, NUM_DRAWN = 32_000, 128, 256
SPREADS = {"flat": 1.0, "peaked": 8.0}  # standard deviations of logits


class Searched(Drawn):
    """A step that is done, with the likeliest tokens of its rows."""

    def __init__(self, count: int, runner: "Likely", batch: Batch) -> None:
        super().__init__(count)
        self._runner = runner
        self.asks = asks_of(batch)

    def wait(self) -> Sampled:
        """Constants, and what the device would have written."""
        self._runner.num_in_flight -= 1
        self._runner.ended = time.perf_counter()
        sampled = super().wait()
        if not self.asks:
            return sampled
        tops = self._runner.tops.read(self.asks, 0)
        return Sampled(sampled.token_ids, sampled.log_probs, sampled.outcomes, tops)


class Likely(Nothing):
    """Also finds likely tokens, drawn before; stages what a launch of their kernel would."""

    vocab_size = VOCAB_SIZE

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.tops = Tops(NUM_DRAWN, VOCAB_SIZE, torch.device("cpu"))
        logits = np.random.default_rng(0).normal(0, spread, (NUM_DRAWN, VOCAB_SIZE))
        values = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        size = self.tops._on_host[0].shape[1]
        self._ids = np.argsort(-values, -1)[:, :size]
        self._values = np.take_along_axis(values, self._ids, -1)
        self._turn = 0
        self.num_in_flight = 0
        self.ended = 0.0  # the last step
        self.idle: list[float] = []  # milliseconds before each launch on an idle device

    def launch(self, batch: Batch) -> Drawn:
        """All that the host does for a step, but for copies and launches."""
        drawn = super().launch(batch)
        if not self.num_in_flight:
            self.idle.append((time.perf_counter() - self.ended) * 1e3)
        self.num_in_flight += 1
        searched = Searched(drawn._count, self, batch)
        if searched.asks:
            self._stage(len(searched.asks))
        return searched

    def _stage(self, count: int) -> None:
        np.zeros(count, ASK)["row"] = np.arange(count)
        self._turn += 1
        ids, values = self.tops._on_host[:2]
        ids[:] = np.roll(self._ids, 67 * self._turn, 0)
        values[:] = np.roll(self._values, 67 * self._turn, 0)


def engine_of(runner: Likely, num_prompts: int, sampling: SamplingParams) -> Engine:
    """Return an engine that has computed its prompts."""
    engine = Engine(Limits(256, 8192, 1000), runner, None)
    for number in range(num_prompts):
        prompt = pack([number, *range(1, NUM_INPUT)])
        engine.submit(b"bench", Submit(number, prompt, sampling, 1))
    while engine.num_steps < 8:
        engine.step()
    return engine


def times_of(engine: Engine) -> list[float]:
    """Milliseconds of each step until all has ended, but for the last ones."""
    times = []
    while engine.has_work:
        begin = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - begin) * 1e3)
    return times[:-3]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    args = parser.parse_args()
    plain = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, end_ids=(1,))
    search = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=0.0,
        n=args.width,
        end_ids=(1,),
        beams=Beams(width=args.width, length_penalty=1.0, early_stopping=0),
    )
    sides = [("plain", "flat", args.batch * args.width, plain)]
    sides += [("beams", name, args.batch, search) for name in SPREADS]
    for name, logits, num_prompts, sampling in sides:
        every, idle, profile = [], [], cProfile.Profile()
        for _ in range(args.repeat):
            runner = Likely(SPREADS[logits])
            engine = engine_of(runner, num_prompts, sampling)
            if args.profile:
                profile.enable()
            every += times_of(engine)
            profile.disable()
            idle += runner.idle[1:-1]
        waits = f", of which the device waits {statistics.median(idle):.3f}" if idle else ""
        print(f"{name}, {logits}: {statistics.median(every):.3f} ms{waits}")
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    sys.exit(main())
