"""From nothing to a first token, in this process: `python benchmarks/first_token.py DIR`.

Does what the engine's process does at start, without its socket. The last line is one JSON object:
seconds of each part, and the time of day at which the token was there.
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
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(message)s")
    laps = {"imports": time.time() - BEGAN}

    def lap(name: str) -> None:
        laps[name] = time.time() - BEGAN - sum(laps.values())

    config = EngineConfig(checkpoint=args.checkpoint, max_model_len=8192)
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
    laps = {name: round(seconds, 3) for name, seconds in laps.items()}
    print(json.dumps({"first_token_at": time.time(), "laps": laps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
