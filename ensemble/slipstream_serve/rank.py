"""`slipstream rank`: run the ranks of this host for a server on another one."""

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from slipstream import __version__
from slipstream.config import EngineConfig
from slipstream.launch import CANNOT_START, die_with_parent
from slipstream_compose.compose import ComposeError
from slipstream_contract.arguments import patience
from slipstream_contract.deployment import DEFAULT, deployments_of
from slipstream_contract.shares import memory_share
from slipstream_runtime.rendezvous import RendezvousError, place_of
from slipstream_runtime.spanned import serve_host

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0  # until the ranks are started again
_EPILOG = """The environment says which ranks: MASTER_ADDR, MASTER_PORT (29500), and either RANK and
WORLD_SIZE, as torchrun sets them, or NODE_RANK and NNODES. Rank 0 is the server: `slipstream serve`
with the same variables. Ranks that end are started again, with all others, until this process ends.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare `slipstream rank`."""
    parser = subparsers.add_parser(
        "rank", help="run ranks of a server on another host", epilog=_EPILOG
    )
    parser.add_argument(
        "--model-repository", type=Path, required=True, metavar="DIR", help="as the server has it"
    )
    parser.add_argument("--name", default=DEFAULT, help="of the deployment (%(default)s)")
    parser.add_argument(
        "--start-timeout",
        type=patience,
        default=900.0,
        metavar="S",
        help="seconds to wait for rank 0 (%(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Run ranks again and again; return 2 if they cannot start. Raises ComposeError."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s ranks %(levelname)s %(message)s")
    config = config_of(args.model_repository.absolute(), args.name)
    place = place_of(os.environ, config.num_ranks)
    if place is None:
        raise RendezvousError(
            "the environment names no other host: set MASTER_ADDR, and RANK and WORLD_SIZE or "
            "NODE_RANK and NNODES; or the deployment has one rank"
        )
    if place.first == 0:
        raise RendezvousError("rank 0 is the server: run `slipstream serve` here")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(msgspec.json.encode(config))
        file.flush()

        def command(rank: int, descriptor: int) -> list[str]:
            return [
                *(sys.executable, "-P", "-m", "slipstream.engine.rank", "--config", file.name),
                *("--rank", str(rank), "--ranks", str(descriptor)),
            ]

        limit_s = args.start_timeout
        while True:
            try:
                code = serve_host(
                    *(place, __version__, command, die_with_parent, limit_s),
                    stuck_after_s=config.stuck_after_s,
                    quiet=CANNOT_START,
                )
            except OSError as error:
                _log.warning("the hosts did not find each other: %s", error)
                code = 1
            if code == CANNOT_START:
                return CANNOT_START
            _log.info("the ranks have ended (%d): they are started again", code)
            time.sleep(_PAUSE_S)


def config_of(repository: Path, name: str) -> EngineConfig:
    """Return the engine's settings in a repository. Raises ComposeError."""
    try:
        return _config_of(repository, name)
    except ValueError as error:
        raise ComposeError(str(error)) from None


def _config_of(repository: Path, name: str) -> EngineConfig:
    deployments = deployments_of(repository)
    found = [each for each in deployments if each.name == name]
    if not found:
        have = ", ".join(each.name for each in deployments) or "none"
        raise ValueError(
            f"--name {name!r:.64} is no deployment of {repository} (there are: {have})"
        )
    try:
        config = msgspec.convert(dict(found[0].settings), EngineConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{found[0].engine_model}/1/model.json: {error}") from None
    share = memory_share(deployments, found[0].engine_model)
    checkpoint = str(found[0].checkpoint)
    return msgspec.structs.replace(config, checkpoint=checkpoint, memory_share=share)
