"""The engine itself, but it keeps a journal, and may be slowed: what passes too fast can be seen.

A server starts it like any engine, from `SLIPSTREAM_PYTHON`: `write_python` makes a script that
takes the place of the interpreter there. A request is known by its seed; one without is not noted.
The journal has a JSON object a line: `what` is

    submit    a request came in
    cancel    it was told to end: `state`, `held` (blocks), `free` (blocks free or fenced, after)
    step      a step was told: `free`, `fenced`, `total`, `states`, of each request after it, and
              `left`, of each request that was told to end: blocks that are held for it still

and all have `t` (ns since the epoch) and `step` (steps told before).
"""

import argparse
import functools
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.core.sequence import Request, SequenceStatus
from slipstream.engine import process
from slipstream.engine.reading import ReadingEngine
from slipstream.wire import Submit, Tokens

_SCRIPT = """#!/bin/sh
case "$3" in
slipstream.launch)  # the supervisor, which is to start the engine by this script again
    shift 3
    exec {python} -P -c "import sys; sys.executable = '$0'
from slipstream import launch
sys.exit(launch.main(sys.argv[1:]))" "$@";;
*)
    shift 3
    exec {python} -P {command} -- "$@";;
esac
"""


def write_python(path: Path, journal: Path, step_s: float = 0.0) -> None:
    """An executable at `path` for `SLIPSTREAM_PYTHON`; `step_s` is added to every step."""
    order_pace(journal, step_s)
    options = [f"--journal={journal}"]
    command = shlex.join([__file__, *options])
    path.write_text(_SCRIPT.format(python=shlex.quote(sys.executable), command=command))
    path.chmod(0o755)


def order_pace(journal: Path, step_s: float) -> None:
    """From the next step on, add so many seconds to every step of the engine of this journal."""
    draft = journal.with_suffix(".draft")
    draft.write_text(str(step_s))
    draft.rename(_pace_of(journal))


def _pace_of(journal: Path) -> Path:
    return journal.with_suffix(".pace")


def state_of(request: Request) -> str:
    """`waiting`, `preempted`, `prefill`, `decode`, `last` (its last token is due) or `finished`."""
    sequence = request.sequences[0]
    if sequence.status is SequenceStatus.FINISHED:
        return "finished"
    if sequence.status is SequenceStatus.WAITING:
        return "preempted" if sequence.num_preemptions else "waiting"
    if sequence.num_computed < sequence.num_prompt:
        return "prefill"
    return "last" if sequence.num_tokens + 1 >= sequence.num_final else "decode"


class NotingEngine(ReadingEngine):
    """See the module."""

    def __init__(self, journal: int, pace: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._journal = journal
        self._pace = pace
        self._left: dict[str, set[int]] = {}  # seed -> blocks that it had when it was told to end

    def submit(self, bridge: bytes, message: Submit) -> None:
        """Note and do `Engine.submit`."""
        super().submit(bridge, message)
        self._note("submit", message.sampling.seed)

    def cancel(self, bridge: bytes, request: int, *why: Any) -> bool:
        """Note and do `Engine.cancel`."""
        found = self._requests.get((bridge, request))
        if found is None:
            return super().cancel(bridge, request, *why)
        held = [block for s in found.sequences for table in s.cache.tables for block in table]
        facts = {"state": state_of(found), "held": len(held)}
        is_known = super().cancel(bridge, request, *why)
        self._left[str(found.sampling.seed)] = set(held)
        self._note("cancel", found.sampling.seed, **facts, free=self.status().kv_blocks_free)
        return is_known

    def step(self) -> dict[bytes, list[Tokens]]:
        """Do `Engine.step`, delayed."""
        time.sleep(float(self._pace.read_text()))
        outputs = super().step()
        cache = self._scheduler.cache
        self._note(
            "step",
            0,
            free=cache.num_free,
            fenced=cache.num_fenced,
            total=cache.num_blocks,
            states={str(r.sampling.seed): state_of(r) for r in self._requests.values()},
            left=self._take_left(),
        )
        return outputs

    def _take_left(self) -> dict[str, int]:
        """Blocks in use or fenced that are nobody else's; told once more when there are none."""
        blocks = self._scheduler.cache._blocks
        used = {
            block
            for request in self._requests.values()
            for sequence in request.sequences
            for table in sequence.cache.tables
            for block in table
        }
        for seed, held in self._left.items():
            self._left[seed] = {block for block in held - used if blocks.is_busy(block)}
        left = {seed: len(held) for seed, held in self._left.items()}
        self._left = {seed: held for seed, held in self._left.items() if held}
        return left

    def _note(self, what: str, seed: int | None, **facts: object) -> None:
        if seed is None:
            return
        about = {"t": time.time_ns(), "step": self.num_steps, "what": what, "seed": seed}
        os.write(self._journal, json.dumps(about | facts).encode() + b"\n")


class Journal:
    """Reads what an engine notes, as it grows."""

    def __init__(self, path: Path) -> None:
        self.entries: list[dict[str, Any]] = []
        path.touch()
        self._file = path.open("rb")
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """The entries since the last time; they are added to `entries` too."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            self.entries.append(json.loads(line))
            yield self.entries[-1]

    def of(self, what: str) -> dict[int, dict[str, Any]]:
        """The last entry of that kind of each seed."""
        for _ in self.read():
            pass
        return {entry["seed"]: entry for entry in self.entries if entry["what"] == what}


def main() -> int:
    """Own options, `--`, and the engine's arguments."""
    border = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--journal", type=Path, required=True)
    options = parser.parse_args(sys.argv[1:border])
    journal = os.open(options.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    pace = _pace_of(options.journal)
    process.ReadingEngine = functools.partial(NotingEngine, journal, pace)  # type: ignore[misc, assignment]
    return process.main(sys.argv[border + 1 :])


if __name__ == "__main__":
    sys.exit(main())
