"""What must hold whatever happens: the judge of every test that plants a fault.

    lost nothing    every request ends with its full answer or with one typed error, in time; what
                    came before the error is a beginning of the full answer. Only where the server
                    itself ends may the connection end instead; an answer that ends in good order
                    without its last event is as wrong as other tokens
    harmed nobody   a request that the fault does not concern has its full answer, bit for bit
    kept nothing    when all have ended, every block is free, and no process, thread, descriptor or
                    shared memory is there that was not before

`Oracle.problems` is a list of sentences; tests assert that it is empty, and those in
test_oracle.py that it is not.
"""

import importlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.asking import MODELS, Ask, ClosedError, pieces
from faults.planter import plant
from server.support import PROMPT, Client, RequestError
from slipstream_runtime import inflight
from slipstream_serve.server import repository_root

_LEAKS = re.compile(r'Traceback|File "|\.py\b|0x[0-9a-f]{6}|/tmp/')  # of what is inside
END_S = 90.0  # a request that has not ended by then is lost
SETTLE_S = 40.0


def _watch() -> Any:
    """load/soak_watch.py, which is a script's module and in no package."""
    folder = str(repository_root() / "load")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("soak_watch")
    finally:
        sys.path.remove(folder)


@dataclass
class Outcome:
    """What became of a request; `error` is None after a full answer.

    `is_closed`: that error is the client's own, for its connection ended.
    """

    ask: Ask
    text: str = ""
    error: str | None = None
    has_ended: bool = False
    is_closed: bool = False
    ended_s: float = 0.0  # time.monotonic()


