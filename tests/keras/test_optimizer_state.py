"""Test that optimizers, losses and metrics with extra state equal one process."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput

TOLERANCE = 1e-12
STEPS, ROWS = 4, 6
KINDS = (
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion"),
    *("Adafactor", "Lamb"),
)
Make = Callable[[list[Any]], Any]


# --- optimizers with state, each made for two variables ------------------------------------------


def without_bias(kind: str) -> Make:
    def make(variables: list[Any]) -> Any:
        found = getattr(keras.optimizers, kind)(0.05, weight_decay=0.3)
        found.exclude_from_weight_decay(var_names=["bias"])
        return found

    return make


def with_attributes(optimizer: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    return optimizer


class Shrinking(keras.optimizers.SGD):
    """An SGD whose `factor` is set after construction and is missing in its configuration."""

    factor = 1.0

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.factor, variable, learning_rate)


class Required(keras.optimizers.SGD):
    """An SGD that Keras cannot rebuild, because its configuration lacks a required argument."""

    def __init__(self, factor: float, **options: Any) -> None:
        super().__init__(**options)
        self.factor = factor

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.factor, variable, learning_rate)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate with an attribute and a variable that its configuration lacks."""

    def __init__(self, base: float = 0.1) -> None:
        super().__init__()
        self.base, self.every = base, 100.0
        self.scale = tf.Variable(1.0, dtype="float64", trainable=False)

    def __call__(self, step: Any) -> Any:
        late = tf.floor(tf.cast(step, "float64") / self.every)
        return self.base * self.scale * 0.5**late

    def get_config(self) -> dict[str, Any]:
        return {"base": self.base}


def own_schedule(every: float, scale: float) -> Any:
    found = Halving()
    found.every = every
    found.scale.assign(scale)
    return found


def closure(rate: float) -> Any:
    return lambda: rate


class Holder:
    rate = 0.03

    def now(self) -> float:
        return self.rate


def listed(variables: list[Any]) -> Any:
    found = keras.optimizers.AdamW(0.05, weight_decay=0.3)
    found.exclude_from_weight_decay(var_list=variables[1:])
    return found


def trained(variables: list[Any]) -> Any:
    """Return an Adam with moments and a step count from earlier, unrelated gradients."""
    found = keras.optimizers.Adam(0.05)
    found.build(variables)
    for number, slot in enumerate(found.variables[2:]):
        slot.assign(np.full(slot.shape, 0.1 * (number + 1)))
    found.iterations.assign(7)
    return found


def counted(variables: list[Any]) -> Any:
    found = keras.optimizers.Adam(0.05)
    found.iterations.assign(9)
    return found


def scaled(variables: list[Any]) -> Any:
    inner = without_bias("AdamW")(variables)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)


def own_step(variables: list[Any]) -> Any:
    found = keras.optimizers.SGD(0.1)

    def step(self: Any, gradient: Any, variable: Any, rate: Any) -> None:
        self.assign_sub(variable, 0.7 * rate * gradient)

    found.update_step = MethodType(step, found)
    return found


def rate_set_later(variables: list[Any]) -> Any:
    found = keras.optimizers.SGD(0.5)
    found.learning_rate = 0.02
    return found


def schedule_set_later(variables: list[Any]) -> Any:
    found = keras.optimizers.SGD(0.5)
    found.learning_rate = own_schedule(2.0, 0.3)
    return found


def extra_variable(variables: list[Any]) -> Any:
    """Return an optimizer with its own list of variables, which Keras tracks."""
    found = Shrinking(0.1)
    found.kept = [keras.Variable(0.25, dtype="float64", name="kept")]
    found.factor = found.kept[0]
    return found


SGD = keras.optimizers.SGD
CASES: dict[str, Make] = {
    **{f"{kind} without the bias": without_bias(kind) for kind in KINDS},
    "LARS without the bias": lambda _: _excluding(_lars()),
    "excluded by variable": listed,
    "moments and steps": trained,
    "steps before it is built": counted,
    "loss scale around exclusions": scaled,
    "attribute of a subclass": lambda _: with_attributes(Shrinking(0.1), factor=0.3),
    "argument that no configuration names": lambda _: Required(0.3, learning_rate=0.1),
    "attribute of a schedule": lambda _: SGD(own_schedule(2.0, 1.0)),
    "variable of a schedule": lambda _: SGD(own_schedule(100.0, 0.2)),
    "rate of a closure": lambda _: SGD(closure(0.04)),
    "rate of a method": lambda _: SGD(Holder().now),
    "rate set later": rate_set_later,
    "schedule set later": schedule_set_later,
    "momentum set later": lambda _: with_attributes(SGD(0.1, momentum=0.5), momentum=0.9),
    "decay set later": lambda _: with_attributes(SGD(0.1), weight_decay=0.3),
    "clipnorm set later": lambda _: with_attributes(SGD(0.1), clipnorm=0.05),
    "EMA set later": lambda _: with_attributes(
        SGD(0.1, use_ema=True, ema_overwrite_frequency=2), ema_momentum=0.5
    ),
    "accumulation with exclusions": lambda _: _excluding(
        keras.optimizers.AdamW(0.05, weight_decay=0.3, gradient_accumulation_steps=2)
    ),
    "loss scale factor set later": lambda _: with_attributes(SGD(0.1), loss_scale_factor=8.0),
    "method of the object": own_step,
    "list of variables": extra_variable,
}


