"""The one seam of a model's training: what is put around its methods, in one declared order.

    fit -> ledger -> record -> whole -> updates -> rows -> priority -> the model's own train_step
        -> its layers' moments, its losses: whole
        -> update_state of its metrics: updates
        -> optimizer.apply: dense -> whole -> rows -> the optimizer's own

Whoever has something to do within a training step writes a `Hook` and puts it on the model's
seam. What it goes around is called by it, and knows nothing of it; when it comes off, the model
has its own methods again.
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
)  # from the outside in

Batch: TypeAlias = "tf.Tensor | tuple[tf.Tensor, ...] | dict[str, tf.Tensor]"
Logs: TypeAlias = dict[str, tf.Tensor]
Rows: TypeAlias = "int | tf.Tensor | None"
Variables: TypeAlias = "list[keras.Variable] | None"
# Whose method it is: the model, an optimizer, a layer, the losses, a metric.
Holder: TypeAlias = (
    "keras.Model | keras.optimizers.Optimizer | keras.Layer | keras.Loss | keras.metrics.Metric"
)

# With what the model was compiled, and the function that Keras then made of its step.
_Compiled: TypeAlias = "tuple[keras.Model | None, Callable[..., Logs]]"


class Hook:
    """What one part of labkit does around a model's training; by itself, nothing.

    Each method stands for one of the model's, or of its optimizers', and is expected to call
    `inner` for what it goes around. `rows` are those of the batch under way as it came, whatever
    hooks further out have made of it; None outside a step.

    Attributes:
        name: where it stands, one of `ORDER`; a seam has one hook of a name.
    """

    name: ClassVar[str]

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """One training step; traced."""
        return inner(data)

    def test_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """One step of validation; traced."""
        return inner(data)

    def compute_loss(
        self, inner: Callable[..., tf.Tensor], rows: Rows, *given: tf.Tensor, **named: tf.Tensor
    ) -> tf.Tensor:
        """The loss of a batch, arguments as Keras gives them; traced."""
        return inner(*given, **named)

    def compiled_loss(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        compiled: keras.Loss,
        *given: tf.Tensor,
        **named: tf.Tensor,
    ) -> tf.Tensor:
        """The sum of the losses that the model is compiled with; traced."""
        return inner(*given, **named)

    def moments(
        self,
        inner: Callable[..., tuple[tf.Tensor, tf.Tensor]],
        rows: Rows,
        layer: keras.layers.BatchNormalization,
        inputs: tf.Tensor,
        mask: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The moments by which a layer normalizes; traced."""
        return inner(inputs, mask)

    def evaluate(self, inner: Callable[..., Logs], rows: Rows, *given: Any, **named: Any) -> Logs:
        """The whole of `model.evaluate`, by `fit` or by a callback."""
        return inner(*given, **named)

    def fit(
        self, inner: Callable[..., keras.callbacks.History], rows: Rows, *given: Any, **named: Any
    ) -> keras.callbacks.History:
        """A `model.fit` that a callback calls while the hook is on."""
        return inner(*given, **named)

    def update_state(
        self,
        inner: Callable[..., None],
        rows: Rows,
        metric: keras.metrics.Metric,
        *given: tf.Tensor,
        **named: tf.Tensor,
    ) -> None:
        """What a metric sees of a batch; traced. Compiled metrics see it through their collection.

        That makes them when it sees the first batch.
        """
        inner(*given, **named)

    def get_metrics_result(self, inner: Callable[[], Logs], rows: Rows) -> Logs:
        """What the metrics say."""
        return inner()

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Gradients on their way into one of the model's optimizers; traced."""
        return inner(gradients, variables)


_FUNCTIONS = ("train_function", "test_function")
# What is gone around, and the compiled functions in which each is traced.
_TRACED_IN: dict[str, tuple[str, ...]] = {
    "train_step": ("train_function",),
    "test_step": ("test_function",),
    "compute_loss": ("train_function",),
    "compiled_loss": _FUNCTIONS,
    "moments": ("train_function",),
    "evaluate": (),
    "fit": (),
    "update_state": _FUNCTIONS,
    "get_metrics_result": (),  # traced, it is the model's own: ranks meet outside the graph
    "apply": ("train_function",),
}


