"""Tensor parallelism: each rank has some units of every layer."""

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
    r"""Vertical slices: rank i of k has some units of each layer, and all ranks see all samples.

    Of two Dense layers in a row, \(y = \sum_i f(x A_i) B_i\): A is cut by outputs, B by inputs, so
    that one allreduce forward and one backward do for both. Conv2D layers are cut likewise, by
    channels, with pooling between them; batch normalisation between a pair is cut with it.
    Attention is cut by heads: queries, keys and values by outputs, the projection behind them by
    inputs. A Dense or Conv2D layer alone is cut by outputs, which are gathered; an Embedding by
    words; scores at the end stay cut where the loss is the sparse cross-entropy of logits.

    All else stays whole on every slice: other layers (depthwise, separable and grouped
    convolutions among them), a regularizer or constraint, attention with dropout of its scores or
    with masked inputs, fewer units than slices. `run.layers` says so, layer by layer, beside the
    bytes that it sends. Several replicas share a batch and average the gradients of each slice.

    Args:
        slices: ranks of one replica; None: all workers. Workers are a multiple of it.
        algorithm: how slices add up: a name of `labkit.schedules.ALLREDUCE`, "mpi",
            "shared_memory", or "auto": "mpi", and "ring" on an emulated network.

    Of several replicas each normalises its own rows. Every rank builds the whole model first, and
    gathers it at the end, and after each epoch where callbacks of the user's own may look at it;
    weights that they set count from the next step on. In between it holds its slices alone:
    weights, gradients and optimizer state.

    Source: M. Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053. Differs from it: convolutions
    are cut too; parts may differ by one unit; positions are cut as words are.
    """

    called: ClassVar[str] = "slice"
    whole: ClassVar[str] = "model"
    parallelism: ClassVar[tuple[str, ...]] = ("model by units", "hybrid")
    paper: ClassVar[str] = "Shoeybi 2019, arXiv 1909.08053"

    slices: PositiveInt | None = Field(None, kw_only=False)
    algorithm: str = "auto"

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, value: str) -> str:
        return one_of("algorithm", value, ("auto", *ALGORITHMS))

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what does not fit together, before any rank starts."""
        super().check(experiment)
        refuse_unmetered(self.algorithm, experiment.network)
        workers, slices = experiment.workers, self.ranks(experiment.workers)
        refuse_remainder("slices", slices, workers)
        refuse_narrow(slices, experiment)

    def forecast(self, asked: Query) -> StepForecast:
        """By what slices of each layer add up and gather."""
        return of_tensor_parallel(asked, self.ranks(asked.workers), self.algorithm)

    def ranks(self, workers: int) -> int:
        """Of one replica."""
        return self.slices or workers

    def share(self, model: keras.Model, replica: Communicator) -> Sliced:
        """This rank's slice; scores stay cut where the loss, if any, takes them so."""
        from labkit.model_parallel.tensor import Sliced

        return Sliced(model, replica, self.resolved(replica), _of_logits(model))

    def objective(self, model: keras.Model, share: Sliced, losses: Losses) -> Objective:
        """The loss and those of layers, the same on all slices."""
        import tensorflow as tf

        from labkit.model_parallel.tensor import cross_entropy

        def objective(x: Nest, y: Nest, weighted: Weighted) -> tf.Tensor:
            predicted = share.model(x, training=True)
            if share.link is None:
                loss = losses(y, predicted, weighted)
            else:
                weight, _ = weighted  # a mean, of which rows count
                each = cross_entropy(share.link, model.output_shape[-1], y, predicted)
                loss = tf.reduce_mean(each if weight is None else each * _beside(weight, each))
            return tf.add_n([loss, *(tf.cast(own, loss.dtype) for own in share.model.losses)])

        return objective

    def resolved(self, communicator: Communicator) -> str:
        """The algorithm, where one is given."""
        return super().resolved(communicator) if self.algorithm == "auto" else self.algorithm


def _beside(weight: tf.Tensor, each: tf.Tensor) -> tf.Tensor:
    """Sample weights (rows,) or (rows, …) in the shape of the losses (rows, …)."""
    import tensorflow as tf

    weight = tf.cast(weight, each.dtype)
    if weight.shape.rank > each.shape.rank:
        return weight[..., 0]
    return tf.reshape(
        weight, tf.concat([tf.shape(weight), [1] * (each.shape.rank - weight.shape.rank)], 0)
    )


def _of_logits(model: keras.Model) -> bool:
    """Whether the loss is the mean sparse cross-entropy of scores, which slices share."""
    import keras

    loss: keras.losses.Loss = model.loss if model.compiled else None
    return (
        type(loss) is keras.losses.SparseCategoricalCrossentropy
        and loss.from_logits
        and loss.ignore_class is None
        and loss.reduction == "sum_over_batch_size"
        and not model._compile_config.config.get("loss_weights")
    )
