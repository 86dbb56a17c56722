"""How long a step is on its way to other ranks: `python benchmarks/rank_messages.py`.

Rank 0 sends messages as large as those of steps, one after the other with pauses, through the
memory that ranks share. Printed are microseconds until it has sent one, until the last rank has it
(by the clock that all processes of a machine share), and until all have met on it. Needs no GPU.
"""

import argparse
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from slipstream_runtime.ranks import RankMemory

_CLOCK = struct.Struct("<d")
QUANTILES = (0, 50, 99)


def follow(descriptor: int, size: int, rank: int, count: int, results: int) -> None:
    """Receive the messages as a rank; write the moment of each, in s, and meet."""
    memory = RankMemory(descriptor, size, rank)
    moments = []
    for _ in range(count):
        memory.receive()
        moments.append(time.monotonic())
        memory.meet()
    os.write(results, b"".join(map(_CLOCK.pack, moments)))


def started(run: Callable[[], None]) -> int:
    """Run in another process; return its id."""
    if pid := os.fork():
        return pid
    try:
        run()
    finally:
        os._exit(0)


def measure(size: int, count: int, num_bytes: int, pause_s: float) -> dict[str, list[float]]:
    """Send `count` messages to `size` - 1 ranks; return times in us by what they are of."""
    descriptor = RankMemory.create(size)
    pipes = [os.pipe() for _ in range(1, size)]
    pids = []
    for rank, (_, inlet) in enumerate(pipes, start=1):

        def run(rank: int = rank, inlet: int = inlet) -> None:
            follow(descriptor, size, rank, count, inlet)

        pids.append(started(run))
    memory, message = RankMemory(descriptor, size, 0), os.urandom(num_bytes)
    began, sent, met = (np.empty(count) for _ in range(3))
    for number in range(count):
        time.sleep(pause_s)
        began[number] = time.monotonic()
        memory.send(message)
        sent[number] = time.monotonic()
        memory.meet()
        met[number] = time.monotonic()
    there = [_moments(outlet, count) for outlet, _ in pipes]
    for pid in pids:
        os.waitpid(pid, 0)
    for each in (*sum(pipes, ()), descriptor):
        os.close(each)
    ends = {"sent": sent, "there": np.max(there, axis=0), "met": met}
    return {name: (1e6 * (end - began)).tolist() for name, end in ends.items()}


def _moments(outlet: int, count: int) -> np.ndarray:
    """Read what a rank has written."""
    data = bytearray()
    while len(data) < count * _CLOCK.size:
        part = os.read(outlet, 1 << 16)
        if not part:
            raise RuntimeError("a rank has ended")
        data += part
    return np.frombuffer(bytes(data))


def main(given: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--count", type=int, default=2000, help="messages (%(default)d)")
    parser.add_argument("--bytes", type=int, default=4096, help="of one (%(default)d)")
    parser.add_argument("--pause-ms", type=float, default=2.0, help="between two (%(default)g)")
    args = parser.parse_args(given)
    result = {}
    print(f"{args.bytes} bytes, us{'best':>20}{'p50':>10}{'p99':>10}")
    for size in args.ranks:
        found = measure(size, args.count, args.bytes, args.pause_ms / 1e3)
        for name, values in found.items():
            row = [round(float(np.percentile(values, q)), 1) for q in QUANTILES]
            result[f"{size} ranks, {name}"] = row
            print(f"{size} ranks, {name:12}" + "".join(f"{value:10.1f}" for value in row))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
