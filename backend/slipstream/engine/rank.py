"""Run the process of a rank other than 0: it loads its part, and runs the steps of rank 0.

    python -m slipstream.engine.rank --config FILE --ranks FD --rank R

Exit codes are those of `engine/process.py`: 2 if the rank cannot start, with one line on stderr; 1
if the ranks cannot go on together; 0 if rank 0 has ended.
"""

import argparse
import faulthandler
import gc
import logging
import os
import signal
import sys
from pathlib import Path

from slipstream_runtime.ranks import RankMemory
from slipstream_runtime.waking import wake_at_once

from slipstream.config import EngineConfig
from slipstream.engine.settings import read_config
from slipstream.errors import StartError
from slipstream.launch import CANNOT_START

_log = logging.getLogger(__name__)


def follow(config: EngineConfig, memory: RankMemory) -> None:
    """Load a rank's part of the model, and run steps until rank 0 ends."""
    assert memory.rank is not None, "it is a rank's"
    from slipstream.runner.joining import start
    from slipstream.runner.plan import resolve
    from slipstream.runner.ranks import Follower

    runner, _ = start(resolve(config, memory.rank), memory)
    assert isinstance(runner, Follower), "rank 0 is the engine"
    gc.collect()
    gc.freeze()
    memory.serve()
    _log.info("rank %d of %d is ready", memory.rank, memory.size)
    runner.follow()


def main(arguments: list[str] | None = None) -> int:
    """Run the process; return its exit code."""
    parser = argparse.ArgumentParser(prog="slipstream.engine.rank", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="EngineConfig as JSON")
    parser.add_argument("--ranks", type=int, required=True, help="descriptor of shared memory")
    parser.add_argument("--rank", type=int, required=True, help="number of this rank, from 1")
    options = parser.parse_args(arguments)
    wake_at_once()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends this process
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    form = f"%(asctime)s rank {options.rank} %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form)
    try:
        config = read_config(options.config)
        follow(config, RankMemory.alive(options.ranks, config.num_ranks, options.rank))
    except StartError as error:
        print(f"slipstream engine: {' '.join(str(error).split())}", file=sys.stderr)
        return CANNOT_START
    except Exception:
        _log.exception("rank %d ends", options.rank)
        logging.shutdown()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
