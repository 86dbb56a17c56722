"""vLLM on the rows of the GPU table, one precision a process; called by `step.py`.

It runs the same prompts to the same lengths, greedily, without detokenising or (but for `reuse.py`)
a prefix cache. All other settings are its own choices. Its weights are a real checkpoint's, as ours
are drawn: from 256 rows on speed depends on them, and vLLM's own made-up ones are others.
"""

import os
import time

BEGAN = float(os.environ.get("SLIPSTREAM_BENCH_BEGAN", time.time()))
for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # greedy sampling never asks for it
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}.items():
    os.environ.setdefault(_name, _value)

import argparse  # noqa: E402 - vLLM reads the environment when it is imported
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import driving  # noqa: E402
import workloads  # noqa: E402
from rows import MAX_SEQUENCES, ROWS  # noqa: E402
from side import Side, measure_pareto, measure_rows, wanted  # noqa: E402


class PeerTarget:
    """vLLM's engine as `driving` runs it."""

    def __init__(self, llm: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine = llm.llm_engine
        self._num_requests = 0
        self.sampling = lambda max_tokens: SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def submit(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Offer a greedy request, under a name that was never used."""
        self._num_requests += 1
        name = f"{number}-{self._num_requests}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self.sampling(max_tokens))

    def step(self) -> tuple[int, int]:
        """What the engine's process tells next."""
        outputs = self._engine.step()
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return num_tokens, sum(output.finished for output in outputs)


def start(checkpoint: Path, is_fp8: bool, reuses: bool = False) -> Any:
    """vLLM on the checkpoint; `reuses`: with prefix caching."""
    from vllm import LLM

    options: dict[str, Any] = {"quantization": "fp8"} if is_fp8 else {}
    return LLM(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=MAX_SEQUENCES,
        enable_prefix_caching=reuses,
        generation_config="vllm",
        **options,
    )


def facts(llm: Any) -> dict[str, object]:
    """What vLLM is and what it chose."""
    import vllm

    config = llm.llm_engine.vllm_config
    scheduler = config.scheduler_config
    return {
        "versions": f"vLLM {vllm.__version__}",
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(getattr(scheduler, "async_scheduling", False)),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", nargs="*", default=[], choices=ROWS)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    side = Side(args.output, "vllm")
    llm = start(args.checkpoint, args.fp8)
    target = PeerTarget(llm)
    driving.run(target, workloads.decode(1, max_tokens=1))
    started = time.time() - BEGAN
    print(f"vLLM's first token after {started:.1f} s", flush=True)
    side.about(**facts(llm))
    rows = wanted(args.rows, lambda row: row.is_fp8 == args.fp8)
    if ROWS["start"] in rows:
        side.add("start", [started])
    measure_rows(side, target, rows, args.repeat)
    if ROWS["decode-bs1"] in rows:
        measure_pareto(side, target, (1, 32, 128, 256))
    return 0


if __name__ == "__main__":
    sys.exit(main())
