"""Faults for an engine that runs: a test leaves an order in a folder, the engine carries it out.

`write_python` makes a script which, as `SLIPSTREAM_PYTHON`, runs supervisor and engine as they are,
but for a look into that folder before each turn of the loop. The name of an order's file is one of
`FAULTS`, its text holds keyword arguments as JSON; the file is gone once the fault is planted. A
restarted engine begins without faults. The victim of a fault is whoever samples with seed `VICTIM`.
"""

import json
import runpy
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

VICTIM = 66_600  # a seed
_HOUR_NS = 3_600_000_000_000


def write_python(path: Path, orders: Path) -> None:
    """An executable at `path` that looks for orders in the folder `orders`."""
    words = [sys.executable, "-P", __file__, str(orders)]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$0" "$@"\n')
    path.chmod(0o755)


def plant(orders: Path, fault: str, timeout_s: float = 30.0, **arguments: object) -> None:
    """Order a fault and wait until it is planted."""
    assert fault in FAULTS, fault
    draft = orders / f".{fault}"
    draft.write_text(json.dumps(arguments))
    order = draft.rename(orders / fault)
    begin = time.monotonic()
    while order.exists():
        assert time.monotonic() - begin < timeout_s, f"{fault} was not planted"
        time.sleep(0.01)


# --- in the engine's process ---------------------------------------------------------------------


class AcceleratorError(RuntimeError):
    """By the name that torch gives to a CUDA error that stays."""


def _launching(loop: Any, check: Callable[[Any], None]) -> None:
    """Let `check` see, or stop, every batch before it is launched."""
    runner = loop._engine._runner
    launch = type(runner).launch.__get__(runner)

    def planted(batch: Any) -> Any:
        check(batch)
        return launch(batch)

    runner.launch = planted


def heal(loop: Any) -> None:
    """Steps are launched as ever."""
    loop._engine._runner.__dict__.pop("launch", None)


def fail_victim(loop: Any) -> None:
    """Every step with the victim raises."""

    def check(batch: Any) -> None:
        if any(row.seed == VICTIM for row in batch.rows):
            raise ValueError("planted")

    _launching(loop, check)


def fail_once(loop: Any) -> None:
    """The next step raises."""

    def check(batch: Any) -> None:
        heal(loop)
        raise ValueError("planted")

    _launching(loop, check)


def short_memory(loop: Any, max_tokens: int) -> None:
    """Steps of more tokens run out of memory; those of the victim always do."""
    import torch

    def check(batch: Any) -> None:
        if batch.num_tokens > max_tokens or any(row.seed == VICTIM for row in batch.rows):
            raise torch.OutOfMemoryError("planted: out of memory")

    _launching(loop, check)


def sticky(loop: Any) -> None:
    """From the next step on, all raise as a broken CUDA context does."""

    def check(batch: Any) -> None:
        raise AcceleratorError("planted: an illegal memory access was encountered")

    _launching(loop, check)


def illegal_address(loop: Any) -> None:
    """The next step writes through a pointer to nowhere, on the GPU: its context is lost."""
    import cupy

    source = 'extern "C" __global__ void stray(int* to) { to[threadIdx.x] = 1; }'
    stray = cupy.RawKernel(source, "stray")

    def check(batch: Any) -> None:
        heal(loop)
        stray((1,), (32,), (cupy.uint64(0x10),))

    _launching(loop, check)


def fill_memory(loop: Any) -> None:
    """Take what the device has left, and keep it."""
    import torch

    loop.hoard = []
    size = torch.cuda.mem_get_info()[0]
    while size > 1 << 20:
        try:
            loop.hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2


def nan(loop: Any, number: int) -> None:
    """NaN in all that the cache holds of the victim when it samples output `number`."""
    import torch

    runner = loop._engine._runner

    @torch.inference_mode()
    def check(batch: Any) -> None:
        for row in batch.rows:
            if row.seed == VICTIM and row.num_outputs == number:
                for cache in runner._caches:
                    for table in row.tables:
                        cache[table] = float("nan")

    _launching(loop, check)


def stall(loop: Any, seconds: float) -> None:
    """The next step takes so long."""

    def check(batch: Any) -> None:
        heal(loop)
        time.sleep(seconds)

    _launching(loop, check)


def pace(loop: Any, seconds: float) -> None:
    """Every step takes so much longer: requests last long enough to meet a fault."""
    _launching(loop, lambda batch: time.sleep(seconds))


def turn_clock(loop: Any, hours: int) -> None:
    """The wall clock jumps, for all code of ours in this process."""
    real, real_ns = time.time, time.time_ns
    moved: dict[object, object] = {
        real: lambda: real() + 3600.0 * hours,
        real_ns: lambda: real_ns() + _HOUR_NS * hours,
    }
    for name, module in list(sys.modules.items()):
        if name == "time" or name.startswith("slipstream"):
            for attribute, value in list(vars(module).items()):
                if value is real or value is real_ns:
                    setattr(module, attribute, moved[value])


