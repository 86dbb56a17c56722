"""The layers of each stage of a pipeline, by what a step takes in them: measured once, and kept.

At a start rank 0 times a step of each kind of layer, and of the head, on its device, with weights
of the checkpoint, and cuts the layers so that the slowest stage takes least. All ranks take its
answer: hosts may have kept others. Layers count that differ in matrices, rotation or window. Sums
over tensor ranks, what a step reads of the cache and what goes from stage to stage are not timed:
they are the same in all layers.
"""

import gc
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
from slipstream_runtime.ranks import RankMemory
from torch import Tensor

from slipstream.kernels.elementwise.norm import RmsNorm, rms_norm
from slipstream.kernels.runtime.op import KernelError
from slipstream.layers.decoder import StepDecoder
from slipstream.layers.residual import Residual
from slipstream.models.model_config import ModelConfig
from slipstream.models.sharding import share
from slipstream.models.stages import Bounds, Costs, kinds_of, split
from slipstream.runner.graphs import layout_of
from slipstream.runner.group import Group
from slipstream.runner.host import MIN_ELEMENTS, Kept, cores_here, is_busy
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import Plan, resolve, settle
from slipstream.runner.step_facts import facts_of_step
from slipstream.runner.step_shape import StepShape

_log = logging.getLogger(__name__)
_ROWS = 32  # of a timed step: of decodes
_REPEAT = 8  # steps of which the shortest counts
_REPLAYS = 20  # of a graph, timed together


class PartTimes(NamedTuple):
    """Seconds of a step in one layer, and in the head."""

    layer: float
    head: float


Timer = Callable[[Plan], PartTimes]  # of a plan of one layer, and both ends
_bounds: msgspec.json.Decoder[list[tuple[int, int]]] = msgspec.json.Decoder(list[tuple[int, int]])


def agreed(plan: Plan, memory: RankMemory) -> Plan:
    """Return the plan of this rank with the layers that rank 0 gives its stage.

    All ranks come here. Raises `ConfigError`, `CheckpointError`.
    """
    bounds = bounds_of(plan, measure) if plan.rank == 0 else None
    found = _bounds.decode(memory.gather(msgspec.json.encode(bounds or []))[0])
    return resolve(plan.config, plan.rank, found) if found else plan


def bounds_of(plan: Plan, timer: Timer) -> Bounds | None:
    """Return the layers of each stage by times; None: by bytes, as they are not measured now."""
    whole = _whole(plan)
    of_rank = {"ranks": plan.config.tensor_parallel, "threads": plan.num_threads}
    kept = Kept("stages", facts_of_step(plan, whole.model) | of_rank)
    costs = _read(kept, whole.model)
    where = f"as measured before ({kept.path})"
    if costs is None:
        if whole.block_elements < MIN_ELEMENTS:
            return None
        if is_busy(cores_here().all):
            _log.info("stages: by bytes, as others use the machine; later starts will measure")
            return None
        try:
            costs = costs_of(plan, whole.model, timer)
        except (RuntimeError, KernelError) as error:
            _log.warning("stages: by bytes, as layers could not be measured: %s", error)
            return None
        where = "measured: " + kept.write({"layers": costs.layers, "head": costs.head})
    bounds = split(*costs, plan.config.pipeline_parallel)
    _log.info("stages: %s layers; %s, %s", said(bounds), in_words(costs), where)
    return bounds


def costs_of(plan: Plan, whole: ModelConfig, timer: Timer) -> Costs:
    """Return seconds of each layer and of the head; `timer` times one layer of each kind."""
    kinds = kinds_of(whole)
    times = {layer: timer(_alone(plan, layer)) for layer in sorted(set(kinds))}
    return Costs([times[layer].layer for layer in kinds], min(each.head for each in times.values()))


def said(bounds: Bounds) -> str:
    """Return how many layers each stage has, in words."""
    return " + ".join(str(end - begin) for begin, end in bounds)


def in_words(costs: Costs) -> str:
    """Return the times, in words."""
    low, high = 1e3 * min(costs.layers), 1e3 * max(costs.layers)
    layer = f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"
    return f"a layer {layer} ms, the head {1e3 * costs.head:.3f} ms"


