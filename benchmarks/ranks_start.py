"""How fast ranks read a checkpoint: `python benchmarks/ranks_start.py FOLDER [--layers 16]`.

Writes a checkpoint of random bf16 weights of a shape, cut to some layers, into the folder, unless
it is there, and starts the model on one rank and on `--tensor-parallel` N, by turns, with the files
in the page cache. The lines are the engines' own: bytes that each rank read, and how fast.
"""

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import make_checkpoint
import msgspec
import tensor_parallel
from shapes import SHAPES, write_config
from slipstream.config import EngineConfig

_CUT = "cut"  # the shape's name here
_LIMIT_S = 300.0
_LOGGING = (
    'import logging\nlogging.basicConfig(level=logging.INFO, format="%(process)d %(message)s")\n'
)


def write(folder: Path) -> None:
    """Write the shape `_CUT`, sharded as checkpoints are."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / make_checkpoint.INDEX).exists():
        return
    write_config(_CUT, folder)
    places, size = {}, 0
    with ThreadPoolExecutor() as pool:
        for number, tensors in enumerate(make_checkpoint.shards(_CUT)):
            name = f"model-{number:05}.safetensors"
            size += make_checkpoint.write_shard(folder / name, tensors, pool)
            places |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / make_checkpoint.INDEX).write_text(json.dumps(index))


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-3.3-70b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tensor-parallel", type=int, default=2, metavar="N")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    args = parser.parse_args()
    SHAPES[_CUT] = SHAPES[args.shape] | {"num_hidden_layers": args.layers}
    write(args.folder)
    given = argparse.Namespace(device=args.device, tokens=4, prompt=64, requests=4)
    given.batches, given.sizes = [1], [8 << 10]
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as made:
        Path(made, "sitecustomize.py").write_text(_LOGGING)
        os.environ["PYTHONPATH"] = os.pathsep.join([made, *sys.path])
        for turn in range(args.turns):
            for size in (1, args.tensor_parallel):
                config = EngineConfig(
                    checkpoint=str(args.folder),
                    device=args.device,
                    tensor_parallel=size,
                    max_num_seqs=8,
                    kv_cache_tokens=8192,
                    kv_cache_reuse=False,
                )
                path = Path(made, f"{turn}-{size}.json")
                path.write_bytes(msgspec.json.encode(config))
                with tensor_parallel.ranks_of(given, "engine", size, path) as ranks:
                    found = ranks.wait(_LIMIT_S)
                if isinstance(found, str):
                    print(f"{size} ranks: {found}", file=sys.stderr)
                    return 1
                seconds = [each["start_s"] for each in found]
                print(json.dumps({"ranks": size, "start_s": seconds}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
