"""Training of the same experiment in processes of frameworks other than TensorFlow."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import ClassVar, Literal

from pydantic import Field

from labkit.common.errors import InvalidInput
from labkit.frameworks.environments import Installation, find
from labkit.strategies.external_process import (
    TRUSTED_NETWORK,
    open_private_network,
    refuse_external,
    refuse_hosts,
    train_external,
)
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy
from labkit.strategies.taxonomy import Cell

OPTIONS = ("momentum", "nesterov")
PRECISIONS = ("float32", "float64")


class ExternalFramework(Strategy):
    r"""PyTorch's DDP or FSDP, Horovod, or Keras on JAX trains the same model on the same batches.

    labkit exports the layers, the initial weights and the rows of each batch to a new process for
    each worker. The new process of a worker runs in a separate Python installation. `labkit
    frameworks setup NAME` creates the installation. Alternatively, `LABKIT_TORCH_PYTHON`,
    `LABKIT_HOROVOD_PYTHON` or `LABKIT_JAX_PYTHON` names an existing Python installation. Worker r
    of k has \(n_r\) of the n rows of a batch, and multiplies its loss accordingly; the framework
    averages the gradients of all workers:

    \[g = \frac{1}{k} \sum_r k \frac{n_r}{n} \nabla \ell_r.\]

    Supported models are sequential models of Dense, Conv2D, MaxPooling2D and Flatten. Supported
    losses are cross-entropy of scores and the mean squared error; the optimizer is SGD with or
    without momentum. For the supported models, losses and optimizers, all frameworks compute the
    same function, and `verify` compares their weights with those of one labkit process. labkit
    raises an error for all other models, losses and optimizers.

    Args:
        framework: "ddp": PyTorch's DistributedDataParallel over gloo. "fsdp": PyTorch's
            fully_shard, layer by layer, over gloo. "horovod": Horovod with TensorFlow's Keras.
            "jax": Keras on JAX, one process per device, with `keras.distribution.DataParallel`.
        trusted_network: Whether the processes may listen for each other on every network interface
            of this machine, without encryption and without a key. If True, anyone on the network
            can read and change the training. If False, the processes run in a private network
            namespace; if that is impossible, training raises an error.

    Raises:
        InvalidInput: The framework is not installed; the message has the command that installs it.

    Source: S. Li et al., PyTorch distributed: experiences on accelerating data parallel training,
    2020, arXiv 2006.15704; Y. Zhao et al., PyTorch FSDP: experiences on scaling fully sharded data
    parallel, 2023, arXiv 2304.11277; A. Sergeev and M. Del Balso, Horovod, 2018, arXiv 1802.05799.
    Differs from it: on JAX, workers with fewer rows repeat some rows with weight zero. The ranks of
    labkit start the Horovod processes, which therefore communicate by Gloo instead of MPI. MPI is
    faster (`labkit bench exchange --peer horovod` starts Horovod with mpirun).
    """

    scheduling: ClassVar[tuple[str, ...]] = ("overlap", "sequential")
    paper: ClassVar[str] = "Li 2020, arXiv 2006.15704"
    no_forecast_reason: ClassVar[str] = (
        "executes its steps in another framework, which reports no times for the parts of a step"
    )

    framework: Literal["ddp", "fsdp", "horovod", "jax"] = Field("ddp", kw_only=False)
    trusted_network: bool = TRUSTED_NETWORK

    def cell(self, workers: int) -> Cell:
        """Return the taxonomy cell; JAX has sequential scheduling, as XLA orders the work."""
        cell = super().cell(workers)
        return cell._replace(scheduling="sequential") if self.framework == "jax" else cell

    @property
    def exact(self) -> bool:
        """True: gradients are averaged without compression."""
        return True

    @property
    def environment_key(self) -> str:
        """The framework's version and the path of its Python installation, as text."""
        environment = find(self.framework)
        return (
            environment
            if isinstance(environment, str)
            else f"{environment.version} {environment.python}"
        )

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the largest number of rows of a batch that one worker processes."""
        return -(-batch_size // workers)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for a missing framework or an option that differs by framework."""
        self._environment()
        refuse_external("ExternalFramework", experiment)
        if experiment.precision not in PRECISIONS:
            raise InvalidInput(
                f"precision={experiment.precision!r} differs between frameworks; "
                "ExternalFramework supports "
                f"{', '.join(PRECISIONS)}"
            )
        unsupported = [name for name in experiment.optimizer_options if name not in OPTIONS]
        if experiment.optimizer != "sgd" or unsupported:
            option = (
                f"its {unsupported[0]}" if unsupported else f"optimizer={experiment.optimizer!r}"
            )
            raise InvalidInput(
                f"{option} differs between frameworks; ExternalFramework supports optimizer='sgd' "
                "with its "
                f"{' and '.join(OPTIONS)}"
            )

    def train(self, session: Session) -> None:
        """Train by asking the processes of the framework to execute steps."""
        communicator = session.communicator
        refuse_hosts("ExternalFramework", communicator, "start all ranks on one host")
        session.compile(session.optimizer())
        with ExitStack() as stack:
            folder = ""
            if communicator.rank == 0:
                directory = tempfile.TemporaryDirectory(prefix="labkit-peer-")
                folder = stack.enter_context(directory)
            folder = communicator.broadcast_object(folder, label="the folder of exported arrays")
            endpoint = f"the rendezvous of {self.framework}"
            prefix = open_private_network(session, stack, endpoint, self.trusted_network)
            name = f"worker {communicator.rank}"
            child = session.exported(name, self._environment(), folder, prefix)
            stack.callback(child.close)
            child.answer()
            port = child.ask("open") if communicator.rank == 0 else None
            child.ask(
                "join",
                communicator.broadcast_object(
                    port, label="the rendezvous address of the framework's processes"
                ),
            )
            algorithm, version = child.ask("describe")
            traffic = train_external(session, child, networks=[prefix])
        session.exchanged = {"algorithm": algorithm, "version": version} | traffic

    def _environment(self) -> Installation:
        environment = find(self.framework)
        if isinstance(environment, str):
            raise InvalidInput(environment)
        return environment