def _read(kept: Kept, model: ModelConfig) -> Costs | None:
    found = kept.read() or {}
    try:
        costs = msgspec.convert(found, type=_KeptCosts)
    except msgspec.ValidationError:
        return None
    if len(costs.layers) != model.dims.num_layers or min(costs.layers) <= 0 or costs.head < 0:
        return None
    return Costs(costs.layers, costs.head)


class _KeptCosts(msgspec.Struct):
    layers: list[float]
    head: float


def _whole(plan: Plan) -> Plan:
    """Return the plan of all stages together, as one rank of its stage has them."""
    return settle(msgspec.structs.replace(plan.config, pipeline_parallel=1), plan.device, plan.rank)


def _alone(plan: Plan, layer: int) -> Plan:
    """Return the plan of a stage that has one layer and both ends, with room for one step."""
    few = msgspec.structs.replace(
        plan.config,
        max_num_seqs=_ROWS,
        max_num_batched_tokens=_ROWS,
        kv_cache_tokens=plan.block_size,
        kv_cache_host_bytes=0,
        memory_share=None,
        cuda_graphs=False,
        speculation="none",
    )
    # The first stage has the ends; nobody asks for the others.
    bounds = [(layer, layer + 1)] * plan.config.pipeline_parallel
    return settle(few, plan.device, plan.rank, bounds)


class _OwnRanks:
    """Stands for other ranks that would give just what this one gives; nothing is sent."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def sum(self, x: Tensor) -> Tensor:
        return x

    def add_sum(self, values: Tensor, x: Tensor) -> None:
        values.add_(x)

    def add_sum_norm(self, values: Tensor, x: Tensor, norm: RmsNorm) -> Tensor:
        values.add_(x)
        return rms_norm(values, *norm)

    def gather(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.size)

    def spread(self, x: Tensor) -> None:
        """Nothing is there to take."""

    def least(self, value: int) -> int:
        return value

    def start(self, limit_s: float) -> None:
        """Nothing is waited for."""

    def late(self) -> str | None:
        """Nothing can be late."""


class _OfRank(Group):
    """A rank of several whose layers run without the others."""

    def __init__(self, size: int) -> None:
        self._size = size

    def share(self, model: StepDecoder, vocab_size: int) -> None:
        if self._size > 1:
            share(model, _OwnRanks(self._size), vocab_size)


class _OneLayer(ModelRunner):
    """A layer between embedding and head, whose steps are padding."""

    def prepare(self, plan: Plan) -> tuple[Callable[[], Residual], Callable[[Residual], object]]:
        """Return what runs the layer over a step of decodes, and what runs the head behind it."""
        layout = layout_of(plan)
        rows = layout.up(_ROWS)
        decodes = rows if layout.has_decodes else 0
        shape = StepShape(rows, rows, decodes, rows, int(decodes == 0))
        inputs = self._stage(self._builder.padding(shape))
        self._hidden(shape, inputs)  # fills the tables
        of_layers = self._layers.of(shape, inputs, self._caches[0])
        caches = [self._caches[place] for place in self._places]
        return lambda: self._model.hidden(inputs.token_ids, of_layers, caches), self._model.logits


def measure(plan: Plan) -> PartTimes:
    """Load a plan of one layer, and time its steps on the plan's device."""
    found = _measured(plan)
    if plan.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def _measured(plan: Plan) -> PartTimes:
    runner = _OneLayer(plan, _OfRank(plan.config.tensor_parallel))
    layer, head = runner.prepare(plan)
    if plan.device.type == "cpu":
        return _in_turns(layer, head)
    alone_s = _of_graph(layer)
    return PartTimes(alone_s, max(0.0, _of_graph(lambda: head(layer())) - alone_s))


def _in_turns(layer: Callable[[], Residual], head: Callable[[Residual], object]) -> PartTimes:
    """Time layer and head by turns: as in a step, each finds the other's weights in the caches."""
    times: list[PartTimes] = []
    for _ in range(_REPEAT + 1):
        began = time.perf_counter()
        states = layer()
        between = time.perf_counter()
        head(states)
        times.append(PartTimes(between - began, time.perf_counter() - between))
    return PartTimes(min(each.layer for each in times[1:]), min(each.head for each in times[1:]))


def _of_graph(step: Callable[[], object]) -> float:
    """Time repeats of a CUDA graph: a step's launches take longer than one layer."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    seconds: list[float] = []
    for _ in range(_REPEAT):
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) * 1e-3 / _REPLAYS)
    return min(seconds)