@dataclass
class Oracle:
    """Asks, lets a test plant its fault meanwhile, and judges."""

    client: Client
    orders: Path
    problems: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    references: dict[Ask, str] = field(default_factory=dict)
    _before: Any = None

    def plant(self, fault: str, **arguments: object) -> None:
        """Have a fault planted in the engine, now."""
        plant(self.orders, fault, **arguments)

    def learn(self, questions: Iterable[Ask]) -> None:
        """The answers without a fault, and then what the server holds."""
        new = [ask for ask in questions if ask not in self.references]
        for outcome in self._run(new):
            assert outcome.error is None, outcome
            self.references[outcome.ask] = outcome.text
        if self._before is None:
            self.client.wait_idle(30)
            counts = None
            while counts != (counts := self._counts()):  # connections of the clients are closed
                time.sleep(0.3)
            self._before = self._held()

    @contextmanager
    def storm(self, questions: Iterable[Ask], running: int | None = None) -> Iterator[None]:
        """All requests at once; the block runs while they do, and is left when all have ended.

        Args:
            questions: whose references are known.
            running: wait for so many sequences before the block.
        """
        first = len(self.outcomes)
        threads = self._start(questions)
        try:
            if running is not None:
                self.client.wait_running(running)
            yield
        finally:
            self._join(threads, self.outcomes[first:])

    def judge(
        self,
        concerned: str | Callable[[Outcome], bool] = "nobody",
        codes: Iterable[str] = ("UNAVAILABLE",),
        settle_s: float = SETTLE_S,
        said: str = "",
        may_close: bool = False,
    ) -> list[str]:
        """All that is wrong with what came since the last time; `problems` has it as well.

        Args:
            concerned: who may have an error: "nobody", "victims" (and they must), "all", or as a
                function says.
            codes: of the errors that are right.
            settle_s: how long what was held may take to be given back.
            said: a regular expression of what tritonserver itself may say instead, without a code.
            may_close: whether a connection may end without an answer: the server did.
        """
        problems: list[str] = []
        for outcome in self.outcomes:
            may_fail = concerned == "all" or (concerned == "victims" and outcome.ask.is_victim)
            if callable(concerned):
                may_fail = concerned(outcome)
            right = "|".join([*(rf"\b{code}: \S" for code in codes), *([said] if said else [])])
            problems += self._judge_one(outcome, may_fail, right, may_close)
            if concerned == "victims" and outcome.ask.is_victim and outcome.error is None:
                problems.append(f"{outcome.ask}: the victim of the fault has not noticed it")
        problems += self._settle(settle_s)
        self.outcomes.clear()
        self.problems += problems
        return problems

    def num_in_flight(self) -> int:
        """How many requests the models have in their hands, the engine asked or not."""
        files = self.client.server.runtime.directory.glob("in-flight-*")
        return sum(inflight.count(file) for file in files)

    def wait_back(self, pid: int, timeout_s: float) -> None:
        """Until another engine than `pid` serves every model."""
        begin = time.monotonic()
        while True:
            try:
                if self.client.health()["engine_pid"] != pid:
                    self.ask_all()
                    return
            except RequestError as error:
                if "UNAVAILABLE" not in str(error) or time.monotonic() - begin > timeout_s:
                    raise
            time.sleep(0.05)

    def ask_all(self) -> None:
        """Whether every model answers, over both protocols. Raises RequestError or ClosedError."""
        for model in MODELS:
            for is_http in (False, True):
                for _ in pieces(self.client, Ask(model, PROMPT, 1, 1, is_http=is_http), END_S):
                    pass

    def _judge_one(
        self, outcome: Outcome, may_fail: bool, right: str, may_close: bool
    ) -> list[str]:
        ask, got, error = outcome.ask, outcome.text, outcome.error
        want = self.references[ask]
        name = f"{ask.model} over {'HTTP' if ask.is_http else 'gRPC'}, seed {ask.seed}"
        if not outcome.has_ended:
            return [f"{name}: no end: {error}"]
        if error is None:
            return [] if got == want else [f"{name}: answered {got!r}, not {want!r}"]
        problems = []
        if not may_fail:
            problems.append(f"{name}: harmed: {error}")
        if not re.search(right, error) and not (outcome.is_closed and may_close):
            problems.append(f"{name}: not an error of {right}: {error}")
        if _LEAKS.search(error):
            problems.append(f"{name}: an error that tells what is inside: {error}")
        if not want.startswith(got):
            problems.append(f"{name}: {got!r} is no beginning of {want!r}")
        return problems

    def _settle(self, settle_s: float) -> list[str]:
        """Wait until nothing is held; what still is."""
        watch, begin = _watch(), time.monotonic()
        while True:
            lines = []
            try:
                state = self.client.health()
                if state["running"] or state["waiting"]:
                    lines.append(f"sequences are left: {state}")
                if state["kv_blocks_free"] != state["kv_blocks_total"]:
                    lines.append(f"blocks are lost: {state}")
                lines += watch.growth(self._before, self._held())
            except RequestError as error:
                lines.append(f"no engine: {error}")
            if not lines or time.monotonic() - begin > settle_s:
                return lines
            time.sleep(0.2)

    def _counts(self) -> Any:
        """What may not grow, without what does as it likes."""
        held = self._held()
        return {name: (each.threads, each.fds) for name, each in held.processes.items()}

    def _held(self) -> Any:
        engine_pid = self.client.health()["engine_pid"]
        held = _watch().held(self.client.server, engine_pid)
        engine = held.processes.pop("engine", None)
        if engine is not None:  # one that takes its place may hold what it likes
            held.processes[f"engine {engine_pid}"] = engine
        before = self._before or held
        for name in before.processes.keys() ^ held.processes.keys():
            if name.startswith("engine"):
                held.processes.pop(name, None)
                before.processes.pop(name, None)
        return held

    # --- requests ------------------------------------------------------------------------------

    def _run(self, questions: Iterable[Ask]) -> list[Outcome]:
        first = len(self.outcomes)
        self._join(self._start(questions), self.outcomes[first:])
        outcomes = self.outcomes[first:]
        del self.outcomes[first:]
        return outcomes

    def _start(self, questions: Iterable[Ask]) -> list[threading.Thread]:
        threads = []
        for ask in questions:
            self.outcomes.append(Outcome(ask))
            threads.append(
                threading.Thread(target=self._one, args=(self.outcomes[-1],), daemon=True)
            )
            threads[-1].start()
        return threads

    def _one(self, outcome: Outcome) -> None:
        try:
            for piece in pieces(self.client, outcome.ask, END_S):
                outcome.text += piece
        except RequestError as error:
            outcome.error = str(error)
        except ClosedError as error:
            outcome.error, outcome.is_closed = str(error), True
        except Exception as error:  # no answer in time, or a client that cannot read it
            outcome.error = f"{type(error).__name__}: {error}"
            return
        outcome.ended_s = time.monotonic()
        outcome.has_ended = True

    @staticmethod
    def _join(threads: list[threading.Thread], outcomes: list[Outcome]) -> None:
        deadline = time.monotonic() + END_S + 5
        for thread in threads:
            thread.join(max(0.1, deadline - time.monotonic()))
