"""The bytes that a model needs for training, from its shapes alone: the prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.model_parallel.functional import functional_of, nodes_of
from labkit.schedules.pipeline import Table
from labkit.schedules.pipeline.stage_memory import stashed

KINDS = ("weights", "gradients", "optimizer", "activations", "versions")
# Layers whose output is the memory of their input, or which do nothing while training.
_VIEWS = (keras.layers.InputLayer, keras.layers.Reshape, keras.layers.Flatten)

Bytes: TypeAlias = dict[str, int]  # by kind


def activations(model: keras.Model) -> int:
    r"""Bytes a row: the input, and the output of each layer, \(\sum_l |y_l|\).

    What layers keep besides (masks, the parts of an activation function, steps of a recurrence)
    is left out; a layer that only gives its input another shape keeps nothing.
    """
    return a_row(model.inputs) + _outputs(model)


def weights(models: Iterable[keras.Layer]) -> Bytes:
    """Bytes of all variables, and of the gradients of those that are trained."""
    parts = list(models)
    return {
        "weights": sum(_size(v) for part in parts for v in part.variables),
        "gradients": sum(_size(v) for part in parts for v in part.trainable_variables),
    }


def optimizer(kind: keras.optimizers.Optimizer, gradients: int) -> int:
    """Bytes of an optimizer's state for so many bytes of gradients.

    As many times the bytes of the weights as it has state for one number; and its own few numbers.

    Args:
        kind: a Keras optimizer without state.
    """
    # How much state an optimizer has for a number is seen on a variable of one number; asking its
    # class would need a table that grows with Keras.
    one = keras.Variable(np.zeros(1), name="one")
    kind.build([one])
    copies = sum(len(v.shape) == 1 for v in kind.variables)
    return copies * gradients + sum(_size(v) for v in kind.variables if len(v.shape) == 0)


def of_stages(
    models: Sequence[keras.Model], table: Table, rank: int, rows: int, recompute: bool = False
) -> Bytes:
    r"""What a rank keeps at most for the backward passes of a schedule.

    activations: \(\max_t \sum_s n_s(t) a_s\), with \(n_s(t)\) micro-batches under way at its stage
    s after row t of the table, of \(a_s\) bytes each; recomputed, \(a_s\) is the input, and the
    rest of one micro-batch comes on top. versions: the weights of before that `stashed` counts.

    Args:
        models: all stages.
        table: the schedule.
        rank: in the replica.
        rows: of the largest micro-batch.
        recompute: as of `Stage`.
    """
    whole = np.array([rows * activations(model) for model in models])
    kept = np.array([rows * a_row(model.inputs) for model in models]) if recompute else whole
    own = table.of_rank(rank)
    begins = (own.action == "forward").astype(np.int64)
    ends = np.isin(own.action, ("backward", "backward_weight")).astype(np.int64)
    under_way = np.cumsum((begins - ends) * kept[own.stage])
    once = ((whole - kept)[own.stage] * (begins | ends)).max(initial=0)
    stages = [stage for stage in range(table.stages) if stage % table.ranks == rank]
    older = {stage: int(stashed(table)[stage]) - 1 for stage in stages}
    return {
        "activations": int(under_way.max(initial=0) + once),
        "versions": sum(
            many * weights([models[stage]])["gradients"] for stage, many in older.items()
        ),
    }


def of_module(model: keras.Model, modules: int, rank: int, rows: int) -> Bytes:
    """What a module keeps at most that is K - 1 - k iterations late (`Delayed`)."""
    late = modules - 1 - rank
    return {
        "activations": (late + 1) * rows * activations(model),
        "versions": late * weights([model])["gradients"],
    }


def _outputs(model: keras.Model) -> int:
    total = 0
    for node in nodes_of(functional_of(model)):
        if isinstance(node.operation, keras.Model):  # a model in the model
            total += _outputs(node.operation)
        elif not isinstance(node.operation, _VIEWS):
            total += a_row(node.outputs)
    return total


def a_row(tensors: Iterable[keras.KerasTensor]) -> int:
    """Bytes of a row of all tensors; an axis of open length counts as one."""
    return sum(
        int(np.prod([length or 1 for length in tensor.shape[1:]], dtype=np.int64))
        * int(tf.as_dtype(tensor.dtype).size)
        for tensor in tensors
    )


def _size(variable: keras.Variable) -> int:
    return int(prod(variable.shape) * tf.as_dtype(variable.dtype).size)
