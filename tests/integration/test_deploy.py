"""The Dockerfile, compose and Kubernetes files, by the tools made for each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from servekit import __version__
from servekit.config.load import load_config
from servekit.supervisor.supervisor import END_S
from tests.deploy.dockerfile import ROOT, Stage, stages

DEPLOY = ROOT / "deploy"
COMPOSE = sorted((DEPLOY / "compose").glob("*.yaml"))
KUBERNETES = DEPLOY / "kubernetes"
#: The oldest that we look at; later ones take the same.
KUBERNETES_VERSION = "1.32"
OWN_LABELS = {"app.kubernetes.io/name": "servekit"}
OVERLAYS = ["overlays/cpu", "overlays/gpu", "kuberay"]
#: The programs that the test extra brings stand beside its interpreter.
BIN = Path(sys.executable).parent


def run(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True, text=True, timeout=120, check=False, **more,
    )  # fmt: skip


# ---------------------------------------------------------------- the Dockerfile


@pytest.fixture(scope="module")
def built() -> list[Stage]:
    return stages((ROOT / "Dockerfile").read_text())


def test_hadolint_finds_nothing() -> None:
    done = run(BIN / "hadolint", "--failure-threshold=style", ROOT / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_what_it_copies_is_there_and_reaches_docker(built: list[Stage]) -> None:
    """`.dockerignore` keeps all away but what is named in it."""
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = [
        source
        for one in built[0].instructions
        if one.word == "COPY"
        for source in one.operands[:-1]
    ]
    assert copied and all((ROOT / source).exists() for source in copied)
    assert set(copied) == kept


def test_it_is_nobody_in_particular_and_says_so_by_number(built: list[Stage]) -> None:
    assert built[-1].last("USER").rest == "10001:10001"


def test_its_commands_are_ours(built: list[Stage]) -> None:
    """Started as CMD says, less the file; asked as HEALTHCHECK does, where nothing runs."""
    up = built[-1].last("CMD").command
    assert up[0] == "servekit"
    done = run(sys.executable, "-m", *up, cwd=ROOT)
    assert (done.returncode, "/config.yaml" in done.stderr) == (2, True)
    asked = run(sys.executable, "-m", *built[-1].last("HEALTHCHECK").command, "--run-dir", "/none")
    assert asked.returncode == 1


# ---------------------------------------------------------------- compose


def test_compose_files_are_by_its_specification() -> None:
    done = run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *COMPOSE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_compose_mounts_is_there_and_is_published_on_loopback_only() -> None:
    services = yaml.safe_load(COMPOSE[0].read_text())["services"]
    services |= yaml.safe_load((DEPLOY / "compose" / "open-webui.yaml").read_text())["services"]
    assert COMPOSE[0].name == "compose.yaml"
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.split(":-")[-1].replace("}", "").split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), source
    grace = services["servekit"]["stop_grace_period"]
    assert (
        int(grace.removesuffix("s"))
        >= load_config(ROOT / "configs" / "demo.yaml").server.drain_timeout_s + END_S
    )


def test_prometheus_reads_the_same_rules_there_as_elsewhere() -> None:
    theirs = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    ours = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    for own in (theirs, ours):
        del own["scrape_configs"][0]["static_configs"]
    assert theirs == ours


# ---------------------------------------------------------------- Kubernetes


needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, whose kustomize renders them, is not here"
)


@cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    done = run("kubectl", "kustomize", KUBERNETES / overlay)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [document for document in documents if document["kind"] == kind]
    return found


@needs_kubectl
@pytest.mark.lane("surroundings")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_are_by_kubernetes_schemas(overlay: str) -> None:
    """A RayCluster's is not among them: the pods in it are tried as pods."""
    import kubernetes_validate

    documents = [*rendered(overlay)]
    for pod in pods(documents):
        documents.append({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, **pod})
    for document in documents:
        if document["kind"] != "RayCluster":
            kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The templates of all pods, those of a RayCluster too."""
    found = [
        document["spec"]["template"] for document in documents if document["kind"] == "Deployment"
    ]
    for document in documents:
        if document["kind"] == "RayCluster":
            spec = document["spec"]
            found += [
                group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
            ]
    return [{"spec": {**pod["spec"], "restartPolicy": "Always"}} for pod in found]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_is_root_or_may_become_it(overlay: str) -> None:
    for pod in pods(rendered(overlay)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context.get("readOnlyRootFilesystem") or container["name"].startswith("ray-")


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_it_has_the_time_to_end_that_its_configuration_asks_for(
    overlay: str, tmp_path: Path
) -> None:
    documents = rendered(overlay)
    text = one(documents, "ConfigMap")["data"]["servekit.yaml"]
    drain_s = yaml.safe_load(text)["server"]["drain_timeout_s"]
    spec = one(documents, "Deployment")["spec"]["template"]["spec"]
    [container] = spec["containers"]
    [_, pause_s] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert spec["terminationGracePeriodSeconds"] >= int(pause_s) + drain_s + END_S


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_are_for_its_own_pods_and_let_it_ask_for_names(overlay: str) -> None:
    documents = rendered(overlay)
    disruption = one(documents, "PodDisruptionBudget")["spec"]
    assert disruption["selector"]["matchLabels"] == OWN_LABELS
    policy = one(documents, "NetworkPolicy")["spec"]
    assert "servekit" in str(policy["podSelector"])
    [names] = [rule for rule in policy["egress"] if {"port": 53, "protocol": "UDP"} in ports(rule)]
    [to] = names["to"]
    expected = {"key": "k8s-app", "operator": "In", "values": ["kube-dns"]}
    assert to["podSelector"] == {"matchExpressions": [expected]}


def ports(rule: dict[str, Any]) -> list[dict[str, Any]]:
    return list(rule.get("ports", ()))


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS[:2])
def test_its_configuration_is_one(overlay: str, tmp_path: Path) -> None:
    documents = rendered(overlay)
    path = tmp_path / "servekit.yaml"
    path.write_text(one(documents, "ConfigMap")["data"]["servekit.yaml"])
    config = load_config(path)
    deployment = one(documents, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert config.server.port == deployment["ports"][0]["containerPort"]
    assert config.keys, "whoever reaches the pod could use all"


@needs_kubectl
def test_every_node_of_the_ray_cluster_is_reached_where_its_gateway_listens() -> None:
    documents = rendered("kuberay")
    config = yaml.safe_load(one(documents, "ConfigMap")["data"]["servekit.yaml"])
    assert config["ray"]["gateways"] == "every_node"
    cluster = one(documents, "RayCluster")["metadata"]["name"]
    [nodes] = [
        document["spec"]
        for document in documents
        if document["kind"] == "Service" and "ray.io/cluster" in document["spec"]["selector"]
    ]
    assert nodes["selector"]["ray.io/cluster"] == cluster
    assert [port["targetPort"] for port in nodes["ports"]] == [config["server"]["port"]]
    ingress = one(documents, "NetworkPolicy")["spec"]["ingress"]
    assert config["server"]["port"] in [
        p["port"] for rule in ingress for p in rule.get("ports", ())
    ]


@needs_kubectl
def test_probes_ask_what_their_names_say() -> None:
    [container] = one(rendered("overlays/cpu"), "Deployment")["spec"]["template"]["spec"][
        "containers"
    ]
    paths = {name: container[name]["httpGet"]["path"] for name in container if "Probe" in name}
    assert paths == {
        "startupProbe": "/livez",
        "livenessProbe": "/livez",
        "readinessProbe": "/readyz",
    }


@needs_kubectl
def test_gpus_are_asked_for_where_they_are_wanted() -> None:
    def limits(overlay: str) -> dict[str, Any]:
        spec = one(rendered(overlay), "Deployment")["spec"]["template"]["spec"]
        found: dict[str, Any] = spec["containers"][0]["resources"]["limits"]
        return found

    assert limits("overlays/gpu")["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in limits("overlays/cpu")


def test_files_for_grafana_and_prometheus_are_whole() -> None:
    for path in (DEPLOY / "grafana" / "provisioning").rglob("*.yml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1
    assert json.loads((DEPLOY / "grafana" / "servekit.json").read_text())["uid"] == "servekit"


# ---------------------------------------------------------------- Helm


CHART = DEPLOY / "helm"
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not here")


def test_the_chart_has_every_manifest_and_uses_every_value() -> None:
    """As far as one can tell without helm: the manifests are those of the base, by a link."""
    template = (CHART / "templates" / "manifests.yaml").read_text()
    resources = yaml.safe_load((CHART / "base" / "kustomization.yaml").read_text())["resources"]
    assert all(f'"{Path(name).stem}"' in template for name in resources)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert all(f".Values.{key}" in template for key in values)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


@needs_helm
@needs_kubectl
@pytest.mark.lane("surroundings")
def test_the_chart_makes_what_kustomize_makes() -> None:
    assert run("helm", "lint", "--strict", CHART).returncode == 0
    ours, theirs = template_chart(), rendered("overlays/cpu")
    assert sorted(map(kind_of, ours)) == sorted(map(kind_of, theirs))
    for kind in ("Deployment", "NetworkPolicy", "PersistentVolumeClaim"):
        made, expected = one(ours, kind)["spec"], one(theirs, kind)["spec"]
        if kind == "Deployment":  # whose labels have the release, and whose ConfigMap has a hash
            made, expected = made["template"]["spec"], expected["template"]["spec"]
            made["volumes"][0] = expected["volumes"][0]
        elif kind == "NetworkPolicy":
            made["podSelector"] = expected["podSelector"]
        assert made == expected


@needs_helm
@pytest.mark.lane("surroundings")
def test_the_values_of_the_chart_take_effect(tmp_path: Path) -> None:
    file = {
        "models": [{"name": "a", "path": "org/a"}],
        "keys": [{"name": "app", "file": "/keys/app"}],
    }
    values = {
        "image": {"repository": "r/servekit", "tag": "cuda"},
        "config": file, "gpus": 2, "keysSecret": "mine", "networkPolicy": False,
        "storage": {"size": "9Gi", "className": "fast"},
    }  # fmt: skip
    given = tmp_path / "values.json"
    given.write_text(json.dumps(values))
    documents = template_chart("--values", str(given))
    assert "NetworkPolicy" not in map(kind_of, documents)
    pod = one(documents, "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "r/servekit:cuda"
    assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 2}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v] == ["mine"]
    storage = one(documents, "PersistentVolumeClaim")["spec"]
    assert (storage["storageClassName"], storage["resources"]["requests"]) == (
        "fast", {"storage": "9Gi"},
    )  # fmt: skip
    path = tmp_path / "servekit.yaml"
    path.write_text(one(documents, "ConfigMap")["data"]["servekit.yaml"])
    assert [model.name for model in load_config(path).models] == ["a"]


def kind_of(document: dict[str, Any]) -> str:
    return str(document["kind"])


def template_chart(*args: str) -> list[dict[str, Any]]:
    done = run("helm", "template", "servekit", CHART, *args)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]
