"""Test the calibration of a small model on ranks, and the parts of a training step."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import labkit as lk
from labkit.bench.calibration_runs import Bench, Effort
from labkit.bench.calibration_runs.message_times import wanted
from labkit.bench.calibration_runs.model import cost
from labkit.cli.app import app
from labkit.common.errors import InvalidInput
from labkit.forecast import Query
from labkit.forecast.calibration_store import differences, fits, merged, place, sources
from labkit.network import Network

LINK = Network(name="a link", latency=1e-4, bandwidth=1e7)
TINY = Effort(
    *(1, 0.0, 1, (4096, 65536), (4096,)),  # rounds, seconds, repeats, buffer and gradient sizes
    *((LINK,), 2),
)


def test_parts_add_up_to_the_step() -> None:
    seconds = {"forward": [1.0, 1.2, 1.1], "gradient": [3.0, 3.1, 3.3]}
    seconds |= {"updated": [3.0, 3.0, 3.0], "fit": [4.0, 4.5, 4.1]}
    found = cost(16, 1, 2, seconds)
    assert found.seconds == pytest.approx(4.1)
    assert found.update.median == 0  # gradient with update takes less time than gradient alone
    for part in (found.forward, found.backward, found.update, found.other):
        assert part.low <= part.median <= part.high
        assert part.count == 3


class ManualClock:
    time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def sleep_until(self, moment: float, exact: bool = True) -> None:
        self.time = max(self.time, moment)


@pytest.mark.heavy
def test_no_step_is_measured_while_it_waits_for_its_batch() -> None:
    from labkit.bench.calibration_runs.step_times import Supply

    clock, began = ManualClock(), []
    supply = Supply(clock, read_s=3.0)
    for step in (1.0, 1.0, 8.0, 0.0):
        supply.wait()
        began.append(clock.now())
        clock.sleep(step)
    assert began == [6, 12, 18, 26]


def test_each_compressor_is_timed_once() -> None:
    lossy = lk.Experiment(strategy=lk.AllReduce(compressor=lk.TopK(ratio=0.1)))
    assert wanted(["Float16", "Float16"], [lossy, lk.Experiment(), lossy]) == [
        *(lk.Float16(), lk.TopK(ratio=0.1))
    ]
    assert len(wanted(None, [lossy, lossy])) == len(wanted(None, [])) + 1


@pytest.mark.parametrize("wrong", [{"threads": [0]}, {"batches": []}, {"workers": 0}])
def test_what_cannot_be_measured_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(
        InvalidInput, match=f"{next(iter(wrong))}=.*: give whole numbers of 1 or more"
    ):
        lk.calibrate([lk.Experiment()], **wrong)  # type: ignore[arg-type]


def test_the_command_refuses_before_anything_starts() -> None:
    unknown = CliRunner().invoke(app, ["calibrate", "nothing-of-this-name"])
    assert unknown.exit_code == 2
    assert "nothing-of-this-name" in unknown.output
    place().unlink(missing_ok=True)
    none = CliRunner().invoke(app, ["calibrate", "--show"])
    assert none.exit_code == 2
    assert "nothing was measured on this machine" in none.output


@pytest.mark.slow
def test_a_small_model_is_calibrated_on_ranks(cluster: lk.Cluster) -> None:
    experiment = lk.Experiment(model="mlp", model_options={"widths": [8]}, dataset="digits")
    lines: list[str] = []
    bench = Bench(cluster, threads=1, workers=2, effort=TINY, progress=lines.append)
    found = bench.models([experiment], [8, 32])
    found = merged(found, bench.messages(found.models))
    found = merged(found, bench.codecs([lk.TopK(ratio=0.1)]))
    assert differences(found) == []
    assert lines[0] == "round 1 of 1: 8 rows of mlp on digits"

    (model,) = found.models
    assert {(each.rows, each.together) for each in model.steps} == {
        *((8, 1), (8, 2)),
        *((32, 1), (32, 2)),
    }
    assert all(each.seconds > 0 for each in model.steps)
    trained = [layer.weights for layer in model.layers if layer.weights]
    assert trained == [((64, 8), (8,)), ((8, 10), (10,))]
    assert [layer.kind for layer in model.layers if layer.weights] == ["Dense", "Dense"]
    assert {rows: each.median > 0 for rows, each in model.read.items()} == {8: True, 32: True}
    for way in ("forward", "backward"):
        assert sum(getattr(layer, way) for layer in model.layers) == pytest.approx(1)
    assert (model.memory, model.slots) == (4 * (64 + 8 + 10), 0)

    assert {each.what for each in found.overheads} == {
        *("meeting", "bucket", "overlap", "message", "emulated", "replicas")
    }
    sizes = {each.nbytes for each in found.overheads if each.what == "bucket"}
    assert sizes == {64, 4 * (64 * 8 + 8 + 8 * 10 + 10)}
    assert set(fits(found)) == {"memory", "host", "link"}
    (codec,) = found.codecs
    assert (codec.nbytes, codec.compressor["name"]) == (4096, "TopK")
    assert codec.encode.median > 0
    assert {row.what for row in sources(found)} >= {
        "steps of mlp on digits",
        "batches of mlp on digits",
    }

    asked = Query(experiment.replace(workers=2), found)
    assert asked.step(16).seconds > 0

    several = [experiment.replace(workers=n, batch_size=16) for n in (1, 2, 3)]
    known = merged(found, bench.ways(several, [8], found))
    assert lines[-1] == "timing complete training steps of 2 experiments, run 2 of 2"
    alone, both = known.ways  # none for three ranks: the benchmark has only two
    assert (alone.workers, alone.batch, alone.network) == (1, 8, None)
    assert (both.workers, both.batch, both.network) == (2, 16, LINK)
    assert both.strategy == several[1].strategy.to_json()
    assert all(len(each.runs) == 2 and min(each.runs) > 0 for each in known.ways)
    how = {row.what: row.how for row in sources(known)}
    assert how["whole steps of AllReduce"].endswith(": 2 settings, 2 runs each")
    there = several[1].replace(network=LINK).forecast(calibration=known)
    assert there.seconds == pytest.approx(both.seconds.median)
    assert there.sources[-1].how == "measured, on a link with 16 rows (2 runs)"
