"""The campaign of forecasts: it forecasts all settings, then measures them in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from labkit.bench.calibration_runs.measure import long_enough, step_seconds
from labkit.bench.runs import temporary_runs
from labkit.bench.timing import Row, head
from labkit.cluster import Cluster
from labkit.common.errors import LabkitError
from labkit.forecast import Calibration
from labkit.hosts import testbed
from labkit.records.run import Run
from tests.acceptance.forecasts.predictions import forecasts
from tests.acceptance.forecasts.settings import LINK, Setting


def measure(
    chosen: Sequence[Setting], repeats: int, known: Sequence[Row], calibration: Calibration
) -> Iterator[Row]:
    """Forecast the step times of all settings, then run the settings in turns.

    Args:
        chosen: settings.
        repeats: Number of runs per setting; each repeat runs all settings, and every second repeat
            reverses their order.
        known: Rows of earlier runs of the campaign, whose forecasts stay valid.
        calibration: Calibration that contains neither the networks nor the batch sizes of the
            settings.

    Returns: One row "forecast" per setting, then one row "measured" per run with the number of its
        forecast, and one row "skipped" per setting that this machine cannot run.

    Raises:
        LabkitError: The known rows belong to another calibration or to other settings.
    """
    foreseen = [row for row in known if row["what"] == "forecast"]
    asked = [each.experiment.hash8 for each in chosen]
    # No forecast may be written after the first run.
    due = asked[: len(foreseen)] if len(foreseen) == len(known) else asked
    if [row["asked"] for row in foreseen] != due:
        raise LabkitError("the file has forecasts of other settings; give a new one")
    if any(row["calibration"] != calibration.hash8 for row in foreseen):
        raise LabkitError("the file has forecasts of another calibration; give it, or a new file")
    for row in forecasts(chosen, calibration, first=len(foreseen)):
        foreseen.append(row)
        yield row
    over = {row["number"] for row in known if row["what"] == "skipped"}
    done = {(row["number"], row["repeat"]) for row in known if row["what"] == "measured"}
    left = [
        (row, repeat)
        for repeat in range(repeats)
        for row in (foreseen if repeat % 2 == 0 else foreseen[::-1])
        if (row["number"], repeat) not in done and row["number"] not in over
    ]
    # Only one cluster runs at a time, because the ranks of another cluster would use the same
    # cores.
    places = {(each.hosts is not None, each.experiment.workers) for each in chosen}
    with temporary_runs():
        for hosts, workers in sorted(places):
            own = [
                (row, repeat, chosen[int(row["number"] or 0)])
                for row, repeat in left
                if row["workers"] == workers
                and (chosen[int(row["number"] or 0)].hosts is not None) == hosts
            ]
            yield from _in_turns(own, workers, hosts) if own else ()


def _in_turns(
    turns: Sequence[tuple[Row, int, Setting]], workers: int, hosts: bool
) -> Iterator[Row]:
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(_cluster(stack, workers, hosts))
        except LabkitError as error:
            if not hosts:
                raise
            for row in {row["number"]: row for row, _, _ in turns}.values():
                yield _about(row, "skipped") | {"reason": str(error)}
            return
        for row, repeat, setting in turns:
            experiment = long_enough(setting.experiment, int(row["steps"] or 1))
            yield _measured(row, repeat, cluster.run(experiment, show=False))


def _cluster(stack: ExitStack, workers: int, hosts: bool) -> Cluster:
    if not hosts:
        return Cluster(workers=workers)
    bed = stack.enter_context(testbed(bandwidth=f"{LINK}Mb/s", slurm=False))
    return Cluster(workers=workers, hosts=[f"{host}:{workers // 2}" for host in bed.hosts])


def _measured(forecast: Row, repeat: int, run: Run) -> Row:
    """Return the measured times of one run."""
    row = _about(forecast, "measured") | {"repeat": repeat, "of": forecast["seal"]}
    row |= {"oversubscribed": run.metrics["oversubscribed"]}
    return row | {"batch_ms": 1e3 * step_seconds(run)}


def _about(forecast: Row, what: str) -> Row:
    case, workers = str(forecast["case"]), int(forecast["workers"] or 1)
    row = head("forecasts", case, what, workers)
    return row | {name: forecast[name] for name in ("network", "number")}
