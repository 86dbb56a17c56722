"""Choose how to serve a checkpoint on GPUs: precision, ranks, cache, tokens of a step, and costs.

Times are modelled, not measured: the least time in which a step's weights and cache can be read, or
its GEMMs computed, plus what launches take and the part of the GEMMs that no read hides. Of experts
a step reads those that its rows choose, if all are as likely, and no read hides their GEMMs. The
constants are fitted to recorded rows (`benchmarks/results`: an 8B shape on H100 and H200, three
other families, two mixtures, weights of 4 and 8 bits and rows of int8 on an H200), which the model
meets within 15 %. What ranks exchange is taken from published figures; steps of two ranks were
recorded, and are met. The cache has what the engine gives it beside the weights and 2 GB for the
largest step, its graphs and the CUDA context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import torch
from slipstream_runtime.ranks import MAX_RANKS

from slipstream.config import MAX_REPLICAS, EngineConfig
from slipstream.errors import ConfigError
from slipstream.kernels.elementwise.eight_bits import E4M3, INT8
from slipstream.kernels.experts.sm90 import streamed
from slipstream.kernels.runtime.registry import Target
from slipstream.runner.matrices import WeightParts, weight_parts
from slipstream.runner.memory import num_blocks
from slipstream.runner.plan import Plan, settle

GOALS = ("latency", "throughput")
CONTEXT = 2048  # tokens of a sequence, on which goals are judged
_MOST_SEQUENCES = 1024  # at once: beyond, no step has a graph
_SHORT = 512  # tokens: as many sequences as have room with so many each are let in
_WORKSPACE = 2_000_000_000  # bytes
_LAUNCH_S = 10e-6  # of each layer
_ROUNDED_S = 8e-6  # more of a layer whose rows are put into fp8 or int8
_UNHIDDEN = 0.65  # of the time of the GEMMs
_PACKED_S = 2e-6  # more of each packed matrix
_PACKED_READ = {4: 0.55, 8: 0.74}  # of the rate of other weights, by bits
_EXPERTS_S = 18e-6  # more of a layer of experts: its router, and rows in their order
_EXPERTS_READ = 0.92  # of the rate of other weights
_PACKED_EXPERTS_READ = {  # likewise, by bits and type of their codes
    (4, "integers"): 0.55,  # as other matrices': neither has been measured at more than a row
    (8, "integers"): 0.74,
    (8, "e4m3"): 0.57,
    (4, "e2m1"): 0.43,
}
_EXPERTS_RATE = 0.6  # of operations in 16 bits, where rows of experts are so
_SUM_S = 5e-6  # of a sum over ranks, of which a layer has two
_SUM_RATE = 300e9  # bytes a second of it
_HOP_S = 30e-6  # from stage to stage


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU: bytes, bytes read and operations a second of 16 bits, fp8 (0: it has none) and int8.

    Its memory is what its driver reports, which is not what it is sold as. Operations of int8 are
    those of fp8 on a Hopper; elsewhere reckoned: what is published, less by as much as 16 bits are.
    """

    name: str
    memory: float
    read: float
    bf16: float
    fp8: float
    int8: float
    target: Target
    is_measured: bool = False  # else nine tenths of what is published
    has_timed_int8: bool = False


_HOPPER = Target("cuda", "sm_90a", 132)
CARDS = {
    card.name: card
    for card in (
        Card("H100", 84.9e9, 3.11e12, 790e12, 1480e12, 1480e12, _HOPPER, True),
        Card("H200", 150.1e9, 4.707e12, 790e12, 1480e12, 1480e12, _HOPPER, True, True),
        Card("A100", 84.9e9, 1.83e12, 250e12, 0.0, 500e12, Target("cuda", "sm_80", 108)),
        Card("L40S", 47.6e9, 0.78e12, 290e12, 580e12, 580e12, Target("cuda", "sm_89", 142)),
    )
}


