"""Prints which kernels multiply with each matrix of a checkpoint, and why the others do not.

    python -m slipstream.runner.kernels [--architecture NAME] [--rows N ...] < CONFIG

CONFIG is an `EngineConfig` as JSON. Neither a GPU nor weights are needed. Exit code 2, and one line
on stderr, where it cannot be done.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from slipstream import quant
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, StartError
from slipstream.fuse.rewrite import FUSED_GATES
from slipstream.kernels.gemm.linear import PathAnswer, answers
from slipstream.kernels.runtime.op import KernelError
from slipstream.kernels.runtime.registry import KNOWN, Target, target_of
from slipstream.layers.decoder import Decoder
from slipstream.models.hf import read_config
from slipstream.runner.cache_dtype import model_on
from slipstream.runner.expert_kernels import mixtures_of
from slipstream.runner.expert_kernels import report as report_experts
from slipstream.runner.matrices import Weight, built, counted, experts_of
from slipstream.runner.plan import dtype_on

ROWS = (1, 2, 8, 64, 256)


def report(weights: list[Weight], rows: list[int], target: Target) -> Iterator[str]:
    """Make the lines of the printed table."""
    for weight in weights:
        around = [weight.norm, "GEMM", "bias" * weight.bias, weight.gate, "residual" * weight.adds]
        stages = ", ".join(filter(None, around))
        shape = f"{weight.count} x [{weight.outputs}, {weight.inputs}] {weight.kind}"
        yield f"{weight.name}: {shape}: {stages}"
        if not weight.outputs:
            yield f"  the scheme {weight.scheme} multiplies by itself"
            continue
        for num_rows in rows:
            yield from _rows(weight, num_rows, target)


def _rows(weight: Weight, num_rows: int, target: Target) -> Iterator[str]:
    spec = weight.spec(num_rows, target)
    behind = ""
    if spec.gate and spec.gate not in FUSED_GATES:
        spec, behind = spec._replace(gate=""), f" + {spec.gate}"
    best, *others = answers(spec)
    if best.refusal is not None:
        yield f"  {num_rows:5}  none"
    else:
        yield f"  {num_rows:5}  {_shown(best)}{behind}"
    for name in dict.fromkeys(answer.gemm.name for answer in others):
        if name != best.gemm.name and not _is_elsewhere(others, name, target):
            yield f"         not {name}: {_why_not(name, others, best)}"


def _shown(answer: PathAnswer) -> str:
    return str(answer.path).replace("GEMM", answer.gemm.name)


def _is_elsewhere(found: list[PathAnswer], name: str, target: Target) -> bool:
    """Whether an implementation runs on another kind of device."""
    return any(each.gemm.name == name and each.gemm.device != target.device for each in found)


def _why_not(name: str, found: list[PathAnswer], best: PathAnswer) -> str:
    own = [answer for answer in found if answer.gemm.name == name]
    taken = [answer for answer in own if answer.refusal is None]
    if taken:
        return f"{_shown(taken[0])} costs {taken[0].cost:g}, not {best.cost:g}"
    whole = [answer for answer in own if not answer.path.finishes]
    return "; ".join(dict.fromkeys(str(answer.refusal) for answer in whole))


def _target(name: str | None) -> Target:
    """The device of this machine, or the card of an architecture."""
    if name is None:
        is_gpu = torch.cuda.is_available()
        return target_of(torch.device("cuda", 0) if is_gpu else torch.device("cpu"))
    if name not in KNOWN:
        raise ConfigError(f"--architecture {name}: not one of {', '.join(KNOWN)}")
    return KNOWN[name]


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="slipstream.runner.kernels", description=__doc__)
    parser.add_argument("--architecture", help=f"{', '.join(KNOWN)}; default: this machine's")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="numbers of rows")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
        if config.quantization not in quant.names():
            known = ", ".join(quant.names())
            raise ConfigError(f"quantization = {config.quantization!r} is not one of {known}")
        target = _target(options.architecture)
        model = model_on(target.device, read_config(Path(config.checkpoint)))
        dtype = dtype_on(target.device, config, model)
        where = f"{target.architecture or 'cpu'}, {target.multiprocessors} multiprocessors"
        print(f"{model.architecture}, {str(dtype).removeprefix('torch.')}, on {where}")
        rows = sorted(set(options.rows))
        decoder = built(config, model, dtype, target)
        weights = counted(decoder, dtype)
        mixtures = []
        if isinstance(decoder, Decoder):
            mixtures = mixtures_of(experts_of(decoder), decoder, dtype)
        for mixture in mixtures:
            weights += mixture.linears
        for line in report(weights, rows, target):
            print(line)
        for mixture in mixtures:
            for line in report_experts(mixture, rows, target, config.deterministic):
                print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (StartError, KernelError, msgspec.DecodeError, OSError) as error:
        print(f"slipstream kernels: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
