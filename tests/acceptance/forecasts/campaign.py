"""The campaign: write forecasts of all settings, then run these in turns on ranks that stay up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from labkit.bench.calibration_runs.ways import long_enough, step_seconds
from labkit.bench.temporary_runs import temporary_runs
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
    """Forecast all settings, then run them, in turns.

    Args:
        chosen: settings.
        repeats: runs of each setting; every round goes through all of them, backwards every other
            time.
        known: rows that there are already; what was forecast then, counts.
        calibration: which has not seen the settings: neither their networks nor their batches.

    Returns:
        a row "forecast" a setting; then a row "measured" a run, which names the forecast that it
        is held against; a row "skipped" of settings for which there is no place here.

    Raises:
        LabkitError: the rows there are of another calibration, or of other settings.
    """
    foreseen = [row for row in known if row["what"] == "forecast"]
    asked = [each.experiment.hash8 for each in chosen]
    # Once something has run, no forecast may follow.
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
    # Ranks of one number and place stay up together: those beside them would take their cores.
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
    """What a global batch took."""
    row = _about(forecast, "measured") | {"repeat": repeat, "of": forecast["seal"]}
    row |= {"oversubscribed": run.metrics["oversubscribed"]}
    return row | {"batch_ms": 1e3 * step_seconds(run)}


def _about(forecast: Row, what: str) -> Row:
    case, workers = str(forecast["case"]), int(forecast["workers"] or 1)
    row = head("forecasts", case, what, workers)
    return row | {name: forecast[name] for name in ("network", "number")}
