"""What a step costs the host: `python benchmarks/host.py`, no GPU needed.

Steady decode on a device that takes no time and draws constants: schedule, staging arrays, commit
and what is told. Prints the least and the median of microseconds a step. Then the same where every
request that ends is followed by one of whose prompt nine tenths are cached, or would be; what a
prompt of 100,000 tokens takes on its way into the cache and out of it, and what a process takes to
read a vocabulary of 128,000 tokens when it starts, in milliseconds.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from slipstream import wire
from slipstream.core.batch import Batch, Sampled
from slipstream.core.sequence import Request, Sequence
from slipstream.core.step_sizes import StepSizes
from slipstream.core.window import AttentionWindow
from slipstream.engine.engine import Engine
from slipstream.engine.request_checks import RequestBounds
from slipstream.engine.scheduler import Limits
from slipstream.kvcache.cache import KVCache
from slipstream.runner.slots import Slots
from slipstream.runner.step_builder import StepBuilder
from slipstream.wire import Submit
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams
from slipstream_contract.vocab import TokenBytes

MAX_SEQS, MAX_LEN, BLOCK_SIZE = 256, 4096, 32
ALL = AttentionWindow()
GEMMA = AttentionWindow(512, 0, 4096, num_tables=7, num_full=1)  # Gemma 3 1B


class Drawn:
    """A step that is done."""

    def __init__(self, count: int) -> None:
        self._count = count

    def wait(self) -> Sampled:
        """Constants, as the results of a device are read."""
        ids, zeros = np.full(self._count, 7), np.zeros(self._count, np.float32)
        return Sampled(ids.tolist(), zeros.tolist(), (zeros == 0).tolist())


class Nothing:
    """Stages the arrays of a step and computes nothing."""

    block_size = BLOCK_SIZE
    vocab_size = 128_256
    max_model_len = MAX_LEN
    max_in_flight = 2
    transfers = None
    attention_doubles_at = 0
    step_sizes = StepSizes()

    def __init__(self, window: AttentionWindow = ALL) -> None:
        self.window = window
        self.num_blocks = MAX_SEQS * MAX_LEN // BLOCK_SIZE * window.num_tables
        slots = Slots(MAX_SEQS, MAX_LEN // BLOCK_SIZE, window.num_tables)
        self._builder = StepBuilder(slots, BLOCK_SIZE)
        self._memory = np.empty(1 << 22, np.uint8)

    def launch(self, batch: Batch) -> Drawn:
        """All that the host does for a step, but for one copy and one launch."""
        arrays = self._builder.build(batch, self._builder.layout.shape_of(batch), 0, MAX_SEQS)
        offset = 0
        for array in arrays:
            piece = self._memory[offset : offset + array.nbytes]
            piece[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            offset += array.nbytes
        return Drawn(sum([row.samples for row in batch.rows]))


def step_times(num_seqs: int, window: AttentionWindow = ALL, num_steps: int = 300) -> list[float]:
    """Seconds of each step of decodes."""
    engine = Engine(Limits(MAX_SEQS, 2048, 1000), Nothing(window), None)
    sampling = SamplingParams(max_tokens=num_steps + 100, temperature=0.0, end_ids=(1,))
    for i in range(num_seqs):
        engine.submit(b"bench", Submit(i, pack(list(range(100 + i % 50))), sampling, 1))
    while engine.status().waiting or engine.num_steps < 30:
        engine.step()
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - begin)
        assert len(outputs[b"bench"]) == num_seqs
    return times


def turnover_times(is_reused: bool) -> list[float]:
    """Seconds of each step of short requests that share 288 of 320 tokens."""
    engine = Engine(Limits(MAX_SEQS, 2048, 1000, kv_cache_reuse=is_reused), Nothing(), None)
    sampling = SamplingParams(max_tokens=64, temperature=0.0)
    number = 0

    def submit() -> None:
        nonlocal number
        own = [1000 + number % 100_000] * 32
        engine.submit(b"bench", Submit(number, pack([*range(288), *own]), sampling, 1))
        number += 1

    for _ in range(MAX_SEQS):
        submit()
    times = []
    for _ in range(500):
        begin = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - begin)
        for tokens in outputs.get(b"bench", ()):
            if tokens.finished is not None:
                submit()
    return times[100:]


def cache_times(num_tokens: int = 100_000, num_rounds: int = 200) -> dict[str, list[float]]:
    """Seconds that a prompt takes outside of steps: unknown, and known but for its end."""
    size = -(-num_tokens // BLOCK_SIZE)
    cache = KVCache(2 * size, BLOCK_SIZE)
    bounds = RequestBounds(
        128_256,
        num_tokens + 2,
        2 * size,
        2 * num_tokens,
        cache.blocks_for,
        has_tokenizer=False,
        has_guides=False,
        max_running=MAX_SEQS,
    )
    laps: dict[str, list[float]] = {}

    def lap(name: str, begin: float) -> None:
        laps.setdefault(name, []).append(time.perf_counter() - begin)

    for number in range(num_rounds):
        for name in ("unknown", "known"):
            prompt = pack([number, *range(num_tokens - 2), 7 if name == "known" else 6])
            frame = wire.encode(Submit(number, prompt, SamplingParams(max_tokens=1), 1))
            begin = time.perf_counter()
            message = wire.decode_engine(frame)
            assert isinstance(message, Submit)
            bounds.validate(message)
            lap("decoded and checked", begin)
            request = Request(b"", message)
            sequence = Sequence(number, request, 0, message.token_ids, 0, num_tokens + 1, None)
            request.sequences.append(sequence)
            begin = time.perf_counter()
            match = cache.match(sequence)
            assert cache.admit(sequence, match, num_tokens, 0)
            lap(f"{name}: lookup and admission", begin)
            cache.launch()
            cache.complete()
            begin = time.perf_counter()
            sequence.num_computed = num_tokens
            cache.computed(sequence)
            lap(f"{name}: taken in once computed", begin)
            begin = time.perf_counter()
            cache.release(sequence)
            lap(f"{name}: release", begin)
    return laps


def vocabulary_times() -> list[float]:
    """Seconds to read a tokenizer.json of byte-level BPE with 128,000 tokens and merges."""
    numbers = range(128_000)
    model = {
        "type": "BPE",
        "vocab": {f"Ġpiece{i:06d}é": i for i in numbers},
        "merges": [["Ġpiece", f"{i:06d}é"] for i in numbers],
    }
    spec = {"model": model, "added_tokens": [], "decoder": {"type": "ByteLevel"}}
    times = []
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_text(json.dumps(spec))
        for _ in range(5):
            begin = time.perf_counter()
            TokenBytes.load(Path(directory))
            times.append(time.perf_counter() - begin)
    return times


def main() -> None:
    """Command line."""
    for window in (ALL, GEMMA):
        for num_seqs in (1, 64, 256):
            times = sorted(t * 1e6 for t in step_times(num_seqs, window))
            median, tables = statistics.median(times), window.num_tables
            name = f"{num_seqs:4} sequences of {tables} table{'s' if tables > 1 else ''}"
            print(f"{name}: {times[0]:6.0f} us, median {median:6.0f}")
    for is_reused in (False, True):
        times = sorted(t * 1e6 for t in turnover_times(is_reused))
        which = "with reuse" if is_reused else "without reuse"
        mean = statistics.fmean(times)
        print(
            f"requests that end and follow, {which}: mean {mean:.0f} us, median "
            f"{statistics.median(times):.0f}"
        )
    for name, took in cache_times().items():
        median = statistics.median(took)
        print(f"100,000 tokens, {name}: {min(took) * 1e3:.2f} ms, median {median * 1e3:.2f}")
    took = vocabulary_times()
    median = statistics.median(took)
    print(f"128,000 names: {min(took) * 1e3:.0f} ms, median {median * 1e3:.0f}")


if __name__ == "__main__":
    sys.exit(main())
