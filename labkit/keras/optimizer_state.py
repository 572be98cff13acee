"""The complete settings of an optimizer: its configuration, and attributes outside of it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput

Pairs: TypeAlias = "list[tuple[tf.Tensor | None, tf.Variable]]"
Saveable: TypeAlias = (
    "keras.optimizers.Optimizer | keras.Loss | keras.Metric"
    " | keras.optimizers.schedules.LearningRateSchedule"
)

# Names of attributes that Keras creates itself (for tracking or as a cache), or that are compared
# by value (variables).
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
        del new._variables[count:]  # deepcopy registers the variables in tracked lists twice
    new._tracker.stored_ids["variables"] = set(map(id, new._variables))
    vars(new).pop(
        "_all_reduce_sum_gradients", None
    )  # this method belongs to the original optimizer
    return without_replica_sum(new)


class Recipe(NamedTuple):
    """A picklable description from which another process creates an optimizer.

    Attributes:
        kind: Class of the optimizer.
        own: Classes of the optimizer and of its schedule, by name; they need not be registered with
            Keras.
        settings: Configuration from `get_config`.
        attributes: Values of attributes that the configuration omits, by name.
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
        # Both classes may be custom classes, for example a learning rate schedule of the user.
        custom_classes = {
            known.__name__: known for known in (type(inner), type(inner._learning_rate))
        }
        attributes = beyond_configuration(inner)
        return cls(type(optimizer), custom_classes, optimizer.get_config(), attributes)

    def new(self) -> keras.optimizers.Optimizer:
        """Create the described optimizer, with zero steps and without slots (such as momenta)."""
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
    """Raise an error if weight decay excludes variables, as the strategy replaces variables.

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
    """Return the attributes that `get_config` of a Keras object omits, such as an optimizer's."""
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
        known: Identities of the enclosing pairs of values, which are being compared.
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
    # By default, == compares only identities, so the attributes are compared.
    if not equal and hasattr(value, "__dict__"):
        return _same(vars(value), vars(other), known)
    return equal


def without_replica_sum(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Make an optimizer sum gradients over replicas only inside a tf.distribute strategy.

    The gradient sum of Keras has a custom gradient, whose function TensorFlow stores until the
    process ends. This function refers to the graph, the model and the optimizer's slots, so that
    they would stay in memory.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    original_sum: Callable[[Pairs], Pairs] = inner._all_reduce_sum_gradients

    def sum_if_replicated(pairs: Pairs) -> Pairs:
        return original_sum(pairs) if tf.distribute.has_strategy() else pairs

    inner._all_reduce_sum_gradients = sum_if_replicated
    return optimizer
