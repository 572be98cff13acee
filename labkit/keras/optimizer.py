"""Distributed Keras optimizers, which apply the mean gradient of all ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

import keras
import numpy as np
import tensorflow as tf

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.common.nearest import named_arguments
from labkit.communicator import Communicator
from labkit.compression import Compressor
from labkit.exchange import SCHEDULES, Exchange, Guard, weight_by_rows
from labkit.exchange.hooks import Rows, Variables, optimizers

Pairs: TypeAlias = "list[tuple[tf.Tensor | None, tf.Variable]]"
Saveable: TypeAlias = (
    "keras.optimizers.Optimizer | keras.Loss | keras.Metric"
    " | keras.optimizers.schedules.LearningRateSchedule"
)

# The pattern _TRACKING matches names of optimizer attributes. Keras creates some of the matching
# attributes itself. Labkit compares the other matching attributes by value elsewhere.
_TRACKING = re.compile(
    r"_self_.*|_lock|_tracker|_variables|_trainable_variables(_indices)?|_metrics|_dtype_policy"
    r"|_distribution_strategy|_exclude_from_weight_decay_cache|built|inner_optimizer"
    r"|_all_reduce_sum_gradients"
)
_SHARED = (keras.Layer, keras.Loss, keras.Metric, MethodType, tf.distribute.Strategy)


def view_of(
    optimizer: keras.optimizers.Optimizer, kind: type[keras.optimizers.Optimizer]
) -> keras.optimizers.Optimizer:
    """Return an object of another class that shares all state with the given optimizer.

    Args:
        optimizer: The user's optimizer.
        kind: Class of the new object, which is a subclass of the optimizer's class.
    """
    view = object.__new__(kind)
    object.__setattr__(view, "__dict__", vars(optimizer))
    return view


def copy_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return a copy of an optimizer with all its attributes, but with variables of its own.

    The copy refers to the same model variables, layers and methods as the original.

    Raises:
        InvalidInput: An attribute cannot be copied.
    """
    return _copy(optimizer, {})


def _copy(
    optimizer: keras.optimizers.Optimizer, memo: dict[int, Any]
) -> keras.optimizers.Optimizer:
    new = memo[id(optimizer)] = object.__new__(type(optimizer))
    memo |= {id(variable): variable for variable in optimizer._trainable_variables}
    for name, value in vars(optimizer).items():
        for leaf in keras.tree.flatten(value):
            if isinstance(leaf, keras.optimizers.Optimizer):
                _copy(leaf, memo)
            elif isinstance(leaf, _SHARED):
                memo[id(leaf)] = leaf
        try:
            vars(new)[name] = copy.deepcopy(value, memo)
        except (TypeError, NotImplementedError, ValueError, RuntimeError) as error:
            raise InvalidInput(
                f"{type(optimizer).__name__}.{name} ({type(value).__name__}) cannot be copied "
                f"({error}): every rank and worker needs its own optimizer; set the attribute "
                "to a value that copy.deepcopy accepts"
            ) from error
    if (count := len(optimizer._variables)) < len(new._variables):
        # The function `deepcopy` registers variables in Keras's tracked lists twice, so the
        # duplicates are deleted.
        del new._variables[count:]
    new._tracker.stored_ids["variables"] = set(map(id, new._variables))
    vars(new).pop(
        "_all_reduce_sum_gradients", None
    )  # The copied attribute is a function that would call the original optimizer's method.
    return without_replica_sum(new)


