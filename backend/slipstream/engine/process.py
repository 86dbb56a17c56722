"""Run the engine's process: load the checkpoint, then serve until there is nothing to serve.

    python -m slipstream.engine.process --config FILE --socket ipc://PATH [--memory-lock FILE]
        [--ranks FD]

FILE is an `EngineConfig` as JSON; a relative checkpoint in it is relative to FILE. Exit codes: 0
after SIGTERM, SIGINT or the end of the parent; 1 if the device is beyond repair, after all tokens
were sent; 2 if the engine cannot start, with one line on stderr; 3 if all models that used it were
unloaded.
"""

import argparse
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from slipstream_contract.contained import ProcessEnd
from slipstream_contract.vocab import TokenBytes
from slipstream_runtime.locking import locked
from slipstream_runtime.ranks import RankMemory
from slipstream_runtime.waking import wake_at_once

from slipstream.config import EngineConfig
from slipstream.core.laps import Laps, process_age
from slipstream.engine import drafter_choice
from slipstream.engine.chores import Chores
from slipstream.engine.kv_events import publish
from slipstream.engine.loop import EngineLoop
from slipstream.engine.reading import ReadingEngine
from slipstream.engine.reports import RequestLog
from slipstream.engine.settings import (
    adapters_of,
    edit_context_of,
    limits_of,
    read_config,
    welcome_of,
)
from slipstream.engine.telemetry import Telemetry
from slipstream.guide.checkpoint import start_set_up
from slipstream.launch import CANNOT_START

_log = logging.getLogger(__name__)

Make = Callable[[EngineConfig, str, Path | None, RankMemory | None], EngineLoop]


def load(
    config: EngineConfig,
    address: str,
    memory_lock: Path | None = None,
    ranks: RankMemory | None = None,
) -> EngineLoop:
    """Load the checkpoint and listen. Raises whatever is wrong with either.

    Engines of one `memory_lock` take memory in turn; `ranks`: memory that ranks share.
    """
    laps = Laps(process_age())
    from slipstream.runner.scheme_choice import resolve
    from slipstream.runner.threads import start_runner

    laps.lap("imports")
    with locked(memory_lock):
        plan = resolve(config)
        laps.lap("plan")
        vocab = TokenBytes.load(plan.checkpoint) if plan.has_tokenizer else None
        guide_compiler = None
        if vocab is not None:
            vocab_size = plan.model.dims.vocab_size
            guide_compiler = start_set_up(plan.checkpoint, vocab_size, vocab.raw)
        edit_context = edit_context_of(config, plan.checkpoint, plan.model.dims.vocab_size, vocab)
        laps.lap("vocabulary")
        plan, runner = start_runner(plan, ranks)
    laps.lap("runner")
    limits = limits_of(config, plan)
    num_device_drafts = 0 if plan.drafts is None else plan.drafts.num_drafts
    speculation, device_drafts = drafter_choice.choose(config, num_device_drafts)
    telemetry = Telemetry(config.gpu_hour_price, runner.memory)
    request_log = RequestLog(Path(config.request_log), telemetry) if config.request_log else None
    engine = ReadingEngine(
        limits,
        runner,
        vocab,
        model=plan.model_name,
        telemetry=telemetry,
        request_log=request_log,
        speculation=speculation,
        device_drafts=device_drafts,
        guide_compiler=guide_compiler,
        edit_context=edit_context,
        adapters=adapters_of(config, plan.model_name, runner.adapters),
    )
    publish(config, plan.model_name, engine.prefixes)
    welcome = welcome_of(plan, runner, has_thinking=edit_context.thinking is not None)
    loop = EngineLoop(engine, welcome, address, Chores(runner.chores(plan)))
    num_slots = 0 if runner.transfers is None else runner.transfers.num_slots
    _log.info("%s", plan.banner(runner.num_blocks, num_slots))
    laps.log(_log, "process ready")
    return loop


def _exit(number: int, frame: FrameType | None) -> None:
    raise ProcessEnd(0)


def main(arguments: list[str] | None = None, make: Make = load) -> int:
    """Run the process, whose loop `make` makes; return its exit code."""
    parser = argparse.ArgumentParser(prog="slipstream.engine.process", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="EngineConfig as JSON")
    parser.add_argument("--socket", required=True, help="ZeroMQ address to listen on")
    parser.add_argument("--memory-lock", type=Path, help="locked while memory is taken")
    parser.add_argument("--ranks", type=int, help="descriptor of the memory that ranks share")
    options = parser.parse_args(arguments)
    wake_at_once()  # undo what the parent may have set: steps come before everything else
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    faulthandler.enable()  # a crash in native code says where
    faulthandler.register(signal.SIGUSR1)  # the supervisor sends it to an engine that is stuck
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    gc.disable()  # a start makes objects that stay: collections would take a tenth of it
    try:
        config = read_config(options.config)
        ranks = None
        if options.ranks is not None:
            ranks = RankMemory.alive(options.ranks, config.num_ranks, 0)
        loop = make(config, options.socket, options.memory_lock, ranks)
    except Exception as error:
        _log.debug("start failed", exc_info=True)
        print(f"slipstream engine: {' '.join(str(error).split())}", file=sys.stderr)
        return CANNOT_START
    gc.collect()
    gc.freeze()  # weights and modules stay: keep them out of collections
    gc.enable()
    if ranks is not None:
        ranks.serve()  # behind all that may wait for a disk, or hold the interpreter
    code = loop.run()
    if code:  # skip destructors: on a broken device they could hang
        logging.shutdown()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
