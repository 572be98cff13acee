"""A notebook as a container image and as a Kubernetes MPIJob.

A description of a notebook as a Kubernetes MPIJob, for Kubeflow's mpi-operator.

Schema: https://github.com/kubeflow/mpi-operator, manifests/base/kubeflow.org_mpijobs.yaml.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import __version__
from labkit.common import names
from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.files import DISTRIBUTION, checkout
from labkit.common.units import plural
from labkit.jobs import cells, estimate, parameters
from labkit.jobs.parameters import Values

if TYPE_CHECKING:
    import yaml


IMAGE = f"labkit:{__version__}"

# The container image needs ssh, because mpiexec uses ssh to start ranks in other pods. The
# mpi-operator mounts the ssh keys with its own file modes. The ssh option StrictModes is therefore
# off. ssh does not check host keys, because each pod has new keys.
_TEXT = """\
# A container image of labkit {version}. Build it in the folder of the {origin}:
#     podman build -t {image} -f FILE .
# Written by `labkit container`, which does not build it.
FROM python:{python}-slim
RUN apt-get update \\
 && apt-get install -y --no-install-recommends openssh-client openssh-server \\
 && rm -rf /var/lib/apt/lists/* \\
 && mkdir -p /run/sshd \\
 && echo 'StrictModes no' > /etc/ssh/sshd_config.d/labkit.conf \\
 && printf 'StrictHostKeyChecking no\\nUserKnownHostsFile /dev/null\\nLogLevel ERROR\\n' \\
    > /etc/ssh/ssh_config.d/labkit.conf
{install}
WORKDIR /labkit/job
"""
_FROM_SOURCE = """\
RUN pip install --no-cache-dir uv
WORKDIR /labkit
COPY pyproject.toml README.md LICENSE ./
COPY labkit labkit
COPY notebooks notebooks
COPY data/README.md data/
RUN uv sync --no-dev --no-editable --extra train
ENV PATH="/labkit/.venv/bin:$PATH"\
"""
_WHEEL = f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"
_FROM_WHEEL = f"COPY {_WHEEL} /labkit/\nRUN pip install --no-cache-dir '/labkit/{_WHEEL}[train]'"


def text() -> str:
    """Return a Containerfile with this Python version, this labkit version and its dependencies."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    origin, install = ("source", _FROM_SOURCE) if checkout() else ("wheel", _FROM_WHEEL)
    return _TEXT.format(
        version=__version__, image=IMAGE, python=python, origin=origin, install=install
    )


# Kubeflow's mpi-operator writes the host file, with one line `name slots=n` per worker pod.
HOST_FILE = "/etc/mpi/hostfile"

# By default, Open MPI would cut the long host names of Kubernetes at the first dot.
VARIABLES = {
    "LABKIT_LAUNCHER": "hosts",
    "LABKIT_HOSTS": HOST_FILE,
    "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
}
FOLDER = "/labkit/job"  # The launcher's working folder, inside its pod, is /labkit/job.
PATIENCE = 300  # The launcher waits at most `PATIENCE` seconds until all workers are reachable.
LARGEST_MAP = 2**20  # Kubernetes limits the size of a ConfigMap to 1 MiB.

# mpiexec does not wait until hosts are reachable, so the script waits before it calls mpiexec. A
# pod has a host name only some time after its start, and sshd starts even later.
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
# Written by `labkit kubernetes`, which does not run it. {kept}.
"""
_CLAIMED = "The launcher mounts the volume {claim}, which keeps the runs"
_LOST = "Runs are lost with the launcher's pod: `labkit kubernetes --claim` keeps them in a volume"


@dataclass(frozen=True)
class MPIJob:
    """The description of an MPIJob that runs a notebook.

    Attributes:
        notebook, values: Notebook to run, and the values of its parameters.
        workers: Number of worker pods, without the launcher's pod. None stands for as many pods as
            the notebook's ranks need.
        slots: Maximum number of ranks per pod.
        image: Container image of all pods, built from the output of `labkit container`.
        name: Name of the MPIJob, or "" for the name of the notebook.
        namespace: Kubernetes namespace, or "" for the default namespace.
        claim: Name of the volume claim in which the runs are stored. If the name is "", the runs
            are deleted with the launcher's pod.

    Raises:
        InvalidInput: The mpi-operator or the notebook would reject a value.
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
        ranks = estimate.workers_of(
            self.notebook, parameters.validate_values(self.notebook, self.values)
        )
        pods = -(-ranks // self.slots) if self.workers is None else self.workers
        if ranks > pods * self.slots:
            raise InvalidInput(
                f"{self.notebook.name} needs {plural(ranks, 'rank')}, but "
                f"--workers {pods} × --slots {self.slots} are fewer; give more workers or slots"
            )
        stem = re.sub(r"[^a-z0-9]+", "-", self.notebook.stem.lower()).strip("-")
        object.__setattr__(self, "workers", pods)
        object.__setattr__(self, "name", self.name or stem or "notebook")
        # The mpi-operator checks the longest worker name, which belongs to the last worker.
        names.LABEL.validate(f"{self.name}-worker-{pods - 1}", "--name, of the last worker")
        names.IMAGE.validate(self.image, "--image")
        names.KEY.validate(self._file, "the notebook's name")
        if self.namespace:
            names.LABEL.validate(self.namespace, "--namespace")
        if self.claim:
            names.SUBDOMAIN.validate(self.claim, "--claim")
        if any("\0" in str(value) for value in self.values.values()):
            raise InvalidInput(
                "a parameter contains the character NUL, which command lines cannot have; remove it"
            )

    @property
    def text(self) -> str:
        """The YAML input of `kubectl apply`: a ConfigMap with the notebook, and its MPIJob."""
        import yaml

        class Readable(yaml.SafeDumper):
            """A YAML writer that writes a text with several lines as a block of lines."""

        Readable.add_representer(str, _represent_text)
        runs_note = _CLAIMED.format(claim=self.claim) if self.claim else _LOST
        head = _HEAD.format(notebook=self.notebook.name, kept=runs_note)
        return head + yaml.dump_all(self.documents(), Dumper=Readable, sort_keys=False)

    def documents(self) -> list[dict[str, JSON]]:
        """Return two Kubernetes objects: the ConfigMap with the notebook, and the MPIJob."""
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
            # A failed job is not repeated, because its second attempt would be another run.
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
        # The ranks of a pod share gradients in /dev/shm, whose default size is only 64 MiB.
        volumes: dict[str, dict[str, JSON]] = {"/dev/shm": {"emptyDir": {"medium": "Memory"}}}
        container: dict[str, JSON] = {"name": "labkit", "image": self.image}
        container |= {"command": [*command]}
        if launcher:
            volumes[f"{FOLDER}/notebook"] = {"configMap": {"name": self.name}}
            if self.claim:
                claim_source: dict[str, JSON] = {"claimName": self.claim}
                volumes[f"{FOLDER}/runs"] = {"persistentVolumeClaim": claim_source}
            env: list[JSON] = [{"name": n, "value": value} for n, value in VARIABLES.items()]
            container |= {"workingDir": FOLDER, "env": env}
        volume_names = {place: Path(place).name for place in volumes}
        container["volumeMounts"] = [{"name": n, "mountPath": p} for p, n in volume_names.items()]
        pod_volumes: list[JSON] = [
            {"name": volume_names[place]} | volume for place, volume in volumes.items()
        ]
        pod: dict[str, JSON] = {"containers": [container], "volumes": pod_volumes}
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}


def waiting(hosts: str, patience: int) -> str:
    """Return shell code that waits until all hosts in a file have addresses and answer ssh.

    Args:
        hosts: Path of the file with the host names.
        patience: Maximum waiting time in seconds.
    """
    return _AWAIT.format(hosts=hosts, patience=patience)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )
