"""Inference on ranks: what they predict together, and metrics of it."""

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
from labkit.exchange.hooks import seam
from labkit.keras import global_metrics
from labkit.keras.safe_mode import load_model
from labkit.keras.whole_metrics import SeenByMetrics
from labkit.model_parallel.losses import WholeLosses
from labkit.strategies import Batch, Predicted, Predictor, Strategy


def load(file: str | bytes) -> keras.Model:
    """A saved model, of a file or what it holds, with Keras's float type as in its training."""
    if isinstance(file, bytes):
        with NamedTemporaryFile(suffix=".keras") as kept:
            kept.write(file)
            kept.flush()
            return load(kept.name)
    keras.backend.clear_session()
    model = load_model(file, compile=False)
    if any(each.dtype == "float64" for each in keras.tree.flatten(getattr(model, "inputs", []))):
        keras.config.set_floatx("float64")
    return model


def predict(
    communicator: Communicator, model: keras.Model, strategy: Strategy, x: Batch, batch_size: int
) -> Batch | None:
    """The predictions that this rank holds of rows x, in rank order; None where it has none.

    Args:
        communicator: the ranks.
        model: the same on all of them.
        strategy: how they predict, see `Strategy.predictor`.
        x: an array (rows, …), or a nest of them, the same on all ranks.
        batch_size: rows that go through the model at a time.

    Raises:
        InvalidInput: rows that the model does not take; a model that cannot be divided so.
    """
    rows = len(keras.tree.flatten(x)[0])
    _refuse_shapes(model, x)
    if rows == 0:  # what there is none of has a shape
        one = keras.tree.map_structure(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), x)
        found = model.predict(one, verbose=0)
        return keras.tree.map_structure(lambda leaf: leaf[:0], found)
    readers = strategy.readers(communicator)
    replica = communicator.split(readers.rank)
    together = strategy.predictor(model, replica)
    among = communicator if together is None else readers
    edges = cut(rows, [1.0] * among.size)
    own = _part(x, edges[among.rank], edges[among.rank + 1])
    found = (_alone(model) if together is None else together)(_batches(own, batch_size))
    parts = [y for y, _ in found if y is not None]
    replica.close()
    if readers is not communicator:
        readers.close()
    return keras.tree.map_structure(lambda *each: np.concatenate(each), *parts) if parts else None


def evaluate(
    model: keras.Model, data: tf.data.Dataset, predict: Predictor, communicator: Communicator
) -> dict[str, float]:
    """Metrics of rows that the ranks of each replica predict together, as Keras evaluates them.

    Args:
        model: compiled; its weights do not count.
        data: batches (x, y) or (x, y, sample weight), the same on all ranks of a replica; of
            several replicas, parts of the same batches.
        predict: see `labkit.strategies.Predictor`.
        communicator: the ranks of all replicas.
    """
    model.reset_metrics()
    held, sent = tee(_full(data))
    penalty, rows, losses = 0.0, 0, WholeLosses()
    found, seen = predict(x for _, (x, *_) in sent), SeenByMetrics.of(model)
    with seam(model).instead(seen):
        for (number, (x, y, weight)), (predicted, own) in zip(held, found, strict=True):
            count = len(keras.tree.flatten(x)[0])
            penalty += own * count
            if predicted is not None:
                rows += count
                losses.add(number, model._compile_loss, y, predicted, weight, count)
                model.compute_metrics(x, y, predicted, weight)
    penalty, total = communicator.tally(np.array([penalty, rows]), "the held-out rows")
    if not total:
        raise InvalidInput("no rank has data to evaluate on")
    loss = losses.mean(communicator) + penalty / total
    with_rows = communicator.split(int(rows > 0))  # elsewhere metrics may not be built
    result: dict[str, float] = {}
    if rows:
        means = global_metrics(model, with_rows, model.get_metrics_result, seen)
        result = {name: float(value) for name, value in means.items()} | {"loss": loss}
    with_rows.close()
    have = communicator.allgather(rows > 0, "evaluate")
    return dict(communicator.share(result, have.index(True), "evaluate"))


def _full(data: tf.data.Dataset) -> Iterator[tuple[int, tuple[Batch, Batch, Batch | None]]]:
    """Batches with rows, and their numbers among all."""
    for number, batch in enumerate(data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        if len(keras.tree.flatten(x)[0]):
            yield number, (x, y, weight)


def _alone(model: keras.Model) -> Predictor:
    def predict(batches: Iterable[Batch]) -> Iterator[Predicted]:
        return ((model.predict_on_batch(x), 0.0) for x in batches)

    return predict


def _batches(x: Batch, size: int) -> Iterator[Batch]:
    rows = len(keras.tree.flatten(x)[0])
    return (_part(x, start, start + size) for start in range(0, rows, size))


def _part(x: Batch, first: int, last: int) -> Batch:
    return keras.tree.map_structure(lambda leaf: leaf[first:last], x)


def _refuse_shapes(model: keras.Model, x: Batch) -> None:
    """Keras says it at length, and on the first stage alone."""
    specs, leaves = keras.tree.flatten(getattr(model, "inputs", None) or []), keras.tree.flatten(x)
    if specs and len(specs) != len(leaves):
        raise InvalidInput(f"x is of {len(leaves)} arrays, the model takes {len(specs)}")
    for spec, leaf in zip(specs, leaves, strict=False):
        wanted, given = spec.shape[1:], leaf.shape[1:]
        # An axis of 1 at the end Keras puts or leaves out.
        fits = None in wanted or np.prod(given) == np.prod(wanted)
        if not fits:
            raise InvalidInput(
                f"x has rows of shape {list(given)}, the model takes {list(wanted)}; reshape x"
            )
