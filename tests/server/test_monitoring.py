"""What ships for monitoring, in a real Prometheus that scrapes a real server under some load."""

import contextlib
import importlib
import json
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.server.metrics_page import Page, wait_for_page
from fixtures.server.support import PROMPT, Client, RequestError, lasting
from slipstream_serve.server import repository_root

yaml = pytest.importorskip("yaml")
ROOT = repository_root()
FOLDER = ROOT / "docs" / "monitoring"


class Strict(yaml.SafeLoader):
    """YAML as Docker and Prometheus read it: a key that is there twice is an error."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), keys
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict:
    return yaml.load(path.read_text(), Strict)


DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
COMPOSE = read(ROOT / "docker-compose.yml")
RULES = read(FOLDER / "alerts.yml")["groups"][0]["rules"]
# Names that others chose: with a colon, counters without `_total`, and histograms as counters.
COMPATIBLE = ("nv_", "vllm:")
_NAME = re.compile(r"(?<!\?)\b(?:slipstream|vllm|nv)[_:][a-z0-9_]+")


@pytest.fixture(scope="session")
def tools() -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "load"))
        module = importlib.import_module("monitoring_tools")
    try:
        return module.get()
    except module.ToolsError as error:
        pytest.skip(f"no Prometheus: {error}")


def run(*command: object, text: str = "") -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, input=text, capture_output=True, text=True, timeout=120)


def panels() -> list[dict]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """List the queries of the dashboard, by panel and letter."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels()
        for target in panel["targets"]
    }


# --- files ---------------------------------------------------------------------------------------


