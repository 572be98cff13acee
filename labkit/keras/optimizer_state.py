"""The whole state of an optimizer: what its configuration says, and what was set beside it."""

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

# Keras makes these anew: they are tracking, caches, and variables, whose values are looked at.
_TRACKING = re.compile(
    r"_self_.*|_lock|_tracker|_variables|_trainable_variables(_indices)?|_metrics|_dtype_policy"
    r"|_distribution_strategy|_exclude_from_weight_decay_cache|built|inner_optimizer"
    r"|_all_reduce_sum_gradients"
)
_SHARED = (keras.Layer, keras.Loss, keras.Metric, MethodType, tf.distribute.Strategy)


def view_of(
    optimizer: keras.optimizers.Optimizer, kind: type[keras.optimizers.Optimizer]
) -> keras.optimizers.Optimizer:
    """The same optimizer under another class: both have one state, so that none can be lost.

    Args:
        optimizer: the user's own.
        kind: a subclass of its class.
    """
    view = object.__new__(kind)
    object.__setattr__(view, "__dict__", vars(optimizer))
    return view


def copy_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """A new optimizer with all that one has, and with variables of its own.

    Model variables, layers and methods that its attributes name are shared.

    Raises:
        InvalidInput: an attribute cannot be copied.
    """
    return _copied(optimizer, {})


def _copied(
    optimizer: keras.optimizers.Optimizer, memo: dict[int, Any]
) -> keras.optimizers.Optimizer:
    new = memo[id(optimizer)] = object.__new__(type(optimizer))
    memo |= {id(variable): variable for variable in optimizer._trainable_variables}
    for name, value in vars(optimizer).items():
        for leaf in keras.tree.flatten(value):
            if isinstance(leaf, keras.optimizers.Optimizer):
                _copied(leaf, memo)
            elif isinstance(leaf, _SHARED):
                memo[id(leaf)] = leaf
        try:
            vars(new)[name] = copy.deepcopy(value, memo)
        except (TypeError, NotImplementedError, ValueError, RuntimeError) as error:
            raise InvalidInput(
                f"{type(optimizer).__name__}.{name} ({type(value).__name__}) cannot be copied "
                f"({error}): every rank and worker has an optimizer of its own; set the attribute "
                "to a value that copy.deepcopy takes"
            ) from error
    if (count := len(optimizer._variables)) < len(new._variables):
        del new._variables[count:]  # lists that Keras tracks enter their variables once more
    new._tracker.stored_ids["variables"] = set(map(id, new._variables))
    vars(new).pop("_all_reduce_sum_gradients", None)  # bound to the original
    return without_replica_sum(new)


class Recipe(NamedTuple):
    """What makes an optimizer in another process.

    Attributes:
        kind: its class.
        own: classes by name that its settings may name, which need not be registered with Keras.
        settings: as `get_config` says them.
        attributes: those that the settings do not say.
    """

    kind: type[keras.optimizers.Optimizer]
    own: dict[str, type]
    settings: dict[str, JSON]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, optimizer: keras.optimizers.Optimizer) -> Recipe:
        """That of an optimizer.

        Raises:
            InvalidInput: it names variables of this process, or has taken steps.
        """
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        refuse_steps(optimizer)
        refuse_variables(optimizer)
        # Of the user's own, such as a schedule.
        own = {known.__name__: known for known in (type(inner), type(inner._learning_rate))}
        attributes = beyond_configuration(inner)
        return cls(type(optimizer), own, optimizer.get_config(), attributes)

    def made(self) -> keras.optimizers.Optimizer:
        """A new one, without state."""
        with keras.saving.custom_object_scope(self.own):
            optimizer = self.kind.from_config(self.settings)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        for name, value in self.attributes.items():
            setattr(inner, name, value)
        return without_replica_sum(optimizer)


def refuse_steps(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse an optimizer that has moments of earlier steps, where these have no place.

    Raises:
        InvalidInput: it has taken steps.
    """
    if steps := int(optimizer.iterations):
        raise InvalidInput(
            f"the optimizer of the compiled model has taken {steps} steps, and its state cannot "
            "begin this run: compile with a new optimizer, or use strategy=lk.AllReduce()"
        )


def refuse_variables(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse exclusions by variable, where an optimizer gets other variables than the model's.

    Raises:
        InvalidInput: it has such exclusions.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "_exclude_from_weight_decay", None):
        raise InvalidInput(
            "exclude_from_weight_decay(var_list=…) names variables that this strategy cuts or "
            "moves: give var_names=[…], or use strategy=lk.AllReduce()"
        )


def beyond_configuration(saveable: Saveable) -> dict[str, Any]:
    """The attributes of an optimizer, loss, metric or schedule that its `get_config` loses."""
    kinds = type(saveable), type(getattr(saveable, "_learning_rate", None))
    with keras.saving.custom_object_scope({kind.__name__: kind for kind in kinds}):
        made = type(saveable).from_config(saveable.get_config())
    if isinstance(saveable, keras.optimizers.Optimizer) and saveable.built:
        made.build(saveable._trainable_variables)
    return {
        name: value
        for name, value in vars(saveable).items()
        if not _TRACKING.fullmatch(name) and not _same(value, vars(made).get(name))
    }


def _same(value: Any, other: Any, known: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two attributes have one value; nothing is the same as an empty set or list.

    Args:
        value, other: the attributes.
        known: identities of the pairs that hold these, which are being compared.
    """
    pair = id(value), id(other)
    if pair in known:
        return True
    known |= {pair}
    if isinstance(value, keras.Layer):  # a model of its own, whose weights no configuration has
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
        held, others = (
            [cell.cell_contents for cell in function.__closure__ or ()]
            for function in (value, other)
        )
        return value.__code__ == other.__code__ and _same(held, others, known)
    equal = bool(value == other)
    if not equal and hasattr(value, "__dict__"):  # objects compare by identity
        return _same(vars(value), vars(other), known)
    return equal


def without_replica_sum(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The same one, which sums gradients over replicas of TensorFlow's own only where there are.

    The sum that Keras asks for has a custom gradient, and TensorFlow keeps what makes such a one,
    and with it the graph, the model and its slots, until the process ends.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    sums: Callable[[Pairs], Pairs] = inner._all_reduce_sum_gradients

    def summed(pairs: Pairs) -> Pairs:
        return sums(pairs) if tf.distribute.has_strategy() else pairs

    inner._all_reduce_sum_gradients = summed
    return optimizer
