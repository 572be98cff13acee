"""`labkit kubernetes` and `labkit container`: write files for Kubernetes and Podman."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from labkit.cli.shared_options import PARAMETER, OfNotebook, Target
from labkit.common.output import output_option
from labkit.common.terminal import say


@click.command(cls=OfNotebook)
@click.argument("notebook", type=Target())
@PARAMETER
@output_option("-o", "output", default="job.yaml", show_default=True, help="File to write.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Number of ranks.  [default: the notebook's parameter workers]",
)
@click.option(
    "--slots",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of ranks in each pod.",
)
@click.option(
    "--image", default="", help="Container image.  [default: the image of `labkit container`]"
)
@click.option("--name", default="", help="Name of the job.  [default: the notebook's name]")
@click.option("--namespace", default="", help="Kubernetes namespace.")
@click.option(
    "--claim", default="", help="PersistentVolumeClaim that stores runs; without it, runs are lost."
)
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
    """Write a Kubernetes MPIJob that runs a notebook.

    The Kubernetes cluster must have the mpi-operator of Kubeflow.
    """
    from labkit.jobs.containers import IMAGE, MPIJob
    from labkit.records.store import write_atomically

    values = dict(parameters)
    job = MPIJob(notebook, values, image or IMAGE, workers, slots, name, namespace, claim)
    text = job.text
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, text)
    say(f"job: {output}; to submit it: {shlex.join(['kubectl', 'apply', '-f', str(output)])}")


@click.command()
@output_option("-o", "output", default="Containerfile", show_default=True, help="File to write.")
def container(output: Path) -> None:
    """Write a Containerfile for an image with labkit."""
    from labkit.jobs import containers
    from labkit.records.store import write_atomically

    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, containers.text())
    build = ["podman", "build", "-t", containers.IMAGE, "-f", str(output), "."]
    say(f"image: {output}; to build it: {shlex.join(build)}")
