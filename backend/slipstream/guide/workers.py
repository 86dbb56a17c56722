"""Compile guides and fill masks in threads of their own; the engine takes what is ready.

Compiled guides are kept, the last used ones within bounds of count and bytes; so are the errors of
those that cannot be compiled, which then fail at once.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from slipstream_contract.guide import Guide

from slipstream.guide.interface import GuideCompiler, GuideError, MakeCompiler, Template

_log = logging.getLogger(__name__)

MAX_COMPILE_S = 2.0
MAX_TEMPLATES = 1024
MAX_TEMPLATE_BYTES = 256 << 20
_NUM_COMPILERS = 2
_ERROR_BYTES = 1024


class Templates:
    """The guides used last, compiled, or why they are not."""

    def __init__(self, most: int = MAX_TEMPLATES, most_bytes: int = MAX_TEMPLATE_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Guide, tuple[Template | GuideError, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, guide: Guide) -> Template | GuideError | None:
        """Return what is kept of a guide."""
        found = self._kept.get(guide)
        if found is None:
            return None
        self._kept.move_to_end(guide)
        return found[0]

    def put(self, guide: Guide, made: Template | GuideError) -> None:
        """Keep the result of a guide; drop those used longest ago beyond the bounds."""
        own = made.num_bytes if isinstance(made, Template) else _ERROR_BYTES
        size = own + len(guide.text)
        before = self._kept.pop(guide, None)
        self.num_bytes += size - (0 if before is None else before[1])
        self._kept[guide] = made, size
        while len(self._kept) > self._most or self.num_bytes > self._most_bytes:
            _, (_, size) = self._kept.popitem(last=False)
            self.num_bytes -= size


@dataclass(slots=True, eq=False)
class _Compile:
    """A guide on its way; `waiting` are the calls that report it."""

    guide: Guide
    waiting: list[Callable[[Template | GuideError], None]] = field(default_factory=list)
    started_s: float = 0.0  # 0: not yet
    is_over: bool = False


class Workers:
    """Threads beside the engine's. All methods are called by the engine's thread alone."""

    def __init__(
        self, make: MakeCompiler, num_fillers: int, max_compile_s: float = MAX_COMPILE_S
    ) -> None:
        """Start to set up the tokenizer; requests may come before that is done."""
        self.num_jobs = 0  # that have not been reported
        self.templates = Templates()
        self._max_compile_s = max_compile_s
        self._make = make
        self._compiler: GuideCompiler | None = None
        self._failure: GuideError | None = None
        self._compiles: dict[Guide, _Compile] = {}
        self._asked: SimpleQueue[_Compile] = SimpleQueue()
        self._fills: SimpleQueue[tuple[Callable[[], None], Callable[[str], None]]] = SimpleQueue()
        self._done: deque[tuple[Any, ...]] = deque()
        self._news = threading.Event()
        self._start("guide-set-up", self._set_up)
        self._num_fillers = num_fillers
        self._has_fillers = False

    @staticmethod
    def _start(name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    def _set_up(self) -> None:
        try:
            self._compiler = self._make()
        except GuideError as error:
            self._failure = error
        except Exception as error:
            _log.exception("no guided output")
            self._failure = GuideError(f"the tokenizer cannot be used: {type(error).__name__}")
        for number in range(_NUM_COMPILERS):
            self._start(f"guide-compiler-{number}", self._compile_all)

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids by which a text of a grammar ends."""
        assert self._compiler is not None, "a template without its compiler"
        return self._compiler.end_ids

    def compile(self, guide: Guide, report: Callable[[Template | GuideError], None]) -> None:
        """Report a compiled guide, or why there is none: now if it is known, else by `poll`."""
        known = self.templates.get(guide)
        if known is not None:
            report(known)
            return
        job = self._compiles.get(guide)
        if job is None:
            job = self._compiles[guide] = _Compile(guide)
            self._asked.put(job)
        job.waiting.append(report)
        self.num_jobs += 1

    def fill(self, run: Callable[[], None], report: Callable[[str], None]) -> None:
        """Run in a thread what makes a mask; `poll` reports its error, empty if there is none."""
        if not self._has_fillers:
            self._has_fillers = True
            for number in range(self._num_fillers):
                self._start(f"guide-masks-{number}", self._fill_all)
        self.num_jobs += 1
        self._fills.put((run, report))

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to poll, at most so long."""
        if not self._done:
            self._news.wait(timeout_s)

    def poll(self) -> None:
        """Report what is done, and guides that take too long."""
        self._news.clear()
        while self._done:
            report, *arguments = self._done.popleft()
            report(*arguments)
        if not self._compiles:
            return
        now = time.monotonic()
        for job in [job for job in self._compiles.values() if job.started_s]:
            if now - job.started_s > self._max_compile_s:
                limit = f"it took more than {self._max_compile_s:g} s to compile"
                self._compiled(job, GuideError(limit))

    # --- reports, in the engine's thread -------------------------------------------------------

    def _compiled(self, job: _Compile, made: Template | GuideError) -> None:
        if job.is_over:
            return  # it came after its time
        job.is_over = True
        del self._compiles[job.guide]
        if self._failure is None:
            self.templates.put(job.guide, made)
        self.num_jobs -= len(job.waiting)
        for report in job.waiting:
            report(made)

    def _filled(self, report: Callable[[str], None], error: str) -> None:
        self.num_jobs -= 1
        report(error)

    # --- threads -------------------------------------------------------------------------------

    def _finish(self, *what: Any) -> None:
        self._done.append(what)
        self._news.set()

    def _compile_all(self) -> None:
        while True:
            job = self._asked.get()
            job.started_s = time.monotonic()
            self._finish(self._compiled, job, self._compile(job.guide))

    def _compile(self, guide: Guide) -> Template | GuideError:
        if self._compiler is None:
            assert self._failure is not None
            return self._failure
        try:
            return self._compiler.compile(guide)
        except GuideError as error:
            return error
        except Exception as error:  # of a library, about a text from outside
            _log.warning("a guide of %d characters", len(guide.text), exc_info=True)
            return GuideError(f"it cannot be compiled: {type(error).__name__}")

    def _fill_all(self) -> None:
        while True:
            run, report = self._fills.get()
            error = ""
            try:
                run()
            except GuideError as caught:
                error = str(caught)
            except Exception as caught:
                _log.exception("a mask")
                error = f"its mask cannot be made: {type(caught).__name__}"
            self._finish(self._filled, report, error)
