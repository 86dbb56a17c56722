"""The Helm chart: what it renders is valid, drains in time, is closed, and refuses bad values."""

import json
import re

import pytest

pytest.importorskip("helm_python")
pytest.importorskip("kubernetes_validate")

import helm_python as helm
from fixtures.deploy import chart
from fixtures.deploy.chart import CHART, SMALLEST, merged, pod_templates, render, server_of
from slipstream.bridge.families import engine_metrics
from slipstream.config import EventPorts
from slipstream_client.cli import build_parser
from slipstream_runtime.rendezvous import KEY_VARIABLE, Place, place_of
from slipstream_serve import gateway, triton

VERSIONS = ("1.29", "1.33", "1.37")
NVIDIA = {
    "gpu": ["NVIDIA-A10G"],
    "model": {
        "name": "llama-3-8b-instruct",
        "tensorrtLlm": {"dataType": None, "parallelism": {"pipeline": None, "tensor": 2}},
        "pullSecret": None,
    },
    "triton": {
        "image": {"pullSecrets": [{"name": "ngc-container-pull"}], "imagePullPolicy": "Always"},
        "resources": {"cpu": None, "memory": None},
    },
    "autoscaling": {
        "enable": True,
        "replicas": {"maximum": None, "minimum": None},
        "metric": {"name": "triton:queue_compute:ratio", "value": "1500m"},
    },
    "logging": {
        "initialization": {"verbose": None},
        "tritonServer": {"useIso8601": None, "verbose": False},
    },
    "kubernetes": {"hostRootPath": None, "labels": None, "noService": None, "tolerations": None},
}
"""As the values files of NVIDIA's chart for autoscaling are, empty keys included."""

MULTI_NODE = {
    "gpuPerNode": 4,
    "tensorrtLLM": {"parallelism": {"tensor": 4, "pipeline": 2}},
    "multiNode": {"keySecret": "ranks"},
    "triton": {"resources": {"efa": 4}},
    "gpu": "NVIDIA-H100-80GB-HBM3",
}
CASES = {
    "smallest": {},
    "all": {
        "autoscaling": {"enable": True},
        "monitoring": {"monitor": "PodMonitor", "alerts": True, "dashboard": True},
        "apiKeys": {"secret": "keys"},
        "inferencePool": {"enable": True, "endpointPicker": "picker", "kvEvents": True},
        "model": {"composeOptions": ["--max-model-len=8192"]},
        "triton": {"cacheClaim": "kernels", "serveOptions": ["--stall=30"]},
        "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
    },
    "download": {
        "persistentVolumeClaim": "",
        "model": {"download": {"repository": "Qwen/Qwen3-8B"}, "pullSecret": "hf"},
        "monitoring": {"monitor": "ServiceMonitor"},
    },
    "keda": {"autoscaling": {"enable": True, "engine": "keda", "replicas": {"minimum": 0}}},
    "nodes": merged(MULTI_NODE, {"autoscaling": {"enable": True}}),
    "nvidia": NVIDIA,
}


@pytest.mark.parametrize("case", CASES)
def test_all_that_it_renders_is_valid_in_each_version(case):
    objects = render(CASES[case])
    assert {"Service", "ServiceAccount"} <= objects.keys()
    for found in objects.values():
        for version in VERSIONS:
            chart.validate(found, version)


def test_pods_of_other_nodes_run_the_ranks_that_a_leader_waits_for():
    """The variables are those by which `slipstream rank` and the leader find their ranks."""
    template = render(MULTI_NODE)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    places = []
    for index, role in enumerate(("leaderTemplate", "workerTemplate")):
        container = template[role]["spec"]["containers"][0]
        build_parser(container["args"][0]).parse_args(container["args"])
        assert "--model-repository=/repository" in container["args"]
        lws = {"$(LWS_LEADER_ADDRESS)": "leader", "$(LWS_WORKER_INDEX)": str(index)}
        given = {
            each["name"]: lws.get(each["value"], each["value"])
            for each in container["env"]
            if "value" in each
        }
        places.append(place_of(given, 8))
        assert any(each["name"] == KEY_VARIABLE for each in container["env"])
    assert places == [Place(0, 4, 8, "leader", 29500), Place(4, 4, 8, "leader", 29500)]
    assert "preStop" not in str(template["workerTemplate"])


