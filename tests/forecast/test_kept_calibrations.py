"""Test kept calibrations: one per machine; stale ones are refused, foreign ones are labelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labkit.common.errors import InvalidInput, LabkitError
from labkit.forecast import (
    Calibration,
    CollectiveCost,
    LayerCost,
    ModelCost,
    Spread,
    StepCost,
)
from labkit.forecast.calibration_store import (
    differences,
    earlier,
    fits,
    local_calibration,
    merged,
    place,
    sources,
    this_machine,
)

NOW = "2026-01-01T00:00:00+00:00"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))


def spread(seconds: float) -> Spread:
    return Spread.of([seconds])


def made(**fields: Any) -> Calibration:
    return Calibration(made=NOW, **{"machine": this_machine()} | fields)


def model(name: str, *rows: int, seconds: float = 1.0) -> ModelCost:
    parts = dict.fromkeys(("forward", "backward", "update", "other"), spread(seconds))
    steps = [StepCost(rows=row, threads=1, together=1, **parts) for row in rows]
    layers = (LayerCost(name="dense", kind="Dense", forward=1, backward=1, out=4),)
    return ModelCost(
        model={"model": name, "dataset": "digits"},
        layers=layers,
        steps=tuple(steps),
        read={row: spread(seconds) for row in rows},
    )


def test_without_one_it_is_said_how_to_get_one() -> None:
    with pytest.raises(InvalidInput, match=r"nothing was measured.*`labkit calibrate MODEL`"):
        local_calibration()


def test_this_machines_own_is_found() -> None:
    kept = made()
    kept.save(place())
    assert local_calibration() == kept
    assert differences(kept) == []


@pytest.mark.parametrize("name", ["tensorflow", "labkit_source", "openmpi", "cores"])
def test_a_stale_one_is_refused_with_what_differs(name: str) -> None:
    own = this_machine()
    made(machine=own | {name: "another"}).save(place())
    said = f"stale: {name} was another, is {own[name]}; measure again with `labkit calibrate`"
    with pytest.raises(LabkitError, match=said):
        local_calibration()


def test_what_another_labkit_has_written_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    assert earlier(path) is None
    made().save(path)
    assert earlier(path) == made()
    path.write_text('{"schema_version": 1}')
    assert earlier(path) is None
    path.write_text('{"of": "somebody else"}')
    with pytest.raises(InvalidInput, match="holds no calibration: it has no schema_version"):
        earlier(path)


def test_one_of_another_machine_is_named_so() -> None:
    away = made(machine=this_machine() | {"cpu": "Deep Thought"}, models=(model("mlp", 8),))
    row, batches = sources(away)
    assert row.what == "steps of mlp on digits"
    assert row.how.startswith("measured elsewhere (Deep Thought), 2026-01-01: rows 8; threads 1")
    assert batches == ("batches of mlp on digits", f"{row.how.split(':')[0]}, reading: rows 8")
    assert sources(made(models=away.models))[0].how.startswith("measured here, ")


def test_what_is_added_joins_what_was_measured_before() -> None:
    old = made(models=(model("mlp", 8, 16), model("cnn", 8)))
    new = made(models=(model("mlp", 16, 32, seconds=2.0),))
    both = merged(old, new)
    assert [each.model["model"] for each in both.models] == ["mlp", "cnn"]
    found = {step.rows: step.forward.median for step in both.models[0].steps}
    assert found == {8: 1.0, 16: 2.0, 32: 2.0}
    assert {rows: each.median for rows, each in both.models[0].read.items()} == found
    with pytest.raises(InvalidInput, match="cannot be merged"):
        merged(old, new.model_copy(update={"machine": {"cpu": "another"}}))


def test_latency_and_speed_of_each_level_are_those_that_made_the_times() -> None:
    alpha, beta, gamma = 1e-4, 1e-9, 2e-10
    sums = []
    for nbytes in (1e3, 1e6):
        # With 2 ranks, a ring takes two rounds of half the bytes, a butterfly one round of all
        # bytes.
        ring = 2 * alpha + nbytes * (beta + gamma / 2)
        times = {"ring": ring, "butterfly": alpha + nbytes * (beta + gamma), "mpi": 1e3}
        sums += [
            cost("host", algorithm, int(nbytes), seconds) for algorithm, seconds in times.items()
        ]
        sums.append(cost("memory", "shared_memory", int(nbytes), 2 * alpha + nbytes * beta))
    found = fits(made(collectives=tuple(sums)))
    assert set(found) == {"memory", "host"}  # no network link was measured
    host = found["host"]
    assert (host.alpha, host.beta, host.gamma) == pytest.approx((alpha, beta, gamma), rel=1e-6)
    assert found["memory"].alpha == pytest.approx(alpha)


def cost(level: Any, algorithm: str, nbytes: int, seconds: float) -> CollectiveCost:
    return CollectiveCost(
        level=level, algorithm=algorithm, workers=2, nbytes=nbytes, seconds=spread(seconds)
    )
