"""An engine of a shape with adapters, in one process without sockets, for benchmarks."""

import argparse
import random
import time
from pathlib import Path

from lora import draw
from shapes import write_config
from slipstream.config import EngineConfig
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.models.adapters.read import AdapterWeights
from slipstream.models.adapters.targets import Targets
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream.wire import Submit
from slipstream_contract.ids import pack
from slipstream_contract.sampling import SamplingParams

NAME = b"users"


class Bench:
    """An engine of a shape, in this thread."""

    def __init__(self, args: argparse.Namespace, root: str) -> None:
        self.args = args
        folder = Path(root, "model")
        folder.mkdir()
        write_config(args.shape, folder)
        config = EngineConfig(
            checkpoint=str(folder),
            load_format="random",
            kv_cache_tokens=2 * args.users * (args.prompt + args.output) + 4096 * args.streams,
            max_num_seqs=args.users,
            adapter_root=root,  # adapters are expected
        )
        self._begin = time.perf_counter()
        self.plan = resolve(config)
        self.runner = ModelRunner(self.plan)
        self.say("the model is there")
        num_graphs = sum(1 for _ in self.runner.captured_ahead())
        self.say(f"{num_graphs} graphs of steps with adapters are captured")
        found = self.runner.adapters.targets
        assert found is not None, "a family's model serves adapters"
        self.targets: Targets = found
        limits = Limits(args.users, 2048, kv_cache_reuse=False)
        self.store = AdapterStore(self.runner.adapters, root)
        self.engine = Engine(limits, self.runner, None, adapters=self.store)
        self.held = 0.0  # seconds
        self._next = 0

    def say(self, what: str) -> None:
        """Print what has been done, with the seconds since the start."""
        print(f"{time.perf_counter() - self._begin:6.1f} s  {what}", flush=True)

    def draw(self, seed: int) -> AdapterWeights:
        """An adapter in host memory, as reading one makes it."""
        cpu = self.plan.device.type == "cpu"
        made = draw(self.targets, self.args.rank, self.plan.dtype, self.plan.device, seed, "all")
        if cpu:
            return self.runner.adapters.prepared(made)
        host = {place: tuple(t.to("cpu") for t in terms) for place, terms in made.terms.items()}
        return self.runner.adapters.prepared(AdapterWeights(host, made.digest, made.rank))

    def submit(self, adapter: str, rng: random.Random, num_tokens: int) -> int:
        """Ask for so many tokens behind a random prompt; return the request's number."""
        prompt = [rng.randrange(3, self.runner.vocab_size) for _ in range(self.args.prompt)]
        sampling = SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0)
        self._next += 1
        message = Submit(self._next, pack(prompt), sampling, time.monotonic_ns(), adapter=adapter)
        self.engine.submit(NAME, message)
        return self._next

    def step(self) -> tuple[dict[int, int], set[int]]:
        """Run a step; return how many tokens each request got, and the requests that ended."""
        if self.store.is_loading:
            begin = time.thread_time()
            self.store.poll()
            self.held = max(self.held, time.thread_time() - begin)
        counts: dict[int, int] = {}
        ended: set[int] = set()
        for tokens in self.engine.step().get(NAME, ()):
            counts[tokens.request] = counts.get(tokens.request, 0) + len(tokens.token_ids)
            if tokens.finished is not None:
                ended.add(tokens.request)
        return counts, ended
