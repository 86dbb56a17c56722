"""Detect that the server or a model's process has died, stopped or hangs, and repair it.

When a model's process dies, the server still reports itself ready and starts no other. Unloading
the model and loading it again takes a fraction of a second and harms no other model. But Triton
24.10 never ends the streams that the dead process had in flight; only the end of the server does.
So if there were any, the server is restarted once no other request has been served for `QUIET_S`,
at the latest after `OTHERS_S`; the engines live on. Triton also never finishes unloading a model
whose process died sending a response of an ensemble, or got a request when it was dead. Such
remains end with the server too, but only while no request is served. Every repair is reported in
one line.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from slipstream_runtime import inflight
from slipstream_runtime.processes import is_running, is_stopped
from slipstream_runtime.stillness import STILL_S, STOPPED_S, Stillness
from slipstream_runtime.vitals import remove_dead

from slipstream_serve.exits import Exits
from slipstream_serve.hangs import ServerWatch
from slipstream_serve.pulse import Pulse, contract_of
from slipstream_serve.served import Loaded, RepairCounts, num_instances
from slipstream_serve.spare import Spare
from slipstream_serve.triton import (
    ENDING_S,
    ServeError,
    TritonServer,
    kill,
)

INTERVAL_S = 0.2
MAX_GAP_S = 2.0  # a longer gap between two looks: this process itself was stopped
MODEL_SILENCE_S = 30.0  # of a running model, which may only be busy
OTHERS_S = 10.0  # how long other requests delay the restart that ends hanging streams
QUIET_S = 2.0  # a model's response may still be on its way through an ensemble
LOAD_S = 60.0
STEADY_S = 60.0  # without a fault: the next repair follows without a pause
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
_INSTANCE_SUFFIX = re.compile(r"_\d+_\d+$")


@dataclass(frozen=True)
class Fault:
    """A fault of the server (`model` None) or of one process of a model."""

    model: str | None
    what: str
    pid: int = 0  # of the model's process; negative if it had ended before it was seen
    is_gentle: bool = False  # the server works: it may end its streams before it is killed


@dataclass
class _Pauses:
    """The pauses between repairs of one thing: each repair soon after another doubles them."""

    num_soon: int = 0
    repaired_s: float = field(default=-STEADY_S)

    def due_s(self) -> float:
        if not self.num_soon:
            return 0.0
        return self.repaired_s + min(FIRST_PAUSE_S * 2.0 ** (self.num_soon - 1), MAX_PAUSE_S)

    def note(self, fault_s: float) -> None:
        is_soon = fault_s - self.repaired_s < STEADY_S
        self.num_soon = self.num_soon + 1 if is_soon else 1
        self.repaired_s = time.monotonic()


class Repairer:
    """Watches a server that is ready, and repairs it. `say` prints a line for the user."""

    def __init__(
        self, server: TritonServer, wait_ready: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        """`wait_ready` returns once tokens can be generated; raises ServeError if they cannot."""
        self.num_repairs = 0
        self._repairs = RepairCounts(server)
        self._loaded = Loaded(server)
        self._spare = Spare(server.runtime.spare)
        self._server = server
        self._wait_ready = wait_ready
        self._say = say
        self._pauses: dict[str | None, _Pauses] = {}
        self._stopped_s: dict[int, float] = {}  # pid -> since when it is stopped
        self._restart_s = 0.0  # when hanging streams are ended; 0: there are none
        self._num_lost = 0
        self._busy_s = 0.0  # when a request was last seen in flight
        self._models: dict[int, str] = {}  # pid -> model
        self._still: dict[int, Stillness] = {}  # pid -> whether it hangs
        self._exits = Exits()
        self._server_watch = ServerWatch(server.endpoints)
        self._pulses: dict[str, Pulse] = {}
        self._num_processes: Counter[str] = Counter()  # of each model
        self._leaving: dict[int, str] = {}  # pid -> model: unloaded, but still with requests
        self._replaced_s = 0.0  # when the last one was unloaded
        self._see_processes()  # and renew no probes: the first are on their way
        self._num_processes = Counter(self._models.values())
        self._pulses = {model: self._pulse(model) for model in self._num_processes}

    def run(self) -> NoReturn:
        """Watch until a signal's exception. The server dies with the calling thread."""
        try:
            self._watch()
        finally:
            for probe in self._probes():
                probe.close()
            self._exits.close()

    def _watch(self) -> NoReturn:
        looked_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s - looked_s > MAX_GAP_S:
                self._reset_timers()
            looked_s = now_s
            fault = self._find(now_s)
            if fault is not None:
                self._repair(fault, now_s)
                looked_s = time.monotonic()
            if self._loaded.look():
                self._adopt()
                looked_s = time.monotonic()
            self._exits.wait(INTERVAL_S)

    # --- finding -------------------------------------------------------------------------------

    def _find(self, now_s: float) -> Fault | None:
        """Return the first fault whose pause is over."""
        if self._is_due(None, now_s):
            fault = self._find_in_server(now_s)
            if fault is not None:
                return fault
        if self._server.exit_code is not None:
            return None
        self._update_leaving()
        for pid, model in self._models.items():
            if self._is_due(model, now_s):
                what = self._fault_of(pid, model, now_s)
                if what and self._was_unloaded(pid, model):
                    self._adopt()
                    return None
                if what:
                    process = f" (pid {pid})" if pid > 0 else ""
                    return Fault(model, f"the process of model {model}{process} {what}", pid)
        return None

    def _find_in_server(self, now_s: float) -> Fault | None:
        server = self._server
        if server.exit_code is not None:
            return Fault(None, server.reason())
        if self._is_stuck(server.pid, now_s):
            return Fault(None, f"tritonserver (pid {server.pid}) was stopped")
        hang = self._server_watch.hang(server.pid)
        if hang:
            return Fault(None, hang)
        return self._find_left_over(now_s)

    def _find_left_over(self, now_s: float) -> Fault | None:
        """Return the fault that a replaced process has left behind, if it is time for a restart."""
        if not (self._restart_s or self._leaving):
            return None
        if self._num_in_flight():
            self._busy_s = now_s
        is_quiet = now_s > self._busy_s + QUIET_S
        if self._restart_s and (is_quiet or now_s > self._restart_s):
            return Fault(None, f"{self._num_lost} requests of an ended process hang", 0, True)
        if self._leaving and is_quiet and now_s > self._replaced_s + OTHERS_S:
            models = ", ".join(sorted(set(self._leaving.values())))
            return Fault(None, f"a process of {models} that was replaced does not end", 0, True)
        return None

    def _fault_of(self, pid: int, model: str, now_s: float) -> str:
        if not is_running(pid):
            return "ended"
        if self._is_stuck(pid, now_s):
            return "was stopped"
        pulse, still = self._pulses.get(model), self._still[pid]
        if self._server_watch.is_in_doubt:
            still.reset()
            if pulse is not None:
                pulse.reset()
        elif pulse is not None and pulse.silence_s() > MODEL_SILENCE_S:
            return f"did not answer for {MODEL_SILENCE_S:g} s"
        elif still.look(self._unanswered_s(model)):
            return f"{still.what} for {STILL_S:g} s"
        return ""

    def _unanswered_s(self, model: str) -> float:
        """Return how long a probe has waited for an idle process of the model, in seconds."""
        others = (self._still[pid] for pid in self._pids(model))
        if model not in self._pulses or any(still.is_at_work for still in others):
            return 0.0
        return self._pulses[model].unanswered_s()

    def _is_stuck(self, pid: int, now_s: float) -> bool:
        if not is_stopped(pid):
            self._stopped_s.pop(pid, None)
            return False
        return now_s - self._stopped_s.setdefault(pid, now_s) > STOPPED_S

    def _is_due(self, key: str | None, now_s: float) -> bool:
        pauses = self._pauses.get(key)
        return pauses is None or now_s >= pauses.due_s()

    def _num_in_flight(self) -> int:
        processes = (self._models | self._leaving).items()
        files = (self._server.runtime.in_flight(model, pid) for pid, model in processes)
        return sum(inflight.count(file) for file in files)

    # --- repairing -----------------------------------------------------------------------------

    def _repair(self, fault: Fault, found_s: float) -> None:
        pauses = self._pauses.setdefault(fault.model, _Pauses())
        self._spare.release()
        try:
            done = self._restart(fault) if fault.model is None else self._mend(fault)
            self.num_repairs += 1
            self._repairs.note(fault.model)
            seconds = time.monotonic() - found_s
            line = f"repair {self.num_repairs}, {seconds:.1f} s: {fault.what}; {done}"
        except (ServeError, OSError) as error:
            self._server.kill()  # the next round starts a new server
            line = f"could not repair: {fault.what}; {error}; trying again"
            pauses = self._pauses.setdefault(None, _Pauses())
        self._spare.reserve()
        pauses.note(found_s)
        self._watch_anew()
        self._report(line)  # last: its reader may rely on the new processes being watched

    def _report(self, line: str) -> None:
        with contextlib.suppress(OSError):  # no reader, or no disk space
            self._say(f"{time.strftime('%H:%M:%S')} {line}")

    def _mend(self, fault: Fault) -> str:
        """Replace a process of a model; return what was done."""
        assert fault.model is not None
        self._models.pop(fault.pid, None)
        if fault.pid > 0:
            kill([fault.pid])  # it may only be stopped
        lost = self._take_lost(fault.model)
        others = dict.fromkeys(self._pids(fault.model), fault.model)
        try:
            loaded = self._reload(fault.model)
        except ServeError as error:
            return f"{error}; {self._restart(fault)}"
        self._leaving |= others
        self._replaced_s = self._busy_s = time.monotonic()
        if not lost:
            return f"loaded {loaded} again"
        self._restart_soon(lost)
        return f"loaded {loaded} again, {lost} requests hang until the server is started again"

    def _restart_soon(self, num_lost: int) -> None:
        """Schedule a restart of the server, which ends `num_lost` hanging requests."""
        self._busy_s = time.monotonic()
        self._restart_s = self._busy_s + OTHERS_S
        self._num_lost += num_lost

    def _update_leaving(self) -> None:
        """Note the end of unloaded processes, and schedule a restart if they lost requests."""
        for pid, model in list(self._leaving.items()):
            if not is_running(pid):
                del self._leaving[pid]
                lost = self._take_lost(model)
                if lost:
                    self._restart_soon(lost)

    def _take_lost(self, model: str) -> int:
        """Return how many requests the model's dead processes had in flight; remove their files.

        Each request is counted once.
        """
        lost, start = 0, self._server.runtime.in_flight(model, 0).name.removesuffix("0")
        for file in self._server.runtime.directory.glob(f"{start}*"):
            pid = file.name.removeprefix(start)  # else the file of a model whose name begins so
            if pid.isdigit() and not is_running(int(pid)):
                lost += inflight.count(file)
                file.unlink(missing_ok=True)
        # On a full disk the new process needs the room.
        remove_dead(self._server.runtime.vitals(model, 0))
        return lost

    def _reload(self, model: str) -> str:
        """Unload and load a model; return what was loaded. Live processes finish their work."""
        self._loaded.look(is_due=True)
        ensembles = [name for name in self._ensembles_on(model) if name in self._loaded.models]
        self._server.control("unload", model, LOAD_S)
        for name in (model, *ensembles):
            self._server.control("load", name, LOAD_S)
        if self._server.has_open_control:  # its number of processes may have changed
            self._num_processes.pop(model, None)
        return ", ".join([model, *ensembles])

    def _ensembles_on(self, model: str) -> list[str]:
        step = re.compile(rf'\bmodel_name\s*:\s*"{re.escape(model)}"')
        files = sorted(self._server.repository.glob("*/config.pbtxt"))
        texts = {file.parent.name: file.read_text(errors="replace") for file in files}
        return [
            name
            for name, text in texts.items()
            if "ensemble_scheduling" in text and step.search(text)
        ]

    def _restart(self, fault: Fault) -> str:
        """Restart the server and return what was done. Raises ServeError."""
        server = self._server
        if fault.is_gentle:
            with contextlib.suppress(OSError):
                server.runtime.stopping.touch()
                time.sleep(ENDING_S)
        server.kill()
        self._restart_s, self._num_lost = 0.0, 0
        self._leaving.clear()
        server.runtime.remove_process_files()
        if server.has_open_control:
            server.models = sorted(self._loaded.models)
        server.start()
        self._wait_ready()
        return "started tritonserver again"

    def _watch_anew(self) -> None:
        """Find the processes after a repair, and measure silence from now on."""
        (self._adopt if self._server.has_open_control else self._see_processes)()
        self._stopped_s.clear()
        for probe in self._probes():
            probe.renew()

    def _see_processes(self) -> None:
        stubs = self._server.stubs()
        models = {pid: _INSTANCE_SUFFIX.sub("", stub) for pid, stub in stubs.items()}
        self._models = {pid: model for pid, model in models.items() if pid not in self._leaving}
        found = Counter(self._models.values())
        missing = (self._num_processes - found).elements()  # died since the last look
        self._models |= {-index: model for index, model in enumerate(missing, 1)}
        runtime = self._server.runtime
        self._still = {
            pid: Stillness(pid, runtime.vitals(model, pid)) for pid, model in self._models.items()
        }
        self._exits.watch([self._server.pid, *self._models])
        for model, pulse in self._pulses.items():
            pulse.pids = self._pids(model)

    def _was_unloaded(self, pid: int, model: str) -> bool:
        """Return whether a process has ended because a client unloaded, or replaced, its model."""
        if not self._server.has_open_control or is_running(pid):
            return False
        self._loaded.look(is_due=True)
        is_loaded = model in self._loaded.models
        return not is_loaded or self._count_processes()[model] >= self._num_processes[model]

    def _adopt(self) -> None:
        """Watch the processes of the models that are loaded now."""
        known, self._num_processes = self._num_processes, Counter()
        for model, number in self._count_processes().items():
            if model in self._loaded.models:  # some may be unloaded and not have ended yet
                most = num_instances(self._server.repository / model) or number
                self._num_processes[model] = known.get(model, min(number, most))
        self._see_processes()
        for model in self._pulses.keys() - self._num_processes.keys():
            self._pulses.pop(model).close()
        for model in self._num_processes.keys() - self._pulses.keys():
            self._pulses[model] = self._pulse(model)

    def _count_processes(self) -> Counter[str]:
        """Return how many processes each model has, without those that a repair has replaced."""
        stubs = self._server.stubs().items()
        return Counter(
            _INSTANCE_SUFFIX.sub("", stub) for pid, stub in stubs if pid not in self._leaving
        )

    def _pulse(self, model: str) -> Pulse:
        server = self._server
        contract = contract_of(server.repository, model)
        return Pulse(server.endpoints, model, self._pids(model), contract=contract)

    def _pids(self, model: str) -> list[int]:
        return [pid for pid, other in self._models.items() if other == model]

    def _reset_timers(self) -> None:
        self._stopped_s.clear()
        for still in self._still.values():
            still.reset()
        for probe in self._probes():
            probe.reset()

    def _probes(self) -> list[ServerWatch | Pulse]:
        return [self._server_watch, *self._pulses.values()]
