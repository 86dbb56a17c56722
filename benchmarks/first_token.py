"""From nothing to a first token, in this process: `python benchmarks/first_token.py DIR`.

Does what the engine's process does at start, without its socket. The last line is one JSON object:
seconds of each part by the clock and of the processor, all threads together, which other work on
the machine changes little; their sums; and the time of day at which the token was there.
"""

import time

BEGAN = time.time()

import argparse  # noqa: E402 - the clock runs before any import
import gc  # noqa: E402

gc.disable()  # as the engine's process has it
import json  # noqa: E402
import logging  # noqa: E402
import sys  # noqa: E402

from slipstream import wire  # noqa: E402
from slipstream.config import EngineConfig  # noqa: E402
from slipstream.engine.engine import Engine  # noqa: E402
from slipstream.engine.scheduler import Limits  # noqa: E402
from slipstream.runner.model_runner import ModelRunner  # noqa: E402
from slipstream.runner.plan import resolve  # noqa: E402
from slipstream_contract.ids import pack  # noqa: E402
from slipstream_contract.sampling import SamplingParams  # noqa: E402


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--num-input", type=int, default=128)
    parser.add_argument("--quantization", default="auto", help="as of slipstream compose")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    laps: dict[str, tuple[float, float]] = {}

    def lap(name: str) -> None:
        now = time.time() - BEGAN, time.process_time()
        before = [sum(part) for part in zip(*laps.values(), strict=True)] or [0.0, 0.0]
        laps[name] = now[0] - before[0], now[1] - before[1]

    lap("imports")
    config = EngineConfig(
        checkpoint=args.checkpoint, max_model_len=8192, quantization=args.quantization
    )
    plan = resolve(config)
    lap("plan")
    runner = ModelRunner(plan)
    lap("runner")
    limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, config.max_waiting)
    engine = Engine(limits, runner, None)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = list(range(1, args.num_input + 1))
    engine.submit(b"start", wire.Submit(0, pack(prompt), sampling, time.monotonic_ns()))
    while not engine.step():
        pass
    lap("first step")
    wall = {name: round(part[0], 3) for name, part in laps.items()}
    processor = {name: round(part[1], 3) for name, part in laps.items()}
    sums = {"wall_s": round(sum(wall.values()), 3), "cpu_s": round(sum(processor.values()), 3)}
    print(json.dumps({"first_token_at": time.time(), **sums, "laps": wall, "cpu": processor}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