class Recipe(NamedTuple):
    """A picklable description from which another process creates an optimizer.

    Attributes:
        kind: Class of the optimizer.
        own: Dict from class name to class, for the optimizer and its schedule. The classes in `own`
            need not be registered with Keras.
        settings: Configuration from `get_config`.
        attributes: Dict from name to value of each attribute that the configuration omits.
    """

    kind: type[keras.optimizers.Optimizer]
    own: dict[str, type]
    settings: dict[str, JSON]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, optimizer: keras.optimizers.Optimizer) -> Recipe:
        """Return the picklable description of an optimizer.

        Raises:
            InvalidInput: The optimizer refers to variables of this process, or has already taken
                steps.
        """
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        refuse_steps(optimizer)
        refuse_variables(optimizer)
        # The classes of the optimizer and of its learning rate schedule may be custom classes of
        # the user.
        custom_classes = {
            known.__name__: known for known in (type(inner), type(inner._learning_rate))
        }
        attributes = beyond_configuration(inner)
        return cls(type(optimizer), custom_classes, optimizer.get_config(), attributes)

    def new(self) -> keras.optimizers.Optimizer:
        """Create the described optimizer, with zero steps and no slot variables (like momenta)."""
        with keras.saving.custom_object_scope(self.own):
            optimizer = self.kind.from_config(self.settings)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        for name, value in self.attributes.items():
            setattr(inner, name, value)
        return without_replica_sum(optimizer)


def refuse_steps(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise an error if an optimizer has taken steps, as the run cannot use its moments.

    Raises:
        InvalidInput: The optimizer has already taken steps.
    """
    if steps := int(optimizer.iterations):
        raise InvalidInput(
            f"the optimizer of the compiled model has taken {steps} steps, and this run cannot "
            "use its state; compile with a new optimizer, or use strategy=lk.AllReduce()"
        )


def refuse_variables(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise an error if an optimizer excludes given variables (`var_list`) from weight decay.

    Raises:
        InvalidInput: The optimizer excludes variables from weight decay.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "_exclude_from_weight_decay", None):
        raise InvalidInput(
            "exclude_from_weight_decay(var_list=…) refers to variables that this strategy splits "
            "or moves; give var_names=[…], or use strategy=lk.AllReduce()"
        )


def beyond_configuration(saveable: Saveable) -> dict[str, Any]:
    """Return the attributes of a Keras object, such as an optimizer, that `get_config` omits."""
    kinds = type(saveable), type(getattr(saveable, "_learning_rate", None))
    with keras.saving.custom_object_scope({kind.__name__: kind for kind in kinds}):
        new = type(saveable).from_config(saveable.get_config())
    if isinstance(saveable, keras.optimizers.Optimizer) and saveable.built:
        new.build(saveable._trainable_variables)
    return {
        name: value
        for name, value in vars(saveable).items()
        if not _TRACKING.fullmatch(name) and not _same(value, vars(new).get(name))
    }


def _same(value: Any, other: Any, known: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Return whether two attribute values are equal; None equals an empty set, list or dict.

    Args:
        value, other: Values of the same attribute in two objects.
        known: Pairs of ids of the enclosing values, whose comparison is still in progress.
    """
    pair = id(value), id(other)
    if pair in known:
        return True
    known |= {pair}
    # Layers are compared by identity, because their configurations omit weights.
    if isinstance(value, keras.Layer):
        return value is other
    if value is other or (other is None and isinstance(value, set | dict | list) and not value):
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, keras.Variable | tf.Variable | np.ndarray | tf.Tensor):
        return np.array_equal(np.asarray(value), np.asarray(other))
    if isinstance(value, Mapping):
        return value.keys() == other.keys() and all(
            _same(v, other[k], known) for k, v in value.items()
        )
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(
            _same(one, two, known) for one, two in zip(value, other, strict=True)
        )
    if isinstance(value, FunctionType):
        contents, other_contents = (
            [cell.cell_contents for cell in function.__closure__ or ()]
            for function in (value, other)
        )
        return value.__code__ == other.__code__ and _same(contents, other_contents, known)
    equal = bool(value == other)
    # By default, the operator == compares only the identities of Python objects. The code therefore
    # also compares the attributes of the objects.
    if not equal and hasattr(value, "__dict__"):
        return _same(vars(value), vars(other), known)
    return equal


