"""`labkit kubernetes` and `labkit container`: what another machine is told to run."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from labkit.cli.notebook_options import PARAMETER, OfNotebook, Target
from labkit.common.output import output_option
from labkit.common.terminal import say


@click.command(cls=OfNotebook)
@click.argument("notebook", type=Target())
@PARAMETER
@output_option("-o", "output", default="job.yaml", show_default=True)
@click.option("--workers", type=click.IntRange(1), help="Pods; default: as the notebook asks.")
@click.option(
    "--slots", type=click.IntRange(1), default=1, show_default=True, help="Ranks in a pod."
)
@click.option("--image", default="", help="Default: the one that `labkit container` describes.")
@click.option("--name", default="", help="Of the job; default: the notebook's.")
@click.option("--namespace", default="", help="Of the cluster's.")
@click.option("--claim", default="", help="A PersistentVolumeClaim for runs; else lost.")
def kubernetes(
    notebook: Path,
    parameters: tuple[tuple[str, str], ...],
    output: Path,
    workers: int | None,
    slots: int,
    image: str,
    name: str,
    namespace: str,
    claim: str,
) -> None:
    """Write an MPIJob for Kubeflow's mpi-operator, which runs a notebook in Kubernetes."""
    from labkit.jobs.containerfile import IMAGE
    from labkit.jobs.mpijob import MPIJob
    from labkit.records.store import write_atomically

    values = dict(parameters)
    job = MPIJob(notebook, values, image or IMAGE, workers, slots, name, namespace, claim)
    text = job.text
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, text)
    say(f"job: {output}, not run here; {shlex.join(['kubectl', 'apply', '-f', str(output)])}")


@click.command()
@output_option("-o", "output", default="Containerfile", show_default=True)
def container(output: Path) -> None:
    """Write a Containerfile of labkit, with what Kubernetes needs to start ranks."""
    from labkit.jobs import containerfile
    from labkit.records.store import write_atomically

    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, containerfile.text())
    build = ["podman", "build", "-t", containerfile.IMAGE, "-f", str(output), "."]
    say(f"image: {output}, not built here; {shlex.join(build)}")
