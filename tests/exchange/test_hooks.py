"""Test that hooks around a model's training run in a fixed order, and can be removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any, ClassVar

import keras
import numpy as np
import pytest

from labkit.common.errors import LabkitError
from labkit.exchange.hooks import ORDER, Hook, hooks_of, rows_of


class Note(Hook):
    """A hook that records its calls, each with its rows."""

    def __init__(self, name: str, said: list[tuple[str, Any]]) -> None:
        self.name, self.said = name, said  # type: ignore[misc]  # one class stands for all names

    def train_step(self, inner: Callable[[Any], Any], rows: Any, data: Any) -> Any:
        self.said.append((self.name, rows))
        return inner(data)


class Halve(Hook):
    """A hook that passes on half of the batch."""

    name: ClassVar[str] = "rows"

    def train_step(self, inner: Callable[[Any], Any], rows: Any, data: Any) -> Any:
        half = keras.tree.map_structure(lambda leaf: leaf[: len(leaf) // 2], data)
        return inner(half)


class Everywhere(Hook):
    """A hook around every method that hooks can wrap."""

    name: ClassVar[str] = "record"

    def __init__(self) -> None:
        self.said: list[str] = []
        self.rows: Any = None

    def train_step(self, inner: Callable[[Any], Any], rows: Any, data: Any) -> Any:
        self.said.append("train_step")
        return inner(data)

    def test_step(self, inner: Callable[[Any], Any], rows: Any, data: Any) -> Any:
        self.said.append("test_step")
        return inner(data)

    def compute_loss(self, inner: Callable[..., Any], rows: Any, *given: Any, **named: Any) -> Any:
        self.said.append("compute_loss")
        return inner(*given, **named)

    def get_metrics_result(self, inner: Callable[[], Any], rows: Any) -> Any:
        self.said.append("get_metrics_result")
        return inner()

    def apply(
        self, inner: Callable[..., Any], rows: Any, gradients: Any, variables: Any = None
    ) -> Any:
        self.said.append("apply")
        self.rows = rows
        return inner(gradients, variables)


X, Y = np.arange(24, dtype=np.float32).reshape(8, 3), np.ones((8, 1), np.float32)


@pytest.fixture
def model() -> Iterator[Any]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    yield model
    keras.backend.clear_session()


METHODS = ("train_step", "test_step", "compute_loss", "get_metrics_result", "make_train_function")


def own_methods(model: Any) -> list[Any]:
    """Return methods that the model and its optimizer have in place of their classes' methods."""
    held = [vars(model).get(name) for name in METHODS]
    return [*held, vars(model.optimizer).get("apply")]


@pytest.mark.parametrize("names", list(permutations(["record", "rows", "priority"])))
def test_hooks_run_in_the_declared_order_whatever_the_order_of_putting_on(
    model: Any, names: tuple[str, ...]
) -> None:
    said: list[tuple[str, Any]] = []
    for name in names:
        hooks_of(model).add_hook(Note(name, said))
    model.train_step((X, Y))
    assert said == [("record", 8), ("rows", 8), ("priority", 8)]


def test_rows_are_those_of_the_batch_as_it_came(model: Any) -> None:
    said: list[tuple[str, Any]] = []
    for hook in (Note("priority", said), Halve(), Note("record", said)):
        hooks_of(model).add_hook(hook)
    model.train_step((X, Y))
    assert said == [("record", 8), ("priority", 8)]


def test_a_name_without_a_place_is_refused(model: Any) -> None:
    with pytest.raises(LabkitError, match=f"'first' is unknown; allowed: {', '.join(ORDER)}"):
        hooks_of(model).add_hook(Note("first", []))


def test_taking_off_leaves_the_model_its_own_methods(model: Any) -> None:
    own = own_methods(model)
    hook = Everywhere()
    hooks_of(model).add_hook(hook)
    model.fit(X, Y, batch_size=4, verbose=0)
    model.evaluate(X, Y, verbose=0)
    assert set(hook.said) == {*METHODS[:4], "apply"}
    assert hook.rows is not None
    hooks_of(model).remove_hooks("record")
    assert own_methods(model) == own == [None] * 6
    hook.said.clear()
    model.fit(X, Y, batch_size=4, verbose=0)
    assert hook.said == []


def test_a_method_that_stood_on_the_model_itself_comes_back(model: Any) -> None:
    calls = []
    plain = model.train_step

    def train_step(data: Any) -> Any:
        calls.append(rows_of(data))
        return plain(data)

    model.train_step = train_step
    hooks_of(model).add_hook(Everywhere())
    model.train_step((X, Y))
    assert calls == [8]
    hooks_of(model).clear()
    assert model.train_step is train_step


def test_a_train_step_of_the_users_own_is_called(model: Any) -> None:
    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            return {**super().train_step(data), "mine": 7.0}

    own = Own([keras.Input((3,)), keras.layers.Dense(1)])
    own.compile(optimizer="sgd", loss="mse")
    hook = Everywhere()
    hooks_of(own).add_hook(hook)
    assert own.fit(X, Y, batch_size=4, verbose=0).history["mine"] == [7.0]
    assert "train_step" in hook.said


def test_an_error_in_a_step_leaves_nothing_of_the_fit_behind(model: Any) -> None:
    class Fail(Hook):
        name: ClassVar[str] = "priority"

        def train_step(self, inner: Callable[[Any], Any], rows: Any, data: Any) -> Any:
            raise RuntimeError("as planned")

    hooks_of(model).add_hook(Everywhere())
    hooks_of(model).add_hook(Fail())
    with pytest.raises(RuntimeError, match="as planned"):
        model.fit(X, Y, verbose=0)
    assert own_methods(model) == [None] * 6
    assert hooks_of(model).hooks == ()
    model.fit(X, Y, verbose=0)


def test_what_stays_outlives_an_error_and_the_fit(model: Any) -> None:
    stays = Everywhere()
    hooks_of(model).add_hook(stays, stays=True)
    hooks_of(model).add_hook(Note("record", []))
    assert len(hooks_of(model).hooks) == 1
    hooks_of(model).clear()
    assert hooks_of(model).hooks == (stays,)
    hooks_of(model).clear(staying=True)
    assert own_methods(model) == [None] * 6


def test_the_end_of_the_data_takes_nothing_off(model: Any) -> None:
    hooks_of(model).add_hook(Everywhere())
    model.fit(X, Y, batch_size=4, epochs=3, verbose=0)
    assert len(hooks_of(model).hooks) == 1


def test_a_step_compiled_with_the_same_hooks_is_used_again(model: Any) -> None:
    hook = Everywhere()
    for _ in range(3):
        hooks_of(model).add_hook(hook)
        model.fit(X, Y, batch_size=4, verbose=0)
        hooks_of(model).remove_hooks("record")
        model.fit(X, Y, batch_size=4, verbose=0)
    assert hook.said.count("train_step") == 1  # traced once
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    hooks_of(model).add_hook(hook)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert hook.said.count("train_step") == 2  # another optimizer


def test_a_model_with_hooks_is_saved_as_without(model: Any, tmp_path: Any) -> None:
    hooks_of(model).add_hook(Everywhere())
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert own_methods(loaded) == [None] * 6
