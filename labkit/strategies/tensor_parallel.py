"""Tensor parallelism: each rank stores some units of every layer."""

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
    r"""Vertical slices: rank i of k stores some units of each layer, and all ranks read all
    samples.

    For two consecutive Dense layers, \(y = \sum_i f(x A_i) B_i\): matrix A is cut by outputs, and B
    by inputs. The pair of layers therefore needs one allreduce in the forward pass and one in the
    backward pass. Conv2D layers are cut in the same way, by channels, also with pooling between
    them. Batch normalisation inside a pair of layers is cut with the pair. Attention is cut by
    heads: queries, keys and values by outputs, the output projection by inputs. A single Dense or
    Conv2D layer is cut by outputs, which are gathered. An Embedding is cut by words. The final
    scores stay cut over the ranks if the loss is the sparse cross-entropy of logits.

    All other layers are whole on every slice: other types (including depthwise, separable and
    grouped convolutions), and layers with a regularizer or constraint. So are attention with
    dropout of its scores or with masked inputs, and layers with fewer units than slices. For each
    layer, `run.layers` lists how the layer is cut and the bytes that it sends. Several replicas
    divide each batch and average the gradients of each slice.

    Args:
        tensor_parallel_size: The number of ranks of one replica; None: all workers. The number of
            workers must be a multiple of `tensor_parallel_size`.
        algorithm: The allreduce algorithm that sums over the slices: a name of
            `labkit.schedules.ALLREDUCE`, "mpi", "shared_memory", or "auto". "auto" means "ring" on
            an emulated network, and "mpi" without one.

    Batch normalisation uses the rows of one replica. Every rank builds the whole model first, and
    gathers the trained model at the end. With the user's callbacks, ranks also gather the model
    after each epoch; weights that callbacks set take effect from the next step. During training a
    rank stores only its slices: weights, gradients and optimizer state.

    Source: M. Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053. Differs from it: convolutions
        are cut, too; slices may differ by one unit; position embeddings are cut like word
        embeddings, unlike in the paper.
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
        """Forecast a step from each layer's computation, allreduces and gathers."""
        return of_tensor_parallel(query, self.ranks(query.workers), self.algorithm)

    def ranks(self, workers: int) -> int:
        """Return the number of ranks of one replica."""
        return self.tensor_parallel_size or workers

    def share(self, model: keras.Model, replica: Communicator) -> Sliced:
        """Return this rank's slice; the final scores stay cut if the loss supports cut scores."""
        from labkit.model_parallel.tensor import Sliced

        return Sliced(model, replica, self.resolved(replica), _is_logits_loss(model))

    def objective(self, model: keras.Model, share: Sliced, losses: Losses) -> Objective:
        """Return a function: the loss plus the layers' losses, which is equal on all slices."""
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
        """Return the allreduce algorithm: the field's value, or the default for "auto"."""
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
