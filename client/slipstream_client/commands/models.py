"""`slipstream models`: what a repository serves, and what of it a server has loaded.

A deployment is an engine and the models that use it (docs/several.md). `--load` and `--unload` need
a server whose model control is open: `slipstream serve --model-control explicit`.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc
from slipstream_contract.deployment import DEFAULT, Deployment, deployments_of
from slipstream_contract.errors import Code, ContractError, clip
from slipstream_contract.shares import memory_share
from slipstream_serve.server import repository_root
from tritonclient.grpc import service_pb2, service_pb2_grpc

from slipstream_client.client import SlipstreamClient
from slipstream_client.commands.common import add_connection, connect
from slipstream_client.failures import error_from_rpc

_COLUMNS = ("name", "model", "checkpoint", "architecture", "dtype", "context", "share", "engine")
_NONE = "-"
_LOAD_S = 900.0


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its options."""
    parser = subparsers.add_parser(
        "models", help="list a repository's deployments, load and unload them"
    )
    default = repository_root() / "model_repository"
    parser.add_argument("--model-repository", type=Path, metavar="DIR", default=default)
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--load", metavar="NAME", help="load all models of a deployment first")
    change.add_argument("--unload", metavar="NAME", help="unload them first")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    add_connection(parser, timeout_s=3.0)


def run(args: argparse.Namespace) -> int:
    """Print a row for each deployment. Raises ContractError for what cannot be loaded, or read."""
    if not args.model_repository.is_dir():
        raise ContractError(f"--model-repository {args.model_repository}: no such directory")
    try:
        deployments = deployments_of(args.model_repository)
        rows = [_from_repository(deployment, deployments) for deployment in deployments]
    except ValueError as error:
        raise ContractError(str(error)) from None
    with connect(args) as client:
        for verb in ("load", "unload"):
            if getattr(args, verb) is not None:
                _change(client.url, verb, _find(deployments, getattr(args, verb)))
        for row, deployment in zip(rows, deployments, strict=True):
            row |= _from_server(client, deployment, args.timeout)
    print(json.dumps(rows) if args.json else _table(rows))
    return 0


def _find(deployments: Iterable[Deployment], name: str) -> Deployment:
    for deployment in deployments:
        if deployment.is_called(name):
            return deployment
    names = ", ".join(deployment.name for deployment in deployments)
    raise ContractError(f"no deployment is called {clip(name)}; there are {names}", Code.NOT_FOUND)


def _from_repository(deployment: Deployment, others: list[Deployment]) -> dict[str, Any]:
    """Return the row of a deployment that is not loaded. Raises ValueError for wrong shares."""
    settings, config = deployment.settings, _config(deployment.checkpoint)
    architectures = config.get("architectures") or [None]
    return {
        "name": deployment.name,
        "model": deployment.public_name,
        "checkpoint": str(deployment.checkpoint),
        "architecture": architectures[0],
        "dtype": settings.get("dtype", "auto"),
        "context": settings.get("max_model_len") or config.get("max_position_embeddings"),
        "share": memory_share(others, deployment.engine_model),
    }


def _config(checkpoint: Path) -> Mapping[str, Any]:
    """Return the configuration of a checkpoint; nothing where this machine cannot read it."""
    try:
        found = json.loads((checkpoint / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _from_server(
    client: SlipstreamClient, deployment: Deployment, timeout_s: float
) -> dict[str, Any]:
    """Return what the server says of a deployment: above all the state of its engine."""
    if not client.is_ready(deployment.health_model, timeout_s):
        is_some = any(client.is_ready(model, timeout_s) for model in deployment.members)
        return {"engine": "health model not loaded" if is_some else "not loaded"}
    try:
        state = client.health(timeout_s, deployment.name)
    except (ContractError, TimeoutError) as error:
        return {"engine": str(error)}
    about = state["about"]
    kept = {name: about[name] for name in ("checkpoint", "architecture", "dtype")}
    load = f"{about['device']}, {state['running']} running, {state['waiting']} waiting"
    return kept | {
        "context": about["max_model_len"],
        "share": about["memory_share"],
        "engine": "; ".join([load, *state["faults"]]),
        "engine_pid": state["engine_pid"],
    }


def _change(url: str, verb: str, deployment: Deployment) -> None:
    """Load or unload all models of a deployment, an ensemble after, or before, its steps."""
    models = sorted(deployment.members, key=lambda model: model == deployment.models.get(DEFAULT))
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for model in models if verb == "load" else reversed(models):
            try:
                if verb == "load":
                    request = service_pb2.RepositoryModelLoadRequest(model_name=model)
                    stub.RepositoryModelLoad(request, timeout=_LOAD_S)
                else:
                    request = service_pb2.RepositoryModelUnloadRequest(model_name=model)
                    stub.RepositoryModelUnload(request, timeout=_LOAD_S)
            except grpc.RpcError as error:
                raise error_from_rpc(error, url) from None


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the rows with a line of titles; what is not known is `-`."""
    cells = [[_text(row.get(name)) for name in _COLUMNS] for row in rows]
    lines = [list(_COLUMNS), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _text(value: object) -> str:
    if value is None:
        return _NONE
    return f"{value:g}" if isinstance(value, float) else str(value)