def lose_block(loop: Any) -> None:
    """The next block to be freed is lost."""
    blocks = loop._engine._scheduler.cache._blocks
    free = type(blocks).free.__get__(blocks)

    def planted(block_ids: Iterable[int]) -> None:
        found = list(block_ids)
        if found:
            del blocks.free
            free(found[1:])

    blocks.free = planted


def free_early(loop: Any) -> None:
    """The victim's first block is handed out once more, while it is in use."""

    def check(batch: Any) -> None:
        for row in batch.rows:
            if row.seed == VICTIM:
                heal(loop)
                loop._engine._scheduler.cache._blocks._empty.append(row.tables[0][0])
                return

    _launching(loop, check)


def cross_talk(loop: Any) -> None:
    """Two sequences are told each other's new tokens, once."""
    engine = loop._engine
    step = type(engine).step.__get__(engine)

    def planted() -> Any:
        import msgspec

        outputs = step()
        for tokens in outputs.values():
            told = [i for i, each in enumerate(tokens) if each.token_ids and not each.finished]
            pairs = [
                (i, j) for i in told for j in told if tokens[i].token_ids < tokens[j].token_ids
            ]
            if pairs:
                del engine.step
                one, two = (tokens[i] for i in pairs[0])
                tokens[pairs[0][0]] = msgspec.structs.replace(one, token_ids=two.token_ids)
                tokens[pairs[0][1]] = msgspec.structs.replace(two, token_ids=one.token_ids)
                break
        return outputs

    engine.step = planted


def spoil_frames(loop: Any, every: int, kind: str, to_engine: bool) -> None:
    """Of the frames one way, every so-manyth is truncated, repeated, or has a stranger before it.

    `kind` is "truncated", "repeated" or "unknown".
    """
    socket, counter = loop._socket, [0]
    strangers = [b"", b"\x00", b"\x92\xa7Unknown\x01", b"\xc1" * 40, b"\x93\xa6Cancel"]

    def spoiled(frame: bytes) -> list[bytes]:
        counter[0] += 1
        if counter[0] % every:
            return [frame]
        if kind == "truncated":
            return [frame[: len(frame) // 2]]
        if kind == "repeated":
            return [frame, frame]
        return [strangers[counter[0] // every % len(strangers)], frame]

    class Spoiler:
        """The socket, but for the frames."""

        def __init__(self) -> None:
            self.plain = socket
            self.received: deque[list[bytes]] = deque()

        def __getattr__(self, name: str) -> Any:
            return getattr(socket, name)

        def recv_multipart(self, flags: int = 0) -> list[bytes]:
            if not self.received:
                who, *frames = socket.recv_multipart(flags)
                self.received += [[who, f] for f in (spoiled(frames[0]) if to_engine else frames)]
            return self.received.popleft()

        def send_multipart(self, parts: list[bytes], flags: int = 0) -> None:
            who, frame = parts
            for each in [frame] if to_engine else spoiled(frame):
                socket.send_multipart([who, each], flags)

    loop._socket = Spoiler()


def mend_frames(loop: Any) -> None:
    """The end of `spoil_frames`."""
    loop._socket = loop._socket.plain


FAULTS: dict[str, Callable[..., None]] = {
    fault.__name__: fault
    for fault in (
        *(heal, fail_victim, fail_once, short_memory, sticky, illegal_address, fill_memory, nan),
        *(stall, pace, turn_clock, lose_block, free_early, cross_talk, spoil_frames, mend_frames),
    )
}


def _look_for_orders(orders: Path) -> None:
    """Wrap the loop's turn."""
    from slipstream.engine import loop as module

    turn = module.EngineLoop.turn
    module._IDLE_MS = 50

    def planted(self: module.EngineLoop, idle_ms: int) -> None:
        for order in orders.iterdir():
            if order.name in FAULTS:
                FAULTS[order.name](self, **json.loads(order.read_text()))
                order.unlink()
        turn(self, idle_ms)

    module.EngineLoop.turn = planted  # type: ignore[method-assign]


def main() -> None:
    """Runs `python -P -m MODULE ARGUMENTS...`, given ORDERS and the interpreter's name first."""
    orders, called_as, *words = sys.argv[1:]
    assert words[:2] == ["-P", "-m"], words
    module, arguments = words[2], words[3:]
    sys.executable = called_as  # the supervisor starts the engine with it
    sys.argv = [module, *arguments]
    if module == "slipstream.launch":
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    assert module == "slipstream.engine.loop", module
    _look_for_orders(Path(orders))
    from slipstream.engine import loop

    sys.exit(loop.main(arguments))


if __name__ == "__main__":
    main()
