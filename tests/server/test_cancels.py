"""Every way to leave x every state of a request x every model, on a real server with a slow engine.

The engine is the real one, slowed so that states last, and keeps a journal (`load/noting_engine`).
In every round some requests stay: their texts must not change. Cells that do not exist:

- `stop` is an input of `tensorrt_llm` alone. It knows that model's requests, and so the ensemble's,
  but not those of `tensorrt_llm_bls` and `vllm_model`, which have ids of their own.
- `stop` of what is still queued or tokenised finds nobody: the request is told by its client only.
- A prompt of token ids is never tokenised.

What a server cannot know is not noticed before it writes: that a reader of HTTP is gone, in every
model; that any client is gone, in the ensemble (docs/clients.md).
"""

import contextlib
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures.server.support import CHECKPOINT, PROMPT, ROOT, Client, compose, start
from slipstream_client import SlipstreamClient
from slipstream_preprocessing.tokenizer import load_tokenizer
from slipstream_serve.server import server_directory

pytestmark = [pytest.mark.triton, pytest.mark.rest]
SLOW = pytest.mark.slow

MODELS = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm", "vllm_model")
TOKENISING = ("ensemble", "tensorrt_llm_bls", "vllm_model")
WAYS = ("Cancel", "Deadline", "Stop", "Kill", "KillCurl")
STEP_S = 0.015
OPTIONS = {"max-num-seqs": 20, "max-num-batched-tokens": 28, "kv-cache-tokens": 2048}
SLOWER = (1, 2, 4, 8)  # steps last so many times as long where all were too slow for shorter ones
DEADLINE_S = 4.0  # until which all must have asked, when steps last STEP_S
STATE_S = 30.0  # until which they must, if none has a deadline
STAYING = {"ensemble": 50, "tensorrt_llm_bls": 60}  # model -> tokens of the one that stays
IDLE_S = 60.0
_NAMES = ("noting_engine", "leaving")

Cell = tuple[str, str]  # way, model


def cells(ways: tuple[str, ...] = WAYS, has_stop: bool = True) -> list[Cell]:
    """All that exist."""
    return [
        (way, model)
        for way in ways
        for model in MODELS
        if way != "Stop" or (has_stop and model in ("ensemble", "tensorrt_llm"))
    ]


