"""Where replicas run: the GPUs and the part of the host that each has, as its configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from slipstream_runtime.processes import num_cores

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_THREADS = "OMP_NUM_THREADS"


class Place(NamedTuple):
    """A replica's configuration, and variables of its environment."""

    config: EngineConfig
    environment: dict[str, str]


def gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    text = environment.get(_VISIBLE)
    if text is not None:
        return [each.strip() for each in text.split(",") if each.strip() not in ("", "-1")]
    return [str(number) for number in range(len(list(devices.glob("nvidia[0-9]*"))))]


def places(
    config: EngineConfig, environment: Mapping[str, str], devices: Path = Path("/dev")
) -> list[Place]:
    """Return the places of `config.replicas`, each with GPUs for all of its ranks.

    On CPUs they share cores and memory evenly. Raises ConfigError if there are too few GPUs.
    """
    count, ranks = config.replicas, config.num_ranks
    found = [] if config.device == "cpu" else gpus(environment, devices)
    alone = msgspec.structs.replace(
        config, replicas=1, kv_cache_host_bytes=config.kv_cache_host_bytes // count
    )
    if not found and config.device != "cuda":
        if config.memory_share is not None:
            alone = msgspec.structs.replace(alone, memory_share=config.memory_share / count)
        threads = environment.get(_THREADS) or str(max(1, num_cores() // count))
        return [Place(_numbered(alone, i), {_THREADS: threads}) for i in range(count)]
    if len(found) < count * ranks:
        visible = environment.get(_VISIBLE)
        raise ConfigError(
            f"replicas = {count} of {ranks} ranks need {count * ranks} GPUs, but there are "
            f"{len(found)} ({_VISIBLE} {'is not set' if visible is None else repr(visible)})"
        )
    return [
        Place(
            _numbered(alone, number),
            {_VISIBLE: ",".join(found[number * ranks : (number + 1) * ranks])},
        )
        for number in range(count)
    ]


def _numbered(config: EngineConfig, number: int) -> EngineConfig:
    """Return a configuration whose events have ports of their own."""
    if not config.kv_events:
        return config
    return msgspec.structs.replace(config, kv_events=f"{config.kv_events}+{number}")
