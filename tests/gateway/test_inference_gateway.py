"""What Kubernetes' inference gateway reads at the port of requests: now, and in its names."""

import json
import re

from fixtures.gateway.served import MODEL, Gateway
from fixtures.server.support import KV_CACHE_TOKENS, LONG


def gauges(gateway: Gateway) -> dict[str, float]:
    """The gauges in vLLM's names, of the one model."""
    page = gateway.get("/metrics").data.decode()
    found = re.findall(r'^vllm:(\w+)\{model_name="([^"]+)"[^}]*\} (\S+)$', page, re.MULTILINE)
    assert {model for _, model, _ in found} == {MODEL}
    assert len(found) == len({name for name, _, _ in found})
    return {name: float(value) for name, _, value in found}


def test_queue_and_cache_are_those_of_this_moment(long_gateway: Gateway):
    gateway = long_gateway
    gateway.wait_idle()
    idle = gauges(gateway)
    names = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
    assert idle == dict.fromkeys(names, 0.0) | {"cache_config_info": 1.0}
    connection = gateway.connect()
    body = {"prompt": "a", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    connection.getresponse().readline()  # it runs
    busy = gauges(gateway)
    connection.close()
    assert busy["num_requests_running"] == 1
    assert 0 < busy["kv_cache_usage_perc"] <= 1
    gateway.wait_idle()
    assert gauges(gateway) == idle
    page = gateway.get("/metrics").data.decode()
    (size, number) = re.search(r'block_size="(\d+)",num_gpu_blocks="(\d+)"', page).groups()
    assert int(size) * int(number) == KV_CACHE_TOKENS
