"""A source of tokens in the engine's place: one token a step and sequence, a step every so often.

It is the engine's own loop, and so its wire, around a `PacedEngine` that computes nothing: what is
then late at the client was made late by the Triton side. A server starts it like any engine, from
`SLIPSTREAM_PYTHON`: `write_python` makes a script that takes the place of the interpreter there.

The tokens of a request are `expected_bytes` of its seed, a letter each, so that a client can count
tokens and check their order in the text alone. Each step adds a line to the journal: when its
tokens were made (ns since the epoch), then `seed:ns` of every request whose first token it made and
when it was submitted.
"""

import argparse
import os
import shlex
import signal
import string
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
from slipstream import __version__, launch, wire
from slipstream.core.prefix import PrefixIndex
from slipstream.engine.adapters import AdapterStore
from slipstream.engine.loop import EngineLoop
from slipstream.engine.process import main as run_process
from slipstream.engine.settings import read_config
from slipstream.replicas.process import make as make_router
from slipstream_contract.vocab import TokenBytes
from slipstream_runtime.admission import Load
from slipstream_runtime.waking import wake_at_once

LETTERS = (string.ascii_letters + string.digits).encode()
MODEL = "paced"
_CONTEXT = 1 << 30
_NO_BOUND = 1 << 48  # those of several add up
_ROUTER = "slipstream.replicas.process"
_MODULES = ("slipstream.launch", "slipstream.engine.process", _ROUTER)


