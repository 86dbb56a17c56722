"""Adapters reach all replicas, and again one that restarts."""

import os
import signal

import pytest
from fixtures.bridge.launching import CONFIG
from fixtures.bridge.replicated import Client
from fixtures.models.adapters import draw_pairs, write_adapter
from fixtures.models.checkpoints import make_model
from fixtures.waiting import wait_for
from slipstream_contract.errors import ContractError

pytestmark = pytest.mark.rest


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    sizes = {key: CONFIG[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    model = make_model(
        "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **sizes
    )
    write_adapter(root / "one", draw_pairs(model, ["gate_proj", "down_proj"], 4, size=2.0), 4)
    return root


@pytest.fixture(scope="module")
def settings(root):
    return {"adapter_root": str(root)}


def names(client: Client) -> list[str]:
    return sorted(client.connection.adapters)


def is_back(client: Client, number: int, pid: int) -> bool:
    state = client.replicas[number]
    return state.is_up and state.engine_pid not in (0, pid)


def test_an_adapter_is_loaded_everywhere_and_again_after_a_death(server, client):
    prompt = [3, 1, 4, 1, 5]
    plain = client.complete(1, prompt)
    client.connection.load_adapter("mine", "one", 120)
    wait_for(lambda: names(client) == ["mine"])
    texts = [client.complete(10 + number, [*prompt, number], adapter="mine") for number in range(4)]
    adapted = client.complete(20, prompt, adapter="mine")
    assert adapted != plain
    pids = [each.engine_pid for each in client.replicas]
    for number, pid in enumerate(pids):  # each in turn: then no engine is left that was asked
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda number=number, pid=pid: is_back(client, number, pid))
    wait_for(lambda: names(client) == ["mine"])
    assert client.complete(21, prompt, adapter="mine") == adapted
    assert [client.complete(30 + n, [*prompt, n], adapter="mine") for n in range(4)] == texts
    (count,) = client.connection.request_status(60, with_adapters=True).adapter_counts
    assert (count.name, count.num_requests) == ("mine", 10)
    assert count.num_prompt_tokens == 8 * 6 + 2 * 5
    assert count.num_output_tokens == sum(map(len, [*texts, *texts, adapted, adapted]))
    with pytest.raises(ContractError, match="no such"):
        client.connection.load_adapter("other", "absent", 120)
    client.connection.unload_adapter("mine", 60)
    wait_for(lambda: names(client) == [])
    client.submit(50, prompt, adapter="mine")
    wait_for(lambda: 50 in client.rejected)
    assert "mine" in client.rejected[50].message
