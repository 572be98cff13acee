"""Strategies that divide each layer among ranks: TensorParallel and SpatialParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from labkit.communicator import ALGORITHMS, refuse_unmetered
from labkit.forecast import Query, StepForecast, of_grid, of_tensor_parallel
from labkit.model_parallel.memory import by_kind, unique_nbytes
from labkit.schedules.grid_layers import Grid, squarest_grid, validate_grid
from labkit.strategies.pipeline_rank import all_ranks_finite
from labkit.strategies.strategy import (
    Batch,
    ExperimentSpec,
    Predicted,
    Predictor,
    Serving,
    Session,
    Step,
    Strategy,
    TrainingState,
)
from labkit.strategies.taxonomy import Cell
from labkit.strategies.validation import (
    GridValue,
    norms,
    one_of,
    refuse_batch_division,
    refuse_keras_step_options,
    refuse_narrow,
    refuse_norms,
    refuse_optimizer,
    refuse_remainder,
    rows_and_columns,
)

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from labkit.communicator import Communicator
    from labkit.model_parallel.functional import Nest
    from labkit.model_parallel.losses import Losses, Weighted
    from labkit.model_parallel.tensor import Sliced
    from labkit.model_parallel.tiles import GridPart
    from labkit.model_parallel.weights import Share


# An `Objective` maps a batch (x, y, and sample weights with counts, see `Losses`) to its loss.
Objective: TypeAlias = "Callable[[Nest, Nest, Weighted], tf.Tensor]"


class IntraLayer(Strategy):
    """Each rank of a replica holds a part of every layer; the replicas divide each batch."""

    resumable: ClassVar[bool] = True
    # Error messages call a rank's part by the noun `part_name`, such as "slice".
    part_name: ClassVar[str]
    # Error messages call the undivided object by the noun `whole_name`, such as "model".
    whole_name: ClassVar[str]

    @property
    def exact(self) -> bool:
        """True: the result differs from training on one process only by the order of sums."""
        return True

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that do not work with divided layers."""
        refuse_keras_step_options(experiment)
        replicas = experiment.workers // self.ranks(experiment.workers)
        refuse_batch_division(experiment, f"the {self.part_name}s of a {self.whole_name}", replicas)
        refuse_norms(experiment.optimizer, experiment.optimizer_options, self.part_name)

    def ranks(self, workers: int) -> int:
        """Return the number of ranks of one replica."""
        raise NotImplementedError(f"{type(self).__name__} must define ranks")

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy; with several replicas, its parallelism is hybrid."""
        cell = super().cell(workers)
        return cell._replace(parallelism="hybrid") if workers > self.ranks(workers) else cell

    def share(self, model: keras.Model, replica: Communicator) -> Share:
        """Return this rank's part of a model whose layers are divided among the replica's ranks."""
        raise NotImplementedError(f"{type(self).__name__} must define share")

    def objective(self, model: keras.Model, share: Any, losses: Losses) -> Objective:
        """Return a function that computes a batch's loss, with the exchanges between ranks."""
        raise NotImplementedError(f"{type(self).__name__} must define objective")

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the number of batch rows of a replica; all its ranks read the same rows."""
        return -(-batch_size // (workers // self.ranks(workers)))

    def bytes_per_row(self, share: Any) -> int | None:
        """Return the predicted activation bytes per row, or None to use the sum over all layers."""
        return None

    def resolved(self, communicator: Communicator) -> str:
        """Return the name of the algorithm that sums over ranks, see `Communicator.allreduce`."""
        return "mpi" if communicator.network is None else "ring"

    def readers(self, communicator: Communicator) -> Communicator:
        """Return the ranks that divide each batch, one from the same position in each replica."""
        return communicator.split(communicator.rank % self.ranks(communicator.size))

    def predictor(self, model: keras.Model, replica: Communicator) -> Predictor:
        """Return the function with which all ranks of a replica jointly predict the same rows."""
        return replica_predictor(self.share(model, replica))

    def serving(self, model: keras.Model, replica: Communicator) -> Serving:
        """Return a predictor by this rank's part of each layer; all ranks read all rows."""
        share = self.share(model, replica)
        return Serving(replica_predictor(share), True, share.model.variables)

    def train(self, session: Session) -> None:
        """Train each rank's part of the model, with one optimizer per rank.

        During training, a rank holds only the weights of its part of the model. After an epoch, the
        user's callbacks see the weights of the whole model. After a batch, the callbacks see only
        the weights of undivided layers. If callbacks set weights, the next step uses them; the
        callbacks must set them on all ranks.
        """
        share, step = self.start(session)
        steps, weight_bytes = count(), 0

        def counted_step(x: Batch, y: Batch, weight: Batch | None) -> float | None:
            nonlocal weight_bytes
            loss = step(x, y, weight)
            # After the first step, the weights of the undivided model are freed.
            if next(steps) == 0:
                weight_bytes = unique_nbytes(session.model.variables, share.model.variables)
            return loss

        session.loop(
            counted_step, lambda: collect(session, share, self.part_name), replica_predictor(share)
        )
        session.layers = share.describe(max(1, next(steps)))
        rows = self.rows(session.experiment.batch_size, session.communicator.size)
        optimizer, new_optimizer = session.model.optimizer, session.optimizer()
        with share.uncounted():
            memory = by_kind(
                session.model,
                share.model,
                optimizer,
                new_optimizer,
                rows,
                look=True,
                bytes_per_row=self.bytes_per_row(share),
            )
        session.memory = replace(memory, measured=memory.measured | {"weights": weight_bytes})

    def start(self, session: Session) -> tuple[Share, Step]:
        """Return this rank's part of the session's model, and the function for a training step."""
        import keras
        import tensorflow as tf

        from labkit.communicator import computing
        from labkit.exchange import Exchange
        from labkit.model_parallel.losses import Losses, LossTargets

        optimizer = session.optimizer()
        refuse_norms(type(optimizer).__name__.lower(), norms(optimizer), self.part_name)
        refuse_optimizer(optimizer)
        session.compile(optimizer)
        replica = session.part(session.communicator.rank // self.ranks(session.communicator.size))
        share = self.share(session.model, replica)
        variables = list(share.model.trainable_variables)
        losses = Losses(session.model, session.readers, parts=1)
        gradients = differentiated(self.objective(session.model, share, losses), variables)
        algorithm, guard = self.resolved(session.communicator), session.guard
        exchange = Exchange(session.readers, algorithm, paces=False, guard=guard)
        compute_scope = computing(session.communicator)
        names = [variable.path for variable in variables]
        has_callbacks = session.experiment.callbacks is not None

        def step(x: Batch, y: Batch, weight: Batch | None) -> float | None:
            share.release(look=has_callbacks)
            rows = len(keras.tree.flatten(x)[0])
            counts = losses.counts([LossTargets(y, weight, losses.masks(x))], [1.0])[0]
            loss, local_gradients = None, [tf.zeros_like(variable.value) for variable in variables]
            # All ranks of a replica have equally many rows. Either all ranks of a replica compute
            # gradients, or none.
            if rows:
                batch = keras.tree.map_structure(
                    lambda value: None if value is None else tf.convert_to_tensor(value),
                    (x, y, (weight, counts)),
                )
                with compute_scope():
                    loss, local_gradients = gradients(*batch)
            if session.readers.total(rows, "the number of rows in a step") > 0:
                mean = exchange.mean(local_gradients, np.int64(rows), names)
                if all_ranks_finite(session, exchange):
                    with compute_scope():
                        optimizer.apply(mean, variables)
            return float(loss) if loss is not None and share.first else None

        optimizers, remembers = [(optimizer, variables)], {"exchange": exchange}
        tracked, pairs = share.model.variables, list(share.pairs())
        session.keeps(TrainingState(tracked, optimizers, pairs, remembers, release=share.release))
        return share, step


def differentiated(
    objective: Objective, variables: list[keras.Variable]
) -> Callable[..., tuple[tf.Tensor, list[tf.Tensor]]]:
    """Return a compiled function from a batch to its loss and the gradients of the variables."""
    import tensorflow as tf

    def gradients(x: Nest, y: Nest, weight: Weighted) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = objective(x, y, weight)
        raw = tape.gradient(loss, [variable.value for variable in variables])
        return loss, [
            tf.zeros_like(variable.value) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(raw, variables, strict=True)
        ]

    compiled: Callable[..., tuple[tf.Tensor, list[tf.Tensor]]] = tf.function(
        gradients, autograph=False, reduce_retracing=True
    )
    return compiled


def replica_predictor(share: Share) -> Predictor:
    """Return the predictor of a replica's ranks; only the first rank receives the predictions."""
    import keras
    import tensorflow as tf

    from labkit.model_parallel.functional import attach_mask, mask_of

    def forward(x: Nest) -> tuple[Nest, list[tf.Tensor | None], tf.Tensor]:
        y, total = share.predict(x), tf.zeros((), keras.config.floatx())
        # Losses that layers add to the model have the same value on all ranks.
        for loss in share.model.losses:
            total += tf.reduce_sum(tf.cast(loss, total.dtype))
        return y, [mask_of(output) for output in keras.tree.flatten(y)], total

    call = tf.function(forward, autograph=False, reduce_retracing=True)

    def predict(batches: Iterable[Batch]) -> Iterator[Predicted]:
        for x in batches:
            with share.uncounted():
                y, masks, penalty = call(keras.tree.map_structure(tf.convert_to_tensor, x))
                for output, mask in zip(keras.tree.flatten(y), masks, strict=True):
                    # Compiled functions drop Keras masks, so each mask is attached again.
                    attach_mask(output, mask)
            yield (y, float(penalty)) if share.first else (None, 0.0)

    return predict


def collect(session: Session, share: Share, part_name: str) -> None:
    """Copy the weights of all ranks' parts to every rank."""
    share.collect()
    for variable in session.model.variables:
        value = np.array(variable.numpy(), order="C")
        session.communicator.broadcast(value, label=f"the weights of the {part_name}s")
        variable.assign(value)


class TensorParallel(IntraLayer):
    r"""Tensor parallelism: each of k ranks stores some units of each layer and reads all samples.

    Two consecutive Dense layers compute \(y = \sum_i f(x A_i) B_i\). The slices divide the columns
    of matrix A and the rows of matrix B. In the forward pass, a pair of cut Dense layers needs one
    allreduce. In the backward pass, the pair of layers also needs one allreduce. Pairs of Conv2D
    layers are cut by channels. Pooling layers may be between the two Conv2D layers of a pair. Batch
    normalisation between the two layers of a pair is cut by the same channels or units. Attention
    is cut by its heads. Queries, keys and values are cut by outputs, and the output projection by
    inputs. A single Dense or Conv2D layer is cut by outputs, and its outputs are gathered. An
    Embedding is cut by the words of its vocabulary. If the loss is the sparse cross-entropy of
    logits, the final scores are not gathered.

    labkit cuts no other types of layers, such as depthwise, separable and grouped convolutions.
    labkit also cuts no layer with a regularizer or constraint. Every slice stores each uncut layer
    as a whole. Attention layers with dropout or masked inputs are not cut. Every slice also stores
    whole layers with fewer units than slices. For each layer, `run.layers` lists how the layer is
    cut and the bytes that it sends. Several replicas divide each batch and average the gradients of
    each slice.

    Args:
        tensor_parallel_size: The number of ranks of one replica. If `tensor_parallel_size` is None,
            all workers form one replica. The number of workers must be a multiple of
            `tensor_parallel_size`.
        algorithm: The allreduce algorithm that sums over the slices. The value is "auto", "mpi",
            "shared_memory" or a name from `labkit.schedules.ALLREDUCE`. "auto" means "ring" if a
            network is emulated, and "mpi" if not.

    Batch normalisation uses the statistics of the rows of one replica. Every rank builds the whole
    model first, and gathers the trained model at the end. If the user passes callbacks, ranks also
    gather the model after each epoch. If callbacks set weights, the next step uses them. During
    training, a rank stores weights, gradients and optimizer state only of its own slices.

    Source: M. Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053. Difference from the paper:
        convolutions are also cut, and the sizes of slices may differ by one unit. Position
        embeddings are cut like word embeddings.
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
        """Raise InvalidInput for conflicting options, before any rank starts."""
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
        """Return a function for the loss plus the layers' losses, which is equal on all slices."""
        import tensorflow as tf

        from labkit.model_parallel.tensor import cross_entropy

        def objective(x: Nest, y: Nest, weighted: Weighted) -> tf.Tensor:
            predicted = share.model(x, training=True)
            if share.link is None:
                loss = losses(y, predicted, weighted)
            else:
                # TensorFlow's `reduce_mean` divides by the number of rows, so the counts are not
                # needed.
                weight, _ = weighted
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


class SpatialParallel(IntraLayer):
    """A grid of machines divides a model's layers into tiles; the machines exchange border values.

    Locally connected, convolution and pooling layers are divided into tiles. Machine (i, j) of the
    grid computes tile (i, j) of each layer. A machine reads the values under the kernels of its
    tile. A machine sends a value only once to each machine that reads it. Several kernels on the
    receiving machine share one copy of the value. All machines that read a value send their
    gradients of this value back, and these gradients are summed. A Dense layer is divided by units;
    each unit reads all values of the previous layer. Machine 0 gathers the final scores, computes
    the loss and returns the gradients of the scores. Each machine trains its own units and its
    unshared kernels. During training, a machine sends its units and unshared kernels to no other
    machine. Every machine stores all kernels of a Conv2D layer; the kernels' gradients from all
    tiles are summed. Several replicas divide each batch and average their gradients.

    `run.layers` lists the part of each layer that each machine computes. `run.layers` also lists
    the values that each machine sends before a layer.

    Args:
        grid: The rows and columns (r, c) of the grid of machines of one replica. If `grid` is None,
            all workers form one grid, as square as possible. The number of workers must be a
            multiple of r × c. Each machine must have at least one position or unit of every layer.

    Allowed layers are LocallyConnected2D, Conv2D, MaxPooling2D and AveragePooling2D without
    padding, Flatten, Dense after Flatten, and element-wise activations. Each machine of a replica
    reads the replica's rows itself, so machines send no input data. Every rank builds the whole
    model first, and gathers the trained model at the end. If the user passes callbacks, ranks also
    gather the model after each epoch. If callbacks set weights, the next step uses them. During
    training, a machine stores weights, gradients and optimizer state only of its own tiles.

    Source: J. Dean et al.: Large scale distributed deep networks, NIPS 2012. Difference from the
        paper: training is synchronous, without the paper's parameter server. A machine waits for
        the values that it reads; communication does not overlap computation. Every machine reads
        the complete input.
    """

    part_name: ClassVar[str] = "machine"
    whole_name: ClassVar[str] = "grid"
    architecture: ClassVar[tuple[str, ...]] = ("neighbours",)
    parallelism: ClassVar[tuple[str, ...]] = ("model by tiles", "hybrid")
    paper: ClassVar[str] = "Dean 2012"

    grid: tuple[PositiveInt, PositiveInt] | None = Field(None, kw_only=False)

    @field_validator("grid", mode="before")
    @classmethod
    def _grid(cls, value: GridValue) -> GridValue:
        return rows_and_columns(value)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for conflicting options, before any rank starts."""
        super().check(experiment)
        validate_grid(
            self.grid_of(experiment.workers), experiment.workers, experiment.grid_layers or ()
        )

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a training step from the computation of tiles and their messages."""
        return of_grid(query, self.grid_of(query.workers))

    def grid_of(self, workers: int) -> Grid:
        """Return the rows and columns of the grid of one replica."""
        return self.grid or squarest_grid(workers)

    def ranks(self, workers: int) -> int:
        """Return the number of ranks of one replica."""
        rows, columns = self.grid_of(workers)
        return rows * columns

    def share(self, model: keras.Model, replica: Communicator) -> GridPart:
        """Return the tiles and units of this machine."""
        from labkit.model_parallel.tiles import GridPart

        return GridPart(model, replica, self.grid_of(replica.size), self.resolved(replica))

    def objective(self, model: keras.Model, share: GridPart, losses: Losses) -> Objective:
        """Return the function that computes the loss on machine 0; elsewhere it returns zero."""
        return partial(share.objective, losses=losses)

    def bytes_per_row(self, share: GridPart) -> int:
        """Return the predicted bytes of activations per row, summed over this machine's tiles."""
        return share.model.bytes_per_row()
