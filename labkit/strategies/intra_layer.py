"""What strategies that cut each layer over ranks have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from labkit.model_parallel.memory import by_kind, together
from labkit.strategies.pipeline_rank import taken_by_all
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
    refuse_given,
    refuse_in_parts,
    refuse_norms,
    refuse_shares,
)

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from labkit.communicator import Communicator
    from labkit.model_parallel.functional import Nest
    from labkit.model_parallel.losses import Losses, Weighted
    from labkit.model_parallel.weights import Share

# Of a batch (x, y, sample weights and what they count, as `Losses` takes them): its loss.
Objective: TypeAlias = "Callable[[Nest, Nest, Weighted], tf.Tensor]"


class IntraLayer(Strategy):
    """Some of each layer on each rank; replicas of all of it share a batch."""

    resumable: ClassVar[bool] = True
    called: ClassVar[str]  # what a rank has, in messages: "slice"
    whole: ClassVar[str]  # of what: "model"

    @property
    def exact(self) -> bool:
        """Sums are only taken in another order."""
        return True

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what no model can do of which each rank has some of each layer."""
        refuse_in_parts(experiment)
        replicas = experiment.workers // self.ranks(experiment.workers)
        refuse_shares(experiment, f"the {self.called}s of a {self.whole}", replicas)
        refuse_norms(experiment.optimizer, experiment.optimizer_options, self.called)

    def ranks(self, workers: int) -> int:
        """Of one replica."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many ranks it has")

    def cell(self, workers: int) -> Cell:
        """Several replicas divide the data, too."""
        cell = super().cell(workers)
        return cell._replace(parallelism="hybrid") if workers > self.ranks(workers) else cell

    def share(self, model: keras.Model, replica: Communicator) -> Share:
        """This rank's share of a model, over the ranks of a replica."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it cuts a model")

    def objective(self, model: keras.Model, share: Any, losses: Losses) -> Objective:
        """The loss of a batch, with what ranks exchange for it."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its ranks minimise")

    def rows(self, batch_size: int, workers: int) -> int:
        """Rows of a replica's part of the batch, which all of its ranks see."""
        return -(-batch_size // (workers // self.ranks(workers)))

    def a_row(self, share: Any) -> int | None:
        """Bytes of activations that a row is predicted to leave; None: as the layers say."""
        return None

    def resolved(self, communicator: Communicator) -> str:
        """The algorithm by which ranks add up, see `Communicator.allreduce`."""
        return "mpi" if communicator.network is None else "ring"

    def readers(self, communicator: Communicator) -> Communicator:
        """The ranks of one place in all replicas: they divide the batch among them."""
        return communicator.split(communicator.rank % self.ranks(communicator.size))

    def predictor(self, model: keras.Model, replica: Communicator) -> Predictor:
        """By all ranks, the same rows."""
        return through(self.share(model, replica))

    def serving(self, model: keras.Model, replica: Communicator) -> Serving:
        """This rank's share of each layer; all ranks read all rows."""
        share = self.share(model, replica)
        return Serving(through(share), True, share.model.variables)

    def train(self, session: Session) -> None:
        """Steps on shares, an optimizer a rank.

        While a rank trains it holds the weights of its share alone. After an epoch callbacks of
        the user's own find the whole ones, after a batch only those of layers that are not cut.
        Weights that they set, then or then, count from the next step on; they do it on all ranks.
        """
        share, step = self.start(session)
        steps, held = count(), 0

        def counted(x: Batch, y: Batch, weight: Batch | None) -> float | None:
            nonlocal held
            loss = step(x, y, weight)
            if next(steps) == 0:  # the whole weights are away now
                held = together(session.model.variables, share.model.variables)
            return loss

        session.loop(counted, lambda: collect(session, share, self.called), through(share))
        session.layers = share.describe(max(1, next(steps)))
        rows = self.rows(session.experiment.batch_size, session.communicator.size)
        used, plain = session.model.optimizer, session.optimizer()
        with share.uncounted():
            found = by_kind(
                session.model, share.model, used, plain, rows, look=True, a_row=self.a_row(share)
            )
        session.memory = replace(found, measured=found.measured | {"weights": held})

    def start(self, session: Session) -> tuple[Share, Step]:
        """This rank's share of the session's model, and the step that trains it."""
        import keras
        import tensorflow as tf

        from labkit.communicator import computing
        from labkit.exchange import Exchange
        from labkit.model_parallel.losses import Aims, Losses

        optimizer = session.optimizer()
        refuse_norms(type(optimizer).__name__.lower(), norms(optimizer), self.called)
        refuse_given(optimizer)
        session.compile(optimizer)
        replica = session.part(session.communicator.rank // self.ranks(session.communicator.size))
        share = self.share(session.model, replica)
        variables = list(share.model.trainable_variables)
        losses = Losses(session.model, session.readers, parts=1)
        gradients = differentiated(self.objective(session.model, share, losses), variables)
        algorithm, guard = self.resolved(session.communicator), session.guard
        exchange = Exchange(session.readers, algorithm, paces=False, guard=guard)
        slowly = computing(session.communicator)
        names = [variable.path for variable in variables]
        watched = session.experiment.callbacks is not None

        def step(x: Batch, y: Batch, weight: Batch | None) -> float | None:
            share.release(look=watched)
            rows = len(keras.tree.flatten(x)[0])
            counts = losses.counts([Aims(y, weight, losses.masks(x))], [1.0])[0]
            loss, found = None, [tf.zeros_like(variable.value) for variable in variables]
            if rows:  # as many on all ranks of a replica
                batch = keras.tree.map_structure(
                    lambda v: None if v is None else tf.convert_to_tensor(v),
                    (x, y, (weight, counts)),
                )
                with slowly():
                    loss, found = gradients(*batch)
            if session.readers.total(rows, "the rows of a step") > 0:
                mean = exchange.mean(found, np.int64(rows), names)
                if taken_by_all(session, exchange):
                    with slowly():
                        optimizer.apply(mean, variables)
            return float(loss) if loss is not None and share.first else None

        optimizers, remembers = [(optimizer, variables)], {"exchange": exchange}
        held, pairs = share.model.variables, list(share.pairs())
        session.keeps(TrainingState(held, optimizers, pairs, remembers, release=share.release))
        return share, step


def differentiated(
    objective: Objective, variables: list[keras.Variable]
) -> Callable[..., tuple[tf.Tensor, list[tf.Tensor]]]:
    """A compiled function of a batch: its loss, and the gradients of the variables."""
    import tensorflow as tf

    def gradients(x: Nest, y: Nest, weight: Weighted) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = objective(x, y, weight)
        found = tape.gradient(loss, [variable.value for variable in variables])
        return loss, [
            tf.zeros_like(variable.value) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(found, variables, strict=True)
        ]

    compiled: Callable[..., tuple[tf.Tensor, list[tf.Tensor]]] = tf.function(
        gradients, autograph=False, reduce_retracing=True
    )
    return compiled


def through(share: Share) -> Predictor:
    """Predictions by the ranks of a replica, which its first one holds."""
    import keras
    import tensorflow as tf

    from labkit.model_parallel.functional import mask_of, masked

    def forward(x: Nest) -> tuple[Nest, list[tf.Tensor | None], tf.Tensor]:
        y, total = share.predict(x), tf.zeros((), keras.config.floatx())
        for own in share.model.losses:  # the same on all ranks
            total += tf.reduce_sum(tf.cast(own, total.dtype))
        return y, [mask_of(each) for each in keras.tree.flatten(y)], total

    call = tf.function(forward, autograph=False, reduce_retracing=True)

    def predict(batches: Iterable[Batch]) -> Iterator[Predicted]:
        for x in batches:
            with share.uncounted():
                y, masks, penalty = call(keras.tree.map_structure(tf.convert_to_tensor, x))
                for each, mask in zip(keras.tree.flatten(y), masks, strict=True):
                    masked(each, mask)  # what compiled functions return has lost it
            yield (y, float(penalty)) if share.first else (None, 0.0)

    return predict


def collect(session: Session, share: Share, called: str) -> None:
    """Give all ranks the weights of all shares."""
    share.collect()
    for variable in session.model.variables:
        value = np.array(variable.numpy(), order="C")
        session.communicator.broadcast(value, what=f"the weights of the {called}s")
        variable.assign(value)