class Scene:
    """The server, and rounds of clients on it that leave."""

    def __init__(self, load: SimpleNamespace, server: Client, journal: Path) -> None:
        self.load = load
        self.server = server
        self.journal_path = journal
        self.journal = load.noting_engine.Journal(journal)
        self.sdk = SlipstreamClient(server.address)
        self.nursery = load.leaving.Nursery()
        self.address = load.leaving.Server(server.address, server.http, self.sdk, self.nursery)
        self.tokenizer = load_tokenizer(CHECKPOINT)
        self.seeds = itertools.count(1000)
        self.texts = {model: self.stay(model) for model in STAYING}

    def close(self) -> None:
        self.nursery.close()
        self.sdk.close()

    def pace(self, slower: int) -> None:
        """Have the next steps last so many times `STEP_S`."""
        self.load.noting_engine.order_pace(self.journal_path, slower * STEP_S)

    def stay(self, model: str) -> str:
        options = {"max_tokens": STAYING[model], "end_id": -1, "temperature": 0.0}
        return self.sdk.complete(PROMPT, model=model, timeout_s=120.0, **options).text

    @contextlib.contextmanager
    def staying(self) -> Iterator[None]:
        """Around a round: the requests that stay; afterwards nothing is held."""
        texts: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda m=model: texts.update({m: self.stay(m)}))
            for model in STAYING
        ]
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join(120)
        assert texts == self.texts
        self.server.wait_idle(IDLE_S)
        state = self.server.health()
        assert state["waiting"] == 0
        assert self.server.server.exit_code is None

    def ask(self, cell: Cell, prompt: str, max_tokens: int, deadline_s: float = DEADLINE_S):
        """A client of a cell; with its seed."""
        way, model = cell
        seed = next(self.seeds)
        prompt = f"# {seed}\n{prompt}"  # nobody finds it in the cache
        text = self.tokenizer.encode(prompt).ids if model == "tensorrt_llm" else prompt
        asked = self.load.leaving.Asked(model, text, max_tokens, seed)
        more = [deadline_s] if way == "Deadline" else []
        return asked.seed, getattr(self.load.leaving, way)(self.address, asked, *more)

    def wait_states(self, seeds: list[int], state: str, timeout_s: float) -> bool:
        """Wait until all are in that state at once; return False if they were not in time."""
        end_s = time.monotonic() + timeout_s
        while True:
            is_over = time.monotonic() > end_s
            for entry in self.journal.read():
                states = entry.get("states", {})
                if all(states.get(str(seed)) == state for seed in seeds):
                    return True
            if is_over:
                return False
            time.sleep(0.002)

    def cancelled(self, seeds: list[int], timeout_s: float = 120.0) -> dict[int, dict[str, object]]:
        """Their entries in the journal; all must have been told to end."""
        begin = time.monotonic()
        while set(seeds) - (found := self.journal.of("cancel")).keys():
            assert time.monotonic() - begin < timeout_s, set(seeds) - found.keys()
            time.sleep(0.01)
        return {seed: found[seed] for seed in seeds}

    def gone_in_two_steps(self, entry: dict[str, object]) -> bool:
        """Two steps after it was told, an engine knows nothing of a request, and holds nothing.

        If no such step comes, it has nothing to do: then all blocks are free (`staying`).
        """
        begin, seed = time.monotonic(), str(entry["seed"])
        while time.monotonic() - begin < 2.0:
            for step in self.journal.entries:
                if step["what"] == "step" and step["step"] > entry["step"] + 1:
                    return seed not in step["states"] and not step["left"].get(seed)
            time.sleep(0.02)
            list(self.journal.read())
        return True


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Iterator[Scene]:
    if not (server_directory() / "bin" / "tritonserver").is_file():
        pytest.skip("no tritonserver: make install")
    folder = tmp_path_factory.mktemp("cancels")
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    repository = compose(CHECKPOINT, folder / "models", *options, "--dtype", "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "load"))
        load = SimpleNamespace(**{name: importlib.import_module(name) for name in _NAMES})
        load.noting_engine.write_python(folder / "python", folder / "journal", STEP_S)
        patch.setenv("SLIPSTREAM_PYTHON", str(folder / "python"))
        server = start(repository, folder / "server.log")
        try:
            scene = Scene(load, Client(server), folder / "journal")
            yield scene
            scene.close()
        finally:
            server.stop()
            for name in _NAMES:
                sys.modules.pop(name)
        # An ensemble that failed while a step of it ran is never freed before Triton 26.03.
        log = (folder / "server.log").read_text()
        assert "Found 0 model versions that have in-flight inferences" in log


def leave(clients: dict[int, object]) -> dict[int, int]:
    """All go, those with a deadline last; when each did."""
    order = sorted(clients.items(), key=lambda item: type(item[1]).__name__ == "Deadline")
    return {seed: client.leave() for seed, client in order}


def close(clients: dict[int, object]) -> None:
    for client in clients.values():
        client.close()
    assert [client.error for client in clients.values() if client.error] == []


def is_told_at_once(cell: Cell) -> bool:
    """Whether the server tells the model of this client's leaving before its next response."""
    way, model = cell
    return way == "Stop" or (model != "ensemble" and way != "KillCurl")


def check(
    scene: Scene,
    asked: dict[int, Cell],
    left: dict[int, int],
    state: str,
    go_on: Callable[[], None],
) -> bool:
    """All were told to end; return whether those that Triton speaks of were in that state still.

    Of the others it speaks when what is asked for comes: `go_on` lets it.
    """
    scene.cancelled([seed for seed, cell in asked.items() if is_told_at_once(cell)])
    go_on()
    found = scene.cancelled(list(asked))
    for seed, cell in asked.items():
        entry = found[seed]
        assert scene.gone_in_two_steps(entry), (cell, entry)
        if is_told_at_once(cell):
            assert entry["t"] - left[seed] < 20e9, (cell, "noticed late")
    told = [seed for seed, cell in asked.items() if is_told_at_once(cell)]
    return all(found[seed]["state"] == state for seed in told)


def run_round(
    scene: Scene,
    ways: list[Cell],
    state: str,
    prompt: str = PROMPT,
    deadline_s: float = DEADLINE_S,
    go_on: Callable[[], None] = lambda: None,
) -> None:
    """All ask, are in the state, and leave at once, at the first pace at which they are in time.

    At that pace an engine must know of it while they are in that state.
    """
    try:
        for slower in SLOWER:
            scene.pace(slower)
            if ask_and_leave(scene, ways, state, prompt, slower * deadline_s, go_on):
                return
    finally:
        scene.pace(1)
    pytest.fail(f"not all at once in {state}, or told later, at any pace: {ways}")


def ask_and_leave(
    scene: Scene,
    ways: list[Cell],
    state: str,
    prompt: str,
    deadline_s: float,
    go_on: Callable[[], None],
) -> bool:
    """Return whether all were in the state at once, and were told to end in it."""
    clients, asked = {}, {}
    for cell in sorted(ways, key=lambda cell: cell[0] == "Deadline"):  # their time begins last
        seed, client = scene.ask(cell, prompt, 400, deadline_s)
        clients[seed], asked[seed] = client, cell
    try:
        has_deadline = any(way == "Deadline" for way, _ in ways)
        if not scene.wait_states(list(asked), state, deadline_s if has_deadline else STATE_S):
            return False
        left = leave(clients)
        return check(scene, asked, left, state, go_on)
    finally:
        close(clients)


@contextlib.contextmanager
def filled(scene: Scene, num_sequences: int) -> Iterator[Callable[[], None]]:
    """So many sequences run meanwhile, until the block is left or what it yields is called.

    Some are preempted soon: the cache is smaller than all of them.
    """
    options = {"num_return_sequences": num_sequences, "temperature": 1.0, "seed": 1, "end_id": -1}
    stream = scene.sdk.stream(PROMPT * 4, model="tensorrt_llm_bls", max_tokens=900, **options)
    begin = time.monotonic()
    while not (state := scene.server.health())["running"] or (
        state["running"] + state["waiting"] < num_sequences
    ):
        assert time.monotonic() - begin < 120
        time.sleep(0.02)
    try:
        yield stream.cancel
    finally:
        stream.cancel()


def test_in_decode(scene: Scene) -> None:
    with scene.staying():
        run_round(scene, cells(), "decode")


def test_while_waiting(scene: Scene) -> None:
    with filled(scene, OPTIONS["max-num-seqs"]) as empty, scene.staying():
        run_round(scene, cells(), "waiting", go_on=empty)


@pytest.mark.parametrize("way", ["Cancel", *(pytest.param(w, marks=SLOW) for w in WAYS[1:])])
def test_in_a_chunk_of_its_prompt(scene: Scene, way: str) -> None:
    prompt = PROMPT * (40 if way != "Deadline" else 150)
    with scene.staying():
        for cell in cells((way,)):  # one prompt at a time is cut into chunks
            run_round(scene, [cell], "prefill", prompt, 0.4)


@SLOW
@pytest.mark.parametrize("way", WAYS)
def test_preempted(scene: Scene, way: str) -> None:
    with scene.staying(), filled(scene, 14) as empty:
        run_round(scene, cells((way,)), "preempted", deadline_s=10.0, go_on=empty)


def test_as_its_last_token_is_due(scene: Scene) -> None:
    """A deadline cannot be aimed so well: three of each model pass about then."""
    wanted = {cell for cell in cells() if cell[0] != "Deadline"}
    for _ in range(8):  # a machine may stand still while the step lasts
        with scene.staying():
            wanted -= leave_at_the_last_token(scene, wanted)
        if not wanted:
            return
    pytest.fail(f"never left as the last token was due: {sorted(wanted)}")


def leave_at_the_last_token(scene: Scene, wanted: set[Cell]) -> set[Cell]:
    """The cells whose clients left while their last token was due."""
    clients, asked, found = {}, {}, set()
    begin = time.monotonic()
    scene.sdk.complete(PROMPT, model="tensorrt_llm_bls", max_tokens=20, end_id=-1)
    seconds = time.monotonic() - begin
    for cell in [*sorted(wanted), *cells(("Deadline",))]:
        for more_s in (0.0, 0.02, 0.04) if cell[0] == "Deadline" else (0.0,):
            seed, client = scene.ask(cell, PROMPT, 20, seconds + more_s)
            clients[seed], asked[seed] = client, cell
    here = {seed for seed, cell in asked.items() if cell in wanted}
    begin = time.monotonic()
    while here and time.monotonic() - begin < 5:
        for entry in scene.journal.read():
            states = entry.get("states", {})
            due = [seed for seed in here if states.get(str(seed)) == "last"]
            here -= set(due)
            for seed in due:
                clients[seed].leave()
                found.add(asked[seed])
        time.sleep(0.001)
    time.sleep(0.2)
    close(clients)
    return found


@contextlib.contextmanager
def stopped(pids: list[int], seconds: float) -> Iterator[None]:
    """They stand still, but no longer than that: a server gives a model up after a second.

    A process of its own continues them, however long this one is held up.
    """
    script = f"sleep {seconds}; kill -CONT {' '.join(map(str, pids))}"
    with subprocess.Popen(["sh", "-c", script]):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield


def never_began(scene: Scene, asked: dict[int, Cell], left: dict[int, int]) -> set[int]:
    """Return requests that left and never reached the engine; none, if one reached it long after.

    A machine may stand still between the two, but not in every round. The first of a crowd may be
    given to an engine that has nothing to do (docs/clients.md), and is ended within a step.
    """
    begun = scene.journal.of("submit")
    found = scene.cancelled([seed for seed in asked if seed in begun])
    late = [seed for seed in found if begun[seed]["t"] - left[seed] > 0.3e9]
    stayed = [seed for seed in late if found[seed]["step"] > begun[seed]["step"] + 1]
    is_crowd = len({asked[seed][1] for seed in late}) < len(late)
    return set() if stayed or is_crowd else asked.keys() - begun.keys()


def test_queued_in_the_server(scene: Scene) -> None:
    wanted = {cell for cell in cells(has_stop=False) if cell[0] != "KillCurl"}
    for _ in range(8):
        with scene.staying():
            wanted -= leave_while_stubs_stand_still(scene, wanted)
        if not wanted:
            return
    pytest.fail(f"reached the engine whenever they left: {sorted(wanted)}")


def leave_while_stubs_stand_still(scene: Scene, wanted: set[Cell]) -> set[Cell]:
    """Return the requests that no stub had received when they left, and the engine never."""
    clients, asked = {}, {}
    stubs = [pid for name in ("preprocessing", *MODELS[1:]) for pid in scene.server.stubs(name)]
    with stopped(stubs, 0.6):
        for cell in sorted(wanted):
            seed, client = scene.ask(cell, PROMPT, 400, 0.3)
            clients[seed], asked[seed] = client, cell
        time.sleep(0.1)
        left = leave(clients)
    time.sleep(0.5)
    close(clients)
    return {asked[seed] for seed in never_began(scene, asked, left)}


def test_before_its_prompt_is_tokenised(scene: Scene) -> None:
    """A client leaves before its turn, unless the machine was quick or this process slow.

    Who is killed may not even have asked.
    """
    wanted = {(way, model) for way in ("Cancel", "Deadline") for model in TOKENISING}
    for _ in range(12):
        with scene.staying():
            wanted -= leave_while_others_are_tokenised(scene, wanted)
        if not wanted:
            return
    pytest.fail(f"reached the engine whenever they left: {sorted(wanted)}")


def send_post(address: str, model: str, body: bytes) -> socket.socket:
    """A connection on which a model is asked, and which the server closes behind its answer."""
    host, port = address.removeprefix("http://").rsplit(":", 1)
    asking = socket.create_connection((host, int(port)), timeout=120)
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: {address}\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    asking.sendall(head.encode() + body)
    return asking


def leave_while_others_are_tokenised(scene: Scene, wanted: set[Cell]) -> set[Cell]:
    """Return the requests that never reached the engine."""
    clients, asked = {}, {}
    text = " " * 17_000 + " a\n" * 10_000  # begins with few tokens: 30 ms, then refused
    body = json.dumps({"max_tokens": 1, "stream": True, "text_input": text}).encode()
    # No threads: to start so many takes as long as to tokenise what they send.
    texts = [send_post(scene.server.http, model, body) for model in TOKENISING * 40]
    time.sleep(0.3)  # they come first
    for cell in sorted(wanted):
        seed, client = scene.ask(cell, PROMPT * 60, 400, 0.1)
        clients[seed], asked[seed] = client, cell
    left = leave(clients)
    for text_sent in texts:
        with text_sent:
            while text_sent.recv(4096):
                pass
    close(clients)
    return {asked[seed] for seed in never_began(scene, asked, left)}
