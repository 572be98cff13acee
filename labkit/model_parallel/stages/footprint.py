"""Memory of a model during training: predicted from its shapes, and counted from its tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import prod
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from labkit.model_parallel.functional import functional_of, nodes_of
from labkit.schedules.pipeline import ScheduleTable
from labkit.schedules.pipeline_stages import stored_versions

KINDS = ("weights", "gradients", "optimizer", "activations", "versions")
# The layers in _VIEWS store no new tensor. Each layer in _VIEWS only returns its input or a view of
# its input.
_VIEWS = (keras.layers.InputLayer, keras.layers.Reshape, keras.layers.Flatten)

Bytes: TypeAlias = dict[str, int]  # The type `Bytes` maps a kind of tensor to its number of bytes.


def activations(model: keras.Model) -> int:
    r"""Return the bytes of activations per batch row: input plus outputs \(y_l\) of all layers l.

    The prediction of activation bytes omits masks, intermediate values of activation functions, and
    the steps of a recurrence. A layer that only reshapes its input adds no bytes.
    """
    return bytes_per_row(model.inputs) + _outputs(model)


def weights(models: Iterable[keras.Layer]) -> Bytes:
    """Return the bytes of all variables, and of the gradients of trainable variables."""
    parts = list(models)
    return {
        "weights": sum(_size(v) for part in parts for v in part.variables),
        "gradients": sum(_size(v) for part in parts for v in part.trainable_variables),
    }


def optimizer(kind: keras.optimizers.Optimizer, gradients: int) -> int:
    """Return the bytes of an optimizer's state, given the bytes of all gradients.

    An optimizer's state consists of several arrays of the weights' size and of a few scalars.

    Args:
        kind: A Keras optimizer that has not been built.
        gradients: Bytes of all gradients.
    """
    # The optimizer is built for a variable with one element. Each one-element array in the
    # optimizer's state represents one copy of the weights. A lookup of the number of copies by
    # optimizer class would need a table of all Keras optimizers.
    scalar = keras.Variable(np.zeros(1), name="one")
    kind.build([scalar])
    copies = sum(len(v.shape) == 1 for v in kind.variables)
    return copies * gradients + sum(_size(v) for v in kind.variables if len(v.shape) == 0)


def of_stages(
    models: Sequence[keras.Model],
    table: ScheduleTable,
    rank: int,
    rows: int,
    recompute: bool = False,
) -> Bytes:
    r"""Return the maximum bytes that a rank stores for pending backward passes of a schedule.

    "activations" is \(\max_t \sum_s n_s(t) a_s\). The maximum covers the time slots t, which are
    rows of the schedule. The sum covers the stages s of the rank. The number \(n_s(t)\) counts the
    micro-batches in flight at stage s after time slot t. The bytes \(a_s\) are the activations of
    one micro-batch at stage s. With recomputation, the activation bytes \(a_s\) count only the
    input of stage s. The remaining activations of one micro-batch are added to the maximum.
    The value "versions" is the number of bytes of older weights.

    Args:
        models: Models of all stages of the pipeline, in order.
        table: The pipeline schedule.
        rank: Number of the rank within its replica.
        rows: Number of rows in the largest micro-batch.
        recompute: Whether the backward pass recomputes the activations, see `Stage`.
    """
    full = np.array([rows * activations(model) for model in models])
    stored = (
        np.array([rows * bytes_per_row(model.inputs) for model in models]) if recompute else full
    )
    rows_of_rank = table.of_rank(rank)
    begins = (rows_of_rank.action == "forward").astype(np.int64)
    ends = np.isin(rows_of_rank.action, ("backward", "backward_weight")).astype(np.int64)
    in_flight = np.cumsum((begins - ends) * stored[rows_of_rank.stage])
    recomputed = ((full - stored)[rows_of_rank.stage] * (begins | ends)).max(initial=0)
    stages = [stage for stage in range(table.stages) if stage % table.ranks == rank]
    older = {stage: int(stored_versions(table)[stage]) - 1 for stage in stages}
    return {
        "activations": int(in_flight.max(initial=0) + recomputed),
        "versions": sum(
            many * weights([models[stage]])["gradients"] for stage, many in older.items()
        ),
    }


def of_module(model: keras.Model, modules: int, rank: int, rows: int) -> Bytes:
    """Return the maximum bytes of a module that trains with delayed gradients."""
    late = modules - 1 - rank
    return {
        "activations": (late + 1) * rows * activations(model),
        "versions": late * weights([model])["gradients"],
    }


def _outputs(model: keras.Model) -> int:
    total = 0
    for node in nodes_of(functional_of(model)):
        if isinstance(node.operation, keras.Model):
            total += _outputs(node.operation)
        elif not isinstance(node.operation, _VIEWS):
            total += bytes_per_row(node.outputs)
    return total


def bytes_per_row(tensors: Iterable[keras.KerasTensor]) -> int:
    """Return the total bytes of one row of all tensors; axes of unknown length count as 1."""
    return sum(
        int(np.prod([length or 1 for length in tensor.shape[1:]], dtype=np.int64))
        * int(tf.as_dtype(tensor.dtype).size)
        for tensor in tensors
    )


def _size(variable: keras.Variable) -> int:
    return int(prod(variable.shape) * tf.as_dtype(variable.dtype).size)


# The type `BytesByAddress` maps the memory address of a tensor to the tensor's bytes.
BytesByAddress: TypeAlias = dict[int, int]


class MemoryLedger:
    """The peak bytes of `activations`, `gradients` and `versions` that the stages of a rank store.

    The ledger counts the bytes of real tensors, and counts tensors that share a memory block only
    once. "activations" are the tensors that a stage saves for its backward pass. A stage may also
    save "activations" between the two parts of the backward pass. "gradients" are weight gradients
    that are stored until the update. "versions" are old weights that a pending backward pass still
    needs after the variables have changed. Current weights do not count as activations, even if a
    backward pass reads them.

    The ledger omits messages and the temporary memory of operations. The ledger also omits the
    tensor lists of TensorFlow loops, in which recurrent layers store their time steps. On a GPU,
    memory addresses are unknown, so weights that a backward pass reads count as activations.

    Args:
        steps: Number of warm-up training steps, whose values are discarded because the pipeline is
            not yet full. After the warm-up, the ledger measures the same number of training steps,
            and then records nothing. With `steps=0`, the ledger never records anything.
    """

    def __init__(self, steps: int = 0) -> None:
        self.open = steps > 0
        self.most = {"activations": 0, "gradients": 0, "versions": 0}
        self._steps, self._step = steps, 0
        # The dict `_stored` maps a kind of tensor to bytes per stage and micro-batch. For
        # gradients, the number of the micro-batch is None.
        self._stored: dict[str, dict[tuple[int, int | None], BytesByAddress]] = {
            kind: {} for kind in self.most
        }
        # The dict `_weights` maps a stage number to the bytes of the stage's weights.
        self._weights: dict[int, BytesByAddress] = {}

    def step(self) -> None:
        """Count a training step; the ledger measures only the steps after the warm-up."""
        if self._step == self._steps:
            self.most = dict.fromkeys(self.most, 0)
        self.open = self._step < 2 * self._steps
        self._step += 1

    def keep(
        self,
        stage: Hashable,
        number: int,
        tensors: Iterable[tf.Tensor],
        variables: Iterable[keras.Variable] = (),
    ) -> None:
        """Record the tensors, including weights, that a stage stores for a micro-batch."""
        if not self.open:
            return
        self._weights[id(stage)] = _bytes(variable.value.value() for variable in variables)
        stored = _bytes(tensors)
        read = {place: stored.pop(place) for place in self._weights[id(stage)] if place in stored}
        self._stored["activations"][id(stage), number] = stored
        self._stored["versions"][id(stage), number] = read
        self._count("activations")
        self._count("versions")

    def gather(self, stage: Hashable, gradients: Iterable[tf.Tensor]) -> None:
        """Record the gradients that a stage stores; they replace the stage's previous gradients."""
        if self.open:
            self._stored["gradients"][id(stage), None] = _bytes(gradients)
            self._count("gradients")

    def drop(self, stage: Hashable, number: int) -> None:
        """Record that a stage has freed its tensors of a micro-batch."""
        for kind in ("activations", "versions"):
            self._stored[kind].pop((id(stage), number), None)

    def _count(self, kind: str) -> None:
        union: BytesByAddress = {}
        for tensors in self._stored[kind].values():
            union |= tensors
        for weights in self._weights.values():
            for place in weights:
                union.pop(place, None)
        self.most[kind] = max(self.most[kind], sum(union.values()))


def _is_memory(value: tf.Tensor) -> bool:
    """Return whether a value is a numeric tensor with at least one axis and memory of its own."""
    if not isinstance(value, tf.Tensor) or not hasattr(value, "numpy"):
        return False
    return value.dtype not in (tf.resource, tf.variant, tf.string) and value.shape.rank > 0


def _bytes(tensors: Iterable[tf.Tensor]) -> BytesByAddress:
    # The private method `_numpy` returns the memory of a TensorFlow tensor without a copy. The
    # public method `numpy` copies the memory.
    arrays = [tensor._numpy() for tensor in tensors if _is_memory(tensor)]
    return {array.ctypes.data: array.nbytes for array in arrays}
