"""Faults that tests plant in labkit's own code while it trains, each described as data.

A fault replaces one function or attribute of labkit, on the ranks, for one run. `hunt` runs a list
of faults in one job: each experiment must pass without a fault, and the equivalence check must
detect each fault.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from labkit import Experiment, compression
from labkit.strategies import AllReduce, Pipeline, TensorParallel

# Such a function gets the rank and the original function, and returns the replacement.
Around = Callable[[int, Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: The error that the fault causes.
        where: The replaced object: a module of labkit, and a dotted name in it.
        new: A function that makes the replacement from the rank and the original.
        shown_by: The experiment that shows the fault, a name of EXPERIMENTS.
        says: Words that the verdict must contain beside "failed".
        at: Words for the step and place that the verdict names.
    """

    name: str
    where: str
    new: Around
    shown_by: str = "plain"
    says: str = ""
    at: str = ""
    sample: bool = field(default=False, kw_only=True)


BASE: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 50, "test_rows": 10},
    "model_options": {"widths": [6, 6]},
    "batch_size": 20,
    "workers": 2,
    "learning_rate": 0.05,
}
VARIABLES = 6  # kernels and biases of three Dense layers
MOMENTUM = {"optimizer_options": {"momentum": 0.9}}


def lossy(compressor: compression.Compressor, **fields: Any) -> dict[str, Any]:
    return {"strategy": AllReduce("ring", compressor=compressor), **fields}


FEEDBACK = compression.ErrorFeedback(compression.TopK(0.1))
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "plain": {"strategy": AllReduce("ring"), **MOMENTUM},
    "three": {"strategy": AllReduce("ring"), "workers": 3},
    "adam": {"strategy": AllReduce("ring"), "optimizer": "adam"},
    "uneven": {"strategy": AllReduce("ring"), "batch_weights": (1, 4)},
    "memory": {"strategy": AllReduce("shared_memory")},
    "buckets": {"strategy": AllReduce("ring", schedule="overlap", bucket_bytes=400)},
    "priority": {"strategy": AllReduce("ring", schedule="priority")},
    "feedback": lossy(FEEDBACK),
    "feedback, uneven": lossy(FEEDBACK, batch_weights=(1, 4)),
    "feedback in buckets": {
        "strategy": AllReduce("ring", schedule="overlap", bucket_bytes=400, compressor=FEEDBACK)
    },
    "feedback by priority": {
        "strategy": AllReduce("ring", schedule="priority", compressor=FEEDBACK)
    },
    "dgc": lossy(compression.DGC(ratio=0.1, clip_norm=0.5)),
    "topk": lossy(compression.TopK(0.1)),
    "float16": lossy(compression.Float16()),
    "powersgd": lossy(compression.ErrorFeedback(compression.PowerSGD(1))),
    "qsgd": lossy(compression.QSGD()),
    "1f1b": {"strategy": Pipeline("1f1b", microbatches=3)},
    "zero bubble": {"strategy": Pipeline("zero_bubble", microbatches=3)},
    "replicas": {"strategy": Pipeline("gpipe", microbatches=2, stages=1)},
    "slices": {"strategy": TensorParallel()},
}


def experiment(name: str) -> Experiment:
    return Experiment(**BASE | EXPERIMENTS[name])


@contextmanager
def planted(fault: Fault, rank: int) -> Iterator[None]:
    """Install a fault, and restore the original afterwards."""
    from importlib import import_module

    module, _, path = fault.where.partition(":")
    holder: Any = import_module(f"labkit.{module}")
    *way, name = path.split(".")
    for step in way:
        holder = getattr(holder, step)
    own = vars(holder)[name]
    inside = own.fget if isinstance(own, property) else own
    new = fault.new(rank, inside)
    setattr(holder, name, property(new) if isinstance(own, property) else new)
    try:
        yield
    finally:
        setattr(holder, name, own)


