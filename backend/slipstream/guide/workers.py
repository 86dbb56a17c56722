"""Compile guides and fill masks beside the engine's thread; the engine takes what is ready.

Most masks take microseconds: those of guides that have shown it are made together, at once, by the
library's threads. Others are made one by one in threads of their own, so that none waits for a slow
one.

Compiled guides are kept, the last used ones within bounds of count and bytes; so are the errors of
those that cannot be compiled, which then fail at once.
"""

import ctypes
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from slipstream_contract.contained import contained
from slipstream_contract.guide import Guide

from slipstream.guide.interface import (
    GuideCompiler,
    GuideError,
    MakeCompiler,
    Matcher,
    Pace,
    Template,
)

_log = logging.getLogger(__name__)

MAX_COMPILE_S = 2.0  # of a processor: a full or halted machine refuses nobody's guide
MAX_TEMPLATES = 1024
MAX_TEMPLATE_BYTES = 256 << 20
_NUM_COMPILERS = 2
_NUM_FILLERS = 8
_ERROR_BYTES = 1024
_FAST_S = 0.0005  # a mask alone, or what each adds to those made together


class Templates:
    """The guides used last, compiled, or why they are not."""

    def __init__(self) -> None:
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
        while len(self._kept) > MAX_TEMPLATES or self.num_bytes > MAX_TEMPLATE_BYTES:
            _, (_, size) = self._kept.popitem(last=False)
            self.num_bytes -= size


@dataclass(slots=True, eq=False)
class _Compile:
    """A guide on its way; `waiting` are the calls that report it."""

    guide: Guide
    waiting: list[Callable[[Template | GuideError], None]] = field(default_factory=list)
    begun: tuple[int, float] | None = None  # its thread's processor clock, and what that said
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Fill:
    """A mask to be made."""

    matcher: Matcher
    pace: Pace
    take: Callable[[bytes], None]  # in whatever thread made it
    fail: Callable[[Exception], None]  # in the engine's thread: why there is none


class Workers:
    """Threads beside the engine's. All methods are called by the engine's thread alone."""

    def __init__(self, make: MakeCompiler) -> None:
        """Start to set up the tokenizer; requests may come before that is done."""
        self.num_jobs = 0  # that have not been reported
        self.templates = Templates()
        self._make = make
        self._compiler: GuideCompiler | None = None
        self._failure: GuideError | None = None
        self._compiles: dict[Guide, _Compile] = {}
        self._asked: SimpleQueue[_Compile] = SimpleQueue()
        self._asked_fills: list[Fill] = []
        self._fills: SimpleQueue[Fill] = SimpleQueue()
        self._done: deque[tuple[Any, ...]] = deque()
        self._news = threading.Event()
        self._start("guide-set-up", self._set_up)
        self._has_fillers = False
        self._buffer = bytearray()  # of masks made together

    @staticmethod
    def _start(name: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    def _set_up(self) -> None:
        try:
            with contained():
                self._compiler = self._make()
        except GuideError as error:
            self._failure = error
        except Exception as error:
            _log.exception("the tokenizer of guides could not be set up: guided output is refused")
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

    def fill(self, fill: Fill) -> None:
        """Ask for a mask, which is made from the next `flush` on."""
        self._asked_fills.append(fill)

    def flush(self) -> None:
        """Make masks asked for, or start to."""
        asked, self._asked_fills = self._asked_fills, []
        fast: list[Fill] = []
        others: list[Fill] = []
        for fill in asked:
            (fast if fill.pace.is_fast else others).append(fill)
        if others and not self._has_fillers:
            self._has_fillers = True
            for number in range(_NUM_FILLERS):
                self._start(f"guide-masks-{number}", self._fill_all)
        self.num_jobs += len(others)
        for fill in others:
            self._fills.put(fill)
        if fast:
            self._fill_together(fast)

    def _fill_together(self, fills: list[Fill]) -> None:
        """Make masks of fast guides; a guide whose masks were among slow ones is fast no more."""
        compiler = self._compiler
        assert compiler is not None, "a matcher without its compiler"
        size = compiler.num_mask_bytes
        if len(self._buffer) < len(fills) * size:
            self._buffer = bytearray(len(fills) * size)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._buffer))
        start = time.perf_counter()
        try:
            with contained():
                errors = compiler.fill_all([fill.matcher for fill in fills], address)
        except Exception:  # of one of them: the others are made again
            _log.exception("a mask among %d could not be made", len(fills))
            for fill in fills:
                if (failure := self._fill_alone(fill)) is not None:
                    fill.fail(failure)
            return
        is_slow = time.perf_counter() - start > _FAST_S * (4 + len(fills) / 8)
        for number, (fill, error) in enumerate(zip(fills, errors, strict=True)):
            if is_slow:
                fill.pace.note(False)
            mask = bytes(self._buffer[number * size : (number + 1) * size])
            if (failure := _give(fill, mask, error)) is not None:
                fill.fail(failure)

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
        for job in list(self._compiles.values()):
            if _took_s(job) > MAX_COMPILE_S:
                limit = f"it took more than {MAX_COMPILE_S:g} s to compile"
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

    def _filled(self, fill: Fill, error: Exception | None) -> None:
        self.num_jobs -= 1
        if error is not None:
            fill.fail(error)

    # --- threads -------------------------------------------------------------------------------

    def _finish(self, *what: Any) -> None:
        self._done.append(what)
        self._news.set()

    def _compile_all(self) -> None:
        while True:
            job = self._asked.get()
            job.begun = time.pthread_getcpuclockid(threading.get_ident()), time.thread_time()
            self._finish(self._compiled, job, self._compile(job.guide))

    def _compile(self, guide: Guide) -> Template | GuideError:
        if self._compiler is None:
            assert self._failure is not None
            return self._failure
        try:
            with contained():
                return self._compiler.compile(guide)
        except GuideError as error:
            return error
        except Exception as error:  # of a library, about a text from outside
            size = len(guide.text)
            _log.warning("a guide of %d characters could not be compiled", size, exc_info=True)
            return GuideError(f"it cannot be compiled: {type(error).__name__}")

    def _fill_all(self) -> None:
        while True:
            fill = self._fills.get()
            self._finish(self._filled, fill, self._fill_alone(fill))

    def _fill_alone(self, fill: Fill) -> Exception | None:
        """Make a mask; return why there is none."""
        assert self._compiler is not None, "a matcher without its compiler"
        buffer = bytearray(self._compiler.num_mask_bytes)
        start = time.perf_counter()
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))
        try:
            with contained():
                (error,) = self._compiler.fill_all([fill.matcher], address)
        except Exception as caught:
            _log.exception("a mask could not be made")
            return caught
        fill.pace.note(time.perf_counter() - start < _FAST_S)
        return _give(fill, bytes(buffer), error)


def _took_s(job: _Compile) -> float:
    """Return the processor time that a guide has taken so far, in seconds."""
    if job.begun is None:
        return 0.0
    clock, begun_s = job.begun
    return time.clock_gettime(clock) - begun_s


def _give(fill: Fill, mask: bytes, error: str) -> Exception | None:
    """Hand on a mask that was made without an error; return why it cannot be used."""
    if error:
        return GuideError(error)
    try:
        fill.take(mask)
    except Exception as caught:
        _log.exception("a mask could not be taken")
        return caught
    return None
