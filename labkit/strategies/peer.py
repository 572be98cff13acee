"""Other frameworks than TensorFlow's strategies, in processes of their own, on one experiment."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import ClassVar, Literal

from pydantic import Field

from labkit.common.errors import InvalidInput
from labkit.frameworks.environments import Found, find
from labkit.strategies.external_process import (
    TRUSTED,
    enclosed,
    refuse_elsewhere,
    refuse_hosts,
    train_elsewhere,
)
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy
from labkit.strategies.taxonomy import Cell

OPTIONS = ("momentum", "nesterov")
PRECISIONS = ("float32", "float64")


class Peer(Strategy):
    r"""PyTorch's DDP or FSDP, Horovod, or Keras on JAX trains the same model on the same batches.

    Layers, initial weights and the rows of each batch are exported to a fresh process a worker,
    which runs in a Python of its own: that of `labkit peers setup NAME`, or one that
    `LABKIT_TORCH_PYTHON`, `LABKIT_HOROVOD_PYTHON` or `LABKIT_JAX_PYTHON` names. Each worker's loss
    is weighted by its rows, and the framework averages gradients:

    \[g = \frac{1}{k} \sum_r k \frac{n_r}{n} \nabla \ell_r.\]

    What is exported are sequential models of Dense, Conv2D, MaxPooling2D and Flatten, cross-entropy
    of scores or the mean squared error, and SGD with or without momentum: where the mathematics is
    the same, and the gate holds it to one process of labkit's, weight by weight. Elsewhere it is
    refused, and no speed is shown.

    Args:
        framework: "ddp": PyTorch's DistributedDataParallel, over gloo; "fsdp": its fully_shard,
            layer by layer, likewise; "horovod": Horovod with TensorFlow's Keras; "jax": Keras on
            JAX, a process a device, laid out by `keras.distribution.DataParallel`.
        trusted_network: the point where its processes meet may listen on every interface of this
            machine, unencrypted and without a key, so that whoever reaches it may read and change
            what is trained. Otherwise they have a network namespace to themselves, or training is
            refused.

    Raises:
        InvalidInput: the framework is not installed; the words say how it is.

    Source: S. Li et al., PyTorch distributed: experiences on accelerating data parallel training,
    2020, arXiv 2006.15704; Y. Zhao et al., PyTorch FSDP: experiences on scaling fully sharded data
    parallel, 2023, arXiv 2304.11277; A. Sergeev and M. Del Balso, Horovod, 2018, arXiv 1802.05799.
    Differs from it: on JAX, workers with fewer rows repeat some, which weigh nothing; Horovod's
    processes are started by ranks and meet by Gloo, not by MPI, which is faster (`labkit bench
    exchange --peer horovod` starts it with mpirun).
    """

    scheduling: ClassVar[tuple[str, ...]] = ("overlap", "sequential")
    paper: ClassVar[str] = "Li 2020, arXiv 2006.15704"
    no_forecast_reason: ClassVar[str] = (
        "leaves its steps to another framework, which shows no part of them"
    )

    framework: Literal["ddp", "fsdp", "horovod", "jax"] = Field("ddp", kw_only=False)
    trusted_network: bool = TRUSTED

    def cell(self, workers: int) -> Cell:
        """As the papers say; XLA decides by itself, and says nothing of it."""
        cell = super().cell(workers)
        return cell._replace(scheduling="sequential") if self.framework == "jax" else cell

    @property
    def exact(self) -> bool:
        """Gradients are averaged in full."""
        return True

    @property
    def environment_key(self) -> str:
        """The versions that would train, and where."""
        found = find(self.framework)
        return found if isinstance(found, str) else f"{found.version} {found.python}"

    def rows(self, batch_size: int, workers: int) -> int:
        """Rows of a worker."""
        return -(-batch_size // workers)

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what is not there, or not the same mathematics, before any rank starts."""
        self._found()
        refuse_elsewhere("Peer", experiment)
        if experiment.precision not in PRECISIONS:
            raise InvalidInput(
                f"precision={experiment.precision!r} is not the same in other frameworks; Peer has "
                f"{', '.join(PRECISIONS)}"
            )
        more = [name for name in experiment.optimizer_options if name not in OPTIONS]
        if experiment.optimizer != "sgd" or more:
            what = f"its {more[0]}" if more else f"optimizer={experiment.optimizer!r}"
            raise InvalidInput(
                f"{what} is not the same in other frameworks; Peer trains with optimizer='sgd' and "
                f"its {' and '.join(OPTIONS)}"
            )

    def train(self, session: Session) -> None:
        """Ask the framework's processes for steps."""
        communicator = session.communicator
        refuse_hosts("Peer", communicator, "give ranks of one")
        session.compile(session.optimizer())
        with ExitStack() as ended:
            folder = ""
            if communicator.rank == 0:
                made = tempfile.TemporaryDirectory(prefix="labkit-peer-")
                folder = ended.enter_context(made)
            folder = communicator.share(folder, what="the folder of exported arrays")
            listens = f"the meeting point of {self.framework}"
            words = enclosed(session, ended, listens, self.trusted_network)
            name = f"worker {communicator.rank}"
            child = session.exported(name, self._found(), folder, words)
            ended.callback(child.close)
            child.answer()
            port = child.ask("open") if communicator.rank == 0 else None
            child.ask("join", communicator.share(port, what="where the framework's processes meet"))
            algorithm, version = child.ask("describe")
            told = train_elsewhere(session, child, networks=[words])
        session.exchanged = {"algorithm": algorithm, "version": version} | told

    def _found(self) -> Found:
        found = find(self.framework)
        if isinstance(found, str):
            raise InvalidInput(found)
        return found