class Seam:
    """The hooks of one model, see `seam`.

    Hooks are put on for one `fit`, or to stay; an error within a step takes off those of the fit.
    Functions that Keras has compiled with the same hooks before are used again.

    Attributes:
        alike: identities of states that all ranks change alike in a step, whatever their rows.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._staying: dict[str, Hook] = {}
        self._fitting: dict[str, Hook] = {}
        self._rows: Rows = None
        self.alike: set[int] = set()
        # What hooks stand in the place of: holder, method, and the holder's own attribute, if any.
        self._replaced: list[tuple[Holder, str, Callable[..., tf.Tensor] | None]] = []
        self._hooks: tuple[Hook, ...] = ()
        self._compiled: dict[tuple[str, tuple[Hook, ...]], _Compiled] = {}

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """What stands around the model, from the outside in."""
        known = self._staying | self._fitting
        return tuple(known[name] for name in ORDER if name in known)

    def put_on(self, hook: Hook, stays: bool = False) -> None:
        """Place a hook where its name belongs, instead of one of the same name.

        Args:
            hook: what to put around the model.
            stays: until it is taken off; otherwise an error within a training step takes it off.
        """
        if hook.name not in ORDER:
            raise LabkitError(f"hook {hook.name!r} has no place; there are {', '.join(ORDER)}")
        # Functions that Keras has compiled hold the hook itself, and trace with it again.
        compiled = (known for _, hooks in self._compiled for known in hooks)
        hook = next((known for known in compiled if known == hook), hook)
        (self._staying if stays else self._fitting)[hook.name] = hook
        self._arrange()

    def take_off(self, *names: str) -> None:
        """Remove the fit's hooks of these names; nothing where they are off."""
        for name in names:
            self._fitting.pop(name, None)
        self._arrange()

    @contextmanager
    def instead(self, hook: Hook) -> Iterator[None]:
        """For a while, have this hook in the place of the fit's of its name, or of none."""
        before = self._fitting.get(hook.name)
        self.put_on(hook)
        try:
            yield
        finally:
            self.take_off(hook.name)
            if before is not None:
                self.put_on(before)

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """For a while, have none of the fit's hooks of these names."""
        before = {name: self._fitting.pop(name) for name in names if name in self._fitting}
        self._arrange()
        try:
            yield
        finally:
            self._fitting |= before
            self._arrange()

    def clear(self, staying: bool = False) -> None:
        """Remove the hooks of a fit, or also those that stay."""
        self._fitting.clear()
        if staying:
            self._staying.clear()
        self._arrange()

    def forget(self) -> None:
        """Let Keras compile all functions anew: what they were traced with is no more."""
        self._compiled.clear()
        for name in _FUNCTIONS:
            setattr(self._model, name, None)

    def _arrange(self) -> None:
        self._keep_compiled()
        for holder, method, own in reversed(self._replaced):
            delattr(holder, method)
            if own is not None:
                setattr(holder, method, own)
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
        own, is_step = getattr(holder, name), method.endswith("_step")
        if method == "apply":
            own = _with_rows(own)
        # Hooks are told of which part; the part itself knows.
        part = (holder,) if method in ("compiled_loss", "moments", "update_state") else ()

        def call(*given: tf.Tensor, **named: tf.Tensor) -> tf.Tensor:
            before = self._rows
            if is_step:
                self._rows = rows_of(given[0])
            inner = own
            for hook in reversed(around):
                inner = partial(getattr(hook, method), inner, self._rows, *part)
            try:
                return inner(*given, **named)
            finally:
                self._rows = before

        return call

    def _make_guarded(self, force: bool = False) -> None:
        """As Keras does it; and a function that fails leaves no hook of the fit behind."""
        type(self._model).make_train_function(self._model, force)
        self._guard()

    def _guard(self) -> None:
        function = self._model.train_function
        if self._fitting and function is not None and not isinstance(function, _Guarded):
            self._model.train_function = _Guarded(self, function)

    def _keep_compiled(self) -> None:
        """Put aside what Keras has compiled with the hooks that now go."""
        version = getattr(self._model, "_compile_config", None)  # another after each `compile`
        known = self._compiled.items()
        self._compiled = {key: kept for key, kept in known if kept[0] is version}
        for name in _FUNCTIONS:
            function = getattr(self._model, name, None)
            if function is not None:
                bare = function.function if isinstance(function, _Guarded) else function
                self._compiled[name, self._traced_in(name)] = (version, bare)

    def _use_compiled(self) -> None:
        """Take up what was compiled with these hooks, or let Keras compile anew."""
        for name in _FUNCTIONS:
            if hasattr(self._model, name):
                _, function = self._compiled.get((name, self._traced_in(name)), (None, None))
                setattr(self._model, name, function)
        self._guard()

    def _traced_in(self, function: str) -> tuple[Hook, ...]:
        methods = [method for method, where in _TRACED_IN.items() if function in where]
        return tuple(hook for hook in self._hooks if any(_has(hook, each) for each in methods))


class _Guarded:
    """A training function whose failure takes off what was put on for its fit."""

    def __init__(self, seam: Seam, function: Callable[..., Logs]) -> None:
        self._seam, self.function = seam, function

    def __call__(self, batches: tf.data.Iterator) -> Logs:
        try:
            return self.function(batches)
        except (StopIteration, tf.errors.OutOfRangeError):  # so ends the data
            raise
        except BaseException:
            self._seam.clear()
            raise


def seam(model: keras.Model) -> Seam:
    """The seam of a model, which goes where the model goes."""
    found: Seam | None = vars(model).get("_labkit_seam")
    if found is None:
        found = model._labkit_seam = Seam(model)
    return found


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Those that a model is compiled with or keeps in attributes of its own, each once."""
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    kind = keras.optimizers.Optimizer
    return list({id(each): each for each in held if isinstance(each, kind)}.values())


def synchronized(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The layers that want the moments of the batches of all ranks."""
    kind = keras.layers.BatchNormalization
    layers = model._flatten_layers(include_self=False)
    return [each for each in layers if isinstance(each, kind) and each.synchronized]


def _holders(model: keras.Model, method: str) -> list[tuple[Holder, str]]:
    """Whose own what a hook's method goes around is, and by which name."""
    if method == "apply":
        return [(each, method) for each in optimizers(model)]
    if method == "compiled_loss":
        losses = getattr(model, "_compile_loss", None)
        return [] if losses is None else [(losses, "call")]
    if method == "moments":
        return [(layer, "_moments") for layer in synchronized(model)]
    if method == "update_state":
        return [(metric, method) for metric in model.metrics]
    return [(model, method)]


def rows_of(data: Batch) -> int | tf.Tensor:
    """How many rows a batch has; a tensor where that is known in each step only."""
    leaf = keras.tree.flatten(data)[0]
    if leaf.shape[0] is not None:
        return leaf.shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    return tf.cast(tf.shape(leaf)[0], tf.int32)  # a sparse one counts in int64


def _with_rows(apply: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """An optimizer's `apply` that may be told the rows; most optimizers do not ask for them."""
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
