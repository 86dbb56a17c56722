"""What the parts of an engine get of its configuration: limits, edits of logits, adapters."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from slipstream_contract.errors import ContractError
from slipstream_contract.vocab import TokenBytes

from slipstream import __version__, wire
from slipstream.config import EngineConfig
from slipstream.core.adapter import parse_adapters
from slipstream.core.edits import EditContext
from slipstream.core.processors import load_processors
from slipstream.core.thinking import find_thinking
from slipstream.engine.adapters import AdapterStore, Holder
from slipstream.engine.scheduler import Limits
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.runner.model_runner import ModelRunner
    from slipstream.runner.plan import Plan

_MS = 1_000_000  # in ns


def read_config(path: Path) -> EngineConfig:
    """Return the configuration in a JSON file, with its checkpoints relative to that file."""
    config = msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    draft = config.draft_checkpoint and str(path.parent / config.draft_checkpoint)
    checkpoint = str(path.parent / config.checkpoint)
    return msgspec.structs.replace(config, checkpoint=checkpoint, draft_checkpoint=draft)


def edit_context_of(
    config: EngineConfig, checkpoint: Path, vocab_size: int, vocab: TokenBytes | None
) -> EditContext:
    """Return what edits of logits need to know. Raises ConfigError."""
    processors = load_processors(config.logits_processors)
    thinking = None if vocab is None else find_thinking(checkpoint, vocab, config.thinking_end)
    if config.thinking_end and thinking is None:
        raise ConfigError(
            f"thinking_end is {config.thinking_end[:64]!r}, which no token of the checkpoint spells"
        )
    return EditContext(vocab_size, vocab, thinking, processors)


def limits_of(config: EngineConfig, plan: "Plan") -> Limits:
    """Return the bounds of the scheduler, and what requests mean that do not say."""
    return Limits(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        long_prompt_tokens=config.long_prompt_tokens,
        kv_cache_reuse=config.kv_cache_reuse and plan.model.axes.two_way is None,
        logprobs_mode=config.logprobs_mode,
        max_logits_bytes=config.max_logits_bytes,
        max_num_rows=plan.max_drafted_rows,
        guide_in_thinking=config.guide_in_thinking,
        num_stages=config.pipeline_parallel,
        target_itl_ns=round((config.target_itl or 0) * _MS),
        two_way=plan.model.axes.two_way,
    )


def adapters_of(config: EngineConfig, model: str, holder: Holder) -> AdapterStore:
    """Load the adapters that an engine starts with. Raises ConfigError."""
    store = AdapterStore(holder, config.adapter_root, model, config.lora_task_bytes)
    try:
        for name, path in parse_adapters(config.adapters).items():
            store.load(name, path)
        if config.adapter_dir:
            store.watch(config.adapter_dir).start()
    except ContractError as error:
        raise ConfigError(error.message) from None
    return store


def welcome_of(plan: "Plan", runner: "ModelRunner", has_thinking: bool) -> wire.Welcome:
    """Return what this engine says of itself to a bridge."""
    return wire.Welcome(
        protocol=wire.PROTOCOL,
        version=__version__,
        model=plan.model_name,
        engine_pid=os.getpid(),
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        architecture=plan.model.architecture,
        dtype=str(plan.dtype).removeprefix("torch."),
        device=plan.device.type,
        has_thinking=has_thinking,
    )
