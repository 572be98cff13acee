"""The base class of strategies that divide each layer among several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from labkit.model_parallel.memory import by_kind, unique_nbytes
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
    norms,
    refuse_batch_division,
    refuse_keras_step_options,
    refuse_norms,
    refuse_optimizer,
)

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from labkit.communicator import Communicator
    from labkit.model_parallel.functional import Nest
    from labkit.model_parallel.losses import Losses, Weighted
    from labkit.model_parallel.weights import Share

# A function that maps a batch (x, y, and sample weights with counts, see `Losses`) to its loss.
Objective: TypeAlias = "Callable[[Nest, Nest, Weighted], tf.Tensor]"


class IntraLayer(Strategy):
    """Each rank of a replica holds a part of every layer; the replicas divide each batch."""

    resumable: ClassVar[bool] = True
    part_name: ClassVar[str]  # noun for a rank's part in error messages, such as "slice"
    whole_name: ClassVar[str]  # noun for what is divided in error messages, such as "model"

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
        """Return the taxonomy cell; with several replicas, its parallelism is hybrid."""
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
        """Return the predicted activation bytes per row; None: use the sum over all layers."""
        return None

    def resolved(self, communicator: Communicator) -> str:
        """Return the name of the algorithm that sums over ranks, see `Communicator.allreduce`."""
        return "mpi" if communicator.network is None else "ring"

    def readers(self, communicator: Communicator) -> Communicator:
        """Return the ranks that divide each batch: one per replica, all at the same place."""
        return communicator.split(communicator.rank % self.ranks(communicator.size))

    def predictor(self, model: keras.Model, replica: Communicator) -> Predictor:
        """Return the function with which all ranks of a replica jointly predict the same rows."""
        return replica_predictor(self.share(model, replica))

    def serving(self, model: keras.Model, replica: Communicator) -> Serving:
        """Return the predictor on this rank's part of each layer; all ranks read all batch rows."""
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
            if next(steps) == 0:  # by now the weights of the undivided model are freed
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
            if rows:  # all ranks of a replica have equally many rows
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
        for loss in share.model.losses:  # losses that layers add have the same value on all ranks
            total += tf.reduce_sum(tf.cast(loss, total.dtype))
        return y, [mask_of(output) for output in keras.tree.flatten(y)], total

    call = tf.function(forward, autograph=False, reduce_retracing=True)

    def predict(batches: Iterable[Batch]) -> Iterator[Predicted]:
        for x in batches:
            with share.uncounted():
                y, masks, penalty = call(keras.tree.map_structure(tf.convert_to_tensor, x))
                for output, mask in zip(keras.tree.flatten(y), masks, strict=True):
                    # Compiled functions drop masks, so attach the mask again.
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