def test_a_field_that_does_not_exist_is_found_by_the_check():
    found = render()["Deployment"]
    server_of({"Deployment": found})["spec"]["containers"][0]["resourcs"] = {}
    with pytest.raises(Exception, match="resourcs"):
        chart.validate(found, VERSIONS[0])


def test_it_needs_three_values_and_its_lint_finds_nothing():
    assert helm.lint(CHART, values=SMALLEST)["errors"] == []
    chart.chart().render(SMALLEST)
    for missing in SMALLEST:
        with pytest.raises(helm.HelmError):
            chart.chart().render({k: v for k, v in SMALLEST.items() if k != missing})


@pytest.mark.parametrize("case", CASES)
def test_its_commands_are_commands_of_this_version(case):
    pod = server_of(render(CASES[case]))["spec"]
    server = pod["containers"][0]
    compose = next(each for each in pod["initContainers"] if each["name"] == "compose")
    commands = [
        server["args"],
        server["lifecycle"]["preStop"]["exec"]["command"][1:],
        *(server[f"{kind}Probe"]["exec"]["command"][1:] for kind in ("startup", "liveness")),
        server["readinessProbe"]["exec"]["command"][1:],
        compose["args"],
    ]
    for words in commands:
        build_parser(words[0]).parse_args(words)
    ports = {each["name"]: each["containerPort"] for each in server["ports"]}
    serve = build_parser("serve").parse_args(server["args"])
    composed = build_parser("compose").parse_args(compose["args"])
    events = EventPorts.of(composed.kv_events)[1:3] if composed.kv_events else ()
    assert list(ports.values()) == [
        serve.http_port,
        serve.grpc_port,
        serve.metrics_port,
        serve.openai_port,
        *events,
    ]
    if events:
        assert composed.kv_events.startswith("tcp://0.0.0.0:")
        assert composed.kv_events_topic == f"kv@$(POD_IP):{serve.openai_port}@Qwen3-8B"
        assert [each["name"] for each in compose["env"]] == ["POD_IP"]
    world = (composed.tensor_parallel or 1) * (composed.pipeline_parallel or 1)
    limits = server["resources"]["limits"]
    nodes = render(CASES[case]).get("LeaderWorkerSet", {}).get("spec", {})
    nodes = nodes.get("leaderWorkerTemplate", {}).get("size", 1)
    assert limits["nvidia.com/gpu"] * nodes == world
    assert server["resources"]["requests"] == limits


@pytest.mark.parametrize("seconds", [0, 45, 3600])
def test_a_drain_ends_before_the_pod_is_killed(seconds):
    values = {"drainSeconds": seconds, "drainDelaySeconds": min(seconds, 5)}
    pod = server_of(render(values))["spec"]
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    drain = build_parser("drain").parse_args(hook[1:])
    end_s = triton.ENDING_S + triton.EXIT_TIMEOUT_S + 2 + gateway._END_S + 2
    assert drain.timeout + end_s < pod["terminationGracePeriodSeconds"]
    assert drain.delay == min(seconds, 5)


@pytest.mark.parametrize("case", CASES)
def test_every_container_is_without_rights_and_its_root_read_only(case):
    templates = [each for found in render(CASES[case]).values() for each in pod_templates(found)]
    assert templates
    for template in templates:
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]
            names = {each["name"] for each in container["volumeMounts"]}
            assert names <= {volume["name"] for volume in pod["volumes"]}