def _lars() -> Any:
    from labkit.keras import LARS

    return LARS(0.4, weight_decay=0.3, trust_coefficient=0.1, exclude_1d=False)


def _excluding(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


# --- steps with them -----------------------------------------------------------------------------


def two_variables() -> list[Any]:
    random = np.random.default_rng(1)
    values = random.standard_normal((4, 3)), 1 + random.random(3)
    pairs = zip(values, ("kernel", "bias"), strict=True)
    return [keras.Variable(value, dtype="float64", name=name) for value, name in pairs]


def steps(make: Make, wrap: Callable[[Any], Any], rows: slice) -> list[np.ndarray]:
    """Return the weights after some steps with these rows of each batch."""
    random = np.random.default_rng(2)
    variables = two_variables()
    optimizer = wrap(make(variables))

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            error = x @ variables[0].value + variables[1].value - y
            loss = optimizer.scale_loss(tf.reduce_mean(error**2))
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        if hasattr(optimizer, "rows"):
            optimizer.rows = tf.shape(x)[0]
        optimizer.apply(gradients, variables)

    optimizer.build(variables)
    for _ in range(STEPS):
        x, y = random.standard_normal((ROWS, 4)), random.standard_normal((ROWS, 3))
        step(x[rows], y[rows])
    return [variable.numpy() for variable in variables]


def differences(communicator: Any) -> dict[str, Any]:
    """Return how far ranks and a copy differ from the user's optimizer per case, or the error."""
    from labkit import keras as lkk

    keras.config.set_floatx("float64")
    own = slice(0, 4) if communicator.rank == 0 else slice(4, None)
    wraps = {
        "ranks": (lambda plain: lkk.DistributedOptimizer(plain, communicator), own),
        "copy": (lkk.copy_of, slice(None)),
    }
    found: dict[str, Any] = {}
    for name, make in CASES.items():
        wanted = steps(make, lambda plain: plain, slice(None))
        for way, (wrap, rows) in wraps.items():
            try:
                ended = steps(make, wrap, rows)
            except Exception as error:
                found[f"{name}, {way}"] = f"{type(error).__name__}: {error}"
                continue
            apart = (np.abs(a - b).max() for a, b in zip(ended, wanted, strict=True))
            found[f"{name}, {way}"] = float(max(apart))
    return found


@pytest.mark.exhaustive
def test_an_optimizer_with_state_beyond_its_configuration_ends_as_in_one_process(
    cluster: Cluster,
) -> None:
    for found in cluster.call(differences, ranks=2):
        assert len(found) == 2 * len(CASES)
        wrong = {k: v for k, v in found.items() if not isinstance(v, float) or v > TOLERANCE}
        assert wrong == {}


def test_what_is_set_later_on_the_users_object_holds_for_the_distributed_one() -> None:
    from labkit import keras as lkk
    from labkit.communicator import single_rank

    plain = keras.optimizers.Adam(0.5)
    distributed = lkk.DistributedOptimizer(plain, single_rank())
    plain.learning_rate = 0.25
    plain.exclude_from_weight_decay(var_names=["bias"])
    assert float(distributed.learning_rate) == 0.25
    assert distributed._exclude_from_weight_decay_pattern.pattern == "bias"
    assert not hasattr(plain, "exchange")
    again = lkk.DistributedOptimizer(distributed, single_rank())
    assert type(again).__mro__[1] is keras.optimizers.Adam  # gradients are exchanged only once


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    import threading

    from labkit import keras as lkk

    optimizer = with_attributes(SGD(0.1), lock=threading.Lock())
    with pytest.raises(InvalidInput, match=r"SGD\.lock \(lock\) cannot be copied"):
        lkk.copy_of(optimizer)
