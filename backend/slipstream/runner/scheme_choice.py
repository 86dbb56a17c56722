"""The scheme of weights of 16 bits on a CPU: int8 where it is faster, as measured.

Rounded to 8 bits by output they change the bits a byte of a text by some hundredths of a percent
(docs/quantization.md), and one stream reads half the bytes.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch
from torch import Tensor

from slipstream import quant
from slipstream.config import EngineConfig
from slipstream.kernels.cpu.native import library
from slipstream.kernels.runtime.registry import CPU
from slipstream.models.files import tensor_entries
from slipstream.quant.forms import form_of, make_numbers
from slipstream.quant.rounding import rounded8
from slipstream.runner import plan as plans
from slipstream.runner.host import MIN_ELEMENTS, Kept
from slipstream.runner.plan import Plan

_log = logging.getLogger(__name__)
_ROWS = (1, 128)
_LEAST = (1.2, 0.8)  # times as fast as 16 bits, with so many rows, for int8 to be chosen
_ELEMENTS = 1 << 21  # of the matrix that is multiplied with
_REPEAT = 5
_SIXTEEN = {"F16", "BF16"}


def resolve(config: EngineConfig) -> Plan:
    """`plan.resolve` for a server's engine, with the scheme that was measured."""
    return with_scheme(plans.resolve(config))


def with_scheme(plan: Plan) -> Plan:
    """Return the plan with int8 weights where nobody asked for others and a CPU gains by them."""
    config = plan.config
    # What one machine measures, another may not: a deterministic mode has the same on all.
    is_open = config.quantization == "auto" and config.dtype == "auto" and not config.deterministic
    if not is_open or plan.device.type != "cpu" or plan.config.num_ranks > 1 or library() is None:
        return plan
    is_whole = plan.model.build is None and plan.model.axes.experts is None
    if not is_whole or plan.block_elements < MIN_ELEMENTS or not _has_16_bits(plan):
        return plan
    dims = plan.model.dims
    inputs = dims.hidden_size
    outputs = max(16, min(dims.intermediate_size, _ELEMENTS // inputs))
    kept = Kept("scheme", {"outputs": outputs, "inputs": inputs})
    known = kept.read()
    times, where = None if known is None else known.get("times_as_fast"), f"as in {kept.path}"
    if not (isinstance(times, list) and len(times) == len(_ROWS)):
        times = speeds(outputs, inputs)
        where = kept.write({"times_as_fast": times})
    is_faster = all(each >= least for each, least in zip(times, _LEAST, strict=True))
    _log.info(
        "weights of 16 bits %s: int8 is %.1f times as fast with one row, %.1f with %d, as measured "
        "(%s); --dtype float32 keeps them",
        *("become int8" if is_faster else "stay so", *times, _ROWS[1], where),
    )
    if not is_faster:
        return plan
    return plans.resolve(msgspec.structs.replace(config, quantization="int8"))


def speeds(outputs: int, inputs: int) -> list[float]:
    """Return how many times as fast as 16 bits int8 is, with each of `_ROWS`, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(outputs, inputs, generator=generator)
        matrix = rounded8(weight)
        form = form_of(matrix, CPU, torch.float32)
        assert form is not None, "the kernels are there"
        few, whole = form.make(matrix), make_numbers(weight.bfloat16())
        found = []
        for rows in _ROWS:
            x = torch.randn(rows, inputs, generator=generator)
            plain, rounded = quant.named("auto"), quant.named("int8")
            slow = _seconds(partial(plain.matmul, x, whole, None))
            found.append(slow / _seconds(partial(rounded.matmul, x, few, None)))
        return found
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _seconds(product: Callable[[], Tensor]) -> float:
    """Return the shortest of some runs, after one that is not counted."""
    product()
    taken = []
    for _ in range(_REPEAT):
        began = time.perf_counter()
        product()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _has_16_bits(plan: Plan) -> bool:
    """Whether all matrices of the checkpoint are stored in 16 bits."""
    if plan.config.load_format == "random":
        return False
    entries = tensor_entries(plan.checkpoint).values()
    return {entry.dtype for entry in entries if len(entry.shape) > 1} <= _SIXTEEN
