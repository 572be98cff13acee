"""Inference: ranks compute predictions together, and compute metrics from the predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import tee
from tempfile import NamedTemporaryFile

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.communicator import Communicator
from labkit.exchange.hooks import hooks_of
from labkit.keras import global_metrics
from labkit.keras.safe_mode import load_model
from labkit.keras.whole_metrics import SeenByMetrics
from labkit.model_parallel.losses import WholeLosses
from labkit.strategies import Batch, Predicted, Predictor, Strategy


def load(file: str | bytes) -> keras.Model:
    """Load a saved model from a file or bytes, and set Keras's float type."""
    if isinstance(file, bytes):
        with NamedTemporaryFile(suffix=".keras") as temporary:
            temporary.write(file)
            temporary.flush()
            return load(temporary.name)
    keras.backend.clear_session()
    model = load_model(file, compile=False)
    if any(
        tensor.dtype == "float64" for tensor in keras.tree.flatten(getattr(model, "inputs", []))
    ):
        keras.config.set_floatx("float64")
    return model


def predict(
    communicator: Communicator, model: keras.Model, strategy: Strategy, x: Batch, batch_size: int
) -> Batch | None:
    """Return this rank's share of the predictions for rows x; None if the rank has no rows.

    Args:
        communicator: Communicator of the ranks that compute predictions.
        model: Whole Keras model, equal on all ranks.
        strategy: Strategy that divides the model, see `Strategy.predictor`.
        x: Array (rows, …), or a nested structure of such arrays; it is the same on all ranks.
        batch_size: Number of rows in one forward pass.

    Raises:
        InvalidInput: If the rows do not fit the model, or if the strategy cannot divide it.
    """
    rows = len(keras.tree.flatten(x)[0])
    _refuse_shapes(model, x)
    # If x has no rows, the model predicts one row of zeros. The prediction for zeros gives the
    # shape of the empty result.
    if rows == 0:
        one = keras.tree.map_structure(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), x)
        predictions = model.predict(one, verbose=0)
        return keras.tree.map_structure(lambda leaf: leaf[:0], predictions)
    readers = strategy.readers(communicator)
    replica = communicator.split(readers.rank)
    together = strategy.predictor(model, replica)
    dividing_ranks = communicator if together is None else readers
    edges = cut(rows, [1.0] * dividing_ranks.size)
    local_rows = _part(x, edges[dividing_ranks.rank], edges[dividing_ranks.rank + 1])
    predictions = (_whole_model_predictor(model) if together is None else together)(
        _batches(local_rows, batch_size)
    )
    parts = [y for y, _ in predictions if y is not None]
    replica.close()
    if readers is not communicator:
        readers.close()
    return (
        keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *parts) if parts else None
    )


def evaluate(
    model: keras.Model, data: tf.data.Dataset, predict: Predictor, communicator: Communicator
) -> dict[str, float]:
    """Evaluate a model as Keras does; the ranks of each replica compute the predictions together.

    Args:
        model: Compiled Keras model, used only for its losses and metrics, not for its weights.
        data: Batches (x, y) or (x, y, sample weight). The ranks of a replica get the same batches;
            each replica gets a different part of every batch.
        predict: Predictor for batches, see `labkit.strategies.Predictor`.
        communicator: Communicator of the ranks of all replicas.

    Returns:
        For each metric name (including "loss"), its value; the result is the same on all ranks.
    """
    model.reset_metrics()
    batches, inputs = tee(_nonempty_batches(data))
    penalty, rows, losses = 0.0, 0, WholeLosses()
    predictions, seen = predict(x for _, (x, *_) in inputs), SeenByMetrics.of(model)
    with hooks_of(model).replaced(seen):
        for (number, (x, y, weight)), (predicted, local_penalty) in zip(
            batches, predictions, strict=True
        ):
            count = len(keras.tree.flatten(x)[0])
            penalty += local_penalty * count
            if predicted is not None:
                rows += count
                losses.add(number, model._compile_loss, y, predicted, weight, count)
                model.compute_metrics(x, y, predicted, weight)
    penalty, total = communicator.allreduce_small(
        np.array([penalty, rows]), "the sums over the held-out rows"
    )
    if not total:
        raise InvalidInput("no rank has data to evaluate; give data on at least one rank")
    loss = losses.mean(communicator) + penalty / total
    # On ranks without rows, Keras may not have built the metrics.
    evaluating_ranks = communicator.split(int(rows > 0))
    result: dict[str, float] = {}
    if rows:
        means = global_metrics(model, evaluating_ranks, model.get_metrics_result, seen)
        result = {name: float(value) for name, value in means.items()} | {"loss": loss}
    evaluating_ranks.close()
    ranks_with_rows = communicator.allgather(rows > 0, "evaluate")
    return dict(communicator.broadcast_object(result, ranks_with_rows.index(True), "evaluate"))


def _nonempty_batches(
    data: tf.data.Dataset,
) -> Iterator[tuple[int, tuple[Batch, Batch, Batch | None]]]:
    """Yield each batch that has rows, with its index among all batches."""
    for number, batch in enumerate(data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        if len(keras.tree.flatten(x)[0]):
            yield number, (x, y, weight)


def _whole_model_predictor(model: keras.Model) -> Predictor:
    def predict(batches: Iterable[Batch]) -> Iterator[Predicted]:
        return ((model.predict_on_batch(x), 0.0) for x in batches)

    return predict


def _batches(x: Batch, size: int) -> Iterator[Batch]:
    rows = len(keras.tree.flatten(x)[0])
    return (_part(x, start, start + size) for start in range(0, rows, size))


def _part(x: Batch, first: int, last: int) -> Batch:
    return keras.tree.map_structure(lambda leaf: leaf[first:last], x)


def _refuse_shapes(model: keras.Model, x: Batch) -> None:
    """Raise a short InvalidInput if rows have a wrong shape, because Keras's own error is long."""
    specs, leaves = keras.tree.flatten(getattr(model, "inputs", None) or []), keras.tree.flatten(x)
    if specs and len(specs) != len(leaves):
        raise InvalidInput(f"x has {len(leaves)} arrays, but the model takes {len(specs)}")
    for spec, leaf in zip(specs, leaves, strict=False):
        expected, shape = spec.shape[1:], leaf.shape[1:]
        # Keras adds or removes a last axis of length 1. The shapes of x and of the model may
        # therefore differ in the last axis.
        fits = None in expected or np.prod(shape) == np.prod(expected)
        if not fits:
            raise InvalidInput(
                f"x has rows of shape {list(shape)}, the model takes {list(expected)}; reshape x"
            )
