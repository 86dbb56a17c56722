"""The container files, as far as they can be checked without Docker."""

import json
import re
from pathlib import Path

import pytest
from slipstream_client.cli import build_parser
from slipstream_serve import triton
from slipstream_serve.server import repository_root

ROOT = repository_root()
yaml = pytest.importorskip("yaml")
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["triton"]


def test_ports_are_loopback_unless_asked() -> None:
    assert len(SERVICE["ports"]) == 4
    for port in SERVICE["ports"]:
        assert port.startswith("${BIND:-127.0.0.1}:")


def test_it_runs_without_privileges() -> None:
    assert SERVICE["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in SERVICE["security_opt"]
    assert re.search(r"^USER (?!root|0\b)\S+$", DOCKERFILE, re.MULTILINE)


def test_the_repository_is_mounted_read_only_where_the_server_looks() -> None:
    [mount] = [volume for volume in SERVICE["volumes"] if volume.endswith(":ro")]
    target = mount.rsplit(":", 2)[1]
    assert f'"--model-repository={target}"' in DOCKERFILE


def test_serve_is_its_command_and_logs_where_docker_looks() -> None:
    [line] = re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE)
    program, *words = json.loads(line)
    args = build_parser(words[0]).parse_args(words)
    assert program == SERVICE["healthcheck"]["test"][1]
    assert (args.command, args.host, args.log_file) == ("serve", "0.0.0.0", Path("/dev/stderr"))
    ports = (args.http_port, args.grpc_port, args.metrics_port, args.openai_port)
    assert ports == tuple(int(port.rsplit(":", 1)[1]) for port in SERVICE["ports"])


def test_what_no_client_needs_is_closed_by_a_new_key_each_time(tmp_path) -> None:
    keys = set()
    for _ in range(2):
        server = triton.TritonServer(tmp_path, triton.Endpoints.free(), tmp_path / "log")
        try:
            arguments = server._arguments(tmp_path)
        finally:
            server.stop()
        words = dict(word.split("=", 1) for word in arguments if "=" in word)
        closed = words["--http-restricted-api"]
        assert words["--grpc-restricted-protocol"] == closed
        names, header, key = re.fullmatch(r"([\w,-]+):([\w-]+)=([0-9a-f]{32})", closed).groups()
        assert (names, header) == (triton.CLOSED_APIS, triton.CONTROL_HEADER)
        assert "--disable-auto-complete-config" in arguments
        keys.add(key)
    assert len(keys) == 2


def test_it_asks_for_a_gpu_and_for_shared_memory() -> None:
    [device] = SERVICE["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert SERVICE["shm_size"] == "1gb"


def test_build_arguments_and_health_are_the_same_in_both_files() -> None:
    declared = set(re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE))
    assert set(SERVICE["build"]["args"]) == declared
    for name, value in SERVICE["build"]["args"].items():
        default = re.search(rf"^ARG {name}=(\S*)$", DOCKERFILE, re.MULTILINE)
        assert default is not None
        assert value == f"${{{name}:-{default[1]}}}"
    command = ", ".join(f'"{word}"' for word in SERVICE["healthcheck"]["test"])
    assert command.removeprefix('"CMD", ') in DOCKERFILE


def test_every_copied_path_exists_and_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored


def test_the_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make test" in script
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    assert any(step.get("run") == ".ci/run" for step in steps)
