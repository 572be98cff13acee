"""Test callbacks on one rank only: they equal one process, or end quickly with one sentence."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from labkit.cluster import Cluster, RankError

EPOCHS = 3
Lambda = keras.callbacks.LambdaCallback


class Case(NamedTuple):
    """A callback on some ranks and its expected error; an empty text means equal to one process."""

    make: Callable[[Any, Path], Any]
    ranks: tuple[int, ...] = (0,)
    error: str = ""


def set_rate(model: Any, rate: float) -> None:
    model.optimizer.learning_rate.assign(rate)


def stop(model: Any) -> None:
    model.stop_training = True


class Evaluates(keras.callbacks.Callback):
    """A callback that evaluates and predicts its own rows, after an epoch or within it.

    Within an epoch, plain Keras mixes this evaluation into the epoch's metrics; labkit's ranks
    continue the metrics.
    """

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.found: list[float] = []
        self.within = within

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and self.within:
            self.look()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self.within:
            self.look()

    def look(self) -> None:
        x, y = rows(7)
        self.found += np.ravel(self.model.evaluate(x, y, batch_size=3, verbose=0)).tolist()
        self.found.append(float(self.model.predict(x, verbose=0).sum()))


def restoring(model: Any) -> None:
    model.set_weights([np.full(w.shape, 0.1, w.dtype) for w in model.get_weights()])


def freeze(model: Any) -> None:
    model.layers[0].trainable = False


CASES = {
    "ReduceLROnPlateau": Case(
        lambda m, _: keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=9.0)
    ),
    "LearningRateScheduler": Case(
        lambda m, _: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))
    ),
    "EarlyStopping": Case(
        lambda m, _: keras.callbacks.EarlyStopping(
            "loss", patience=1, min_delta=9.0, restore_best_weights=True
        )
    ),
    "BackupAndRestore": Case(
        lambda m, at: keras.callbacks.BackupAndRestore(str(at), delete_checkpoint=False)
    ),
    "ModelCheckpoint": Case(
        lambda m, at: keras.callbacks.ModelCheckpoint(
            str(at / "kept.weights.h5"), save_weights_only=True
        )
    ),
    "SwapEMAWeights": Case(lambda m, _: keras.callbacks.SwapEMAWeights(swap_on_epoch=True)),
    "TerminateOnNaN": Case(lambda m, _: keras.callbacks.TerminateOnNaN()),
    "weights restored": Case(lambda m, _: Lambda(on_epoch_end=lambda e, _: restoring(m))),
    "rate at the start": Case(lambda m, _: Lambda(on_train_begin=lambda _: set_rate(m, 0.3)), (1,)),
    "rate of rank 1": Case(lambda m, _: Lambda(on_epoch_begin=lambda e, _: set_rate(m, 0.2)), (1,)),
    "steps of rank 1": Case(
        lambda m, _: Lambda(on_epoch_end=lambda e, _: m.optimizer.iterations.assign(50)), (1,)
    ),
    "stop of rank 1": Case(
        lambda m, _: Lambda(on_epoch_end=lambda e, _: stop(m) if e == 1 else None), (1,)
    ),
    "stop in the last batch": Case(
        lambda m, _: Lambda(on_train_batch_end=lambda b, logs: stop(m) if b == 2 else None)
    ),
    "evaluate and predict": Case(lambda m, _: Evaluates(within=False)),
    "evaluate within an epoch": Case(lambda m, _: Evaluates(within=True)),
    "units in another order": Case(
        lambda m, _: Lambda(on_epoch_end=lambda e, _: reverse(m)),
        (1,),
    ),
    "the same on all": Case(
        lambda m, _: Lambda(on_epoch_end=lambda e, _: set_rate(m, 0.2)), (0, 1)
    ),
    "different rates": Case(
        lambda m, at: Lambda(on_epoch_end=lambda e, _: set_rate(m, 0.2 + int(at.name[-1]) / 10)),
        (0, 1),
        "replicas different after epoch 1: .*learning_rate is 0.2 on rank 0 and 0.3 on rank 1",
    ),
    "rate within an epoch": Case(
        lambda m, _: Lambda(on_train_batch_end=lambda b, logs: set_rate(m, 0.2)),
        (1,),
        "replicas differ after the first step: .*learning_rate is 0.5 on rank 0 and 0.2 on rank 1",
    ),
    "frozen layer": Case(
        lambda m, _: Lambda(on_train_begin=lambda _: freeze(m)),
        (0,),
        "rank 0 alone has changed which layers are trainable at the start of training",
    ),
}


def reverse(model: Any) -> None:
    """Reverse the columns of a layer's kernel: the same values in other places."""
    kernel = model.layers[0].kernel
    kernel.assign(kernel.numpy()[:, ::-1])


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.standard_normal((count, 6)), random.integers(0, 3, count)


def batches() -> Any:
    return tf.data.Dataset.from_tensor_slices(rows(24)).batch(8)


