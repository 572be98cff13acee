"""Tensor parallelism: each rank has some units of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import PositiveInt, field_validator

from labkit.communicator import ALGORITHMS, refuse_unmetered
from labkit.errors import InvalidInput
from labkit.memory import by_kind
from labkit.strategies.base import Predictor, Question, Session, Strategy
from labkit.strategies.parts import AROUND, refuse_around, refuse_in_parts

if TYPE_CHECKING:
    from labkit.communicator import Communicator
    from labkit.slices import Sliced

# Optimizers that look at a whole variable at once, of which a slice has only a part.
WHOLE = ("adafactor", "lamb", "muon")


class TensorParallel(Strategy):
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
    gathers it at the end, and after each epoch where callbacks of the user's own may look at it.
    In between it holds its slices alone: weights, gradients and optimizer state.

    Source: M. Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053. Differs from it: convolutions
    are cut too; parts may differ by one unit; positions are cut as words are.
    """

    slices: PositiveInt | None = None
    algorithm: str = "auto"

    @property
    def exact(self) -> bool:
        """Sums are only taken in another order."""
        return True

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, value: str) -> str:
        allowed = ("auto", *ALGORITHMS)
        if value not in allowed:
            raise ValueError(f"algorithm={value!r} is not known; allowed: {', '.join(allowed)}")
        return value

    def check(self, experiment: Question) -> None:
        """Refuse what does not fit together, before any rank starts."""
        workers, slices = experiment.workers, self.ranks(experiment.workers)
        refuse_unmetered(self.algorithm, experiment.network)
        refuse_in_parts(experiment)
        if experiment.capacities is not None or experiment.feed == "scatter":
            raise InvalidInput(
                "capacities and feed='scatter' divide a batch among all workers, but the slices of "
                "a model work on the same rows; leave both out"
            )
        if workers % slices:
            allowed = [n for n in range(1, workers + 1) if workers % n == 0]
            raise InvalidInput(
                f"slices={slices} does not divide workers={workers}; "
                f"allowed: {', '.join(map(str, allowed))}"
            )
        if experiment.widest is not None and experiment.widest < slices:
            allowed = [n for n in range(1, experiment.widest + 1) if workers % n == 0]
            raise InvalidInput(
                f"slices={slices} are more than the {experiment.widest} units of the widest layer; "
                f"allowed with workers={workers}: {', '.join(map(str, allowed))}"
            )
        _refuse_norms(experiment.optimizer, experiment.optimizer_options)

    def ranks(self, workers: int) -> int:
        """Of one replica."""
        return self.slices or workers

    def readers(self, communicator: Communicator) -> Communicator:
        """The ranks of one place in all replicas: they divide the batch among them."""
        return communicator.split(communicator.rank % self.ranks(communicator.size))

    def train(self, session: Session) -> None:
        """Steps on slices, an optimizer a rank."""
        sliced, step = self.start(session)
        steps = count()

        def counted(x: Any, y: Any, weight: Any) -> float | None:
            next(steps)
            return step(x, y, weight)

        session.loop(counted, lambda: collect(session, sliced), through(sliced))
        session.layers = sliced.describe(max(1, next(steps)))
        workers = session.communicator.size
        rows = -(-session.experiment.batch_size // (workers // self.ranks(workers)))
        used, plain = session.model.optimizer, session.optimizer()
        with sliced.uncounted():
            session.memory = by_kind(session.model, sliced.model, used, plain, rows, look=True)

    def predictor(self, model: Any, replica: Communicator) -> Predictor:
        """By all slices, the same rows."""
        from labkit.slices import Sliced

        return through(Sliced(model, replica, self._resolved(replica)))

    def start(self, session: Session) -> tuple[Sliced, Callable[[Any, Any, Any], float | None]]:
        """This rank's slice of the session's model, and the step that trains it."""
        from labkit.exchange import Exchange
        from labkit.slices import Sliced

        optimizer = session.optimizer()
        given = {name: getattr(optimizer, name, None) for name in ("clipnorm", "global_clipnorm")}
        _refuse_norms(type(optimizer).__name__.lower(), given)
        refuse_around({name: getattr(optimizer, name, None) for name in AROUND})
        session.compile(optimizer)
        slices = self.ranks(session.communicator.size)
        replica = session.part(session.communicator.rank // slices)
        algorithm = self._resolved(session.communicator)
        sliced = Sliced(session.model, replica, algorithm, _of_logits(session.model))
        variables = list(sliced.model.trainable_variables)
        gradients = _gradients(session.model, sliced, variables)
        exchange = Exchange(session.readers, algorithm)
        names = [variable.path for variable in variables]

        def step(x: Any, y: Any, weight: Any) -> float | None:
            import tensorflow as tf

            sliced.release()
            rows = len(x)
            loss, found = None, [tf.zeros_like(variable.value) for variable in variables]
            if rows:  # as many on all slices of a replica
                loss, found = gradients(*(_tensor(each) for each in (x, y, weight)))
            if session.readers.total(rows, "the rows of a step") > 0:
                optimizer.apply(exchange.mean(found, np.int64(rows), names), variables)
            return float(loss) if loss is not None and replica.rank == 0 else None

        return sliced, step

    def _resolved(self, communicator: Communicator) -> str:
        if self.algorithm != "auto":
            return self.algorithm
        return "mpi" if communicator.network is None else "ring"


def through(sliced: Sliced) -> Predictor:
    """Predictions by the slices of a replica, which its first rank holds."""
    import keras
    import tensorflow as tf

    def forward(x: Any) -> tuple[Any, Any]:
        y, total = sliced.predict(x), tf.zeros((), keras.config.floatx())
        for own in sliced.model.losses:  # the same on all slices
            total += tf.reduce_sum(tf.cast(own, total.dtype))
        return y, total

    call = tf.function(forward, autograph=False, reduce_retracing=True)

    def predict(batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
        for x in batches:
            with sliced.uncounted():
                y, penalty = call(keras.tree.map_structure(tf.convert_to_tensor, x))
            yield (y, float(penalty)) if sliced.first else (None, 0.0)

    return predict


def collect(session: Session, sliced: Sliced) -> None:
    """Give all ranks the weights of all slices."""
    sliced.collect()
    for variable in session.model.variables:
        value = np.array(variable.numpy(), order="C")
        session.communicator.broadcast(value, what="the weights of the slices")
        variable.assign(value)


def _gradients(model: Any, sliced: Sliced, variables: list[Any]) -> Callable[..., Any]:
    """A compiled function of a batch: its loss, and the gradients of the slice."""
    import tensorflow as tf

    from labkit.slices import cross_entropy

    def objective(x: Any, y: Any, weight: Any) -> Any:
        predicted = sliced.model(x, training=True)
        if sliced.link is None:
            loss = model._compile_loss(y, predicted, weight)
        else:
            each = cross_entropy(sliced.link, model.output_shape[-1], y, predicted)
            loss = tf.reduce_mean(each if weight is None else each * _beside(weight, each))
        return tf.add_n([loss, *(tf.cast(own, loss.dtype) for own in sliced.model.losses)])

    @tf.function(autograph=False, reduce_retracing=True)  # type: ignore[untyped-decorator]
    def gradients(x: Any, y: Any, weight: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = objective(x, y, weight)
        found = tape.gradient(loss, [variable.value for variable in variables])
        return loss, [
            tf.zeros_like(variable.value) if gradient is None else tf.convert_to_tensor(gradient)
            for gradient, variable in zip(found, variables, strict=True)
        ]

    return gradients  # type: ignore[no-any-return]


def _beside(weight: Any, each: Any) -> Any:
    """Sample weights (rows,) or (rows, …) in the shape of the losses (rows, …)."""
    import tensorflow as tf

    weight = tf.cast(weight, each.dtype)
    if weight.shape.rank > each.shape.rank:
        return weight[..., 0]
    return tf.reshape(
        weight, tf.concat([tf.shape(weight), [1] * (each.shape.rank - weight.shape.rank)], 0)
    )


def _of_logits(model: Any) -> bool:
    """Whether the loss is the mean sparse cross-entropy of scores, which slices share."""
    import keras

    loss = model.loss
    return (
        type(loss) is keras.losses.SparseCategoricalCrossentropy
        and loss.from_logits
        and loss.ignore_class is None
        and loss.reduction == "sum_over_batch_size"
        and not model._compile_config.config.get("loss_weights")
    )


def _tensor(value: Any) -> Any:
    import tensorflow as tf

    return None if value is None else tf.convert_to_tensor(value)


def _refuse_norms(optimizer: str, options: Any) -> None:
    if optimizer in WHOLE:
        raise InvalidInput(
            f"optimizer={optimizer!r} looks at whole variables, but a slice has a part of each; "
            "use one that works by element, such as 'sgd' or 'adam'"
        )
    for name in ("clipnorm", "global_clipnorm"):
        if options.get(name) is not None:
            raise InvalidInput(
                f"{name}={options[name]} needs the norm of whole gradients, but a slice has a part "
                "of each; use clipvalue"
            )
