"""docker-compose.yml, built and brought up: needs Docker with its compose, or podman-compose.

Without a GPU the container serves on the CPU. Images that the environment names (TRITON_IMAGE,
PROMETHEUS_IMAGE, GRAFANA_IMAGE) are taken; without TRITON_IMAGE and without a GPU a stand-in for
NGC's is built, on BASE_IMAGE. What of the monitoring cannot be pulled is not brought up.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixtures.server.support import PROMPT, ROOT, Client, RequestError, text
from slipstream_serve.triton import Endpoints

yaml = pytest.importorskip("yaml")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
FOLDER = ROOT / "docs" / "monitoring"
PROJECT = "slipstream-test"
BASES = {(3, 11): "debian:bookworm-slim", (3, 12): "ubuntu:24.04", (3, 13): "debian:trixie-slim"}
HAS_GPU = Path("/dev/nvidiactl").exists()


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def find_engine() -> tuple[str, list[str]]:
    """What runs containers, and its compose."""
    if shutil.which("docker") and succeeds("docker", "compose", "ls"):
        return "docker", ["docker", "compose"]
    if shutil.which("podman") and shutil.which("podman-compose"):
        return "podman", ["podman-compose"]
    pytest.skip("neither Docker with its compose nor podman-compose")


class Stack:
    """The services of docker-compose.yml, on ports of this machine that are free."""

    def __init__(self, folder: Path) -> None:
        self.engine, self._compose = find_engine()
        self.endpoints, monitoring = Endpoints.free(), Endpoints.free()
        self.prometheus = f"http://127.0.0.1:{monitoring.http_port}"
        self.grafana = f"http://127.0.0.1:{monitoring.grpc_port}"
        self._environment = os.environ | {
            "HTTP_PORT": str(self.endpoints.http_port),
            "GRPC_PORT": str(self.endpoints.grpc_port),
            "METRICS_PORT": str(self.endpoints.metrics_port),
            "OPENAI_PORT": str(monitoring.metrics_port),
            "PROMETHEUS_PORT": str(monitoring.http_port),
            "GRAFANA_PORT": str(monitoring.grpc_port),
        }
        if not HAS_GPU and "TRITON_IMAGE" not in os.environ:
            self._environment["TRITON_IMAGE"] = self._build_stand_in()
        self._override = folder / "override.yml"
        self._override.write_text(self._what_is_other_here())
        self.services = ["triton", *filter(self._has_image, ("prometheus", "grafana"))]

    def _build_stand_in(self) -> str:
        python, tag = sys.version_info[:2], "localhost/slipstream-test-triton"
        base = os.environ.get("BASE_IMAGE", f"docker.io/library/{BASES[python]}")
        arguments = ["--build-arg", f"BASE={base}"]
        arguments += ["--build-arg", f"PYTHON={python[0]}.{python[1]}"]
        dockerfile = Path(__file__).with_name("standin.Dockerfile")
        context = ROOT / ".slipstream"
        self._run(self.engine, "build", *arguments, "-t", tag, "-f", dockerfile, context)
        return tag

    def _what_is_other_here(self) -> str:
        """The image's own name; no GPU where there is none; limits that we may set, if we may."""
        lines = ["services:", "  triton:", "    image: slipstream-test"]
        if not HAS_GPU:
            lines.append("    deploy: !reset {}")
        if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] != resource.RLIM_INFINITY:
            lines.append("    ulimits:")
            for name, most in (("memlock", 1 << 30), ("nofile", 10_000), ("nproc", 4096)):
                own = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
                lines.append(f"      {name}: {min(own, most)}")
        return "\n".join(lines) + "\n"

    def _has_image(self, service: str) -> bool:
        name = COMPOSE[service]["image"].removeprefix("${").removesuffix("}")
        variable, default = name.split(":-", 1)
        image = self._environment.get(variable, default)
        is_here = succeeds(self.engine, "image", "inspect", image)
        return is_here or succeeds(self.engine, "pull", image)

    def _run(self, *command: object, timeout_s: float = 1500.0) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=self._environment,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def compose(self, *words: str, timeout_s: float = 1500.0) -> str:
        options = ["-p", PROJECT, "--profile", "monitoring"]
        for file in (ROOT / "docker-compose.yml", self._override):
            options += ["-f", str(file)]
        return self._run(*self._compose, *options, *words, timeout_s=timeout_s)

    def inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command in the container of the server."""
        command = [self.engine, "exec", self.container, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    def processes(self, words: str) -> list[int]:
        """In the container of the server, with these words in their command."""
        script = 'for p in [0-9]*; do echo "$p $(tr "\\\\0" " " <$p/cmdline)"; done'
        lines = self.inside("sh", "-c", f"cd /proc; {script} 2>/dev/null").stdout.splitlines()
        return [int(line.split()[0]) for line in lines if words in line]

    @property
    def container(self) -> str:
        [name] = self._run(
            self.engine, "ps", "-a", "--filter", f"name={PROJECT}.triton", "--format", "{{.Names}}"
        ).split()
        return name

    def exit_code(self) -> int | None:
        """Return the exit code of the server's container; None while it runs."""
        [container] = json.loads(self._run(self.engine, "inspect", self.container))
        return None if container["State"]["Running"] else container["State"]["ExitCode"]

    def health(self) -> tuple[int, str]:
        """What the compose file's own check says."""
        done = self.inside(*COMPOSE["triton"]["healthcheck"]["test"][1:])
        return done.returncode, done.stdout + done.stderr

    def wait_healthy(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            code, said = self.health()
            if code == 0:
                return said
            assert time.monotonic() < deadline, said + self.compose("logs", "triton")[-5000:]
            time.sleep(0.2)


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def wait_for(url: str, timeout_s: float = 120.0) -> dict:
    """What is there, once there is something."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return get(url)
        assert time.monotonic() < deadline, url
        time.sleep(0.5)


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("containers"))
    try:
        stack.compose("build", "triton")
        stack.compose("up", "-d", *stack.services)
        stack.wait_healthy(120)
        yield stack
    finally:
        stack.compose("down", "-v", timeout_s=120.0)


@pytest.fixture
def client(stack) -> Client:
    return Client(SimpleNamespace(endpoints=stack.endpoints))


def test_every_model_answers_at_the_mapped_ports(client):
    inputs = {"text_input": PROMPT, "max_tokens": 24}
    told = {
        model: text(client.stream(model, stream=True, **inputs))
        for model in ("ensemble", "tensorrt_llm_bls")
    }
    for model, streamed in told.items():
        assert streamed
        assert client.generate(model, **inputs)["text_output"] == PROMPT + streamed
    greedy = {"stream": True, "max_tokens": 24, "temperature": 0}
    events = client.events("vllm_model", text_input=PROMPT, parameters=greedy)
    assert "".join(event["text_output"] for event in events) == told["ensemble"]


def test_it_runs_without_rights_and_closed(stack, client):
    assert stack.inside("id", "-u").stdout.strip() == "10001"
    assert stack.inside("sh", "-c", "echo x >/models/x").returncode != 0
    assert stack.inside("sh", "-c", "echo x >~/.cache/x && rm ~/.cache/x").returncode == 0
    assert "CapEff:\t0000000000000000" in stack.inside("cat", "/proc/self/status").stdout
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{client.http}/v2/repository/index", data=b"{}", timeout=10)


def test_prometheus_scrapes_it_and_has_the_rules(stack):
    if "prometheus" not in stack.services:
        pytest.skip("no image of Prometheus")
    api = f"{stack.prometheus}/api/v1"
    deadline = time.monotonic() + 120
    query = f"{api}/query?query=slipstream_running_sequences%7Bjob%3D%22slipstream%22%7D"
    while not wait_for(query)["data"]["result"]:
        assert time.monotonic() < deadline
        time.sleep(1)
    [target] = get(f"{api}/targets")["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    [group] = get(f"{api}/rules")["data"]["groups"]
    [shipped] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in shipped["rules"]]


def test_grafana_shows_the_dashboard_and_asks_prometheus(stack):
    if "grafana" not in stack.services:
        pytest.skip("no image of Grafana")
    shipped = json.loads((FOLDER / "dashboard.json").read_text())
    shown = wait_for(f"{stack.grafana}/api/dashboards/uid/{shipped['uid']}")
    assert [panel["title"] for panel in shown["dashboard"]["panels"]] == [
        panel["title"] for panel in shipped["panels"]
    ]
    settings = get(f"{stack.grafana}/api/frontend/settings")
    source = stack.grafana + settings["datasources"]["Prometheus"]["url"]
    [up] = get(f"{source}/api/v1/query?query=up")["data"]["result"]
    assert up["metric"]["job"] == "slipstream"
    assert settings["defaultDatasource"] == "Prometheus"


KILLED = ("python -P -m slipstream.engine.process", "/tensorrt_llm_bls/1/", "tritonserver --model-")


@pytest.mark.parametrize("victim", KILLED)
def test_what_is_killed_comes_back(stack, client, victim):
    [killed, *_] = stack.processes(victim)
    assert stack.inside("sh", "-c", f"kill -9 {killed}").returncode == 0
    begin = time.monotonic()
    while killed in (there := stack.processes(victim)) or not there:
        assert time.monotonic() - begin < 120
    stack.wait_healthy(120)
    assert stack.exit_code() is None
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert client.generate(model, text_input=PROMPT, max_tokens=8)["text_output"]


def test_stop_ends_streams_and_up_starts_again(stack, client):
    ends: list[str] = []

    def ask() -> None:
        try:
            while True:  # the container's context is short: one may end before the server does
                client.stream("ensemble", text_input=PROMPT, max_tokens=1900, stream=True)
        except RequestError as error:
            ends.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    client.wait_running(1)
    stack.compose("stop", "triton", timeout_s=120.0)
    assert stack.exit_code() == 0  # else it was killed
    thread.join(120)
    assert ["the server is stopping" in end for end in ends] == [True]
    stack.compose("up", "-d", "triton")
    stack.wait_healthy(120)
    assert client.generate("ensemble", text_input=PROMPT, max_tokens=8)["text_output"]
