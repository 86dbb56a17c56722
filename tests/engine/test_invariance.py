"""The real runner behind the engine: how and with whom a request runs changes no token of it."""

import json
from pathlib import Path

import pytest
from fixtures.engine.client import Client
from fixtures.models.configs import SMALL_LLAMA
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.scheduler import Limits
from slipstream.runner.model_runner import ModelRunner
from slipstream.runner.plan import resolve
from slipstream_contract.sampling import SamplingParams

VOCAB_SIZE = 101
PROMPT = [7 * i % VOCAB_SIZE for i in range(37)]
ASKED = {
    "greedy": SamplingParams(max_tokens=40, temperature=0.0, log_probs=True),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, top_k=20, seed=11, log_probs=True),
    "penalised": SamplingParams(
        max_tokens=40,
        temperature=1.0,
        top_p=0.9,
        seed=12,
        repetition_penalty=1.2,
        frequency_penalty=0.1,
        min_tokens=40,
        end_ids=(3,),
        log_probs=True,
    ),
}


def runner(folder: Path, kv_cache_tokens: int) -> ModelRunner:
    config = SMALL_LLAMA | {"vocab_size": VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    plan = resolve(
        EngineConfig(
            checkpoint=str(folder),
            device="cpu",
            dtype="float32",
            load_format="random",
            kv_cache_tokens=kv_cache_tokens,
            block_size=8,
        )
    )
    return ModelRunner(plan)


def tokens(client: Client, number: int) -> tuple[list[int], list[float]]:
    stream = client.streams[number, 0]
    return stream.token_ids, stream.log_probs


@pytest.mark.parametrize("name", ASKED)
def test_alone_in_a_batch_in_chunks_and_preempted(tmp_path: Path, name: str) -> None:
    asked = ASKED[name]
    alone = Client(Engine(Limits(), runner(tmp_path, 4096), None))
    alone.submit(PROMPT, asked)
    alone.drain()
    want, want_log_probs = tokens(alone, 0)
    assert len(want) == 40
    # (budget, others, steps after which it is preempted): a crowd, chunks down to one token.
    model = runner(tmp_path, 8192)
    for budget, others, preemptions in [
        (2048, 49, ()),
        (16, 3, ()),
        (5, 0, ()),
        (1, 0, ()),
        (64, 5, (2, 9, 30)),
    ]:
        engine = Engine(Limits(64, budget, 100), model, None)
        client = Client(engine)
        number = client.submit(PROMPT, asked)
        for i in range(others):
            client.submit([i] * (1 + 3 * i % 20), SamplingParams(max_tokens=9 + i, seed=i))
        sequence = engine._requests[client.name, number].sequences[0]
        for step in range(max(preemptions, default=0)):
            client.step()
            if step + 1 in preemptions:
                engine._scheduler._running.preempt(sequence)
        client.drain()
        assert sequence.num_preemptions == len(preemptions)
        got, log_probs = tokens(client, number)
        assert got == want, (budget, others, preemptions)
        assert log_probs == pytest.approx(want_log_probs, abs=1e-4)


def test_a_step_in_flight_changes_nothing(tmp_path: Path) -> None:
    model = runner(tmp_path, 256)  # preemptions too
    asked = [
        *ASKED.values(),
        SamplingParams(max_tokens=30, seed=5, n=3, log_probs=True),
        SamplingParams(max_tokens=30, seed=6, bad_words=((1, 2), (3,)), stop_token_ids=(5, 9)),
        SamplingParams(max_tokens=30, seed=7, presence_penalty=1.5, bias=((8, 3.0),), n=2),
        SamplingParams(max_tokens=1, seed=8),
    ]

    def streams(max_in_flight: int) -> Client:
        model.max_in_flight = max_in_flight
        client = Client(Engine(Limits(9, 50, 100), model, None))
        for i, sampling in enumerate(asked * 2):
            client.submit(PROMPT[: 5 + 3 * i], sampling)
            client.step()
        client.drain()
        return client

    one, two = streams(1), streams(2)
    assert one.engine.status().num_preemptions > 0
    assert two.engine.status().num_preemptions > 0
    for key, stream in one.streams.items():
        other = two.streams[key]
        assert (other.token_ids, other.reason) == (stream.token_ids, stream.reason), key
        assert other.log_probs == pytest.approx(stream.log_probs, abs=1e-4)
