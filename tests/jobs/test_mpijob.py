"""Test that an MPIJob fits the operator's schema, and that its launcher waits for workers."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from labkit.common.errors import InvalidInput
from labkit.jobs.containers import MPIJob, waiting

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "is_swept.ipynb"
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}


def closed(required: str, **properties: Any) -> dict[str, Any]:
    """Return a schema of an object with only these properties; Kubernetes drops unknown ones."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


# This schema has the used parts of the operator's manifests/base/kubeflow.org_mpijobs.yaml
# (v2beta1), and the checks of its pkg/apis/kubeflow/validation.
VOLUME = closed(
    "name",
    name=TEXT,
    configMap=closed("name", name=TEXT),
    emptyDir=closed("", medium=TEXT),
    persistentVolumeClaim=closed("claimName", claimName=TEXT),
)
CONTAINER = closed(
    "name",
    name=TEXT,
    image=TEXT,
    command=listed(TEXT),
    workingDir=TEXT,
    env=listed(closed("name", name=TEXT, value=TEXT)),
    volumeMounts=listed(closed("name mountPath", name=TEXT, mountPath=TEXT)),
)
POD = closed("containers", containers=listed(CONTAINER), volumes=listed(VOLUME))


def replica(replicas: dict[str, Any]) -> dict[str, Any]:
    policy = {"enum": ["Never", "OnFailure"]}
    template = closed("spec", spec=POD)
    return closed("replicas template", replicas=replicas, restartPolicy=policy, template=template)


SCHEMA = closed(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=closed("name", name=TEXT, namespace=TEXT),
    spec=closed(
        "mpiReplicaSpecs slotsPerWorker",
        slotsPerWorker=COUNT,
        sshAuthMountPath=TEXT,
        mpiImplementation={"enum": ["OpenMPI", "Intel"]},
        runPolicy=closed(
            "",
            cleanPodPolicy={"enum": ["None", "Running", "All"]},
            backoffLimit={"type": "integer", "minimum": 0},
        ),
        mpiReplicaSpecs=closed(
            "Launcher Worker", Launcher=replica({"const": 1}), Worker=replica(COUNT)
        ),
    ),
)


@pytest.mark.parametrize(
    "more",
    [{}, {"workers": 3, "slots": 2, "name": "mine", "namespace": "lab", "claim": "kept"}],
)
def test_the_file_fits_what_is_used_of_the_operators_schema(more: dict[str, Any]) -> None:
    text = MPIJob(NOTEBOOK, {"workers": 3, "number": 7}, "labkit:1", **more).text
    notebook, job = yaml.safe_load_all(text)
    jsonschema.validate(job, SCHEMA)
    assert notebook["metadata"] == job["metadata"]
    assert notebook["data"] == {"is_swept.ipynb": NOTEBOOK.read_text()}
    spec = job["spec"]["mpiReplicaSpecs"]
    assert (spec["Worker"]["replicas"], job["spec"]["slotsPerWorker"]) == (3, more.get("slots", 1))
    (container,) = spec["Launcher"]["template"]["spec"]["containers"]
    script = container["command"][-1]
    assert script.endswith("\nexec labkit run notebook/is_swept.ipynb -p workers 3 -p number 7\n")
    assert subprocess.run(["sh", "-n", "-c", script]).returncode == 0
    assert {"name": "LABKIT_HOSTS", "value": "/etc/mpi/hostfile"} in container["env"]
    assert container["workingDir"] == "/labkit/job"
    for pod in (each["template"]["spec"] for each in spec.values()):
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        assert mounts.keys() == {each["name"] for each in pod["volumes"]}
        # `labkit run` keeps runs in this volume, which the ranks do not need.
        kept = {"name": "runs", "persistentVolumeClaim": {"claimName": "kept"}}
        claims = "claim" in more and pod is spec["Launcher"]["template"]["spec"]
        assert (mounts.get("runs") == "/labkit/job/runs", kept in pod["volumes"]) == (claims,) * 2
    assert "does not run it" in text
    told = "the volume kept, which" if "claim" in more else "Runs are lost with the launcher's pod"
    assert told in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"values": {"numbr": 1}}, "has no parameter 'numbr'"),
        (
            {"workers": 1, "values": {"workers": 3}},
            "needs 3 ranks, but --workers 1 × --slots 1 are fewer",
        ),
        (
            {"name": "My_job"},
            "'My_job-worker-0' is not a valid name of a Kubernetes object; allowed: lowercase",
        ),
        ({"name": "n" * 60}, "at most 63"),
        ({"namespace": "a b"}, "'a b' is not a valid name of a Kubernetes object"),
    ],
)
def test_what_would_not_run_there_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        MPIJob(**{"notebook": NOTEBOOK, "values": {}, "image": "labkit"} | given)


def launched(ssh: str, host: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher's script with a hostfile of one worker and a command in place of ssh."""
    Path("ssh").write_text(f"#!/bin/sh\n{ssh}\n")
    Path("ssh").chmod(Path("ssh").stat().st_mode | stat.S_IXUSR)
    Path("hostfile").write_text(f"{host} slots=2\n")
    own = os.environ | {"PATH": f"{Path.cwd()}:{os.environ['PATH']}"}
    command = ["sh", "-euc", waiting("hostfile", 1) + "echo started\n"]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)


def test_the_launcher_waits_until_every_worker_has_a_name_and_answers() -> None:
    # The first ssh call fails, because sshd starts a moment after the name resolves.
    answers = '[ -e asked ] || { touch asked; exit 255; }; echo "$@" > words'
    done = launched(answers, "localhost")
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    assert Path("words").read_text().endswith(" localhost true\n")
    nameless = launched("exit 0", "nowhere.invalid")
    assert (nameless.returncode, nameless.stdout) == (1, "")
    assert nameless.stderr.startswith("labkit: nowhere.invalid has no address after 1 s; kubectl")
    mute = launched("exit 255", "localhost")
    assert mute.stderr.startswith("labkit: localhost does not answer ssh after 1 s")