class Split(NamedTuple):
    """The GPUs of a server: so many engines, each of so many stages of so many tensor ranks."""

    replicas: int = 1
    tensor: int = 1
    pipeline: int = 1

    def options(self) -> dict[str, object]:
        """Return the engine's options, where they are not the default."""
        names = ("replicas", "tensor_parallel", "pipeline_parallel")
        return {name: count for name, count in zip(names, self, strict=True) if count > 1}

    def __str__(self) -> str:
        """Name the counts above one."""
        words = ("replicas", "tensor ranks", "stages")
        found = [f"{n} {word}" for n, word in zip(self, words, strict=True) if n > 1]
        return ", ".join(found) or "one GPU"


ONE = Split()


def splits_of(count: int) -> list[Split]:
    """Return all ways in which so many GPUs serve, none left over; an engine has 8 at most."""
    return [
        Split(count // (tensor * pipeline), tensor, pipeline)
        for tensor in range(1, min(count, MAX_RANKS) + 1)
        for pipeline in range(1, min(count, MAX_RANKS) // tensor + 1)
        if count % (tensor * pipeline) == 0 and count // (tensor * pipeline) <= MAX_REPLICAS
    ]


_PRECISIONS = ("auto", "fp8", "w8a8", "int8", "int4")
_CACHES = ("auto", "fp8")


def cards_here() -> list[str]:
    """List the GPUs of this machine that are in `CARDS`, by their names. Raises ConfigError."""
    if not torch.cuda.is_available():
        return []
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    known = [next((card for card in CARDS if card in name), None) for name in names]
    if None in known:
        unknown = names[known.index(None)]
        raise ConfigError(f"gpus: {unknown!r} is none of {', '.join(CARDS)}; name the nearest")
    return [name for name in known if name is not None]


@dataclass(frozen=True, slots=True)
class Profile:
    """A way to serve a checkpoint on a card, and what it costs.

    Attributes:
        weight_bytes: of all weights as a card keeps them; of the rank that has most.
        cache_tokens: that fit beside them; below `CONTEXT` nothing is served. Of one replica.
        token_bytes: of a token in the cache, of the rank that has most.
        one_ms: between two tokens of one sequence of `CONTEXT` tokens.
        rows, many_ms: the most such sequences at once in a replica, and then between two tokens.
        refused: why it cannot serve; empty: it can.
        split: the GPUs that serve.
        is_reckoned: whether it multiplies rows in int8, which no such card has timed.
    """

    quantization: str
    kv_cache_dtype: str
    weight_bytes: int = 0
    cache_tokens: int = 0
    token_bytes: float = 0.0
    one_ms: float = 0.0
    rows: int = 0
    many_ms: float = 0.0
    refused: str = ""
    split: Split = ONE
    is_reckoned: bool = False

    @property
    def tokens_s(self) -> float:
        """Tokens a second of all cards, full."""
        return 1e3 * self.split.replicas * self.rows / self.many_ms if self.rows else 0.0

    def options(self, goal: str) -> dict[str, object]:
        """Return the engine's options: what is not the default of `slipstream compose`."""
        found: dict[str, object] = {"max_num_batched_tokens": 2048} | self.split.options()
        if goal == "throughput":
            found["max_num_batched_tokens"] = 8192
            fit = self.cache_tokens // _SHORT // 64 * 64
            found["max_num_seqs"] = max(self.rows, min(_MOST_SEQUENCES, fit))
        if self.quantization != "auto":
            found["quantization"] = self.quantization
        if self.kv_cache_dtype != "auto":
            found["kv_cache_dtype"] = self.kv_cache_dtype
        return found


class StepModel:
    """Times of decode steps of a plan on a card, in ms."""

    def __init__(self, plan: Plan, card: Card, weights: WeightParts) -> None:
        dims, model = plan.model.dims, plan.model
        head = model.vocab_rows * dims.hidden_size if model.stage == 0 else 0
        self._tensor, self._row_bytes = model.num_ranks, dims.hidden_size * plan.dtype.itemsize
        self._card = card
        self._layers = dims.num_layers
        self._packed_bytes = sum(each.num_bytes for each in weights.packed)
        embedding = weights.embedding_bytes
        if model.build is not None and not model.ties_embeddings:  # a class of transformers
            embedding = head * plan.dtype.itemsize
        self._read = weights.num_bytes - weights.expert_bytes - self._packed_bytes - embedding
        is_fp8 = plan.config.quantization == "fp8" and card.fp8 > 0
        self._rate = card.fp8 if is_fp8 else card.bf16
        packed = sum(each.num_elements for each in weights.packed)
        rounded = dict(weights.rounded)
        others = weights.expert_elements + packed + sum(rounded.values())
        if weights.has_packed_head:  # counted among what is packed
            others, head = others - head, 0
        self._elements, self._head = plan.block_elements - others, head
        rates = {E4M3: card.fp8, INT8: card.int8}
        self._rounded_s = sum(count / rates[dtype] for dtype, count in rounded.items())
        rounds = is_fp8 or bool(rounded)
        self._launches_s = dims.num_layers * (_LAUNCH_S + (_ROUNDED_S if rounds else 0.0))
        self._launches_s += weights.num_packed * _PACKED_S
        self._launches_s += weights.num_expert_layers * _EXPERTS_S
        self._weights, self._chosen = weights, 0.0
        self._experts_read = _EXPERTS_READ
        if weights.expert_codes is not None:
            self._experts_read = _PACKED_EXPERTS_READ[weights.expert_codes]
        if (experts := model.axes.experts) is not None:
            self._chosen = experts.routing.top_k / experts.routing.num_experts
        refusal = streamed.refusal(card.target, plan.config.deterministic, is_fp8=True)
        of_e4m3 = weights.rounded_experts if refusal is None else 0
        self._pair_s = (weights.expert_elements - of_e4m3) / (_EXPERTS_RATE * card.bf16)
        if of_e4m3:
            self._pair_s += _UNHIDDEN * of_e4m3 / card.fp8
        self.token_bytes = plan.block_bytes * plan.window.num_tables / plan.block_size

    def read_bytes(self, rows: int, context: int) -> tuple[float, float]:
        """Return what a step reads: weights and cache, and weights of experts."""
        read = 1 - (1 - self._chosen) ** rows  # of all experts, by so many rows
        return (
            self._read + self._packed_bytes + rows * context * self.token_bytes,
            read * self._weights.expert_bytes,
        )

    def packed_s(self, rows: int) -> float:
        """Return the time of GEMMs of packed weights: few rows wait for these to be unpacked."""
        seconds = 0.0
        for bits, num_bytes, num_elements in self._weights.packed:
            gemms_s = 2 * rows * num_elements / self._card.bf16
            read_s = num_bytes / (_PACKED_READ[bits] * self._card.read)
            seconds += max(read_s + gemms_s, (1 + _UNHIDDEN) * gemms_s)
        return seconds

    def step_ms(self, rows: int, context: int) -> float:
        """Return the time of a step that gives `rows` sequences of `context` tokens one each."""
        card = self._card
        others, experts = self.read_bytes(rows, context)
        read_s = (others - self._packed_bytes + experts / self._experts_read) / card.read
        row_s = self._elements / self._rate + self._rounded_s + self._head / card.bf16
        gemms_s = 2 * rows * row_s
        unhidden_s = self._launches_s + _UNHIDDEN * gemms_s + self.packed_s(rows)
        unhidden_s += 2 * rows * self._chosen * self._pair_s
        sums_s = 0.0
        if self._tensor > 1:
            shares = 2 * (self._tensor - 1) / self._tensor
            each_s = _SUM_S + shares * rows * self._row_bytes / _SUM_RATE
            sums_s = 2 * self._layers * each_s
        return 1e3 * (max(read_s, gemms_s) + unhidden_s + sums_s)


def profile_of(config: EngineConfig, card: Card, split: Split = ONE) -> Profile:
    """Return what a configuration costs on cards. Raises `CheckpointError`.

    Layers of stages are divided by bytes, as an engine does before it has measured any.
    """
    kept = (config.quantization, config.kv_cache_dtype)
    if "fp8" in kept and not card.fp8:
        return Profile(*kept, refused=f"{card.name} has no fp8", split=split)
    config = msgspec.structs.replace(
        config, tensor_parallel=split.tensor, pipeline_parallel=split.pipeline
    )
    device = torch.device("cuda", 0)
    try:
        plans = [settle(config, device, split.tensor * stage) for stage in range(split.pipeline)]
        weights = [weight_parts(config, each.model, each.dtype, card.target) for each in plans]
    except ConfigError as error:
        return Profile(*kept, refused=str(error), split=split)
    stages = [StepModel(*each) for each in zip(plans, [card] * len(plans), weights, strict=True)]
    tokens = min(
        _cache_tokens(plan, card.memory - each.num_bytes - _WORKSPACE)
        for plan, each in zip(plans, weights, strict=True)
    )
    context = min(CONTEXT, plans[0].max_model_len)
    rows = min(plans[0].max_num_seqs, tokens // context)
    most = max(each.num_bytes for each in weights)
    refused = "" if rows else f"{most / 1e9:.1f} GB of weights leave no room for a sequence"
    one, many = (_token_ms(stages, n, context) for n in (1, max(1, rows)))
    token_bytes = max(each.token_bytes for each in stages)
    made = Profile(*kept, most, tokens, token_bytes, one, rows, many, refused, split)
    rounds_to_int8 = any(INT8 in dict(each.rounded) for each in weights)
    return replace(made, is_reckoned=rounds_to_int8 and not card.has_timed_int8)


def _cache_tokens(plan: Plan, free: float) -> int:
    """Return the tokens of the cache that an engine makes of so many bytes."""
    try:
        return plan.tokens_of(num_blocks(plan, int(free)))
    except ConfigError:
        return 0


def _token_ms(stages: Sequence[StepModel], rows: int, context: int) -> float:
    """Return the time between two tokens of each of `rows` sequences.

    They are in as many parts as there are stages, each in another stage: a token waits for its own
    way through all stages, or for all parts at the slowest one.
    """
    parts = min(rows, len(stages))
    each_ms = [stage.step_ms(-(-rows // parts), context) for stage in stages]
    hops_ms = 1e3 * _HOP_S * len(stages) if len(stages) > 1 else 0.0
    return max(parts * max(each_ms), sum(each_ms) + hops_ms)


def profiles(config: EngineConfig, card: Card, split: Split = ONE) -> list[Profile]:
    """Return every profile of a checkpoint on cards. Raises `CheckpointError`."""
    config = msgspec.structs.replace(config, max_num_seqs=_MOST_SEQUENCES)
    return [
        profile_of(
            msgspec.structs.replace(config, quantization=weights, kv_cache_dtype=cache), card, split
        )
        for weights in _PRECISIONS
        for cache in _CACHES
    ]


def select(found: Sequence[Profile], goal: str) -> Profile:
    """Return the best profile that keeps accuracy: as stored, then fp8; fewer bits if they must.

    `latency`: the least time of a step of one sequence; `throughput`: the most tokens a second.
    What is within 3 % counts as equal, and then the fewest changes win. Raises ConfigError.
    """
    if goal not in GOALS:
        raise ConfigError(f"goal = {goal!r} is not one of {', '.join(GOALS)}")
    served = [each for each in found if not each.refused]
    good = [each for each in served if each.quantization in ("auto", "fp8")] or served
    if not good:
        raise ConfigError(f"no profile serves it: {found[0].refused}")

    def merit(each: Profile) -> float:
        return 1 / each.one_ms if goal == "latency" else each.tokens_s

    best = max(map(merit, good))
    near = [each for each in good if merit(each) >= 0.97 * best]

    def changes(each: Profile) -> tuple[int, int]:
        return (each.quantization != "auto") + (each.kv_cache_dtype != "auto"), _ranks(each)

    return min(near, key=changes)


def _ranks(each: Profile) -> int:
    return each.split.tensor * each.split.pipeline


def best_of_splits(config: EngineConfig, card: Card, count: int, goal: str) -> list[Profile]:
    """Return the best profile of each way to divide so many GPUs; refused ones say why."""
    found = []
    for split in splits_of(count):
        each = profiles(config, card, split)
        is_served = any(not profile.refused for profile in each)
        found.append(select(each, goal) if is_served else each[0])
    return found