def test_the_rules_pass_their_tests_and_each_is_seen_to_fire(tools):
    done = run(tools["promtool"], "test", "rules", FOLDER / "alerts_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(tools["promtool"], "check", "config", FOLDER / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    cases = read(FOLDER / "alerts_test.yml")["tests"]
    checks = [check for case in cases for check in case.get("alert_rule_test", ())]
    fired = {check["alertname"] for check in checks if check["exp_alerts"]}
    silent = {check["alertname"] for check in checks if not check["exp_alerts"]}
    assert fired == silent == {rule["alert"] for rule in RULES}


def test_a_rule_that_is_wrong_does_not_pass(tools, tmp_path):
    for name in ("alerts.yml", "alerts_test.yml"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    rules = tmp_path / "alerts.yml"
    text = rules.read_text()
    for old, new in (("== 0)\n        for: 1m", "> 0)\n        for: 1m"), ("> 15\n", "> 1500\n")):
        assert text.count(old) == 1
        rules.write_text(text.replace(old, new))
        assert run(tools["promtool"], "test", "rules", tmp_path / "alerts_test.yml").returncode


def test_the_dashboard_is_whole():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for panel in panels():
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "$datasource"
            assert 'instance=~"$instance"' in target["expr"]
            assert "nv_" in target["expr"] or "engine" in target["expr"]
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {
        "datasource",
        "instance",
        "engine",
    }


def test_compose_brings_prometheus_and_grafana_up_with_the_dashboard():
    services = COMPOSE["services"]
    assert "profiles" not in services["triton"]
    for name in ("prometheus", "grafana"):
        service = services[name]
        assert service["profiles"] == ["monitoring"]
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("${BIND:-127.0.0.1}:") for port in service["ports"])
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).is_file(), source
                assert mount.endswith(":ro")
            else:
                assert source in COMPOSE["volumes"]
    scrape = read(FOLDER / "prometheus.yml")["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == ["triton:8002"]
    assert any(port.endswith(":8002") for port in services["triton"]["ports"])
    mounts = dict(mount.split(":")[:2] for mount in services["grafana"]["volumes"])
    places = {Path(source).name: Path(target) for source, target in mounts.items()}
    provider = read(FOLDER / "grafana" / "dashboards.yml")["providers"][0]
    assert str(places["dashboard.json"].parent) == provider["options"]["path"]
    assert places["datasources.yml"].parent.name == "datasources"
    assert places["dashboards.yml"].parent.name == "dashboards"
    source = read(FOLDER / "grafana" / "datasources.yml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


# --- a real server -------------------------------------------------------------------------------


@pytest.mark.triton
def test_promtool_finds_nothing_wrong_with_our_metrics(idle, tools):
    url = idle.server.endpoints.metrics
    page = wait_for_page(url, lambda page: "slipstream_running_sequences" in page.names)
    ours = "".join(
        line + "\n"
        for line in page.text.splitlines()
        if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("slipstream_")
    )
    assert ours.count("# TYPE") > 25
    done = run(tools["promtool"], "check", "metrics", text=ours)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = run(tools["promtool"], "check", "metrics", text=page.text)
    assert "error while" not in done.stderr  # it can be read: what follows are matters of taste
    for line in (done.stdout + done.stderr).splitlines():
        assert line.startswith(COMPATIBLE), line


class Prometheus:
    """One that scrapes a server as the shipped configuration says, only more often."""

    def __init__(self, binary: Path, folder: Path, target: str) -> None:
        config = read(FOLDER / "prometheus.yml")
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "alerts.yml").write_text((FOLDER / "alerts.yml").read_text())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(binary),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def get(self, path: str, **query: str) -> dict:
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def wait(self) -> None:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                if self.get("query", query="slipstream_running_sequences")["result"]:
                    return
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def has_data(self, expression: str) -> bool:
        """Whether it is a number somewhere."""
        concrete = expression.replace("$__rate_interval", "1m")
        for variable in ("$instance", "$engine", "${engine}"):
            concrete = concrete.replace(variable, ".*")
        result = self.get("query", query=concrete)["result"]
        return any(sample["value"][1] != "NaN" for sample in result)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(120)


@pytest.fixture
def prometheus(idle, tools, tmp_path) -> Iterator[Prometheus]:
    target = idle.server.endpoints.metrics.removeprefix("http://").removesuffix("/metrics")
    prometheus = Prometheus(tools["prometheus"], tmp_path, target)
    try:
        prometheus.wait()
        yield prometheus
    finally:
        prometheus.close()


def load_a_little(client: Client) -> None:
    """Something of everything that the dashboard shows."""
    threads = [
        threading.Thread(
            target=client.stream,
            args=(model,),
            kwargs={"text_input": PROMPT, "max_tokens": 40, "stream": True},
        )
        for model in ("tensorrt_llm_bls", "ensemble")
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    with contextlib.suppress(RequestError):
        client.stream("tensorrt_llm_bls", text_input=PROMPT, max_tokens=3, top_p=7.0)
    left = client.iterate("tensorrt_llm_bls", **lasting("tensorrt_llm_bls"))
    next(left)
    left.close()
    for thread in threads:
        thread.join()


@pytest.mark.triton
def test_every_query_of_the_dashboard_has_data_and_no_alert_fires(idle, prometheus):
    missing = queries()
    # Without a GPU the server tells nothing of GPUs: that these queries can be read is all.
    gpu = {title for title, query in missing.items() if "nv_gpu_" in query}
    deadline = time.monotonic() + 120
    while missing.keys() - gpu:
        assert time.monotonic() < deadline, missing
        load_a_little(idle)
        time.sleep(1)
        missing = {
            title: query for title, query in missing.items() if not prometheus.has_data(query)
        }
    [group] = prometheus.get("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == {rule["alert"] for rule in RULES}
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert {rule["name"] for rule in group["rules"] if rule["state"] == "firing"} == set()


@pytest.mark.triton
def test_dashboard_and_rules_speak_of_metrics_that_there_are(idle):
    url = idle.server.endpoints.metrics
    page: Page = wait_for_page(url, lambda page: "slipstream_running_sequences" in page.names)
    texts = [*queries().values(), *(rule["expr"] for rule in RULES)]
    named = {name for text in texts for name in _NAME.findall(text)}
    assert {name for name in named - page.names if not name.startswith("nv_gpu_")} == set()
