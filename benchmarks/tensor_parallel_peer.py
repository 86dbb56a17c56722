"""vLLM on several GPUs, on the workloads of `tensor_parallel.py`; weights of a shape, random."""

import argparse
import json
import sys
from pathlib import Path

import peer  # sets vLLM's environment first


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tensor-parallel", type=int, required=True)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--batches", nargs="+", type=int, required=True)
    parser.add_argument("--fp8", action="store_true")
    args = parser.parse_args()
    import driving
    import workloads
    from vllm import LLM

    llm = LLM(
        model=str(args.checkpoint),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy",
        max_num_seqs=max(args.batches),
        max_model_len=8192,
        tensor_parallel_size=args.tensor_parallel,
        pipeline_parallel_size=args.pipeline_parallel,
        enable_prefix_caching=False,
        generation_config="vllm",
        quantization="fp8" if args.fp8 else None,
    )
    target, found = peer.PeerTarget(llm), peer.facts(llm)
    driving.run(target, workloads.decode(1, 2))
    sizes = args.tokens, args.prompt, args.requests
    found |= driving.best_of_two(target, args.batches, *sizes)
    args.output.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