def without_replica_sum(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Make an optimizer sum gradients over replicas only inside a tf.distribute strategy.

    Keras's sum over replicas defines a custom gradient. TensorFlow keeps the function of the custom
    gradient until the process ends. The custom gradient's function would keep the model and its
    graph in memory. The optimizer's slot variables would also stay in memory.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    original_sum: Callable[[Pairs], Pairs] = inner._all_reduce_sum_gradients

    def sum_if_replicated(pairs: Pairs) -> Pairs:
        return original_sum(pairs) if tf.distribute.has_strategy() else pairs

    inner._all_reduce_sum_gradients = sum_if_replicated
    return optimizer


class ExchangeOptions(TypedDict, total=False):
    """The options of a gradient exchange: arguments of `labkit.exchange.Exchange`."""

    algorithm: str
    schedule: str
    bucket_bytes: int | str
    compressor: Compressor | Mapping[str, JSON] | str | None
    seed: int
    guard: Guard | None


@named_arguments(*ExchangeOptions.__annotations__)
def DistributedOptimizer(  # noqa: N802 - the function acts as a class
    optimizer: keras.optimizers.Optimizer | str,
    communicator: Communicator,
    **exchange: Unpack[ExchangeOptions],
) -> keras.optimizers.Optimizer:
    """Return an optimizer of the same class that applies the mean gradient of all ranks.

    The new optimizer shares all state with the given optimizer. The shared state includes moments,
    learning rate and exclusions from weight decay. A later change of one optimizer also changes the
    other. Train with either the given optimizer or the new one, but not with both.

    Gradients are averaged before Keras removes the loss scale. An overflow on one rank makes the
    mean gradient overflow on all ranks. All ranks therefore skip the same step. Training in one
    process may skip different steps. A saved model contains the plain optimizer, and can be loaded
    without labkit.

    With `gradient_accumulation_steps=k`, each rank sums its own gradients. The ranks exchange the
    sums only in every k-th step. In the steps between exchanges, ranks exchange only their numbers
    of samples. With scaled losses, the ranks exchange gradients in every step, because all ranks
    must detect the same overflow. Gradients of a large embedding are sent and applied as sparse
    rows. A word may occur several times in a batch. The word's gradient rows are summed and applied
    once, as with dense gradients.

    During `fit` with labkit's callbacks, the compiler XLA is off. Each rank's gradients are
    weighted by the rank's number of samples. To turn XLA off and to weight gradients in
    `train_on_batch`, call `attach(model)` after `compile`. In a custom training loop, set the
    optimizer's attribute `rows` before `apply`. The attribute `rows` is the rank's number of
    samples. Set the attribute `rows` inside the traced step. Without `rows`, the gradients of all
    ranks have equal weights.

    Args:
        optimizer: Keras optimizer, or its name.
        communicator: Communicator of the ranks that average their gradients.
        exchange: Options of the exchange: `algorithm`, `schedule`, `bucket_bytes`, `compressor`,
            `seed` and `guard`; see `Exchange`.

    Raises:
        InvalidInput: The exchange schedule continues into the next step. An optimizer that is
            incompatible with the guard or compressor also raises InvalidInput.
    """
    schedule = SCHEDULES.get(exchange.get("schedule", ""))
    if schedule is not None and schedule.into_next:
        raise InvalidInput(
            f"schedule={schedule.name!r} spans two steps, which DistributedOptimizer does not "
            f"support; use schedule='overlap', or lk.AllReduce(schedule={schedule.name!r}) in an "
            "experiment"
        )
    plain = keras.optimizers.get(optimizer)
    guard = exchange.get("guard")
    if guard is not None and guard.policy == "skip" and plain.gradient_accumulation_steps:
        raise InvalidInput(
            "on_nonfinite='skip' does not support gradient_accumulation_steps, which adds up "
            "gradients over several steps; use on_nonfinite='stop' or 'clip'"
        )
    scaled = isinstance(plain, keras.optimizers.LossScaleOptimizer)
    if keras.config.dtype_policy().name == "mixed_float16" and not scaled:
        # With mixed_float16, a LossScaleOptimizer wraps the user's optimizer before the optimizer
        # is distributed over ranks. A LossScaleOptimizer must not wrap the distributed optimizer.
        # Otherwise, Keras would not call the distributed optimizer after an overflow.
        plain = keras.optimizers.LossScaleOptimizer(plain)
    kind = type(plain)
    # If the optimizer is already distributed, its plain class is used, because gradients must be
    # exchanged only once.
    if "exchange" in vars(kind):
        kind = kind.__mro__[1]

    # The distributed class takes over the registered name of the plain class, under which Keras
    # saves the optimizer.
    name = keras.saving.get_registered_name(kind)
    members = _members(kind) | {"exchange": Exchange(communicator, **exchange)}
    distributed = view_of(plain, type(name, (kind,), members))
    if distributed.exchange.compressor is not None:
        check_compressor(distributed.exchange.compressor, plain)
    return without_replica_sum(distributed)


def _members(
    kind: type[keras.optimizers.Optimizer],
) -> dict[str, Any]:
    """Return the methods and attributes that a distributed subclass of an optimizer has."""

    def apply(
        self: keras.optimizers.Optimizer,
        grads: list[tf.Tensor],
        trainable_variables: Variables = None,
        rows: Rows = None,
    ) -> tf.Tensor:
        variables = trainable_variables or self._trainable_variables
        names = [variable.path for variable in variables]
        scale = getattr(self, "dynamic_scale", None)
        row_count = self.rows if rows is None else rows
        _restore_shapes(grads, variables)
        if self.gradient_accumulation_steps:
            mean_gradients = weight_by_rows(self.exchange.communicator, grads, row_count)
        else:
            mean_gradients = self.exchange.mean(list(grads), row_count, names, scale)
        # Keras cannot apply the loss scale to sparse gradients (IndexedSlices).
        if self.loss_scale_factor is not None:
            mean_gradients = [
                gradient if gradient is None else tf.convert_to_tensor(gradient)
                for gradient in mean_gradients
            ]
        if not self.exchange.may_skip:
            # If ranks may fail, no weight changes before all gradients have arrived. The weights
            # and the step counter must change together or not at all.
            dependencies = mean_gradients if self.exchange.communicator.outlives else []
            with tf.control_dependencies(
                [gradient for gradient in dependencies if gradient is not None]
            ):
                return kind.apply(self, mean_gradients, trainable_variables)
        if not self.built:
            with tf.init_scope():
                self.build(variables)

        def apply_step() -> tf.Tensor:
            kind.apply(self, mean_gradients, trainable_variables)
            return tf.constant(True)

        return tf.cond(
            self.exchange.all_finite(mean_gradients), apply_step, lambda: tf.constant(False)
        )

    def clip(self: keras.optimizers.Optimizer, grads: list[tf.Tensor]) -> list[tf.Tensor]:
        """In every k-th step, average accumulated gradients over the ranks; then clip gradients."""
        if self.gradient_accumulation_steps:
            known = self._trainable_variables
            names = [v.path for v in known] if len(known) == len(grads) else []
            grads = self.exchange.mean(list(grads), names=names)
        clipped: list[tf.Tensor] = kind._clip_gradients(self, grads)
        return clipped

    return {
        "apply": apply,
        "rows": None,
        "_clip_gradients": clip,
        "__module__": kind.__module__,
    }


def _restore_shapes(gradients: list[tf.Tensor], variables: list[keras.Variable]) -> None:
    """Set the static shapes of gradients, which TensorFlow may lose in masks and loops."""
    for gradient, variable in zip(gradients, variables, strict=True):
        if isinstance(gradient, tf.Tensor):
            gradient.set_shape(variable.shape)


def check_compressor(compressor: Compressor, optimizer: keras.optimizers.Optimizer) -> None:
    """Raise InvalidInput if a compressor cannot be combined with an optimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    config: dict[str, JSON] = inner.get_config()
    plain = {name: value for name, value in config.items() if isinstance(value, int | float | str)}
    compressor.check(type(inner).__name__.lower(), plain)


def distributed_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers of a model that exchange gradients."""
    return [optimizer for optimizer in optimizers(model) if hasattr(optimizer, "exchange")]
