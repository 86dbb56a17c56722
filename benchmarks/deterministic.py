"""What deterministic mode holds and costs: `python benchmarks/deterministic.py [--pairs N]`.

A pair is a token (and its log prob, bit for bit) drawn with its request alone and among others.
Then the median time of a step of both modes, and their ratio.
"""

import argparse
import gc
import sys
import time

import numpy as np
import torch
import workloads
from engine import build, run
from slipstream import wire
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from timing import need_gpu

Answer = tuple[list[int], list[float]]
WORKLOADS = {
    "decode_1": workloads.decode(1, max_tokens=80),
    "decode_128": workloads.decode(128, max_tokens=80),
    "prefill": workloads.prefill(),
}


def answers(engine: Engine, together: int, num_requests: int, num_outputs: int) -> list[Answer]:
    """Tokens and log probs of requests of 1 to 400 tokens, at most `together` at once."""
    rng = np.random.default_rng(5)
    engine = Engine(Limits(together, 2048, num_requests), engine._runner, None)
    found: list[Answer] = [([], []) for _ in range(num_requests)]
    for number, length in enumerate(rng.integers(1, 400, num_requests).tolist()):
        prompt = rng.integers(0, workloads.VOCABULARY, length).tolist()
        sampling = SamplingParams(
            max_tokens=num_outputs,
            temperature=[0.0, 1.0][number % 2],
            seed=number,
            log_probs=True,
        )
        engine.submit(b"bench", wire.Submit(number, pack(prompt), sampling, time.monotonic_ns()))
    while engine.has_work:
        for tokens in engine.step().get(b"bench", ()):
            found[tokens.request][0].extend(tokens.token_ids)
            found[tokens.request][1].extend(tokens.log_probs)
    return found


def main() -> int:
    """Command line; 1 if a pair differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("names", nargs="*", default=["decode_1", "decode_128", "prefill"])
    args = parser.parse_args()
    need_gpu(args.shape)
    times: dict[str, list[float]] = {name: [] for name in args.names}
    num_different = 0
    for deterministic in (True, False):
        engine = build(args.shape, "auto", 2048, deterministic=deterministic)
        if deterministic:
            size = (args.pairs // 50, 50)
            alone, crowd = answers(engine, 1, *size), answers(engine, 200, *size)
            num_different = sum(
                a != b or p != q
                for one, other in zip(alone, crowd, strict=True)
                for a, b, p, q in zip(one[0], other[0], one[1], other[1], strict=True)
            )
            print(f"{size[0] * size[1]} pairs, {num_different} differ", flush=True)
        for name in args.names:
            if name == "prefill":
                run(engine, WORKLOADS[name])
            result = run(engine, WORKLOADS[name])
            times[name].append(result.seconds if result.itl_ms is None else result.itl_ms / 1e3)
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    for name, (ours, plain) in times.items():
        print(f"{name}: {ours * 1e3:.3f} ms, otherwise {plain * 1e3:.3f} ms: {ours / plain:.2f}")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
