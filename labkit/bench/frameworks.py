"""Comparison of TensorFlow's distribution strategies with one process: weights, times, bytes."""

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
# Rounding alone changes float64 weights by at most `MOST_APART`.
MOST_APART = 1e-12


@dataclass(frozen=True)
class Comparison:
    """The measurement of one training run on a rank.

    Attributes:
        seconds: Seconds of each step.
        wire_bytes: Mean bytes per step that the rank sends over the network.
        apart: Largest absolute difference between weights of this run and weights of training in
            one process.
        exchanged: The strategy's description of its gradient exchange.
    """

    seconds: list[float]
    wire_bytes: float
    apart: float
    exchanged: dict[str, JSON]


def kinds_on(network: str | Network | None) -> list[str]:
    """Return the strategy kinds to measure; with a network, only kinds with several processes."""
    return [kind for kind in TF_KINDS if network is None or kind not in TF_LOCAL]


def experiments(
    kinds: Sequence[str] = (),
    cases: Sequence[str] = tuple(CASES),
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    network: str | Network | None = None,
) -> list[Experiment]:
    """Return experiments of each strategy kind, model and optimizer, with 20 steps in float64.

    With `network`, processes communicate over a real link of the network's bandwidth. See
    `TFDistribute` for the rate-limited link between the processes. By default, the experiments
    cover all strategies that the network allows. Shards of the batch have unequal numbers of rows.
    Parameter servers have one worker, because with one worker they compute the same weights as one
    process. All kinds of strategies except parameter servers have two workers.

    Raises:
        InvalidInput: A kind, case or optimizer is unknown.
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
            steps_per_epoch=STEPS,
            precision="float64",
            network=network,
        )
        for case in cases
        for optimizer in optimizers
        for kind in kinds or kinds_on(network)
    ]


def measure(
    cluster: Cluster, experiments: Sequence[Experiment]
) -> Iterator[tuple[Row, dict[str, JSON]]]:
    """Yield a row (times, weight differences) and the `exchanged` data of each experiment."""
    for experiment in experiments:
        # The type checker does not know that the strategy is a `TFDistribute`.
        assert isinstance(experiment.strategy, TFDistribute)
        result = cluster.call(compare_with_one_process, experiment, ranks=experiment.ranks)[0]
        kind, case = experiment.strategy.kind, f"{experiment.model} {experiment.optimizer}"
        # The first step is not counted, because it also traces the TensorFlow graph.
        timed = result.seconds[1:]
        network = Network.parse(experiment.network)
        link = (network.name or f"{8e-6 * network.bandwidth:g} Mb/s") if network else None
        row = head("tf", case, kind, experiment.workers, link, repeats=len(timed)) | spread(timed)
        row["max_abs_difference"] = result.apart
        # A NaN difference makes the comparison false, too.
        row["correct"] = result.apart <= MOST_APART
        row["wire_bytes_per_step"] = result.wire_bytes
        yield row, result.exchanged


def compare_with_one_process(communicator: Communicator, experiment: Experiment) -> Comparison:
    """Train, and compare every weight with training in one process (runs on ranks)."""
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
    return Comparison(
        [row["seconds"] for row in recorder.rows], wire, apart, session.exchanged or {}
    )


@click.command("tf")
@click.option(
    "--kinds",
    default=None,
    callback=names,
    help="Kinds of strategies, separated by commas.  [default: all]",
)
@click.option("--cases", default="mlp,cnn,rnn", show_default=True, callback=names, help="Models.")
@click.option(
    "--optimizers", default="sgd,adam", show_default=True, callback=names, help="Optimizers."
)
@click.option(
    "--network",
    default=None,
    help="Network preset that sets the rate of a real link between the processes (Linux, root).",
)
@AS_JSON
def command(
    kinds: list[str],
    cases: list[str],
    optimizers: list[str],
    network: str | None,
    file: Path | None,
) -> None:
    """Compare weights trained by TensorFlow's strategies and by one process, in float64.

    The command fails if weights differ by more than 1e-12 after 20 steps.
    """
    # The command validates its options before it starts ranks, because a start takes seconds.
    tasks = experiments(kinds, cases, optimizers, network)
    if omitted := [] if kinds else [kind for kind in TF_KINDS if kind not in kinds_on(network)]:
        say(f"not measured: {', '.join(omitted)}, because strategies of one process use no network")
    with Cluster(workers=max(task.ranks for task in tasks), timeout=300) as cluster:
        rows = [row for row, _ in measure(cluster, tasks)]
    shown = [row | {"apart": f"{row['max_abs_difference']:.1e}"} for row in rows]
    columns = {"case": "case", "what": "strategy", "workers": "workers", "apart": "max difference"}
    columns |= {"correct": "equal"} | TIMES | {"wire_bytes_per_step": "bytes per step"}
    say(format_rows(shown, columns))
    write_rows(rows, file)
    if failed := [f"{row['what']} on {row['case']}" for row in rows if not row["correct"]]:
        raise LabkitError(
            f"after training, weights differ by more than {MOST_APART:g} from those of training "
            f"in one process: {', '.join(failed)}"
        )
