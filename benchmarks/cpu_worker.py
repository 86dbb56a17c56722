"""Our engine, or transformers, on the rows of `cpu.py`: a line of JSON in, one out.

    python benchmarks/cpu_worker.py ours|transformers MODEL.gguf THREADS

A row has `prompts`, lists of token ids, and `tokens`, how many each gets; the answer has the wall
and processor seconds until all have their first token, and of the rest.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_MAX_SEQS, _BUDGET = 32, 2048


class Clock:
    """Wall and processor seconds of this process, all of its threads."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self) -> dict[str, float]:
        """Return what went by since it started, or since the last lap."""
        wall, cpu = time.perf_counter(), time.process_time()
        found = {"wall": wall - self._wall, "cpu": cpu - self._cpu}
        self._wall, self._cpu = wall, cpu
        return found


class Ours:
    """The engine alone, as its process steps it."""

    def __init__(self, path: Path, threads: int) -> None:
        os.environ["SLIPSTREAM_CPU_THREADS"] = str(threads)
        from engine import EngineTarget, build
        from slipstream.kernels.cpu.native import library
        from slipstream.models.gguf.unpack import as_directory

        with as_directory(path) as (directory, _):
            engine = build(
                "", "auto", _BUDGET, str(directory), max_num_seqs=_MAX_SEQS, kv_cache_tokens=65_536
            )
        self._target = EngineTarget(engine)
        self._number = 0
        found = library()
        self.about = "torch" if found is None else found.form

    def run(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Run a row."""
        clock, left, seen = Clock(), len(prompts), 0
        for prompt in prompts:
            self._target.submit(self._number, prompt, tokens)
            self._number += 1
        while seen < len(prompts):
            count, ended = self._target.step()
            seen, left = seen + count, left - ended
        first = clock.lap()
        while left:
            left -= self._target.step()[1]
        return {"first": first, "then": clock.lap()}


class Transformers:
    """The class that transformers has of the model, with its own cache, in fp32."""

    def __init__(self, path: Path, threads: int) -> None:
        import numpy as np
        import torch
        import transformers
        from slipstream.models.files import tensor_entries
        from slipstream.models.gguf.restore import restore
        from slipstream.models.gguf.unpack import as_directory

        torch.set_num_threads(threads)
        with as_directory(path) as (directory, _):
            config = transformers.AutoConfig.from_pretrained(directory)
            entries = tensor_entries(directory)
        config.dtype = "float32"
        self._model = transformers.AutoModelForCausalLM.from_config(config).eval()
        held = self._model.state_dict()
        data = np.memmap(path, np.uint8, mode="c")
        for name, entry in entries.items():
            stored = torch.from_numpy(data[entry.begin : entry.end]).view(torch.float32)
            held[name].copy_(stored.view(entry.shape))
            restore(entry, stored, held[name])
        self.about = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def run(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Run a row, whose prompts are of one length."""
        import torch

        with torch.inference_mode():
            clock = Clock()
            out = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1:].argmax(-1)
            first = clock.lap()
            for _ in range(tokens - 1):
                out = self._model(ids, past_key_values=out.past_key_values, use_cache=True)
                ids = out.logits[:, -1:].argmax(-1)
        return {"first": first, "then": clock.lap()}


def main() -> int:
    """Answer until there are no more lines."""
    engine, path, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    worker = {"ours": Ours, "transformers": Transformers}[engine](path, threads)
    print(json.dumps({"about": worker.about}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(**json.loads(line))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
