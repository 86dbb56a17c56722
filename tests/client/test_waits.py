"""`slipstream waits` over a log that an engine wrote."""

import json

import pytest
from fixtures.engine.client import Client
from fixtures.engine.hashed import Words
from fixtures.engine.timed import H200, TimedRunner
from slipstream.engine.engine import Engine
from slipstream.engine.reports import RequestLog
from slipstream.engine.scheduler import Limits
from slipstream.engine.telemetry import Telemetry
from slipstream.figures import FIRST_TOKEN_PARTS
from slipstream_client.cli import main
from slipstream_contract.sampling import SamplingParams


@pytest.fixture
def log(tmp_path):
    path, runner, telemetry = tmp_path / "log.jsonl", TimedRunner(H200), Telemetry()
    limits, parts = Limits(8, 512), (telemetry, RequestLog(path, telemetry))
    client = Client(Engine(limits, runner, Words(), "m", runner.clock, *parts))
    for num_tokens in (20, 900, 60):
        sampling = SamplingParams(max_tokens=3, temperature=0.0)
        client.submit([num_tokens % 50] * num_tokens, sampling)
    cancelled = client.submit([1] * 300, SamplingParams(max_tokens=3, temperature=0.0))
    client.engine.cancel(client.name, cancelled)
    client.drain()
    return path


def test_the_slowest_come_first_with_all_parts(log, capsys):
    assert main(["waits", str(log), "--slowest", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 2
    assert found[0]["first_token_s"] >= found[1]["first_token_s"]
    assert all(tuple(line["first_token_wait_s"]) == FIRST_TOKEN_PARTS for line in found)
    assert main(["waits", str(log)]) == 0
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "times in ms"
    assert "other prompts" in header
    assert len(rows) == 4
    assert rows[-1].endswith("mean of 3")
    assert rows[-1].split()[1] == f"{(20 + 900 + 60) / 3:.0f}"


def test_what_cannot_be_read_is_named(log, tmp_path, capsys):
    assert main(["waits", str(tmp_path / "none")]) == 1
    assert "none: No such file" in capsys.readouterr().err
    assert main(["waits", str(log), "--slowest", "0"]) == 1
    assert "--slowest is 0, below 1" in capsys.readouterr().err
    with log.open("a") as file:
        file.write('{"time": 1}\n')
    assert main(["waits", str(log)]) == 1
    assert "line 5 has no first_token_wait_s" in capsys.readouterr().err
    log.write_text('{"time": 1}')  # a line that is being written
    assert main(["waits", str(log)]) == 0
    assert capsys.readouterr().out == "no request of the log had a token\n"
