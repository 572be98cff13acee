"""Tensor parallelism: each rank stores some of the units of every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveInt, field_validator

from labkit.communicator import ALGORITHMS, refuse_unmetered
from labkit.forecast import Query, StepForecast, of_tensor_parallel
from labkit.strategies.intra_layer import IntraLayer, Objective
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.validation import one_of, refuse_narrow, refuse_remainder

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from labkit.communicator import Communicator
    from labkit.model_parallel.functional import Nest
    from labkit.model_parallel.losses import Losses, Weighted
    from labkit.model_parallel.tensor import Sliced


class TensorParallel(IntraLayer):
    r"""Vertical slices: each of k ranks stores some units of each layer; all ranks read all
    samples.

    Two consecutive Dense layers are \(y = \sum_i f(x A_i) B_i\): matrix A is cut by its outputs,
    and matrix B by its inputs. Two Dense layers that are cut as such a pair need only one allreduce
    in the forward pass and one in the backward pass. Pairs of Conv2D layers are cut by channels, as
    Dense layers are cut by units; pooling layers may be between the two layers of a pair. Batch
    normalisation between the two layers of a pair is cut by the same channels or units. Attention
    is cut by its heads. Queries, keys and values are cut by outputs, and the output projection by
    inputs. A single Dense or Conv2D layer is cut by outputs, and its outputs are gathered. An
    Embedding is cut by the words of its vocabulary. If the loss is the sparse cross-entropy of
    logits, the final scores are not gathered.

    Every slice stores whole layers of other types (such as depthwise, separable and grouped
    convolutions), and whole layers with a regularizer or constraint. Every slice also stores whole
    attention layers with score dropout or masked inputs, and whole layers with fewer units than
    there are slices. For each layer, `run.layers` lists how the layer is cut and the bytes that it
    sends. Several replicas divide each batch and average the gradients of each slice.

    Args:
        tensor_parallel_size: The number of ranks of one replica. None: all workers form one
            replica. The number of workers must be a multiple of `tensor_parallel_size`.
        algorithm: The allreduce algorithm that sums over the slices: a name from
            `labkit.schedules.ALLREDUCE`, "mpi", "shared_memory", or "auto". "auto" means "ring" if
            a network is emulated, and "mpi" if not.

    Batch normalisation uses the statistics of the rows of one replica. Every rank builds the whole
    model first, and gathers the trained model at the end. If there are callbacks of the user, ranks
    also gather the model after each epoch. If callbacks set weights, the next step uses them.
    During training, a rank stores weights, gradients and optimizer state only of its own slices.

    Source: M. Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053. Differs from it: convolutions
        are cut, too, and slices may differ by one unit. Position embeddings are cut like word
        embeddings.
    """

    part_name: ClassVar[str] = "slice"
    whole_name: ClassVar[str] = "model"
    parallelism: ClassVar[tuple[str, ...]] = ("model by units", "hybrid")
    paper: ClassVar[str] = "Shoeybi 2019, arXiv 1909.08053"

    tensor_parallel_size: PositiveInt | None = Field(None, kw_only=False)
    algorithm: str = "auto"

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, value: str) -> str:
        return one_of("algorithm", value, ("auto", *ALGORITHMS))

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput, before any rank starts, for conflicting options."""
        super().check(experiment)
        refuse_unmetered(self.algorithm, experiment.network)
        workers, slices = experiment.workers, self.ranks(experiment.workers)
        refuse_remainder("tensor_parallel_size", slices, workers)
        refuse_narrow(slices, experiment)

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a training step from the computation, allreduces and gathers of each layer."""
        return of_tensor_parallel(query, self.ranks(query.workers), self.algorithm)

    def ranks(self, workers: int) -> int:
        """Return the number of ranks of one replica."""
        return self.tensor_parallel_size or workers

    def share(self, model: keras.Model, replica: Communicator) -> Sliced:
        """Return this rank's slice; the final scores are not gathered if the loss allows it."""
        from labkit.model_parallel.tensor import Sliced

        return Sliced(model, replica, self.resolved(replica), _is_logits_loss(model))

    def objective(self, model: keras.Model, share: Sliced, losses: Losses) -> Objective:
        """Return a function for the loss plus layers' losses; its value is equal on all slices."""
        import tensorflow as tf

        from labkit.model_parallel.tensor import cross_entropy

        def objective(x: Nest, y: Nest, weighted: Weighted) -> tf.Tensor:
            predicted = share.model(x, training=True)
            if share.link is None:
                loss = losses(y, predicted, weighted)
            else:
                weight, _ = weighted  # reduce_mean divides by the number of rows
                losses_per_row = cross_entropy(share.link, model.output_shape[-1], y, predicted)
                loss = tf.reduce_mean(
                    losses_per_row
                    if weight is None
                    else losses_per_row * _broadcast_weights(weight, losses_per_row)
                )
            return tf.add_n(
                [loss, *(tf.cast(layer_loss, loss.dtype) for layer_loss in share.model.losses)]
            )

        return objective

    def resolved(self, communicator: Communicator) -> str:
        """Return the name of the allreduce algorithm; "auto" is replaced by the default."""
        return super().resolved(communicator) if self.algorithm == "auto" else self.algorithm


def _broadcast_weights(weight: tf.Tensor, losses: tf.Tensor) -> tf.Tensor:
    """Reshape sample weights (rows,) or (rows, …) to the shape of the losses (rows, …)."""
    import tensorflow as tf

    weight = tf.cast(weight, losses.dtype)
    if weight.shape.rank > losses.shape.rank:
        return weight[..., 0]
    return tf.reshape(
        weight, tf.concat([tf.shape(weight), [1] * (losses.shape.rank - weight.shape.rank)], 0)
    )


def _is_logits_loss(model: keras.Model) -> bool:
    """Return whether the loss is the mean sparse cross-entropy of logits."""
    import keras

    loss: keras.losses.Loss = model.loss if model.compiled else None
    return (
        type(loss) is keras.losses.SparseCategoricalCrossentropy
        and loss.from_logits
        and loss.ignore_class is None
        and loss.reduction == "sum_over_batch_size"
        and not model._compile_config.config.get("loss_weights")
    )
