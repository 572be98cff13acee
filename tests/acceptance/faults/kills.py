"""Kill ranks at random moments of a training, and check that the other ranks finish it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from labkit.bench.timing import Row, head
from labkit.common.errors import LabkitError
from labkit.hosts import Testbed
from labkit.hosts.testbed_state import require
from labkit.strategies import Strategy
from tests.acceptance.faults.claims import (
    BATCH,
    EPOCHS,
    ROWS,
    claimed,
    data,
    lossy_name,
    named,
    question,
)
from tests.acceptance.faults.mpi_job import BEGUN, STEPS, TOLD, Ranks, hosts
from tests.acceptance.ledger import audit, read

SIZE = 4
EACH = 2  # number of kills per run
SEEDS = {"one host": 10, "two hosts": 1}  # number of seeds that are run without a kill
SURE = 0.999  # probability that another seed's accuracy is in the band


class Band(NamedTuple):
    """The accuracy interval and the duration of trainings without a kill.

    Attributes:
        low, high: Limits of the accuracy interval.
        seconds: Duration of one training without a kill.
    """

    low: float
    high: float
    seconds: float


def measure(repeats: int, known: Sequence[Row]) -> Iterator[Row]:
    """Kill ranks until enough kills have hit a running training, every fifth on two hosts.

    Each run has four ranks; two of them are killed, at moments uniform over the duration of a run
    without a kill. The strategies that claim to survive deaths of ranks take turns, in random
    order.

    Args:
        repeats: kills.
        known: Rows of earlier runs of the campaign, which are not measured again.

    Returns: One row "band" per seed that was run without a kill, and one row "kills" per kill. A
        row "kills" contains whether the run `finished` with equal weights on all surviving ranks,
        whether its ledger of samples is `exact`, and its `accuracy`. The column `within` says
        whether the accuracy is in the band; if it is not, the same seed without a kill joins the
        band. The column `seconds` is the time from the kill to the end of the next step, without
        `trace_s`; it is `early_s` if the survivors had not yet traced a step.
    """
    there = list(known)
    for place, wanted in (("one host", repeats - repeats // 5), ("two hosts", repeats // 5)):
        if not wanted:
            continue
        try:
            require(slurm=False) if place == "two hosts" else None
        except LabkitError as error:
            yield head("faults", str(error), "left out", SIZE, place)
            continue
        with hosts(place == "two hosts") as bed:
            for row in _on(place, bed, wanted, there):
                there.append(row)
                yield row


def _on(place: str, bed: Testbed | None, wanted: int, there: list[Row]) -> Iterator[Row]:
    """Kill ranks on one or two hosts until enough kills have hit a running training."""
    claims = claimed(apart=bed is not None)
    order = np.random.default_rng(7).permutation(len(claims))
    done = [row for row in there if row["network"] == place and row["what"] == "kills"]
    number = 1 + max((int(row["number"] or 0) for row in done), default=-1)
    struck = sum(bool(row["struck"]) for row in done)
    while struck < wanted:
        strategy = claims[order[number % len(claims)]]
        bands = list(_bands(place, bed, strategy, there))
        yield from bands
        band = _band(place, strategy, [*there, *bands])
        rows = list(_killed(place, bed, strategy, number, min(EACH, wanted - struck), band))
        if rows[0]["finished"] and not rows[0]["within"] and not rows[0]["why"]:
            # The seed, not the kill, may cause an accuracy outside the band. Therefore the same
            # seed without a kill joins the band.
            more = list(_undisturbed(place, bed, strategy, [int(rows[0]["seed"] or 0)]))
            yield from more
            wider = _band(place, strategy, [*there, *bands, *more])
            for row in rows:
                row["within"] = bool(wider.low <= float(row["accuracy"] or 0) <= wider.high)
        for row in rows:
            struck += bool(row["struck"])
            yield row
        number += 1


def _bands(
    place: str, bed: Testbed | None, strategy: Strategy, there: Sequence[Row]
) -> Iterator[Row]:
    """Run several seeds without a kill, unless rows with this lossy compressor already exist."""
    lossy = lossy_name(strategy)
    if any(_is_band(row, lossy, place) for row in there):
        return
    yield from _undisturbed(place, bed, strategy, range(SEEDS[place]))


def _undisturbed(
    place: str, bed: Testbed | None, strategy: Strategy, seeds: Sequence[int]
) -> Iterator[Row]:
    """Run some seeds without a kill, and yield a row "band" per seed."""
    asked = [(str(seed), question(strategy, SIZE, seed, EPOCHS)) for seed in seeds]
    with Ranks(asked, bed) as ranks:
        if not ranks.ended():
            raise LabkitError(f"{named(strategy)} on {place} hangs undisturbed: {ranks.said()}")
        for name, _ in asked:
            own = ranks.folder / name
            moments = [moment for moment, _ in _steps(own)[0]]
            told = _told(own)
            if 0 not in told:
                raise LabkitError(f"{named(strategy)} failed undisturbed: {ranks.said()}")
            seconds = moments[-1] - float((own / f"{BEGUN}0").read_text())
            case = lossy_name(strategy)
            row = head("faults", case, "band", SIZE, place, seed=int(name))
            yield row | {"accuracy": float(told[0]["accuracy"]), "seconds": seconds}


def _is_band(row: Row, lossy: str, place: str = "") -> bool:
    return (row["what"], row["case"]) == ("band", lossy) and place in ("", row["network"])


def _band(place: str, strategy: Strategy, there: Sequence[Row]) -> Band:
    """Return the prediction interval (Student's t) for one more seed, from seeds on any hosts."""
    from scipy.stats import t as student

    lossy = lossy_name(strategy)
    accuracy = np.array([row["accuracy"] for row in there if _is_band(row, lossy)], float)
    seconds = [float(row["seconds"] or 0) for row in there if _is_band(row, lossy, place)]
    count = len(accuracy)
    wide = student.ppf((1 + SURE) / 2, count - 1) * accuracy.std(ddof=1) * (1 + 1 / count) ** 0.5
    middle = float(accuracy.mean())
    return Band(middle - wide, middle + wide, float(np.median(seconds)))


def _killed(
    place: str, bed: Testbed | None, strategy: Strategy, number: int, count: int, band: Band
) -> Iterator[Row]:
    """Kill some ranks during one run; yield one row per kill."""
    draw = np.random.default_rng([number, len(place)])
    victims = [int(each) for each in draw.permutation(SIZE)[:count]]
    delays = sorted(float(each) for each in draw.uniform(0, band.seconds, count))
    seed = int(draw.integers(1000))
    with Ranks([("0", question(strategy, SIZE, seed, EPOCHS))], bed) as ranks:
        own = ranks.folder / "0"
        if not ranks.wait_for(lambda: len([*own.glob(f"{BEGUN}*")]) == SIZE):
            raise LabkitError(f"{named(strategy)} on {place} did not begin: {ranks.said()}")
        begin, moments = time.monotonic(), list[float | None]()
        for victim, delay in zip(victims, delays, strict=True):
            time.sleep(max(0.0, begin + delay - time.monotonic()))
            moments.append(None if [*own.glob(f"{TOLD}*")] else ranks.kill(victim))
        ended, told, steps = ranks.ended(), _told(own), _steps(own)
        gone = {v for v, moment in zip(victims, moments, strict=True) if moment is not None}
        live = set(range(SIZE)) - gone
        equal = len({told[each]["weights"] for each in live & told.keys()}) == 1
        finished = ended and told.keys() >= live and equal
        account = audit(read(own), data(), -(-ROWS // BATCH), EPOCHS)
        whole: dict[str, Any] = next(
            (each for each in told.values() if "faults" in each), {"faults": []}
        )
        accuracy = whole.get("accuracy", float("nan"))
        struck = [v for v, moment in zip(victims, moments, strict=True) if moment is not None]
        # The rank that had to report the result was killed after the end of the training.
        first = struck and struck[-1] == min(set(range(SIZE)) - set(struck[:-1]))
        behind = bool(finished and "accuracy" not in whole and first)
        common: Row = {
            "number": number,
            "seed": seed,
            "finished": finished,
            "exact": account.is_exact,
            "lost": account.lost,
            "repeated": account.repeated,
            "accuracy": accuracy,
            "within": bool(band.low <= accuracy <= band.high),
            "why": "killed behind the end" if behind else "" if finished else ranks.said(),
        }
    before = 0
    for victim, moment, delay in zip(victims, moments, delays, strict=True):
        row = head("faults", named(strategy), "kills", SIZE - before, place, rank=victim) | common
        row |= {"moment": delay, "struck": moment is not None and not behind}
        if row["struck"] and moment is not None:
            before += 1
            survivors = [line for each in live for line in steps.get(each, ())]
            row["calm"] = any(now < moment and dead == before - 1 for now, dead in survivors)
            later = [now for now, dead in survivors if now > moment and dead >= before]
            fault = next((each for each in whole["faults"] if victim in each["ranks"]), None)
            if later and fault is not None and "trace" in fault["seconds"]:
                row["trace_s"] = fault["seconds"]["trace"]
                seconds = min(later) - moment - fault["seconds"]["trace"]
                row["seconds" if row["calm"] else "early_s"] = seconds
                row |= {
                    f"{name}_s": fault["seconds"][name] for name in ("detect", "agree", "rebuild")
                }
        yield row


def _told(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the result that each rank stored, by rank number."""
    files = sorted(folder.glob(f"{TOLD}*"))
    return {int(path.name[len(TOLD) :]): json.loads(path.read_text()) for path in files}


def _steps(folder: Path) -> dict[int, list[tuple[float, int]]]:
    """Return each rank's step times and numbers of dead ranks; skip incomplete lines."""
    found = {}
    for path in folder.glob(f"{STEPS}*"):
        whole = path.read_text().rpartition("\n")[0].splitlines()
        pairs = (line.split() for line in whole)
        found[int(path.name[len(STEPS) :])] = [(float(now), int(dead)) for now, dead in pairs]
    return found
