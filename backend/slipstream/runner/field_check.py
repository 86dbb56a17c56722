"""Checks of an `EngineConfig` by itself: what no checkpoint and no machine makes possible."""

from math import inf
from pathlib import Path

import msgspec
from slipstream_contract.errors import clip
from slipstream_contract.limits import MAX_DRAFT_TOKENS
from slipstream_contract.log_probs import MODES

from slipstream import quant
from slipstream.config import (
    BACKEND_MODELS,
    BLOCK_SIZES,
    LOAD_FORMATS,
    MAX_SEQS,
    MAX_STEP_TOKENS,
    MAX_STUCK_AFTER_S,
    MAX_TARGET_ITL,
    MIN_STUCK_AFTER_S,
    ON_OFF,
    SPECULATIONS,
    EngineConfig,
    EventPorts,
)
from slipstream.errors import ConfigError
from slipstream.runner.devices import check_rank_counts


def at_least(config: EngineConfig, field: str, low: int) -> int:
    """Return the value of a field; raises `ConfigError` if it is below `low`."""
    value = getattr(config, field)
    assert isinstance(value, int)
    if value < low:
        raise ConfigError(f"{field} = {value} is below {low}")
    return value


_MOST = 2**62  # of any whole number: 64 bits hold it, and a sum of two
_MOSTS = {
    "max_num_batched_tokens": MAX_STEP_TOKENS,
    "max_num_seqs": MAX_SEQS,
    "stuck_after_s": MAX_STUCK_AFTER_S,
}
_NAME_CHARACTERS = 256


def check_fields(config: EngineConfig) -> None:
    """Raise `ConfigError` with field, value and limit for the first that is out of range."""
    _check_most(config)
    for field in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_waiting",
        "max_waiting_tokens",
    ):
        at_least(config, field, 1)
    if config.long_prompt_tokens is not None:
        at_least(config, "long_prompt_tokens", 1)
    if config.target_itl is not None and not 0 < config.target_itl <= MAX_TARGET_ITL:
        raise ConfigError(
            f"target_itl = {config.target_itl} is not above 0 and at most {MAX_TARGET_ITL} ms"
        )
    at_least(config, "num_draft_tokens", 1)
    at_least(config, "suffix_tokens", 0)
    if config.num_draft_tokens > MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"num_draft_tokens = {config.num_draft_tokens} is above {MAX_DRAFT_TOKENS}"
        )
    for field in ("kv_cache_host_bytes", "max_logits_bytes", "lora_task_bytes"):
        at_least(config, field, 0)
    if config.adapter_memory is not None:
        at_least(config, "adapter_memory", 0)
    if config.logprobs_mode not in MODES:
        modes = ", ".join(MODES)
        raise ConfigError(f"logprobs_mode = {config.logprobs_mode!r} is not one of {modes}")
    at_least(config, "stuck_after_s", MIN_STUCK_AFTER_S)
    if config.memory_share is not None and not 0 < config.memory_share <= 1:
        raise ConfigError(f"memory_share = {config.memory_share} is not above 0 and at most 1")
    if not 0 <= config.gpu_hour_price < inf:
        raise ConfigError(f"gpu_hour_price = {config.gpu_hour_price} is not a price")
    for name in ("adapter_root", "adapter_dir"):
        if (path := getattr(config, name)) and not Path(path).is_dir():
            raise ConfigError(f"{name} = {path!r} is no directory")
    _check_log(config.request_log)
    _check_events(config)
    if config.block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"block_size = {config.block_size} is not a power of two between 8 and 256"
        )
    check_rank_counts(config)
    for field, choices in (
        ("load_format", LOAD_FORMATS),
        ("backend_model", BACKEND_MODELS),
        ("idle_tuning", ON_OFF),
        ("prompt_unpacking", ON_OFF),
        ("quantization", quant.names()),
        ("speculation", SPECULATIONS),
    ):
        if (value := getattr(config, field)) not in choices:
            raise ConfigError(f"{field} = {value!r} is not one of {', '.join(choices)}")


def _check_most(config: EngineConfig) -> None:
    for field, value in msgspec.structs.asdict(config).items():
        if type(value) is int and value > _MOSTS.get(field, _MOST):
            raise ConfigError(f"{field} = {value} is above {_MOSTS.get(field, _MOST)}")
    if len(config.model) > _NAME_CHARACTERS or not config.model.isprintable():
        raise ConfigError(
            f"model = {clip(config.model)} is not a name of at most {_NAME_CHARACTERS} "
            "printable characters"
        )


def _check_log(name: str) -> None:
    if not name:
        return
    path = Path(name)
    if not path.is_absolute():
        raise ConfigError(f"request_log = {name!r} is not an absolute path")
    if path.is_dir():
        raise ConfigError(f"request_log = {name!r} is a directory, not a file")
    if not path.parent.is_dir():
        raise ConfigError(f"request_log = {name!r}: there is no directory {path.parent}")


def _check_events(config: EngineConfig) -> None:
    if not config.kv_events:
        if config.kv_events_topic:
            raise ConfigError(
                f"kv_events_topic = {config.kv_events_topic!r} is a topic of no events: "
                "kv_events is not given"
            )
        return
    name = f"kv_events = {config.kv_events!r}"
    try:
        ports = EventPorts.of(config.kv_events)
        if config.replicas > 1:
            EventPorts.of(f"{config.kv_events}+{config.replicas - 1}")
    except ValueError as error:
        raise ConfigError(f"{name} {error}") from None
    if ports.replay_port and abs(ports.port - ports.replay_port) < config.replicas:
        raise ConfigError(f"{name} has ports that {config.replicas} replicas would share")
    if not config.kv_cache_reuse or config.attention_window is not None:
        raise ConfigError(
            f"{name} is about cached blocks, which there are only with kv_cache_reuse and without "
            "an attention_window"
        )