def test_what_selects_pods_selects_the_server_by_ports_that_it_has():
    objects = render(CASES["all"])
    pod = server_of(objects)
    labels, ports = pod["metadata"]["labels"], pod["spec"]["containers"][0]["ports"]
    names = {port["name"] for port in ports}
    selectors = {
        "Service": objects["Service"]["spec"]["selector"],
        "NetworkPolicy": objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        **{
            kind: objects[kind]["spec"]["selector"]["matchLabels"]
            for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor", "InferencePool")
        },
    }
    for kind, selector in selectors.items():
        assert selector.items() <= labels.items(), kind
    used = {port["targetPort"] for port in objects["Service"]["spec"]["ports"]}
    used |= {e["port"] for e in objects["PodMonitor"]["spec"]["podMetricsEndpoints"]}
    for rule in objects["NetworkPolicy"]["spec"]["ingress"]:
        used |= {port["port"] for port in rule["ports"]}
    assert used == names
    job = render(CASES["download"])["Job"]["spec"]["template"]["metadata"]["labels"]
    assert not selectors["Deployment"].items() <= job.items()


def test_what_scales_are_metrics_that_the_server_publishes():
    published = {metric.family for metric in engine_metrics("m", 32, 100, "")}
    hpa = render(CASES["all"])["HorizontalPodAutoscaler"]["spec"]
    triggers = render(CASES["keda"])["ScaledObject"]["spec"]["triggers"]
    values = chart.chart().values["autoscaling"]["metrics"]
    assert [each["pods"]["metric"]["name"] for each in hpa["metrics"]] == [
        each["name"] for each in values
    ]
    for trigger, metric in zip(triggers, values, strict=True):
        assert metric["query"] in published
        wanted = rf'sum\({metric["query"]}\{{namespace="serving",pod=~"llm-\.\*"\}}\)'
        assert re.fullmatch(wanted, trigger["metadata"]["query"])
    assert [trigger["metadata"]["threshold"] for trigger in triggers] == ["4", "40", "0.7"]
    of_nvidia = render(NVIDIA)["HorizontalPodAutoscaler"]["spec"]
    first = of_nvidia["metrics"][0]["pods"]
    assert first["metric"]["name"] == "triton:queue_compute:ratio"
    assert first["target"]["averageValue"] == "1500m"
    assert (of_nvidia["minReplicas"], of_nvidia["maxReplicas"]) == (1, 4)


def test_the_committed_dashboard_and_alerts_are_in_it():
    objects = render(CASES["all"])
    text = objects["ConfigMap"]["data"]["slipstream.json"]
    monitoring = CHART.parents[2] / "docs" / "monitoring"
    assert json.loads(text) == json.loads((monitoring / "dashboard.json").read_text())
    assert "SlipstreamBlocksLeak" in json.dumps(objects["PrometheusRule"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replica": 2}, "replica"),
        ({"model": {"name": "../etc"}}, "name"),
        ({"persistentVolumeClaim": ""}, "persistentVolumeClaim and model.download.repository"),
        ({"drainSeconds": 3}, "drainSeconds is 3, less than drainDelaySeconds, 5"),
        (
            {"gpuPerNode": 8, "model": {"tensorrtLlm": {"parallelism": {"tensor": 16}}}},
            "tensor x pipeline is 16, more than the engine's 8 ranks",
        ),
        (
            {"gpuPerNode": 2, "model": {"tensorrtLlm": {"parallelism": {"tensor": 4}}}},
            "tensor is 4, which gpuPerNode, 2, is no multiple of",
        ),
        (
            merged(MULTI_NODE, {"tensorrtLLM": {"parallelism": {"tensor": 3, "pipeline": 2}}}),
            "6, no multiple of gpuPerNode, 4",
        ),
        (
            {"autoscaling": {"enable": True, "replicas": {"minimum": 9}}},
            "minimum is 9, more than the maximum, 4",
        ),
        (
            {"autoscaling": {"enable": True, "replicas": {"minimum": 0}}},
            "only autoscaling.engine keda scales to zero",
        ),
        ({"inferencePool": {"enable": True}}, "inferencePool.endpointPicker is empty"),
        ({"logging": {"tritonServer": {"verbose": True}}}, "verbose"),
    ],
)
def test_bad_values_are_refused_by_name(values, words):
    with pytest.raises(helm.HelmError, match=re.escape(words)):
        render(values)
