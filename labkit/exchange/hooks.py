"""Hooks around the methods of a Keras model, in the fixed order of `ORDER`.

    fit -> ledger -> record -> whole -> updates -> rows -> priority -> the model's own train_step
        -> its layers' moments, its losses: whole
        -> update_state of its metrics: updates
        -> optimizer.apply: dense -> whole -> rows -> the optimizer's own

The diagram shows the order of calls in `fit`. Names that are not Keras methods are names of hooks.
A module of labkit that acts inside a training step defines a `Hook`. The module adds its hook to
the model's `HookManager`. Each method of a hook calls the model's method that it wraps. When the
hook is removed, the model gets its original method back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, ClassVar, TypeAlias

import keras
import tensorflow as tf

from labkit.common.errors import LabkitError

ORDER = (
    "ledger",
    "record",
    "metrics",
    "tests",
    "dense",
    "whole",
    "updates",
    "rows",
    "priority",
)  # The tuple `ORDER` contains the names of the hooks, from the outermost to the innermost.

Batch: TypeAlias = "tf.Tensor | tuple[tf.Tensor, ...] | dict[str, tf.Tensor]"
Logs: TypeAlias = dict[str, tf.Tensor]
Rows: TypeAlias = "int | tf.Tensor | None"
Variables: TypeAlias = "list[keras.Variable] | None"
# A `Holder` is an object with a method that a hook wraps. A `Holder` is a model, an optimizer, a
# layer, a loss, or a metric.
Holder: TypeAlias = (
    "keras.Model | keras.optimizers.Optimizer | keras.Layer | keras.Loss | keras.metrics.Metric"
)

# A `_Compiled` pair contains the model's compile configuration, and the function that Keras
# compiled with it.
_Compiled: TypeAlias = "tuple[keras.Model | None, Callable[..., Logs]]"


class Hook:
    """A base class of hooks around a model's training; by default, a hook changes nothing.

    Each method of a hook wraps one method of another object. The wrapped object is the model, an
    optimizer, a layer, a loss or a metric. A hook's method must call the wrapped method, which is
    its argument `inner`. The argument `rows` is the number of samples in the batch, before outer
    hooks change the batch. Outside a training step, `rows` is None.

    Attributes:
        name: A name in `ORDER`, which determines the position of the hook. A model has at most one
            hook of each name.
    """

    name: ClassVar[str]

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Wrap one training step; TensorFlow traces this method."""
        return inner(data)

    def test_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Wrap one validation step; TensorFlow traces this method."""
        return inner(data)

    def compute_loss(
        self, inner: Callable[..., tf.Tensor], rows: Rows, *args: tf.Tensor, **kwargs: tf.Tensor
    ) -> tf.Tensor:
        """Wrap the computation of a batch's loss; TensorFlow traces this method."""
        return inner(*args, **kwargs)

    def compiled_loss(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        compiled: keras.Loss,
        *args: tf.Tensor,
        **kwargs: tf.Tensor,
    ) -> tf.Tensor:
        """Wrap the sum of the compiled losses; TensorFlow traces this method."""
        return inner(*args, **kwargs)

    def moments(
        self,
        inner: Callable[..., tuple[tf.Tensor, tf.Tensor]],
        rows: Rows,
        layer: keras.layers.BatchNormalization,
        inputs: tf.Tensor,
        mask: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Wrap a normalization layer's batch moments; TensorFlow traces this method."""
        return inner(inputs, mask)

    def evaluate(self, inner: Callable[..., Logs], rows: Rows, *args: Any, **kwargs: Any) -> Logs:
        """Wrap a complete call of `model.evaluate` by `fit` or a callback."""
        return inner(*args, **kwargs)

    def fit(
        self, inner: Callable[..., keras.callbacks.History], rows: Rows, *args: Any, **kwargs: Any
    ) -> keras.callbacks.History:
        """Wrap a call of `model.fit` that a callback makes during another `fit`."""
        return inner(*args, **kwargs)

    def update_state(
        self,
        inner: Callable[..., None],
        rows: Rows,
        metric: keras.metrics.Metric,
        *args: tf.Tensor,
        **kwargs: tf.Tensor,
    ) -> None:
        """Wrap the update of a metric with a batch; TensorFlow traces this method.

        Keras creates compiled metrics at the first batch.
        """
        inner(*args, **kwargs)

    def get_metrics_result(self, inner: Callable[[], Logs], rows: Rows) -> Logs:
        """Wrap the model's method `get_metrics_result`, which returns the values of all metrics."""
        return inner()

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Wrap `apply` of each optimizer of the model; TensorFlow traces this method."""
        return inner(gradients, variables)


_FUNCTIONS = ("train_function", "test_function")
# For each wrapped method, the dict `_TRACED_IN` lists the compiled functions in which TensorFlow
# traces the method.
_TRACED_IN: dict[str, tuple[str, ...]] = {
    "train_step": ("train_function",),
    "test_step": ("test_function",),
    "compute_loss": ("train_function",),
    "compiled_loss": _FUNCTIONS,
    "moments": ("train_function",),
    "evaluate": (),
    "fit": (),
    "update_state": _FUNCTIONS,
    # The method `get_metrics_result` does not run in a TensorFlow graph, so ranks can communicate
    # in this method.
    "get_metrics_result": (),
    "apply": ("train_function",),
}


class HookManager:
    """The manager of one model's hooks, which `hooks_of` returns.

    A hook is added either for one `fit` or permanently. An error in a training step removes all
    hooks that were added for the current `fit`. The manager reuses functions that Keras has
    compiled earlier with the same hooks.

    Attributes:
        alike: The Python ids of state variables with equal updates on all ranks. The updates are
            equal even if ranks have different numbers of samples.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._staying: dict[str, Hook] = {}
        self._fitting: dict[str, Hook] = {}
        self._rows: Rows = None
        self.alike: set[int] = set()
        # Each entry of `_replaced` contains the changed object and the method's name. Each entry of
        # `_replaced` also contains the object's previous attribute, or None.
        self._replaced: list[tuple[Holder, str, Callable[..., tf.Tensor] | None]] = []
        self._hooks: tuple[Hook, ...] = ()
        self._compiled: dict[tuple[str, tuple[Hook, ...]], _Compiled] = {}

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The current hooks, from the outermost to the innermost."""
        by_name = self._staying | self._fitting
        return tuple(by_name[name] for name in ORDER if name in by_name)

    def add_hook(self, hook: Hook, stays: bool = False) -> None:
        """Add a hook, or replace the earlier hook of the same name.

        Args:
            hook: The hook to add.
            stays: Whether the hook is permanent, until it is removed explicitly. An error in
                training removes a hook that is not permanent.

        Raises:
            LabkitError: The name of the hook is not in `ORDER`.
        """
        if hook.name not in ORDER:
            raise LabkitError(
                f"the hook's name {hook.name!r} is unknown; allowed: {', '.join(ORDER)}"
            )
        # Compiled functions refer to the hook objects that existed when TensorFlow traced the
        # functions. If an earlier hook object equals the new hook, labkit uses the earlier object.
        # Compiled functions refer to the earlier hook object.
        compiled = (earlier for _, hooks in self._compiled for earlier in hooks)
        hook = next((earlier for earlier in compiled if earlier == hook), hook)
        (self._staying if stays else self._fitting)[hook.name] = hook
        self._arrange()

    def remove_hooks(self, *names: str) -> None:
        """Remove hooks by name if they were added for one `fit`; ignore all other names."""
        for name in names:
            self._fitting.pop(name, None)
        self._arrange()

    @contextmanager
    def replaced(self, hook: Hook) -> Iterator[None]:
        """Inside a `with` block, let `hook` replace the current `fit`'s hook of the same name."""
        before = self._fitting.get(hook.name)
        self.add_hook(hook)
        try:
            yield
        finally:
            self.remove_hooks(hook.name)
            if before is not None:
                self.add_hook(before)

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Inside a `with` block, remove the current `fit`'s hooks with the given names."""
        before = {name: self._fitting.pop(name) for name in names if name in self._fitting}
        self._arrange()
        try:
            yield
        finally:
            self._fitting |= before
            self._arrange()

    def clear(self, staying: bool = False) -> None:
        """Remove all hooks that were added for one `fit`.

        Args:
            staying: Whether to remove permanent hooks as well.
        """
        self._fitting.clear()
        if staying:
            self._staying.clear()
        self._arrange()

    def discard_compiled(self) -> None:
        """Discard all compiled functions, so that Keras traces them again."""
        self._compiled.clear()
        for name in _FUNCTIONS:
            setattr(self._model, name, None)

    def _arrange(self) -> None:
        self._keep_compiled()
        for holder, method, original in reversed(self._replaced):
            delattr(holder, method)
            if original is not None:
                setattr(holder, method, original)
        self._replaced.clear()
        self._hooks = self.hooks
        for method in _TRACED_IN:
            around = _around(self._hooks, method)
            for holder, name in _holders(self._model, method) if around else []:
                self._replace(holder, name, self._chain(around, method, holder, name))
        if self._fitting:
            self._replace(self._model, "make_train_function", self._make_guarded)
        self._use_compiled()

    def _replace(self, holder: Holder, method: str, new: Callable[..., tf.Tensor | None]) -> None:
        self._replaced.append((holder, method, vars(holder).get(method)))
        setattr(holder, method, new)

    def _chain(
        self, around: tuple[Hook, ...], method: str, holder: Holder, name: str
    ) -> Callable[..., tf.Tensor]:
        original, is_step = getattr(holder, name), method.endswith("_step")
        if method == "apply":
            original = _with_rows(original)
        # The hook methods `compiled_loss`, `moments` and `update_state` receive the wrapped object.
        # A model may have several losses, layers or metrics.
        part = (holder,) if method in ("compiled_loss", "moments", "update_state") else ()

        def call(*args: tf.Tensor, **kwargs: tf.Tensor) -> tf.Tensor:
            before = self._rows
            if is_step:
                self._rows = rows_of(args[0])
            inner = original
            for hook in reversed(around):
                inner = partial(getattr(hook, method), inner, self._rows, *part)
            try:
                return inner(*args, **kwargs)
            finally:
                self._rows = before

        return call

    def _make_guarded(self, force: bool = False) -> None:
        """Compile the training function, and make it remove the hooks if it raises an error."""
        type(self._model).make_train_function(self._model, force)
        self._guard()

    def _guard(self) -> None:
        function = self._model.train_function
        if self._fitting and function is not None and not isinstance(function, _Guarded):
            self._model.train_function = _Guarded(self, function)

    def _keep_compiled(self) -> None:
        """Save the functions that Keras has compiled with the current hooks."""
        # Keras creates a new `_compile_config` object in each call of `compile`, so a new object
        # shows a recompilation.
        version = getattr(self._model, "_compile_config", None)
        entries = self._compiled.items()
        self._compiled = {key: entry for key, entry in entries if entry[0] is version}
        for name in _FUNCTIONS:
            function = getattr(self._model, name, None)
            if function is not None:
                bare = function.function if isinstance(function, _Guarded) else function
                self._compiled[name, self._traced_in(name)] = (version, bare)

    def _use_compiled(self) -> None:
        """Install the functions that Keras has already compiled with the model's current hooks.

        Keras compiles a missing function at its next use.
        """
        for name in _FUNCTIONS:
            if hasattr(self._model, name):
                _, function = self._compiled.get((name, self._traced_in(name)), (None, None))
                setattr(self._model, name, function)
        self._guard()

    def _traced_in(self, function: str) -> tuple[Hook, ...]:
        methods = [method for method, where in _TRACED_IN.items() if function in where]
        return tuple(hook for hook in self._hooks if any(_has(hook, name) for name in methods))


class _Guarded:
    """A compiled training function that removes the current `fit`'s hooks after an error."""

    def __init__(self, manager: HookManager, function: Callable[..., Logs]) -> None:
        self._manager, self.function = manager, function

    def __call__(self, batches: tf.data.Iterator) -> Logs:
        try:
            return self.function(batches)
        except (StopIteration, tf.errors.OutOfRangeError):  # the end of the data is not an error
            raise
        except BaseException:
            self._manager.clear()
            raise


def hooks_of(model: keras.Model) -> HookManager:
    """Return the hook manager of a model, which the model stores as an attribute."""
    manager: HookManager | None = vars(model).get("_labkit_hooks")
    if manager is None:
        manager = model._labkit_hooks = HookManager(model)
    return manager


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the distinct optimizers of a model, from `compile` and from its attributes."""
    values = [getattr(model, "optimizer", None), *vars(model).values()]
    kind = keras.optimizers.Optimizer
    return list({id(value): value for value in values if isinstance(value, kind)}.values())


def synchronized(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Return the layers that normalize by the moments of the global batch of all ranks."""
    kind = keras.layers.BatchNormalization
    layers = model._flatten_layers(include_self=False)
    return [layer for layer in layers if isinstance(layer, kind) and layer.synchronized]


def _holders(model: keras.Model, method: str) -> list[tuple[Holder, str]]:
    """Return (object, method name) pairs, one for each model method that a hook method wraps."""
    if method == "apply":
        return [(optimizer, method) for optimizer in optimizers(model)]
    if method == "compiled_loss":
        losses = getattr(model, "_compile_loss", None)
        return [] if losses is None else [(losses, "call")]
    if method == "moments":
        return [(layer, "_moments") for layer in synchronized(model)]
    if method == "update_state":
        return [(metric, method) for metric in model.metrics]
    return [(model, method)]


def rows_of(data: Batch) -> int | tf.Tensor:
    """Return the number of samples in a batch, as a tensor if the static shape is unknown."""
    leaf = keras.tree.flatten(data)[0]
    if leaf.shape[0] is not None:
        return leaf.shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    # The number of rows is cast to int32, because the shape of a sparse tensor is int64.
    return tf.cast(tf.shape(leaf)[0], tf.int32)


def _with_rows(apply: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Add an argument `rows` to an optimizer's `apply`, ignored if `apply` does not accept it."""
    if "rows" in signature(apply).parameters:
        return apply

    def call(
        gradients: list[tf.Tensor], variables: Variables = None, rows: Rows = None
    ) -> tf.Tensor:
        return apply(gradients, variables)

    return call


def _around(hooks: tuple[Hook, ...], method: str) -> tuple[Hook, ...]:
    return tuple(hook for hook in hooks if _has(hook, method))


def _has(hook: Hook, method: str) -> bool:
    return getattr(type(hook), method) is not getattr(Hook, method)
