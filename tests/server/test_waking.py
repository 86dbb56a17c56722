"""Scheduling policies, session and groups of a real server's processes."""

import os
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from fixtures.server.support import PROMPT, TEXT_MODELS, Client, serving
from slipstream_serve import spawn

pytestmark = [pytest.mark.triton, pytest.mark.rest, pytest.mark.beside]

BODY = {"text_input": PROMPT, "max_tokens": 4}
USUAL, GENTLE = {os.SCHED_OTHER}, {os.SCHED_BATCH}


def policies(pid: int) -> set[int]:
    """Return the policies of all threads of a process."""
    found = set()
    for entry in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            found.add(os.sched_getscheduler(int(entry.name)))
    return found


def use(client: Client) -> None:
    """Every model over both protocols: what begins threads only when it is used has done so."""
    for model in TEXT_MODELS:
        client.generate(model, **BODY)
        client.stream(model, **BODY)


def check_stubs_and_engine(client: Client) -> None:
    stubs = client.server.stubs()
    assert len(stubs) == 10, stubs
    assert {name: policies(pid) for pid, name in stubs.items()} == dict.fromkeys(
        stubs.values(), GENTLE
    )
    assert policies(client.health()["engine_pid"]) == USUAL


def test_server_and_stubs_wake_gently_and_the_engine_at_once(client):
    use(client)
    assert policies(client.server.pid) == GENTLE
    check_stubs_and_engine(client)


def test_a_server_that_a_user_starts_is_left_alone_and_its_stubs_change_themselves(
    repository, tmp_path, monkeypatch
):
    monkeypatch.setattr(spawn, "gentle_children", nullcontext)
    with serving(repository, tmp_path / "log") as client:
        use(client)
        assert policies(client.server.pid) == USUAL
        check_stubs_and_engine(client)


def test_a_server_is_of_one_session_and_its_engine_and_its_models_of_a_group_each(client):
    """The kernel shares a core among sessions first; signals for some must not reach the others."""
    engine, stubs = client.health()["engine_pid"], client.server.stubs()
    assert {os.getsid(pid) for pid in (client.server.pid, engine, *stubs)} == {os.getsid(0)}
    assert {os.getpgid(pid) for pid in stubs} == {client.server.pid}
    assert os.getpgid(engine) not in {client.server.pid, os.getpgrp()}
