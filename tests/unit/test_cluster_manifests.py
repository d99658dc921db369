"""The manifests of examples/: their structure, as far as KubeRay and SkyPilot prescribe it, and their settings.

The schemas below are small: the fields that the manifests have, with their types, so that a misspelled or misplaced
field is found. Neither system is started.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from verl.config.batch_sizes import count_train_ranks
from verl.config.load import load

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
RAY_JOB = yaml.safe_load((ROOT / "examples/kubernetes/rayjob.yaml").read_text())
TASK = yaml.safe_load((ROOT / "examples/skypilot/verl.yaml").read_text())
GPUS = "nvidia.com/gpu"

Schema = dict[str, Any]


def fields(required: str = "", /, **kinds: Schema) -> Schema:
    return {"type": "object", "properties": kinds, "required": required.split(), "additionalProperties": False}


def items(kind: Schema) -> Schema:
    return {"type": "array", "items": kind, "minItems": 1}


TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITIES: Schema = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(Mi|Gi)?$"}}
POD: Schema = fields(
    "spec",
    spec=fields(
        "containers",
        containers=items(
            fields(
                "name image resources",
                name=TEXT,
                image=TEXT,
                env=items(fields("name value", name=TEXT, value=TEXT)),
                resources=fields("requests limits", requests=QUANTITIES, limits=QUANTITIES),
                volumeMounts=items(fields("name mountPath", name=TEXT, mountPath={"pattern": "^/"})),
            )
        ),
        volumes=items(
            fields(
                "name",
                name=TEXT,
                persistentVolumeClaim=fields("claimName", claimName=TEXT),
                emptyDir=fields(medium={"const": "Memory"}, sizeLimit=TEXT),
            )
        ),
    ),
)
RAY_JOB_SCHEMA: Schema = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields("name", name={"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}),
    spec=fields(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        backoffLimit=COUNT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=fields(
            "headGroupSpec workerGroupSpecs",
            rayVersion=TEXT,
            authOptions=fields("mode", mode={"enum": ["disabled", "token"]}),
            headGroupSpec=fields("template rayStartParams", template=POD, rayStartParams=TEXTS),
            workerGroupSpecs=items(
                fields(
                    "groupName template rayStartParams",
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    template=POD,
                    rayStartParams=TEXTS,
                )
            ),
        ),
    ),
)
TASK_SCHEMA: Schema = fields(
    "run",
    name=TEXT,
    workdir=TEXT,
    num_nodes={"type": "integer", "minimum": 1},
    resources=fields(accelerators={"pattern": r"^[A-Z]\w+:\d+$"}, disk_size=COUNT),
    secrets={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    file_mounts={
        "type": "object",
        "additionalProperties": fields(
            "source", source=TEXT, mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]}, store=TEXT, name=TEXT
        ),
    },
    setup=TEXT,
    run=TEXT,
)


@pytest.mark.parametrize(
    ("manifest", "schema"), [(RAY_JOB, RAY_JOB_SCHEMA), (TASK, TASK_SCHEMA)], ids=["kuberay", "sky"]
)
def test_manifests_have_the_structure_that_their_systems_prescribe(manifest: Any, schema: Schema) -> None:
    Draft7Validator.check_schema(schema)
    assert [error.message for error in Draft7Validator(schema).iter_errors(manifest)] == []
    broken = {**manifest, "entry_point": "verl train"}
    assert list(Draft7Validator(schema).iter_errors(broken)) != []


def pods() -> list[dict[str, Any]]:
    cluster = RAY_JOB["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_pods_of_a_ray_job_share_one_image_and_the_files_of_the_run() -> None:
    containers = [container for pod in pods() for container in pod["containers"]]
    assert {container["image"] for container in containers} == {"verl:cuda"}
    for pod in pods():
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == volumes
    for container in containers:
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/shared", "/dev/shm"}
    assert GPUS not in containers[0]["resources"]["limits"], "the head trains nothing"


def test_a_ray_job_has_the_version_of_ray_that_the_image_has() -> None:
    [pin] = re.findall(r"^ray==(\S+)$", (ROOT / "requirements-cuda.txt").read_text(), re.MULTILINE)
    assert RAY_JOB["spec"]["rayClusterSpec"]["rayVersion"] == pin


def test_a_ray_job_has_as_many_gpus_as_its_settings_ask_for() -> None:
    verl, command, *settings = shlex.split(RAY_JOB["spec"]["entrypoint"])
    assert (verl, command) == ("verl", "train")
    [loaded] = load(settings)
    gpus = sum(
        group["replicas"] * int(container["resources"]["limits"][GPUS])
        for group in RAY_JOB["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        for container in group["template"]["spec"]["containers"]
    )
    assert count_train_ranks(loaded.config) == gpus
    assert loaded.config.trainer.checkpoint_dir.is_relative_to("/shared")


def test_the_task_of_skypilot_is_a_valid_script_with_valid_settings() -> None:
    for script in (TASK["setup"], TASK["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)
    command = TASK["run"].partition("verl train")[2].replace("\\\n", " ")
    sizes = {"NUM_NODES": str(TASK["num_nodes"]), "NUM_GPUS_PER_NODE": TASK["resources"]["accelerators"].split(":")[1]}
    settings = [re.sub(r"\$SKYPILOT_(\w+)", lambda found: sizes[found[1]], word) for word in shlex.split(command)]
    [loaded] = load(settings)
    assert count_train_ranks(loaded.config) == 16
    assert loaded.config.trainer.checkpoint_dir.is_relative_to(next(iter(TASK["file_mounts"])))
    assert TASK["secrets"]["RAY_AUTH_TOKEN"] is None, "a token in the file would be known to all who have it"
    assert (ROOT / TASK["setup"].split()[1]).exists()
