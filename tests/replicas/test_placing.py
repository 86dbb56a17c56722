"""Which GPUs, cores and memory replicas get."""

import pytest
from slipstream.config import EngineConfig, EventPorts
from slipstream.errors import ConfigError
from slipstream.replicas.placing import places


def test_each_replica_has_gpus_for_all_of_its_ranks(tmp_path):
    config = EngineConfig(checkpoint="", replicas=2, tensor_parallel=2, kv_cache_host_bytes=100)
    found = places(config, {"CUDA_VISIBLE_DEVICES": "4,5,GPU-a,7,8"})
    assert [place.environment for place in found] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-a,7"},
    ]
    assert {place.config.replicas for place in found} == {1}
    assert {place.config.kv_cache_host_bytes for place in found} == {50}
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    found = places(config, {}, tmp_path)
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1", "2,3"]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_too_few_gpus_are_refused_by_name(tmp_path, device):
    config = EngineConfig(checkpoint="", replicas=2, tensor_parallel=2, device=device)
    with pytest.raises(ConfigError, match=r"replicas = 2 of 2 ranks need 4 GPUs, but there are 3"):
        places(config, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, tmp_path)


def test_replicas_on_a_cpu_share_its_cores_and_memory(tmp_path):
    config = EngineConfig(checkpoint="", replicas=2, memory_share=0.5)
    found = places(config, {}, tmp_path)
    assert [place.config.memory_share for place in found] == [0.25, 0.25]
    assert all(place.environment["OMP_NUM_THREADS"].isdecimal() for place in found)
    with pytest.raises(ConfigError, match="need 2 GPUs, but there are 0"):
        places(EngineConfig(checkpoint="", replicas=2, device="cuda"), {}, tmp_path)


def test_each_replica_has_ports_of_its_own_for_events():
    config = EngineConfig(checkpoint="", replicas=3, device="cpu", kv_events="tcp://[::]:80,9000")
    ports = [EventPorts.of(place.config.kv_events) for place in places(config, {})]
    assert ports == [("[::]", 80, 9000, rank) for rank in range(3)]
    silent = places(EngineConfig(checkpoint="", replicas=2, device="cpu"), {})
    assert {place.config.kv_events for place in silent} == {""}
