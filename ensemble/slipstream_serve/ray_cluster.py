"""`slipstream ray`: serve a model whose ranks are on several nodes of a Ray cluster.

Ray finds the nodes and runs a command on each: `slipstream serve` on the first, `slipstream rank`
on the others, with the variables by which these find each other. All else is as without Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config import EngineConfig
from slipstream.launch import die_with_parent
from slipstream_contract.arguments import count, patience, port
from slipstream_contract.deployment import DEFAULT
from slipstream_runtime.processes import ending_signals
from slipstream_runtime.rendezvous import KEY_VARIABLE

from slipstream_serve.rank import config_of
from slipstream_serve.triton import ServeError

_LOOK_S = 0.5
_STOP_S = 10.0  # for the commands of nodes, of which one was lost
_EPILOG = """Arguments behind -- are those of `slipstream serve`. The repository, its checkpoint and
Slipstream must be at the same paths on all nodes. A node that is lost ends all ranks, which are
placed and started again.
"""


class Placement(NamedTuple):
    """What is placed: so many nodes, with so many GPUs each."""

    nodes: int
    gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of a node, as Ray names them."""
        return {"CPU": 1, "GPU": self.gpus} if self.gpus else {"CPU": 1}


def placement_of(config: EngineConfig, nodes: int, has_gpus: bool) -> Placement:
    """Divide the ranks of an engine over nodes, a GPU each if the cluster has any.

    Raises `ServeError`.
    """
    ranks = config.num_ranks
    if nodes < 2:
        raise ServeError(f"--nodes {nodes}: from 2 on; one host needs `slipstream serve` alone")
    if ranks % nodes:
        raise ServeError(
            f"--nodes {nodes} cannot share out {ranks} ranks (--tensor-parallel "
            f"{config.tensor_parallel} times --pipeline-parallel {config.pipeline_parallel})"
        )
    is_cpu = config.device == "cpu" or (config.device == "auto" and not has_gpus)
    return Placement(nodes, 0 if is_cpu else ranks // nodes)


def variables(
    place: int, placement: Placement, address: str, port: int, key: str
) -> dict[str, str]:
    """Return the environment by which a node finds the others (`rendezvous.place_of`)."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "NODE_RANK": str(place),
        "NNODES": str(placement.nodes),
        KEY_VARIABLE: key,
    }


class Node:
    """A node's command, in an actor: its GPUs are those that Ray gave the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Return the node's address, which the others reach."""
        import ray

        return str(ray.util.get_node_ip_address())

    def free_port(self, address: str) -> int:
        """Return a port on which nothing listens."""
        with socket.create_server((address, 0)) as server:
            return int(server.getsockname()[1])

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run `slipstream` with these arguments, and return its exit code."""
        command = [sys.executable, "-P", "-m", "slipstream_client.cli", *arguments]
        both = {**os.environ, **environment}
        self._process = subprocess.Popen(command, env=both, preexec_fn=die_with_parent())
        return self._process.wait()

    def stop(self) -> None:
        """Ask the command to end, and wait until it has, for some seconds at most."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare `slipstream ray`."""
    parser = subparsers.add_parser(
        "ray", help="serve a model on several nodes of a Ray cluster", epilog=_EPILOG
    )
    parser.add_argument("--model-repository", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--nodes", type=count, required=True, metavar="N", help="to share the ranks"
    )
    parser.add_argument("--name", default=DEFAULT, help="of the deployment (%(default)s)")
    parser.add_argument(
        "--address", default="auto", help="of the cluster, as ray.init takes it (%(default)s)"
    )
    parser.add_argument(
        "--port", type=port, metavar="N", help="of the first node, for the others (default: a free)"
    )
    parser.add_argument(
        "--placement-timeout",
        type=patience,
        default=300.0,
        metavar="S",
        help="seconds to wait for nodes with room (%(default)g)",
    )
    parser.add_argument("serve", nargs="*", metavar="-- ARGUMENT", help="of `slipstream serve`")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal (0), or until a command cannot start (its exit code)."""
    import ray

    config = config_of(args.model_repository.absolute(), args.name)
    ray.init(address=args.address)
    placement = placement_of(config, args.nodes, ray.cluster_resources().get("GPU", 0) > 0)
    ended = threading.Event()
    with _signals(ended):
        while True:
            code = _serve(ray, args, placement, ended)
            if code is not None:
                return code
            print("slipstream: a node is lost: all ranks are placed again", flush=True)


@contextlib.contextmanager
def _signals(ended: threading.Event) -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(
    ray: Any, args: argparse.Namespace, placement: Placement, ended: threading.Event
) -> int | None:
    """Place the nodes and run their commands; None if a node was lost."""
    group = ray.util.placement_group([placement.bundle] * placement.nodes, strategy="STRICT_SPREAD")
    nodes: list[Any] = []
    try:
        _wait_for_room(ray, group, placement, args.placement_timeout, ended)
        if ended.is_set():
            return 0
        nodes.extend(_actors(ray, group, placement))
        return _run(ray, args, placement, nodes, ended)
    except ray.exceptions.RayActorError:
        return None
    finally:
        _end(ray, nodes)
        ray.util.remove_placement_group(group)


def _wait_for_room(
    ray: Any, group: Any, placement: Placement, limit_s: float, ended: threading.Event
) -> None:
    """Wait for the nodes. Raises `ServeError` that says what the cluster has."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if group.wait(_LOOK_S) or ended.wait(_LOOK_S):  # the former may return at once
            return
    have = [
        {name: node["Resources"].get(name, 0) for name in placement.bundle}
        for node in ray.nodes()
        if node["Alive"]
    ]
    raise ServeError(
        f"no {placement.nodes} nodes with {placement.bundle} free each within {limit_s:g} s; "
        f"the cluster has {have}"
    )


def _actors(ray: Any, group: Any, placement: Placement) -> Iterator[Any]:
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    for place in range(placement.nodes):
        options = {
            "num_cpus": 1,
            "num_gpus": placement.gpus,
            "max_concurrency": 2,  # `stop` while `run` waits
            "scheduling_strategy": strategy(group, placement_group_bundle_index=place),
        }
        yield ray.remote(Node).options(**options).remote()


def _run(
    ray: Any,
    args: argparse.Namespace,
    placement: Placement,
    nodes: list[Any],
    ended: threading.Event,
) -> int:
    """Run the commands until one ends; return its exit code, 0 after a signal."""
    address = ray.get(nodes[0].address.remote())
    port = args.port or ray.get(nodes[0].free_port.remote(address))
    repository, key = str(args.model_repository.absolute()), secrets.token_hex(16)
    first = ["serve", "--model-repository", repository, *args.serve]
    other = ["rank", "--model-repository", repository, "--name", args.name]
    runs = [
        node.run.remote(other if place else first, variables(place, placement, address, port, key))
        for place, node in enumerate(nodes)
    ]
    print(f"slipstream: the server starts on {address}", flush=True)
    done: list[Any] = []
    while not done and not ended.is_set():
        done, _ = ray.wait(runs, timeout=_LOOK_S)
    code = int(ray.get(done[0])) if done else 0
    ray.get(nodes[0].stop.remote())
    ray.get(runs[0])  # it drains, as `--drain` says, before the ranks of other nodes end
    return code


def _end(ray: Any, nodes: list[Any]) -> None:
    """End the commands of the nodes that are there, and the actors."""
    if nodes:
        asked = [node.stop.remote() for node in nodes]
        ray.wait(asked, num_returns=len(asked), timeout=_STOP_S)
    for node in nodes:
        ray.kill(node)
