"""TensorFlow's own strategies against one process: weights, milliseconds and bytes of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from labkit.bench.command import AS_JSON, TIMES, format_rows, names, write_rows
from labkit.bench.timing import Row, head, spread
from labkit.cluster import Cluster
from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.common.options import lookup
from labkit.common.terminal import say
from labkit.experiment import Experiment
from labkit.network import Network
from labkit.strategies import TF_KINDS, TF_LOCAL, TFDistribute

if TYPE_CHECKING:
    from labkit.communicator import Communicator

CASES: dict[str, dict[str, JSON]] = {
    "mlp": {"widths": [16]},
    "cnn": {"filters": [4, 4], "dense": 8},
    "rnn": {"units": 8},
}
OPTIMIZERS: dict[str, dict[str, JSON]] = {"sgd": {"momentum": 0.9}, "adam": {}}
STEPS = 20
MOST_APART = 1e-12  # of weights in float64; what another order of summation comes to is less


@dataclass(frozen=True)
class Held:
    """What a rank has found: seconds a step, bytes a step, and how far weights are apart."""

    seconds: list[float]
    wire_bytes: float
    apart: float
    exchanged: dict[str, JSON]


def kinds_on(network: str | Network | None) -> list[str]:
    """The kinds that there can be: on a real link those that have processes."""
    return [kind for kind in TF_KINDS if network is None or kind not in TF_LOCAL]


def experiments(
    kinds: Sequence[str] = (),
    cases: Sequence[str] = tuple(CASES),
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    network: str | Network | None = None,
) -> list[Experiment]:
    """Each kind on each model with each optimizer: 20 steps in float64 on uneven parts.

    With a network each talks over a real link of its bandwidth, see `TFDistribute`. Where no kinds
    are given, they are those of `kinds_on`.

    Servers have one worker, with which they train as one process does; others have two.

    Raises:
        InvalidInput: a kind, a case or an optimizer that is not known.
    """
    return [
        Experiment(
            model=case,
            model_options=lookup(CASES, case, "case"),
            optimizer=optimizer,
            optimizer_options=lookup(OPTIMIZERS, optimizer, "optimizer"),
            strategy=TFDistribute.model_validate({"kind": kind}),
            workers=1 if lookup(TF_KINDS, kind, "kind").synchronization == "asynchronous" else 2,
            batch_size=51,
            steps=STEPS,
            precision="float64",
            network=network,
        )
        for case in cases
        for optimizer in optimizers
        for kind in kinds or kinds_on(network)
    ]


def measure(cluster: Cluster, asked: Sequence[Experiment]) -> Iterator[tuple[Row, dict[str, JSON]]]:
    """A row an experiment: what one process has other weights by, what a step costs; its record."""
    for experiment in asked:
        assert isinstance(experiment.strategy, TFDistribute)  # for the type checker
        found = cluster.call(hold, experiment, ranks=experiment.ranks)[0]
        kind, case = experiment.strategy.kind, f"{experiment.model} {experiment.optimizer}"
        timed = found.seconds[1:]  # the first one traces
        network = Network.parse(experiment.network)
        link = (network.name or f"{8e-6 * network.bandwidth:g} Mb/s") if network else None
        row = head("tf", case, kind, experiment.workers, link, repeats=len(timed)) | spread(timed)
        row["max_abs_difference"] = found.apart
        row["correct"] = found.apart <= MOST_APART  # False also where a weight is not a number
        row["wire_bytes_per_step"] = found.wire_bytes
        yield row, found.exchanged


def hold(communicator: Communicator, experiment: Experiment) -> Held:
    """On a rank: train, and compare every weight with one process's."""
    from labkit.worker import reference
    from labkit.worker.feed import read
    from labkit.worker.recorder import Recorder
    from labkit.worker.session import TrainingSession

    source = read(experiment, communicator)
    session = TrainingSession(experiment, communicator, source)
    session.feed.validation = None
    recorder = Recorder(communicator, lambda kind, records: None, lambda: False)
    session.callbacks.insert(0, recorder)
    experiment.strategy.train(session)
    own = [weight.numpy() for weight in session.model.weights]
    session.close()
    apart = 0.0
    if communicator.rank == 0:
        one = reference.weights(experiment, source, session.readers.size, session)
        each = [np.abs(a - b).max(initial=0) for a, b in zip(own, one, strict=True)]
        apart = float(np.max(each))
    wire = float(np.mean([row["wire_bytes"] for row in recorder.rows]))
    return Held([row["seconds"] for row in recorder.rows], wire, apart, session.exchanged or {})


@click.command("tf")
@click.option("--kinds", default=None, callback=names, help="Names with commas; default: all.")
@click.option("--cases", default="mlp,cnn,rnn", show_default=True, callback=names)
@click.option("--optimizers", default="sgd,adam", show_default=True, callback=names)
@click.option("--network", default=None, help="A preset: of a real link (Linux, as root).")
@AS_JSON
def command(
    kinds: list[str],
    cases: list[str],
    optimizers: list[str],
    network: str | None,
    file: Path | None,
) -> None:
    """Hold TensorFlow's own strategies against one process, weight by weight, in float64.

    Ends with an error where weights are more than 1e-12 apart after 20 steps.
    """
    # Before engines start.
    asked = experiments(kinds, cases, optimizers, network)
    if left := [] if kinds else [kind for kind in TF_KINDS if kind not in kinds_on(network)]:
        say(f"left out: {', '.join(left)}, of one process each, which no network joins")
    with Cluster(workers=max(each.ranks for each in asked), limit=300) as cluster:
        rows = [row for row, _ in measure(cluster, asked)]
    shown = [row | {"apart": f"{row['max_abs_difference']:.1e}"} for row in rows]
    columns = {"case": "case", "what": "strategy", "workers": "workers", "apart": "weights apart"}
    columns |= {"correct": "the same"} | TIMES | {"wire_bytes_per_step": "bytes a step"}
    say(format_rows(shown, columns))
    write_rows(rows, file)
    if failed := [f"{row['what']} on {row['case']}" for row in rows if not row["correct"]]:
        raise LabkitError(
            f"failed: more than {MOST_APART:g} from one process's weights: {', '.join(failed)}"
        )