def hunt(communicator: Any, faults: Sequence[Fault], cache: str) -> dict[str, dict[str, Any]]:
    """Return the verdict for each fault, and for each experiment without a fault."""
    import os
    from contextlib import nullcontext
    from pathlib import Path

    from labkit.worker import equivalence
    from labkit.worker.feed import read

    os.environ["LABKIT_CACHE"] = cache
    source = read(Experiment(**BASE), communicator)
    found: dict[str, dict[str, Any]] = {}
    wanted = [(name, None) for name in dict.fromkeys(fault.shown_by for fault in faults)]
    for name, fault in [*wanted, *((fault.shown_by, fault) for fault in faults)]:
        one = experiment(name)
        if communicator.rank == 0:  # remove cached verdicts, but keep the reference of one process
            shutil.rmtree(Path(cache) / "gates", ignore_errors=True)
        # Each run gets its own communicator, because a communicator keeps its schedules.
        ranks = communicator.split(0)
        with planted(fault, communicator.rank) if fault else nullcontext():
            verdict = equivalence.verify(one, ranks, source)
        ranks.close()
        found[fault.name if fault else f"without a fault: {name}"] = dict(verdict)
    return found


# --- what goes wrong ------------------------------------------------------------------------------


def after(change: Callable[..., Any]) -> Around:
    """Change what a function returns, given the rank, the returned value and the arguments."""

    def around(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            found = own(*given, **named)
            return change(rank, found, *given)

        return call

    return around


def before(change: Callable[..., Any]) -> Around:
    """Change the arguments of a function, given the rank and the original arguments."""

    def around(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            return own(*change(rank, *given), **named)

        return call

    return around


def in_buffer(change: Callable[[int, np.ndarray], None]) -> Around:
    """Change the buffer after its mean was computed."""

    def changed(rank: int, found: Any, self: Any, buffer: np.ndarray, *_: Any) -> Any:
        change(rank, buffer)
        return found

    return after(changed)


def nothing(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function by one that does nothing."""
    return lambda *given, **named: None


def at_step(number: int, change: Around) -> Around:
    """Apply a change only at one step of each bucket layout."""

    def around(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
        wrong, calls = change(rank, own), Counter[int]()

        def call(layout: Any, *given: Any) -> Any:
            calls[id(layout)] += 1
            is_then = (calls[id(layout)] - 1) // VARIABLES == number
            return (wrong if is_then else own)(layout, *given)

        return call

    return around


def on_rank(one: int, change: Around) -> Around:
    """Apply a change only on one rank."""
    return lambda rank, own: change(rank, own) if rank == one else own


def only_first(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
    """Let each object call the function only once."""
    done: set[int] = set()

    def call(self: Any, *given: Any) -> Any:
        if id(self) in done:
            return None
        done.add(id(self))
        return own(self, *given)

    return call


def zero_last(rank: int, buffer: np.ndarray) -> None:
    buffer[-1] = 0


def halve(rank: int, buffer: np.ndarray) -> None:
    buffer *= 0.5


def err(rank: int, buffer: np.ndarray) -> None:
    buffer[0] += 1e-6


def times_ranks(rank: int, found: Any, self: Any, buffer: np.ndarray, *_: Any) -> None:
    buffer *= self.size


def wrong_total(rank: int, found: float, *_: Any) -> float:
    return found + 1


def rows_are_one(rank: int, self: Any, number: int, arrays: Any, rows: Any, step: int) -> Any:
    return self, number, arrays, np.int64(1), step


def no_last_round(rank: int, rounds: Any, whose: int, length: int) -> Any:
    return list(rounds)[:-1], whose, length


def shorter_slot(rank: int, buckets: Any, *_: Any) -> Any:
    """End the first bucket an element early, so that one element is never packed."""
    from dataclasses import replace

    first = buckets[0]
    slot = first.slots[0]
    short = replace(slot, stop=slot.stop - 1)
    return [replace(first, slots=(short, *first.slots[1:]), stop=first.stop), *buckets[1:]]


def rolled(rank: int, means: list[np.ndarray], *_: Any) -> list[np.ndarray]:
    """Read each variable's mean one element too early."""
    return [np.roll(mean, 1) for mean in means]


def zeros_like(rank: int, means: list[np.ndarray], *_: Any) -> list[np.ndarray]:
    return [np.zeros_like(mean) for mean in means]


def shifted_seed(rank: int, plan: Any, *_: Any) -> Any:
    from dataclasses import replace

    return replace(plan, seed=plan.seed + rank)


def last_twice(rank: int, batches: list[np.ndarray], *_: Any) -> list[np.ndarray]:
    return [*batches[:-1], np.concatenate([batches[-1], batches[-1][:2]])]


def first_rows(rank: int, batches: list[np.ndarray], *_: Any) -> list[np.ndarray]:
    """Let rank 1 use rows of the first batch in each step."""
    return batches if rank == 0 else [batches[0][: len(batch)] for batch in batches]


def with_option(name: str, value: Any) -> Around:
    def changed(rank: int, optimizer: Any, *_: Any) -> Any:
        setattr(optimizer, name, value(getattr(optimizer, name)))
        return optimizer

    return after(changed)


def unlike(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
    """Let rank 1 keep its own initial weights, which differ from those of rank 0."""

    def broadcast(variables: Sequence[Any], communicator: Any) -> None:
        for variable in variables:
            if rank == 1 and "float" in str(variable.dtype):
                variable.assign(variable + 0.01)

    return broadcast


def spoil_slots(rank: int, found: Any, self: Any, *_: Any) -> Any:
    """Let rank 1 start with a different momentum from the others."""
    self.model.optimizer.build(self.model.trainable_variables)
    for variable in self.model.optimizer.variables[2:] if rank == 1 else []:
        variable.assign(variable + 0.01)
    return found


def halved_means(rank: int, means: list[Any], *_: Any) -> list[Any]:
    return [None if mean is None else mean * 0.5 for mean in means]


def without_last(rank: int, means: list[Any], *_: Any) -> list[Any]:
    """Lose the last element between the exchange and the optimizer."""
    import tensorflow as tf

    last = tf.concat([tf.reshape(means[-1], [-1])[:-1], tf.zeros([1], means[-1].dtype)], 0)
    return [*means[:-1], tf.reshape(last, means[-1].shape)]


def doubled_residual(rank: int, self: Any, tensor: Any, state: Any) -> Any:
    residual, inner = state
    return self, tensor, (2 * residual, inner)


def forgets(place: int) -> Around:
    """Reset one part of a compressor's state before each step."""

    def changed(rank: int, self: Any, tensor: Any, state: Any) -> Any:
        import tensorflow as tf

        parts = list(state)
        parts[place] = tf.zeros_like(parts[place])
        return self, tensor, tuple(parts)

    return before(changed)


def keeps_nothing(place: int) -> Around:
    """Lose one part of a compressor's state after each step."""

    def around(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(self: Any, tensor: Any, state: Any) -> Any:
            import tensorflow as tf

            mean, sent, after = yield from own(self, tensor, state)
            parts = list(after)
            parts[place] = tf.zeros_like(parts[place])
            return compression.Reduced(mean, sent, tuple(parts))

        return reduce

    return around


def keeps_velocity(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out momentum factor masking, so that sent elements keep their velocity."""

    def reduce(self: Any, tensor: Any, state: Any) -> Any:
        velocity, _ = self.accumulate(tensor, *state[1:])
        mean, sent, (key, _, waiting, limit) = yield from own(self, tensor, state)
        return compression.Reduced(mean, sent, (key, velocity, waiting, limit))

    return reduce


def mean_error(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same error to the mean on all ranks."""

    def reduce(self: Any, tensor: Any, state: Any) -> Any:
        mean, sent, state = yield from own(self, tensor, state)
        return compression.Reduced(mean + 1e-6, sent, state)

    return reduce


def rolled_tensors(rank: int, tensors: list[Any], *_: Any) -> list[Any]:
    import tensorflow as tf

    return [tf.roll(tf.reshape(tensor, [-1]), 1, 0) for tensor in tensors]


def dropped_payload(rank: int, payloads: list[list[Any]], *_: Any) -> list[list[Any]]:
    """Use rank 0's payload for all ranks."""
    return [[own[0]] * len(own) for own in payloads]


def zero_packed(rank: int, found: Any, self: Any, number: int, *_: Any) -> Any:
    """Leave one element of a bucket unpacked."""
    self.gradients(number)[-2] = 0
    return found


def zero_first_input(rank: int, x: Any, *_: Any) -> Any:
    return x * 0.999


def other_targets(rank: int, found: Any, *_: Any) -> Any:
    """Give rows the targets of other rows."""
    y, weight = found
    return y[::-1], weight


def equal_share(rank: int, share: float, self: Any, number: int) -> float:
    return 1 / 3


def skip_weights(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
    """Compute and then lose the weight gradients of the first micro-batch."""

    def add(self: Any, number: int, found: Any) -> Any:
        return own(self, number, [each * 0 for each in found] if number == 0 else found)

    return add


def stale_gradients(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
    """Apply the gradients of the previous step in each step."""
    kept: dict[int, Any] = {}

    def take(self: Any) -> Any:
        found = own(self)
        last = kept.get(id(self), [each * 0 for each in found])
        kept[id(self)] = found
        return last

    return take


def swapped(rank: int, found: Any, self: Any) -> Any:
    """Swap the collected weights of two layers of equal shape."""
    from labkit.model_parallel.weights import put

    shapes = [tuple(variable.shape) for variable in self._variables]
    first = shapes.index((6,))
    second = shapes.index((6,), first + 1)
    one, two = (self._variables[place] for place in (first, second))
    left, right = one.numpy() + 0, two.numpy() + 0
    put(one, right)
    put(two, left)
    return found


def own_gradients(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
    """Let replicas apply their own gradients instead of the mean."""

    def mean(self: Any, gradients: Any, *given: Any, **named: Any) -> Any:
        own(self, gradients, *given, **named)
        return list(gradients)

    return mean


def no_sum_backward(rank: int, own: Callable[..., Any]) -> Callable[..., Any]:
    def total(self: Any, x: Any, way: str) -> Any:
        return x if way == "backward" else own(self, x, way)

    return total


FAULTS: list[Fault] = [
    # These faults change the mean of gradients.
    Fault(
        "an element of the sum is dropped",
        "communicator.communicator:Communicator.mean",
        in_buffer(zero_last),
        sample=True,
        at="step 0: mean of mlp/dense/kernel (bucket 0), 0 instead of",
    ),
    Fault(
        "the mean is halved",
        "communicator.communicator:Communicator.mean",
        in_buffer(halve),
        at="step 0: mean of",
    ),
    Fault(
        "a sum instead of a mean",
        "communicator.communicator:Communicator.mean",
        after(times_ranks),
        at="step 0: mean of",
    ),
    Fault(
        "the wrong n",
        "communicator.communicator:Communicator.total",
        after(wrong_total),
        at="step 0: mean of",
    ),
    Fault(
        "an error after the mean",
        "communicator.communicator:Communicator.mean",
        in_buffer(err),
        at="step 0: mean of mlp/dense_2/bias (bucket 0)",
    ),
    Fault(
        "an error after the mean on one rank",
        "communicator.communicator:Communicator.mean",
        on_rank(1, in_buffer(err)),
        says="differs between ranks 0 and 1",
        sample=True,
        at="step 0: mean of mlp/dense_2/bias on rank 1 (bucket 0)",
    ),
    Fault(
        "a round is missing",
        "communicator.reductions:plan",
        before(no_last_round),
        "three",
        at="step 0: round of mlp/dense/kernel (round 4, bucket 0)",
    ),
    Fault(
        "the weights of rows are ignored",
        "exchange.bucket_layout:BucketLayout.pack",
        before(rows_are_one),
        "uneven",
    ),
    Fault(
        "a bucket ends an element early",
        "exchange.bucket_layout:pack",
        after(shorter_slot),
        "buckets",
        at="step 0: bucket of mlp/dense_2/bias (bucket 0)",
    ),
    Fault(
        "the wrong slice is read",
        "exchange.bucket_layout:BucketLayout.mean",
        after(rolled),
        at="step 0: bucket of mlp/dense_2/bias (bucket 0)",
    ),
    Fault(
        "the wrong slice is read in shared memory",
        "exchange.bucket_layout:BucketLayout.mean",
        after(rolled),
        "memory",
    ),
    Fault(
        "an element is not packed",
        "exchange.bucket_layout:BucketLayout.pack",
        after(zero_packed),
        at="step 0: bucket of mlp/dense_2/bias (bucket 0), 0 instead of",
    ),
    Fault(
        "gradients of the first step are sent for ever",
        "exchange.bucket_layout:Packing.__call__",
        only_first,
        at="step 1: bucket of",
    ),
    Fault(
        "one rank skips a step",
        "exchange.bucket_layout:BucketLayout.mean",
        on_rank(1, at_step(3, after(zeros_like))),
        says="differs between ranks 0 and 1",
        at="step 3: bucket of mlp/dense_2/bias on rank 1",
    ),
    Fault(
        "all ranks skip a step",
        "exchange.bucket_layout:BucketLayout.mean",
        at_step(19, after(zeros_like)),
        at="step 19: bucket of",
    ),
    # These faults change the data, the initial weights or the optimizer.
    Fault(
        "one rank's seed of rows", "worker.feed:plan_of", after(shifted_seed), at="step 0: batch of"
    ),
    Fault("the last batch is doubled", "common.rows:BatchPlan.local", after(last_twice)),
    Fault(
        "one rank sees the first rows for ever",
        "common.rows:BatchPlan.local",
        after(first_rows),
        at="step 1: batch of",
    ),
    Fault(
        "the learning rate is scaled twice",
        "keras.optimizer:view_of",
        with_option("learning_rate", lambda rate: 2 * rate),
        at="step 0: optimizer of",
    ),
    Fault(
        "one rank's momentum is forgotten",
        "keras.optimizer:view_of",
        on_rank(1, with_option("momentum", lambda momentum: 0.0)),
        at="step 1: optimizer of mlp/dense_2/bias on rank 1",
    ),
    Fault(
        "one rank's gradients are a little too large",
        "keras.whole_batch:WholeBatch.compiled_loss",
        on_rank(1, after(lambda rank, loss, *_: loss * (1 + 1e-5))),
        at="step 0: gradient of mlp/dense_2/bias on rank 1",
    ),
    Fault(
        "the momentum is forgotten",
        "keras.optimizer:view_of",
        with_option("momentum", lambda momentum: 0.0),
        at="step 1: optimizer of",
    ),
    Fault(
        "a slot of the optimizer is not synchronised",
        "keras.replicas:Synchronize.on_train_begin",
        after(spoil_slots),
        "adam",
        says="differs between ranks 0 and 1 after a step",
        at="step 0: optimizer of mlp/dense_2/bias on rank 1",
    ),
    Fault(
        "the initial weights are broadcast to nobody",
        "keras.replicas:broadcast",
        unlike,
        at="step 0: initial weights of mlp/dense_2/bias on rank 1",
    ),
    Fault(
        "the last step of an epoch is not applied",
        "exchange.priority:PriorityTraining.update_all",
        nothing,
        "priority",
        at="step 20: optimizer of mlp/dense_2/bias, ",
    ),
    # Compressed gradients.
    Fault(
        "compressed means are halved on their way to the optimizer",
        "exchange.exchange:Exchange.mean",
        after(halved_means),
        "feedback",
        says="the applied gradient of",
        sample=True,
    ),
    Fault(
        "compressed means lack their last element on their way to the optimizer",
        "exchange.exchange:Exchange.mean",
        after(without_last),
        "feedback",
        says="the applied gradient of",
    ),
    Fault(
        "compressed means are halved on their way to a layer's optimizer",
        "exchange.exchange:Exchange.wait",
        after(halved_means),
        "feedback by priority",
        says="the applied gradient of",
    ),
    Fault(
        "means in halves are halved on their way to the optimizer",
        "exchange.exchange:Exchange.mean",
        after(halved_means),
        "float16",
        says="the applied gradient of",
    ),
    Fault(
        "means of low rank are halved on their way to the optimizer",
        "exchange.exchange:Exchange.mean",
        after(halved_means),
        "powersgd",
        says="the applied gradient of",
    ),
    Fault(
        "the wrong slice of a compressed bucket is read",
        "exchange.bucket_layout:BucketLayout.mean",
        after(rolled),
        "feedback in buckets",
        says="the applied gradient of",
    ),
    Fault(
        "an element is not packed for the compressor",
        "exchange.bucket_layout:BucketLayout.pack",
        after(zero_packed),
        "topk",
        says="the exchanged gradient of",
    ),
    Fault(
        "the weights of rows are ignored by a compressor",
        "exchange.bucket_layout:BucketLayout.pack",
        before(rows_are_one),
        "feedback, uneven",
        says="the exchanged gradient of",
    ),
    Fault(
        "the residual is lost",
        "compression.wrappers:ErrorFeedback.reduce",
        keeps_nothing(0),
        "feedback",
        says="a residual is not the gradient",
    ),
    Fault(
        "the residual is not added",
        "compression.wrappers:ErrorFeedback.reduce",
        forgets(0),
        "feedback",
        says="a residual is not the gradient",
    ),
    Fault(
        "the residual is added twice",
        "compression.wrappers:ErrorFeedback.reduce",
        before(doubled_residual),
        "feedback",
        says="a residual is not the gradient",
    ),
    Fault(
        "DGC forgets what waits",
        "compression.dgc:DGC.reduce",
        keeps_nothing(2),
        "dgc",
        says="a residual is not the gradient",
        sample=True,
    ),
    Fault(
        "DGC forgets its momentum",
        "compression.dgc:DGC.reduce",
        forgets(1),
        "dgc",
        says="a residual is not the gradient",
    ),
    Fault(
        "DGC does not mask the momentum of what was sent",
        "compression.dgc:DGC.reduce",
        keeps_velocity,
        "dgc",
        says="a residual is not the gradient",
    ),
    Fault(
        "an error after the mean of sparse gradients",
        "compression.sparsification:Sparse.reduce",
        mean_error,
        "topk",
        says="not the mean of the values that ranks sent",
    ),
    Fault(
        "sparse sums are an element off",
        "exchange.compressed:CompressedMean._sum",
        after(rolled_tensors),
        "topk",
        says="not the mean of the values that ranks sent",
    ),
    Fault(
        "sums in halves are a fiftieth too large",
        "exchange.compressed:CompressedMean._mean",
        after(lambda rank, tensors, *_: [each * 1.02 for each in tensors]),
        "float16",
        says="not the mean of the values that ranks sent",
    ),
    Fault(
        "one rank's payload counts for all",
        "exchange.compressed:CompressedMean._gather",
        after(dropped_payload),
        "qsgd",
        says="not the mean of the values that ranks sent",
    ),
    Fault(
        "one rank applies other compressed means",
        "exchange.exchange:Exchange.mean",
        on_rank(1, after(lambda rank, means, *_: [each * (1 + 1e-15) for each in means])),
        "feedback",
    ),
    # These faults change models in parts.
    Fault(
        "rows of a micro-batch have the targets of others",
        "model_parallel.stages.stage:MicroBatches.targets",
        after(other_targets),
        "1f1b",
    ),
    Fault(
        "unequal micro-batches count the same",
        "model_parallel.stages.stage:MicroBatches.share",
        after(equal_share),
        "1f1b",
    ),
    Fault(
        "a micro-batch's weight gradients are lost",
        "model_parallel.stages.stage:Stage._add",
        skip_weights,
        "zero bubble",
        at="step 0: gradient of mlp/dense/bias on rank 0",
    ),
    Fault(
        "stages apply stale gradients",
        "model_parallel.stages.stage:Stage.take_gradients",
        stale_gradients,
        "1f1b",
        at="step 0: gradient of",
    ),
    Fault(
        "a message between stages arrives changed",
        "model_parallel.stages.passing:StageMessages.receive",
        after(zero_first_input),
        "1f1b",
    ),
    Fault(
        "the weights of two stages are swapped",
        "model_parallel.weights:WholeWeights.collect",
        after(swapped),
        "1f1b",
    ),
    Fault(
        "replicas of a stage apply their own gradients",
        "exchange.exchange:Exchange.mean",
        own_gradients,
        "replicas",
        says="differs between ranks 0 and 1",
    ),
    Fault(
        "slices do not add up going backward",
        "model_parallel.messages:Link._sum",
        no_sum_backward,
        "slices",
    ),
]
