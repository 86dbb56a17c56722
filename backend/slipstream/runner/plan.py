"""The resolution of an `EngineConfig` on this machine: a frozen `Plan`, before weights are read."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.config import (
    EngineConfig,
)
from slipstream.core.groups import LayerGroups
from slipstream.core.window import AttentionWindow
from slipstream.errors import ConfigError
from slipstream.kernels.attention.backend import AttentionBackend, backend_for
from slipstream.kernels.cache.kv_spec import KVSpec
from slipstream.kernels.runtime.registry import target_of
from slipstream.models.backends import notes, read_checkpoint
from slipstream.models.decoder import block_elements
from slipstream.models.hf import ignored_keys, weights_dtype
from slipstream.models.model_config import ModelConfig
from slipstream.models.sharding import check_ranks, sharded
from slipstream.models.stages import Bounds, check_stages, staged
from slipstream.runner.cache_dtype import (
    attention_spec,
    cache_dtype,
    check_positions,
    model_on,
    note_positions,
)
from slipstream.runner.devices import (
    available_on_host,
    check_gpu,
    device_of,
    total_memory,
)
from slipstream.runner.draft_plan import DraftPlan, plan_drafts
from slipstream.runner.field_check import at_least, check_fields
from slipstream.runner.foreign import check_foreign
from slipstream.runner.matrices import weight_bytes
from slipstream.runner.scheme_check import check_scheme
from slipstream.runner.skipping import check_skips
from slipstream.runner.two_way import check_two_way, two_way_note

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MIN_THREADED_HIDDEN_SIZE = 768
THREADS = "SLIPSTREAM_CPU_THREADS"
_MAX_DRAFTED_ROWS = 256  # beyond, drafts pay on no device
_ASKED_ROWS = 64  # of a step with drafts that requests bring or ask for, whatever the engine drafts
ENDLESS = 2**31 - 1  # tokens: sequences of an `attention_window` may have so many


@dataclass(frozen=True, slots=True)
class Plan:
    """The resolved facts; `config` stays what the operator wrote."""

    config: EngineConfig
    checkpoint: Path
    model_name: str
    model: ModelConfig
    block_elements: int  # of matrices
    device: torch.device
    dtype: torch.dtype
    attention: AttentionBackend
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    groups: LayerGroups  # the layers that share tables
    num_threads: int | None  # of torch on the CPU; None: its own choice
    has_tokenizer: bool
    drafts: DraftPlan | None = None  # a drafter on the device
    rank: int = 0  # of `config.num_ranks`; `model` and all bytes are those of a rank

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the KV cache, which names its format (kernels/cache/kv_format.py)."""
        return self.attention.spec.cache_dtype

    @property
    def kv(self) -> KVSpec:
        """The layout of the KV cache."""
        return self.attention.kv_spec

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the cache, over the layers of a group, and a drafter's."""
        return self.kv.block_bytes + (0 if self.drafts is None else self.drafts.block_bytes)

    @property
    def attention_doubles_at(self) -> int:
        """Tokens before one with which its attention is as many operations as its matrices."""
        d = self.model.dims
        return self.block_elements // (d.num_layers * 2 * d.num_heads * d.head_size)

    @property
    def max_drafted_rows(self) -> int:
        """Most rows of a step that has drafts, its other decodes included."""
        config, most = self.config, _ASKED_ROWS
        if config.speculation != "none":
            drafted = self.max_num_seqs * (1 + config.num_draft_tokens)
            most = max(most, self.max_num_seqs, min(_MAX_DRAFTED_ROWS, drafted))
        return min(self.max_num_batched_tokens, most)

    @property
    def max_num_rows(self) -> int:
        """Most rows of a step that sample."""
        return max(self.max_num_seqs, self.max_drafted_rows)

    @property
    def max_in_flight(self) -> int:
        """Steps that may be in flight, of a pipeline one a stage; on a CPU a stage runs one."""
        if self.model.num_stages > 1:
            return self.model.num_stages
        return 2 if self.device.type == "cuda" else 1

    @property
    def window(self) -> AttentionWindow:
        """The part of a sequence that must stay in the cache."""
        num_ahead = self.max_in_flight * self.max_num_batched_tokens
        if self.config.attention_window is not None:
            size, num_sinks = self.config.attention_window, self.config.sink_tokens
            return AttentionWindow(size, num_sinks, num_ahead, has_gaps=True)
        windows, groups = self.model.all_windows, self.groups
        size = max(windows) if groups.num_tables > 1 or min(windows) else 0
        tables = groups.num_tables, groups.num_full
        return AttentionWindow(size, 0, num_ahead, False, *tables, self.model.axes.chunked)

    @property
    def table_blocks(self) -> int:
        """Blocks that each table of a sequence has room for."""
        if self.window.has_gaps:
            return self.window.max_local_blocks(self.block_size) or 0
        return -(-self.max_model_len // self.block_size)

    @property
    def held_blocks(self) -> int:
        """Blocks that a sequence holds at most."""
        return self.window.blocks_for(self.table_blocks, self.block_size)

    @property
    def longest(self) -> str:
        """The longest sequence, in words."""
        if self.window.has_gaps:
            return f"a sequence with {self.window.size:,} tokens in the attention window"
        return f"a sequence of {self.max_model_len:,} tokens"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as the device keeps them; raises `CheckpointError` as loading."""
        return weight_bytes(self.config, self.model, self.dtype, target_of(self.device))

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens in all layers."""
        return num_tokens // self.block_size * self.window.num_tables

    def tokens_of(self, num_blocks: int) -> int:
        """Tokens that so many blocks hold in all layers."""
        return num_blocks // self.window.num_tables * self.block_size

    def banner(self, num_blocks: int, num_slots: int = 0) -> str:
        """Return the line of the log at start: the cache, and its blocks in host memory."""
        fit = num_blocks / self.held_blocks
        length = f"{self.max_model_len:,} tokens"
        if self.window.has_gaps:
            length = f"any length, the last {self.window.size:,} tokens of them"
            if self.window.num_sinks:
                length += f" with the first {self.window.num_sinks}"
        dtype = str(self.dtype).removeprefix("torch.")
        scheme = self.config.quantization
        dtype += "" if scheme in ("auto", "none") else f", {scheme} weights"
        cache = "" if self.cache_dtype == self.dtype else f"{self.kv.format_name}, "
        size = f"{num_blocks * self.block_bytes / 1e9:.2f} GB"
        ranks = self.config.tensor_parallel * self.config.pipeline_parallel
        device = _device_name(self)
        if ranks > 1:
            device, size = f"{device}, {ranks} ranks", f"{size} on rank 0"
        host = f", {self.tokens_of(num_slots):,} tokens more in host memory" if num_slots else ""
        return (
            f"{self.model_name} ({self.model.architecture}, {dtype}, {device}): "
            f"KV cache of {cache}{self.tokens_of(num_blocks):,} tokens "
            f"({size}, {num_blocks:,} blocks of {self.block_size}){host}, "
            f"room for {fit:.1f} sequences of {length}, "
            f"at most {self.max_num_seqs} at once; at most {self.config.max_waiting:,} requests "
            f"with {self.config.max_waiting_tokens:,} tokens wait"
        )


def _device_name(plan: Plan) -> str:
    if plan.device.type == "cuda":
        return torch.cuda.get_device_name(plan.device)
    num_threads = plan.num_threads or torch.get_num_threads()
    return f"CPU, {num_threads} thread{'s' if num_threads > 1 else ''}"


def dtype_on(device: str, config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """Return the dtype that is configured; auto: the checkpoint's on a GPU, float32 on a CPU."""
    if config.dtype != "auto":
        if config.dtype not in _DTYPES:
            raise ConfigError(f"dtype = {config.dtype!r} is not one of auto, {', '.join(_DTYPES)}")
        return _DTYPES[config.dtype]
    if device == "cpu":
        return torch.float32
    if model.dtype is None and config.load_format == "random":
        return torch.bfloat16
    return _DTYPES[model.dtype or weights_dtype(Path(config.checkpoint))]


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_positions
    length = at_least(config, "max_model_len", 1)
    if length > model.max_positions:
        raise ConfigError(
            f"max_model_len = {length} is above the checkpoint's context of {model.max_positions}"
        )
    return length


def _check_streaming(config: EngineConfig, max_model_len: int) -> None:
    """Raise `ConfigError` for a window and sinks that are out of range."""
    window, sinks = config.attention_window, config.sink_tokens
    if window is None:
        if sinks:
            raise ConfigError(f"sink_tokens = {sinks} needs an attention_window")
        return
    at_least(config, "attention_window", 1)
    at_least(config, "sink_tokens", 0)
    asked = f"attention_window = {window}"
    if sinks >= window:
        raise ConfigError(f"sink_tokens = {sinks} leaves nothing of {asked}")
    if window > max_model_len:
        raise ConfigError(f"{asked} is above max_model_len = {max_model_len}")


def _attention(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    layers_per_block: int,
) -> AttentionBackend:
    """Return the backend for the configuration; `ConfigError` with the reason if there is none."""
    cached = cache_dtype(config, model, device, dtype)
    spec = attention_spec(config, model, device, dtype, cached, layers_per_block)
    backend = backend_for(spec)
    if isinstance(backend, str):
        raise ConfigError(backend)
    return backend(spec)


def _check_cache(plan: Plan) -> None:
    """Refuse a cache that no machine can have."""
    config = plan.config
    if config.kv_cache_tokens is not None:
        at_least(config, "kv_cache_tokens", config.block_size)
    wanted = config.kv_cache_host_bytes
    least = plan.block_bytes * config.num_ranks
    if 0 < wanted < least:
        raise ConfigError(f"kv_cache_host_bytes = {wanted} is below a block's {least} bytes")


def _check_memory(plan: Plan) -> None:
    """Refuse what cannot fit on this machine; what is left is measured after weights are read."""
    config = plan.config
    _check_share(plan)
    wanted, available = config.kv_cache_host_bytes, available_on_host()
    if wanted > available:
        raise ConfigError(
            f"kv_cache_host_bytes = {wanted}: {wanted / 1e9:.2f} GB, but "
            f"{available / 1e9:.2f} GB of host memory are available"
        )
    if config.kv_cache_tokens is None:
        return
    wanted = plan.blocks_of(config.kv_cache_tokens) * plan.block_bytes
    is_cuda = plan.device.type == "cuda"
    of_rank = available // config.num_ranks
    free = torch.cuda.mem_get_info(plan.device)[0] if is_cuda else of_rank
    free = max(0, free - plan.weight_bytes)
    if wanted > free:
        raise ConfigError(
            f"kv_cache_tokens = {config.kv_cache_tokens} takes {wanted / 1e9:.2f} GB, but "
            f"{free / 1e9:.2f} GB are free beside the weights"
        )


def _check_share(plan: Plan) -> None:
    """Refuse a share of the device that has no room for weights and the longest sequence."""
    share, asked = plan.config.memory_share, plan.config.kv_cache_tokens
    if share is None:
        return
    total = total_memory(plan.device)
    blocks = plan.held_blocks if asked is None else plan.blocks_of(asked)
    cache, what = blocks * plan.block_bytes, plan.longest if asked is None else f"{asked:,} tokens"
    weights = plan.weight_bytes
    if weights + cache > share * total:
        raise ConfigError(
            f"memory_share = {share:g} is {share * total / 1e9:.2f} GB of {total / 1e9:.2f} GB, "
            f"but the weights need {weights / 1e9:.2f} GB and the KV cache of {what} "
            f"{cache / 1e9:.2f} GB"
        )


def _num_threads(config: EngineConfig, model: ModelConfig) -> int | None:
    text = os.environ.get(THREADS)
    if text is None and config.num_ranks > 1:
        return max(1, torch.get_num_threads() // config.num_ranks)
    if text is None:
        # Below this, threads wait for each other longer than they compute, and the more so the
        # busier the machine: on 2 cores one thread is 1.4 times as fast, 10 times beside others.
        return 1 if model.dims.hidden_size < _MIN_THREADED_HIDDEN_SIZE else None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{THREADS} = {text!r} is not a whole number >= 1")
    return int(text)


def settle(
    config: EngineConfig, device: torch.device, rank: int = 0, bounds: Bounds | None = None
) -> Plan:
    """Check the configuration against the checkpoint, for a device that need not be there.

    The plan is that of one rank, which differs from others by its device and its part of weights.
    `bounds` are the layers of each stage; None: by the bytes that a step reads.

    Raises `ConfigError` (field, value, limit) or `CheckpointError` (file, key, value).
    """
    check_fields(config)
    checkpoint = Path(config.checkpoint)
    model = model_on(device.type, read_checkpoint(checkpoint, config.backend_model))
    check_foreign(config, model)
    check_two_way(config, model)
    check_ranks(config, model)
    check_stages(config, model)
    model = sharded(model, rank % config.tensor_parallel, config.tensor_parallel)
    dtype = dtype_on(device.type, config, model)
    check_scheme(config, model, device, dtype)
    max_model_len = _max_model_len(config, model)
    _check_streaming(config, max_model_len)
    check_positions(config, model)
    note_positions(model, max_model_len)
    max_tokens = max_model_len if config.attention_window is None else ENDLESS
    model = model.of_length(max_tokens)
    stage, num_stages = rank // config.tensor_parallel, config.pipeline_parallel
    part = staged(model, stage, num_stages, max_tokens, bounds)
    model, groups = part.model, part.groups
    attention = _attention(config, model, device, dtype, groups.size)
    plan = Plan(
        config=config,
        checkpoint=checkpoint,
        model_name=config.model or checkpoint.resolve().name,
        model=model,
        block_elements=block_elements(model),
        device=device,
        dtype=dtype,
        attention=attention,
        max_model_len=max_tokens,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        groups=groups,
        num_threads=_num_threads(config, model),
        has_tokenizer=(checkpoint / "tokenizer.json").is_file(),
        drafts=plan_drafts(config, model, attention, groups, max_tokens),
        rank=rank,
    )
    _check_cache(plan)
    sizes = plan.max_num_seqs, plan.max_num_rows, plan.max_num_batched_tokens
    check_skips(model.axes.skips, attention.spec, *sizes)
    return plan


def settle_here(config: EngineConfig, rank: int = 0, bounds: Bounds | None = None) -> Plan:
    """`settle` for the device that this machine gives; raises `ConfigError` if it cannot serve."""
    device = device_of(config, rank)
    if device.type == "cuda":
        check_gpu(device)
    return settle(config, device, rank, bounds)


def resolve(config: EngineConfig, rank: int = 0, bounds: Bounds | None = None) -> Plan:
    """`settle_here`, and what this machine's memory allows: what the engine starts with.

    Keys of config.json that are ignored are logged, and that it is a class of transformers.
    """
    plan = settle_here(config, rank, bounds)
    _check_memory(plan)
    told = ignored_keys(plan.model), notes(plan.model), two_way_note(config, plan.model)
    for line in filter(None, told):
        _log.warning(line)
    return plan