def expected_bytes(seed: int, count: int) -> bytes:
    """The first `count` tokens of a request, a byte each; neighbouring seeds differ everywhere."""
    start = seed * 7 % len(LETTERS)
    turn = LETTERS[start:] + LETTERS[:start]
    return (turn * (count // len(turn) + 1))[:count]


@dataclass
class _Sequence:
    """One sequence of a request that runs."""

    request: int
    index: int
    seed: int
    token_ids: list[int]  # a turn through all letters
    num_input_tokens: int
    max_tokens: int
    perf: wire.Perf
    submitted_ns: int  # time.time_ns()
    num_tokens: int = 0


class PacedEngine:
    """What `EngineLoop` needs of an engine. Never full, never tired, never wrong."""

    fatal: str | None = None

    def __init__(self, letter_ids: list[int], step_s: float, journal: Path) -> None:
        """`letter_ids` are the token ids of `LETTERS`."""
        assert len(letter_ids) == len(LETTERS)
        self.num_steps = 0
        self.adapters = AdapterStore()
        self.prefixes = PrefixIndex(1)  # of no block
        self._letter_ids = letter_ids
        self._step_s = step_s
        self._journal = journal.open("ab", buffering=0)
        self._sequences: dict[bytes, dict[int, list[_Sequence]]] = {}
        self._begun: deque[str] = deque()
        self._due_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs."""
        return any(self._sequences.values())

    def submit(self, bridge: bytes, message: wire.Submit) -> None:
        """Every sequence of the request runs from the next step on."""
        now_s = time.monotonic()
        if not self.has_work:
            self._due_s = now_s + self._step_s
        sampling = message.sampling
        seed = message.request if sampling.seed is None else sampling.seed
        start = seed * 7 % len(LETTERS)
        turn = self._letter_ids[start:] + self._letter_ids[:start]
        perf = wire.Perf(message.arrival_ns, time.monotonic_ns(), 0, 0, 0, 0, 0)
        submitted_ns = time.time_ns()
        self._sequences.setdefault(bridge, {})[message.request] = [
            _Sequence(
                message.request,
                index,
                seed,
                turn,
                len(message.token_ids),
                sampling.max_tokens,
                perf,
                submitted_ns,
            )
            for index in range(sampling.n)
        ]

    def cancel(self, bridge: bytes, request: int, *why: object) -> bool:
        """End a request with the next step. False if there is none of that number."""
        sequences = self._sequences.get(bridge, {}).get(request, [])
        for sequence in sequences:
            sequence.max_tokens = 0
        return bool(sequences)

    def cancel_bridge(self, bridge: bytes) -> int:
        """Forget the requests of a bridge; how many there were."""
        return len(self._sequences.pop(bridge, {}))

    def has_request(self, bridge: bytes, request: int) -> bool:
        """Whether that request of a bridge runs."""
        return request in self._sequences.get(bridge, {})

    def requests_of(self, bridge: bytes) -> list[int]:
        """Numbers of the requests of a bridge that run."""
        return list(self._sequences.get(bridge, {}))

    def take_rejected(self) -> list[tuple[bytes, wire.Rejected]]:
        """Nothing is refused."""
        return []

    def slack_ns(self) -> float:
        """Have no step wait for requests: it waits for its time."""
        return 0.0

    def load(self) -> Load:
        """Nobody waits, and everybody may."""
        num_running = sum(map(len, self._sequences.values()))
        return Load(0, 0, num_running, _NO_BOUND, _NO_BOUND)

    def step(self) -> dict[bytes, list[wire.Tokens]]:
        """Wait until the step is due; a token for everybody. Steps that were missed are not made
        up for: a source that cannot keep its pace is slower, never ahead.
        """
        now_s = time.monotonic()
        if now_s < self._due_s:
            time.sleep(self._due_s - now_s)
        self._due_s = max(self._due_s + self._step_s, now_s)
        self.num_steps += 1
        made_ns = time.time_ns()
        outputs = {
            bridge: [
                self._advance(sequence, made_ns)
                for sequences in list(requests.values())
                for sequence in sequences
            ]
            for bridge, requests in self._sequences.items()
            if requests
        }
        for bridge, tokens in outputs.items():
            self._forget(bridge, tokens)
        words = [str(made_ns), *self._begun]
        self._begun.clear()
        self._journal.write((" ".join(words) + "\n").encode())
        return outputs

    def status(self, number: int, bridges: Iterable[str]) -> wire.Status:
        """The answer to a `Ping`."""
        running = sum(len(requests) for requests in self._sequences.values())
        return wire.Status(
            number, MODEL, os.getpid(), 1, 1, running, 0, 0.0, self.num_steps, 0, list(bridges)
        )

    def figures(self, num_dropped: int = 0) -> wire.Figures:
        """No metrics."""
        return wire.Figures({}, {}, {}, {})

    def _advance(self, sequence: _Sequence, made_ns: int) -> wire.Tokens:
        if sequence.max_tokens == 0:
            return self._last(sequence, [], wire.FinishReason.CANCELLED, made_ns)
        if sequence.num_tokens == 0 and sequence.index == 0:
            self._begun.append(f"{sequence.seed}:{sequence.submitted_ns}")
        token_id = sequence.token_ids[sequence.num_tokens % len(LETTERS)]
        sequence.num_tokens += 1
        if sequence.num_tokens == sequence.max_tokens:
            return self._last(sequence, [token_id], wire.FinishReason.LENGTH, made_ns)
        start = sequence.num_tokens - 1
        return wire.Tokens(sequence.request, sequence.index, [token_id], [], start=start)

    def _last(
        self, sequence: _Sequence, token_ids: list[int], reason: wire.FinishReason, now_ns: int
    ) -> wire.Tokens:
        perf = msgspec.structs.replace(sequence.perf, last_token_ns=time.monotonic_ns())
        finished = wire.Finished(reason, sequence.num_input_tokens, sequence.num_tokens, perf)
        told = (sequence.request, sequence.index, token_ids, [])
        return wire.Tokens(*told, finished=finished, start=sequence.num_tokens - len(token_ids))

    def _forget(self, bridge: bytes, tokens: list[wire.Tokens]) -> None:
        requests = self._sequences[bridge]
        for entry in tokens:
            if entry.finished is not None:
                requests.pop(entry.request, None)  # its sequences all end in the same step


def load(config: Path, address: str, step_s: float, journal: Path) -> EngineLoop:
    """The loop, listening. Raises ValueError for a tokenizer that has no token for some letter."""
    vocab = TokenBytes.load(Path(read_config(config).checkpoint))
    missing = [letter for letter in LETTERS if letter not in vocab.single_bytes]
    if missing:
        raise ValueError(f"the tokenizer has no token for {chr(missing[0])!r} alone")
    engine = PacedEngine([vocab.single_bytes[letter] for letter in LETTERS], step_s, journal)
    welcome = wire.Welcome(wire.PROTOCOL, __version__, MODEL, os.getpid(), vocab.size, _CONTEXT)
    return EngineLoop(engine, welcome, address)


def write_python(path: Path, step_s: float, journal: Path) -> None:
    """An executable at `path` which, as `SLIPSTREAM_PYTHON`, runs this source as the engine."""
    words = [sys.executable, "-P", __file__, f"--step={step_s}", f"--journal={journal}"]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} --python="$0" -- "$@"\n')
    path.chmod(0o755)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def run(options: argparse.Namespace, module: str, arguments: list[str]) -> int:
    """In place of `python -m module arguments`: the usual supervisor or router, or the source."""
    if module == "slipstream.launch":
        sys.executable = options.python  # the supervisor starts the engine from it
        return launch.main(arguments)
    if module == _ROUTER:  # as it is; its engines are this source
        return run_process(arguments, make=make_router)
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--memory-lock", type=Path)  # it takes none
    engine = parser.parse_args(arguments)
    wake_at_once()  # as the engine does
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    try:
        loop = load(engine.config, engine.socket, options.step, options.journal)
    except (OSError, ValueError) as error:
        print(f"slipstream engine: {error}", file=sys.stderr)
        return launch.CANNOT_START
    return loop.run()


def main() -> int:
    """Command line: own options, `--`, and what an interpreter would be given."""
    border = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--step", type=float, required=True, help="seconds")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--python", required=True, help="how this was called")
    options = parser.parse_args(sys.argv[1:border])
    words = sys.argv[border + 1 :]
    if words[:2] != ["-P", "-m"] or words[2:3] == [] or words[2] not in _MODULES:
        raise SystemExit(f"only python -P -m {{{','.join(_MODULES)}}} is known, not {words[:3]}")
    return run(options, words[2], words[3:])


if __name__ == "__main__":
    sys.exit(main())
