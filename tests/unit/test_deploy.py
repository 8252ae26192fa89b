"""The manifests under deploy/: valid YAML, the fields of their kinds, and command lines that octavo accepts."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from source_tree import ROOT
from specs import some_facts

from octavo.frontend.cli.flags import configurations
from octavo.frontend.cli.serve import read_settings
from octavo.protocol.config import ModelConfig, resolve
from octavo.protocol.config.sources import engine_config

MANIFESTS = sorted(path for path in (ROOT / "deploy").glob("*.yaml") if path.name != "compose.yaml")


def fields(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has no other fields."""
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required.split()}


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


TEXT, NUMBER, ANY = {"type": "string"}, {"type": "integer"}, {"type": "object"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
METADATA = fields(name=TEXT, labels=TEXTS)
RESOURCES = fields("requests limits", requests=TEXTS, limits=TEXTS)
PORT = fields("name containerPort", name={"type": "string", "maxLength": 15}, containerPort=NUMBER)
SECRET = fields("secretKeyRef", secretKeyRef=fields("name key", name=TEXT, key=TEXT))
CONTAINER = fields(
    "name image resources",
    name=TEXT,
    image=TEXT,
    command=items(TEXT),
    args=items(TEXT),
    env=items(fields("name", name=TEXT, value=TEXT, valueFrom=SECRET)),
    ports=items(PORT),
    readinessProbe=fields("httpGet", httpGet=fields("path port", path=TEXT, port=TEXT), periodSeconds=NUMBER),
    resources=RESOURCES,
    volumeMounts=items(fields("name mountPath", name=TEXT, mountPath=TEXT, readOnly={"type": "boolean"})),
)
VOLUME = fields("name", name=TEXT, persistentVolumeClaim=fields("claimName", claimName=TEXT), emptyDir=ANY)
POD = fields(
    "containers",
    containers=items(CONTAINER),
    volumes=items(VOLUME),
    securityContext=fields(runAsUser=NUMBER, runAsGroup=NUMBER, fsGroup=NUMBER),
    terminationGracePeriodSeconds=NUMBER,
)
TEMPLATE = fields("spec", metadata=METADATA, spec=POD)
HEAD = fields("rayStartParams template", rayStartParams=TEXTS, template=TEMPLATE)
WORKERS = fields(
    "groupName replicas minReplicas maxReplicas rayStartParams template",
    groupName=TEXT,
    replicas=NUMBER,
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
RAY_CLUSTER = fields("headGroupSpec workerGroupSpecs", headGroupSpec=HEAD, workerGroupSpecs=items(WORKERS))
KINDS = {
    ("v1", "Service"): fields(
        "selector ports",
        selector=TEXTS,
        ports=items(fields("name port targetPort", name=TEXT, port=NUMBER, targetPort=TEXT)),
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): fields(
        "replicas leaderWorkerTemplate",
        replicas=NUMBER,
        leaderWorkerTemplate=fields(
            "size restartPolicy leaderTemplate workerTemplate",
            size=NUMBER,
            restartPolicy={"enum": ["None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]},
            leaderTemplate=TEMPLATE,
            workerTemplate=TEMPLATE,
        ),
    ),
    ("ray.io/v1", "RayJob"): fields(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        backoffLimit=NUMBER,
        shutdownAfterJobFinishes={"type": "boolean"},
        rayClusterSpec=RAY_CLUSTER,
    ),
    ("ray.io/v1", "RayService"): fields(
        "serveConfigV2 rayClusterConfig", serveConfigV2=TEXT, rayClusterConfig=RAY_CLUSTER
    ),
}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def found(value: Any, key: str) -> Iterator[Any]:
    """Yield every value of a key at any depth."""
    if isinstance(value, dict):
        yield from (value[key],) if key in value else ()
        for inner in value.values():
            yield from found(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from found(inner, key)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_the_fields_of_their_kinds(path: Path) -> None:
    for document in documents(path):
        schema = KINDS[document["apiVersion"], document["kind"]]
        whole = fields("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=schema)
        jsonschema_rs.validate(whole, document)
        for pod in found(document, "spec"):
            mounted = {mount["name"] for mount in [mount for mounts in found(pod, "volumeMounts") for mount in mounts]}
            volumes = {volume["name"] for volumes in found(pod, "volumes") for volume in volumes}
            assert mounted == volumes


def command_lines(path: Path) -> Iterator[list[str]]:
    for document in documents(path):
        for container in (one for containers in found(document, "containers") for one in containers):
            if container.get("command") == ["octavo"]:
                yield container["args"]
        for entrypoint in found(document, "entrypoint"):
            program, *arguments = shlex.split(entrypoint)
            assert program == "octavo"
            yield arguments


def test_command_lines_are_accepted() -> None:
    num_checked = 0
    for path in MANIFESTS:
        sizes = [str(size) for document in documents(path) for size in found(document, "size")]
        for command, *arguments in command_lines(path):
            values = {"LWS_GROUP_SIZE": sizes[0] if sizes else "", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "a"}
            argv = [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], text) for text in arguments]  # noqa: B023
            assert command == "serve"
            engine, _ = configurations(read_settings(argv))
            resolve(engine, some_facts(), device="cpu", num_cores=8)
            num_checked += 1
    assert num_checked == 3


def test_the_service_names_the_recipe_and_settings_that_exist() -> None:
    (document,) = documents(ROOT / "deploy" / "kuberay-service.yaml")
    (application,) = yaml.safe_load(document["spec"]["serveConfigV2"])["applications"]
    module, _, function = application["import_path"].partition(":")
    tree = ast.parse((ROOT / "deploy" / f"{module}.py").read_text())
    assert function in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    own = {"num_replicas", "num_cpus", "num_gpus"}
    engine = engine_config({name: value for name, value in application["args"].items() if name not in own})
    assert isinstance(engine.model, ModelConfig)
