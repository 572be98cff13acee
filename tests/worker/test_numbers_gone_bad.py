"""Test that planted NaN and Inf are found at their step, layer and rank, by every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import labkit as lk
from labkit import Cluster, Experiment, Fault, Run
from labkit.cluster import RankError

BASE: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 100, "test_rows": 10},
    "model_options": {"widths": [6, 6]},
    "batch_size": 20,
    "workers": 2,
    "verify": False,
    "optimizer_options": {"momentum": 0.9},
    "on_nonfinite": "stop",
}
VIRTUAL = {"virtual": {"compute_time": 0.01}}
SPARSE = lk.AllReduce("ring", compressor=lk.TopK(0.5))
PLANTED: dict[str, tuple[dict[str, Any], Fault]] = {
    "a ring": ({"strategy": lk.AllReduce("ring")}, Fault("nan", rank=1, step=2, layer="dense_1")),
    "memory": (
        {"strategy": lk.AllReduce("shared_memory", schedule="overlap"), "workers": 3},
        Fault("inf", rank=2, step=2, layer="dense", offset=7),
    ),
    "a pipeline": ({"strategy": lk.Pipeline()}, Fault("inf", rank=1, step=2, layer="dense_2")),
    "a server": ({"strategy": lk.ParameterServer(1)}, Fault("nan", rank=1, step=3, layer="dense")),
    "virtual servers": (
        {"strategy": lk.ParameterServer(1, synchronous=False), "workers": 3, **VIRTUAL},
        Fault("inf", rank=2, step=1, layer="dense_2"),
    ),
    "alone": (
        {"workers": 1, "strategy": lk.AllReduce("shared_memory")},
        Fault("nan", rank=0, step=2, layer="dense_1"),
    ),
    "slices": ({"strategy": lk.TensorParallel()}, Fault("nan", rank=0, step=2, layer="dense_1")),
    "compressed": ({"strategy": SPARSE}, Fault("nan", rank=1, step=3, layer="dense_2")),
    "by priority": (
        {"strategy": lk.AllReduce(schedule="priority"), "optimizer_options": {}},
        Fault("nan", rank=0, step=1, layer="dense_1"),
    ),
    "virtual": ({"workers": 4, **VIRTUAL}, Fault("nan", rank=3, step=1, layer="dense_1")),
}


def some(names: Sequence[str], fast: int) -> list[Any]:
    """Return names as test parameters; those after the first `fast` ones are marked slow."""
    return [pytest.param(n, marks=[pytest.mark.slow] * (k >= fast)) for k, n in enumerate(names)]


def run(cluster: Cluster, **fields: Any) -> Run:
    return cluster.run(Experiment(**{**BASE, **fields}), show=False)


@pytest.mark.parametrize("name", some(list(PLANTED), 5))
def test_a_bad_gradient_ends_training_with_its_step_layer_and_rank(
    cluster: Cluster, name: str
) -> None:
    fields, fault = PLANTED[name]
    with pytest.raises(RankError) as error:
        run(cluster, faults=fault, **fields)
    what = f"step {fault.step}: the gradient of layer {fault.layer!r} on rank {fault.rank} is not"
    assert what in str(error.value)
    assert "and the loss is not finite, either" not in str(error.value)


def without(step: int) -> Callable[[], list[Any]]:
    """Return callbacks that undo one step as if it had never run."""

    def callbacks() -> list[Any]:
        import keras

        class TakeBack(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                every = [*self.model.variables, *self.model.optimizer.variables]
                self.kept = [(variable, variable.numpy()) for variable in every]

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                for variable, value in self.kept if batch == step else []:
                    variable.assign(value)

        return [TakeBack()]

    return callbacks


@pytest.fixture(scope="module")
def one_less(cluster: Cluster) -> list[np.ndarray]:
    """Return the weights after training with a ring that skips step 2."""
    fields, _ = PLANTED["a ring"]
    weights: list[np.ndarray] = run(cluster, callbacks=without(2), **fields).model().get_weights()
    return weights


@pytest.mark.parametrize("name", some(["a ring", "a pipeline", "memory", "alone", "slices"], 2))
def test_a_skipped_step_leaves_no_trace_on_any_rank(
    cluster: Cluster, one_less: list[np.ndarray], name: str
) -> None:
    fields, fault = PLANTED[name]
    skipped = run(cluster, faults=fault, on_nonfinite="skip", **fields)
    told = skipped.metrics["nonfinite"]
    bad = {"step": fault.step, "rank": fault.rank, "layer": fault.layer, "elements": 1}
    assert (told["policy"], told["steps"], told["found"]) == ("skip", 1, [bad])
    allowed = 0.0 if name == "a ring" else 1e-6  # other strategies add in another order
    for ours, theirs in zip(skipped.model().get_weights(), one_less, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=allowed, atol=allowed)


@pytest.mark.slow
def test_no_memory_keeps_anything_of_a_step_that_is_skipped(cluster: Cluster) -> None:
    fields, fault = PLANTED["compressed"]
    skipped = run(cluster, faults=fault, on_nonfinite="skip", **fields)
    assert skipped.metrics["nonfinite"]["steps"] == 1
    assert np.isfinite(skipped.metrics["test_loss"])


@pytest.mark.slow
def test_what_is_clipped_is_said_and_training_goes_on(cluster: Cluster) -> None:
    fields, fault = PLANTED["a server"]
    found = run(cluster, faults=fault, on_nonfinite="clip", **fields)
    assert found.metrics["nonfinite"]["policy"] == "clip"
    assert np.isfinite(found.metrics["test_loss"])


@pytest.mark.slow
def test_without_a_policy_nothing_is_looked_at_and_with_one_nothing_is_changed(
    cluster: Cluster,
) -> None:
    fields, fault = PLANTED["a ring"]
    lost = run(cluster, faults=fault, on_nonfinite=None, **fields)
    assert not all(np.isfinite(weight).all() for weight in lost.model().get_weights())
    asked = {"on_nonfinite": None}, {"replica_check_interval": 2}, {"on_nonfinite": "skip"}
    runs = [run(cluster, **each, **fields) for each in asked]
    weights = [
        b"".join(weight.tobytes() for weight in found.model().get_weights()) for found in runs
    ]
    assert len(set(weights)) == 1
    assert all("nonfinite" not in found.metrics for found in runs)


@pytest.mark.slow
def test_an_overflow_of_a_scaled_loss_is_no_fault(cluster: Cluster) -> None:
    fields, fault = PLANTED["a ring"]
    found = run(cluster, faults=fault, precision="mixed_float16", **fields)
    assert "nonfinite" not in found.metrics
    assert np.isfinite(found.metrics["test_loss"])


def changing(step: int, who: int) -> Callable[[], list[Any]]:
    """Return callbacks that change a layer's weights on one rank after a step."""

    def callbacks() -> list[Any]:
        import keras
        from mpi4py import MPI

        class Change(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == step and MPI.COMM_WORLD.rank == who:
                    kernel = self.model.layers[-2].kernel
                    kernel.assign(kernel.numpy() * np.float32(1.001))

        return [Change()]

    return callbacks


@pytest.mark.parametrize(("ranks", "every", "step", "who"), [(3, 1, 2, 1), (2, 2, 2, 1)])
def test_a_replica_that_drifts_apart_is_found_with_its_step_layer_and_rank(
    cluster: Cluster, ranks: int, every: int, step: int, who: int
) -> None:
    given = {"strategy": lk.AllReduce("ring"), "workers": ranks, "replica_check_interval": every}
    with pytest.raises(RankError) as error:
        run(cluster, callbacks=changing(step, who), **given)
    steps = f"step {step}" if every == 1 else f"one of the steps {step} to {step + every - 1}"
    assert f"drifted apart in {steps}: layer " in str(error.value)
    assert "'dense_1'" in str(error.value) or every > 1
    assert f"rank {who} was wrong in step {step}: when the steps are repeated" in str(error.value)


@pytest.mark.slow
def test_a_bit_that_no_checksum_finds_is_found_by_the_replicas(cluster: Cluster) -> None:
    flip = Fault("corrupt", rank=1, step=2, message=1, offset=43, bit=6)
    given = {"strategy": lk.AllReduce("ring"), "faults": flip, "optimizer_options": {}}
    with pytest.raises(RankError, match="rank 0 was wrong in step 2"):
        run(cluster, replica_check_interval=1, **given)
    with pytest.raises(RankError, match="from rank 1 to rank 0 in the exchange of gradients"):
        run(cluster, checksums=True, **given)


@pytest.mark.slow
def test_faults_on_the_virtual_clock_take_its_time_and_its_messages(cluster: Cluster) -> None:
    servers = lk.ParameterServer(1, synchronous=False)
    given = {"strategy": servers, "workers": 3, **VIRTUAL}

    def seconds(*faults: Fault) -> np.ndarray:
        history = run(cluster, faults=faults, **given).history
        own = history[history["rank"] == 2].sort_values("step")
        return own["compute_seconds"].to_numpy()

    plain = seconds()
    slow, pause = Fault("slow", rank=2, step=1, factor=3), Fault("pause", rank=2, step=2, seconds=2)
    assert seconds(slow, pause)[:3] - plain[:3] == pytest.approx([0, 0.02, 2])
    assert len(seconds(Fault("kill", rank=2, step=3))) == 3
    corrupt = Fault("corrupt", rank=2, step=1, offset=130, bit=30)
    one, other = (run(cluster, faults=f, **given).metrics["test_loss"] for f in ((), corrupt))
    assert one != other
    with pytest.raises(RankError, match="wait for messages that no program will send"):
        run(cluster, faults=Fault("drop", rank=2, step=1), **given)