def compiled(wrap: Callable[[Any], Any]) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5, use_ema=True, ema_momentum=0.5)
    model.compile(optimizer=wrap(optimizer), loss=loss, metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model: Any, data: Any, callbacks: list[Any], epochs: int = EPOCHS) -> Any:
    return model.fit(data, validation_data=data, epochs=epochs, verbose=0, callbacks=callbacks)


def outcome(model: Any, fitted: Any, case: Case) -> list[Any]:
    """Return the results of training: weights, the optimizer's variables and the history."""
    values = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    # Values that a callback writes into the logs exist only on its own rank.
    names = set() if case is CASES["evaluate within an epoch"] else {*fitted.history}
    names -= {"learning_rate"}
    history = [fitted.epoch, *(fitted.history[name] for name in sorted(names))]
    return [*values, *history]


def one_by_one(communicator: Any) -> dict[str, Any]:
    """Return how far the ranks differ from one process in each case, or the error."""
    from labkit import keras as lkk

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    ours = compiled(lambda plain: lkk.DistributedOptimizer(plain, communicator))
    one = compiled(lambda plain: plain)
    first = [[v.numpy() for v in (*m.variables, *m.optimizer.variables)] for m in (ours, one)]
    with tempfile.TemporaryDirectory() as folder:
        return by_case(communicator, ours, one, first, Path(folder))


def by_case(communicator: Any, ours: Any, one: Any, first: Any, folder: Path) -> dict[str, Any]:
    from labkit import keras as lkk

    backup = folder / "backup"
    fit(one, batches(), [keras.callbacks.BackupAndRestore(str(backup), delete_checkpoint=False)], 2)
    found: dict[str, Any] = {}
    for number, (name, case) in enumerate(CASES.items()):
        for model, values in zip((ours, one), first, strict=True):
            for variable, value in zip(
                (*model.variables, *model.optimizer.variables), values, strict=True
            ):
                variable.assign(value)
            model.layers[0].trainable, model._initial_epoch = True, None
        places = [folder / f"{number}-{side}" for side in ("one", f"ours-{communicator.rank}")]
        for place in places:
            shutil.copytree(backup, place)
        own = [case.make(ours, places[1])] if communicator.rank in case.ranks else []
        callbacks = [*lkk.callbacks(communicator), *own]
        try:
            fitted = fit(ours, lkk.shard(batches(), communicator), callbacks)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        wanted = None
        if communicator.rank == 0:
            alone = [case.make(one, places[0])]
            wanted = *outcome(one, fit(one, batches(), alone), case), seen_by(alone)
        # Only the rank with the callbacks knows what they recorded.
        seen = communicator.broadcast_object(seen_by(own), case.ranks[0])
        wanted = communicator.broadcast_object(wanted)
        ended = *outcome(ours, fitted, case), seen
        found[name] = furthest(ended, wanted)
    return found


def seen_by(callbacks: list[Any]) -> list[float]:
    return [value for each in callbacks for value in getattr(each, "found", ())]


def furthest(ours: Any, wanted: Any) -> float | str:
    """Return the largest difference between two results."""
    if [np.shape(value) for value in ours] != [np.shape(value) for value in wanted]:
        return f"other shapes: {ours[-4:]} and {wanted[-4:]}"
    pairs = zip(ours, wanted, strict=True)
    return max(float(np.abs(np.subtract(a, b)).max(initial=0)) for a, b in pairs)


@pytest.fixture(scope="module")
def outcomes(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.call(one_by_one, ranks=2)


@pytest.mark.battery(2, 4)
@pytest.mark.parametrize("name", CASES)
def test_a_callback_on_one_rank_is_for_all_or_an_error(
    outcomes: list[dict[str, Any]], name: str
) -> None:
    for found in outcomes:
        if error := CASES[name].error:
            assert re.search(error, str(found[name]))
        else:
            assert isinstance(found[name], float), found[name]
            assert found[name] < 1e-11


def alone_in(communicator: Any, what: str) -> None:
    from labkit import keras as lkk

    model = compiled(lambda plain: lkk.DistributedOptimizer(plain, communicator))
    callbacks = {
        "stop": Lambda(on_train_batch_end=lambda b, logs: stop(model) if b == 0 else None),
        "fit": Lambda(on_epoch_end=lambda e, _: model.fit(*rows(8), verbose=0)),
        "longer": Lambda(),
    }
    own = [callbacks[what]] if communicator.rank == 0 else []
    epochs = 3 if what == "longer" and communicator.rank == 0 else 2
    data = lkk.shard(batches(), communicator)
    fit(model, data, [*lkk.callbacks(communicator), *own], epochs)


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("stop", "rank 0 waits in the end of .* steps, because a callback has set stop_training"),
        ("fit", "rank 0 waits in model.fit inside a callback, which every rank must call"),
        ("longer", "rank 0 waits in the comparison of replicas at the start of epoch 3; rank 1"),
    ],
)
def test_a_rank_that_goes_a_way_of_its_own_is_named_in_seconds(
    cluster: Cluster, what: str, sentence: str
) -> None:
    with pytest.raises(RankError, match=sentence):
        cluster.call(alone_in, what, ranks=2)
