"""A notebook as an MPIJob of Kubernetes, as Kubeflow's mpi-operator runs it.

Its schema: https://github.com/kubeflow/mpi-operator, manifests/base/kubeflow.org_mpijobs.yaml.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common import names
from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.units import plural
from labkit.jobs import cells, estimate, parameters
from labkit.jobs.parameters import Values

if TYPE_CHECKING:
    import yaml

HOST_FILE = "/etc/mpi/hostfile"  # which the operator writes, a line `name slots=n` a worker
# Hosts of Kubernetes have long names, which Open MPI would cut at the first point.
VARIABLES = {
    "LABKIT_LAUNCHER": "hosts",
    "LABKIT_HOSTS": HOST_FILE,
    "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
}
FOLDER = "/labkit/job"  # of a pod, where the launcher begins
PATIENCE = 300  # seconds that all workers together get
LARGEST_MAP = 2**20  # bytes that a ConfigMap holds

# Names come later than pods, and sshd later than names; mpiexec waits for neither.
_AWAIT = """\
end=$(($(date +%s) + {patience}))
await() {{
    sentence=$1
    shift
    until "$@" > /dev/null 2>&1; do
        if [ "$(date +%s)" -ge "$end" ]; then
            echo "labkit: $sentence after {patience} s; kubectl get pods says why" >&2
            exit 1
        fi
        sleep 1
    done
}}
for host in $(cut -d' ' -f1 {hosts}); do
    await "$host has no address" getent hosts "$host"
    await "$host does not answer ssh" ssh -o BatchMode=yes -o ConnectTimeout=5 "$host" true
done
"""
_HEAD = """\
# {notebook} as an MPIJob (kubeflow.org/v2beta1), which needs Kubeflow's mpi-operator:
#     kubectl apply -f FILE
# Written by `labkit kubernetes`, and not run there. {kept}.
"""
_CLAIMED = "Runs are kept in the volume {claim}, which the launcher mounts"
_LOST = "Runs end with the launcher's pod: `labkit kubernetes --claim` keeps them in a volume"


@dataclass(frozen=True)
class MPIJob:
    """What is asked for.

    Attributes:
        notebook, values: what runs, with these parameters.
        workers: pods beside the launcher's; slots: ranks in each.
        image: of all pods, as `labkit container` makes one.
        name: of the job; "": the notebook's.
        namespace: of the cluster's; "": the default.
        claim: a volume for the runs, which the launcher mounts; "": they end with its pod.

    Raises:
        InvalidInput: what the operator, or the notebook, would refuse.
    """

    notebook: Path
    values: Values
    image: str
    workers: int | None = None
    slots: int = 1
    name: str = ""
    namespace: str = ""
    claim: str = ""

    def __post_init__(self) -> None:
        ranks = estimate.workers_of(self.notebook, parameters.check(self.notebook, self.values))
        pods = -(-ranks // self.slots) if self.workers is None else self.workers
        if ranks > pods * self.slots:
            raise InvalidInput(
                f"{self.notebook.name} asks for {plural(ranks, 'rank')}, and "
                f"{pods} × {self.slots} have a place; give more --workers or --slots"
            )
        stem = re.sub(r"[^a-z0-9]+", "-", self.notebook.stem.lower()).strip("-")
        object.__setattr__(self, "workers", pods)
        object.__setattr__(self, "name", self.name or stem or "notebook")
        # The operator looks at the name that the last worker gets.
        names.LABEL.check(f"{self.name}-worker-{pods - 1}", "--name, of the last worker")
        names.IMAGE.check(self.image, "--image")
        names.KEY.check(self._file, "the notebook's name")
        if self.namespace:
            names.LABEL.check(self.namespace, "--namespace")
        if self.claim:
            names.SUBDOMAIN.check(self.claim, "--claim")
        if any("\0" in str(value) for value in self.values.values()):
            raise InvalidInput(
                "a parameter holds the character NUL, which no command can; leave it out"
            )

    @property
    def text(self) -> str:
        """The file for `kubectl apply`: the notebook, and the job that runs it."""
        import yaml

        class Readable(yaml.SafeDumper):
            """Writes texts of several lines as they are."""

        Readable.add_representer(str, _readable)
        kept = _CLAIMED.format(claim=self.claim) if self.claim else _LOST
        head = _HEAD.format(notebook=self.notebook.name, kept=kept)
        return head + yaml.dump_all(self.documents(), Dumper=Readable, sort_keys=False)

    def documents(self) -> list[dict[str, JSON]]:
        """The ConfigMap that holds the notebook, and the MPIJob."""
        text = cells.text(self.notebook)
        if len(text.encode()) > LARGEST_MAP:
            raise InvalidInput(
                f"{self.notebook.name} has more than {LARGEST_MAP:,} bytes; clear its outputs"
            )
        notebook: dict[str, JSON] = {"apiVersion": "v1", "kind": "ConfigMap"}
        notebook |= {"metadata": self._metadata(), "data": {self._file: text}}
        job: dict[str, JSON] = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob"}
        return [notebook, job | {"metadata": self._metadata(), "spec": self._spec()}]

    @property
    def _file(self) -> str:
        return f"{self.notebook.stem}.ipynb"

    def _metadata(self) -> dict[str, JSON]:
        named: dict[str, JSON] = {"name": self.name}
        return named | ({"namespace": self.namespace} if self.namespace else {})

    def _spec(self) -> dict[str, JSON]:
        return {
            "slotsPerWorker": self.slots,
            # Results are whole or none: a second attempt would be another run.
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "mpiReplicaSpecs": {
                "Launcher": self._replica(1, ["sh", "-euc", self._script()], launcher=True),
                "Worker": self._replica(self.workers, ["/usr/sbin/sshd", "-De"]),
            },
        }

    def _script(self) -> str:
        words = ["labkit", "run", f"notebook/{self._file}"]
        for name, value in self.values.items():
            words += ["-p", name, str(value)]
        return waiting(HOST_FILE, PATIENCE) + f"exec {shlex.join(words)}\n"

    def _replica(
        self, count: int | None, command: list[str], launcher: bool = False
    ) -> dict[str, JSON]:
        # Ranks of a pod share gradients in memory, of which a pod has 64 MiB by itself.
        volumes: dict[str, dict[str, JSON]] = {"/dev/shm": {"emptyDir": {"medium": "Memory"}}}
        container: dict[str, JSON] = {"name": "labkit", "image": self.image}
        container |= {"command": [*command]}
        if launcher:
            volumes[f"{FOLDER}/notebook"] = {"configMap": {"name": self.name}}
            if self.claim:
                kept_in: dict[str, JSON] = {"claimName": self.claim}
                volumes[f"{FOLDER}/runs"] = {"persistentVolumeClaim": kept_in}
            env: list[JSON] = [{"name": n, "value": value} for n, value in VARIABLES.items()]
            container |= {"workingDir": FOLDER, "env": env}
        named = {place: Path(place).name for place in volumes}
        container["volumeMounts"] = [{"name": n, "mountPath": p} for p, n in named.items()]
        kept: list[JSON] = [{"name": named[place]} | volume for place, volume in volumes.items()]
        pod: dict[str, JSON] = {"containers": [container], "volumes": kept}
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}


def waiting(hosts: str, patience: int) -> str:
    """Lines of a shell that wait until each host of a file has an address and answers ssh."""
    return _AWAIT.format(hosts=hosts, patience=patience)


def _readable(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )
