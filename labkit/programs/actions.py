"""The actions that a program yields; the runtime executes each one and sends back an answer.

Each worker and each server runs one program, which is a Python generator. Labkit has two runtimes,
and each runtime can execute every program. One runtime uses MPI ranks and the wall clock
(`labkit.programs.mpi_runtime`). The other runtime uses one process and a virtual clock
(`labkit.programs.virtual_runtime`). A program never reads the time. A program therefore behaves the
same on wall clock and virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from labkit.common.state import record
from labkit.network import ComputeTime, Fault, Slowdown
from labkit.network.compute_time import uniform_scalar

if TYPE_CHECKING:
    from labkit.compression import Compressor


# The type `Vector` is a flat array with the dtype of the weights. Programs never modify a `Vector`
# in place.
Vector: TypeAlias = NDArray[Any]


@record()
@dataclass(frozen=True)
class Gradient:
    """The mean gradient of a worker's next batch.

    Attributes:
        values: Gradient with respect to all weights, as one flat vector.
        rows: Number of samples in the batch. For an empty batch, `rows` is 0 and all `values` are
            0.
        loss: Loss of the batch, computed with the weights for which the gradient was requested.
        step: Number of batches for which the worker computed gradients before this one.
        last: Whether training ends after this gradient.
        before: Gradients of a backward pass with respect to its inputs. There is one gradient for
            each replica member that sent an input.
    """

    values: Vector
    rows: int
    loss: float
    step: int
    last: bool = False
    before: tuple[Vector, ...] = ()


class Place(NamedTuple):
    """A pass of one pipeline stage or one machine over a batch.

    Attributes:
        worker: Number of the replica, which is also the number of its worker.
        member: Number of the stage or machine in the replica, counted from 0.
        turn: Index of the pass within one batch, counted from 0.
        share: Fraction of the replica's total computation that belongs to this pass.
    """

    worker: int
    member: int
    turn: int = 0
    share: float = 0.0


@record()
@dataclass(frozen=True)
class Passed:
    """The outputs of one replica member (stage or machine) from a forward pass over a batch.

    Attributes:
        values: Outputs as flat vectors, one for each replica member that receives outputs.
        step: Number of batches that the replica processed before this one.
    """

    values: tuple[Vector, ...]
    step: int


@record()
@dataclass(frozen=True, eq=False)
class Message:
    """A message from one program to another.

    Attributes:
        source: Program number of the sender. Workers have the numbers 0, 1, …, and servers have the
            next numbers.
        values: Payload as a flat vector; None for a message without payload.
        version: Version of the weights, which is the number of updates applied to them.
        rows: Number of samples from which the gradient in the message was computed.
        step: Number of the training step of the worker that sends or receives the message.
        ends: Whether training ends after the gradient in this message. In an answer, `ends` means
            that no work is left for the worker. A message without values may use `ends` to report a
            failed worker.
        wants: Whether the sender expects an answer.
        sent, delivered: Times at which the message was sent and delivered, in s.
        held: Seconds from the arrival of a request to the answer.
    """

    source: int
    values: Vector | None = None
    version: int = 0
    rows: int = 0
    step: int = 0
    ends: bool = False
    sent: float = 0.0
    delivered: float = 0.0
    held: float = 0.0
    wants: bool = True


@dataclass(frozen=True)
class Compute:
    """Compute the gradient of a worker's next batch at given weights; the answer is a `Gradient`.

    Attributes:
        weights: Weights at which the gradient is computed, as a flat vector.
        soft: Soft targets (see `Predict`) as a flat vector, which the loss uses in addition to the
            labels.
        share: Coefficient of the soft targets' loss in the total loss.
        penalty: Value of loss terms whose gradient is computed elsewhere, for example by a server.
            The value `penalty` is added only to the recorded loss, not to the loss that is
            differentiated.
    """

    weights: Vector
    soft: Vector | None = None
    share: float = 0.0
    penalty: float = 0.0


@dataclass(frozen=True)
class Curvature:
    """Compute the curvature of the loss of a worker's first batch along blocks of weights.

    The answer is a `Gradient` whose values contain one row per block, flattened. Each row is the
    product of the Hessian and a vector. The vector is ±1 in one block of weights and 0 elsewhere.

    Attributes:
        weights: Weights at which the curvature is computed, as a flat vector.
        ends: Boundaries of the blocks, as indices into the flat weights; n blocks have n + 1
            boundaries.
    """

    weights: Vector
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Predict:
    """An action that predicts soft targets for a batch of any worker.

    The answer is a flat vector of soft targets, which a later action `Compute` reads.

    Attributes:
        worker: Number of the worker whose batch is the input of the prediction.
        step: Number of the batch, counted separately for each worker.
        weights: Weights of the model that predicts, as a flat vector.
    """

    worker: int
    step: int
    weights: Vector


@dataclass(frozen=True)
class Forward:
    """A request for a forward pass through one part of a replica.

    Attributes:
        place: The replica, its member (stage or machine), and the number of this member's pass.
        weights: Weights that belong to the replica member, as a flat vector.
        values: Inputs of the pass, which are outputs of other members; see
            `labkit.programs.roles.Pass`.
    """

    place: Place
    weights: Vector
    values: tuple[Vector, ...]


@dataclass(frozen=True)
class Backward:
    """Run the backward pass that belongs to an earlier forward pass; the answer is a `Gradient`.

    The answer to a replica member's last backward pass contains the weight gradient. The last
    answer also contains the number of samples and the loss.

    Attributes:
        place: The replica, its member (stage or machine), and the number of this member's pass.
        values: Gradients of the member's outputs, one for each replica member that received an
            output.
    """

    place: Place
    values: tuple[Vector, ...]


@dataclass(frozen=True)
class Update:
    """Apply a gradient with the optimizer to the weights that this program stores.

    The answer is the new weights as a flat vector.

    Attributes:
        gradient: Gradient of the weights that this program stores, as a flat vector.
        of: Messages that delivered the gradients of this update; the event log records the
            messages.
        rate: Factor by which the optimizer's learning rate is multiplied in this update.
    """

    gradient: Vector
    of: tuple[Message, ...] = ()
    rate: float = 1.0


@dataclass(frozen=True)
class Code:
    """Call a function that encodes or decodes a payload; the answer is its return value."""

    call: Callable[[], Vector]


@dataclass(frozen=True)
class Drop:
    """Record that a server ignores a gradient, because it is too late or its batch is empty."""

    message: Message


@dataclass(frozen=True)
class Send:
    """Send a message to another program; the sender continues without waiting for delivery.

    Attributes:
        to: Program number of the receiver.
        message: Message to send.
        answers: The earlier message that `message` answers, or None if `message` is not an answer.
    """

    to: int
    message: Message
    answers: Message | None = None


@record()
@dataclass(frozen=True)
class Receive:
    """Receive the next message from the program `source`, or from any program if it is None."""

    source: int | None = None


@record()
@dataclass(frozen=True)
class AllReduceAction:
    """Average the workers' gradients, weighted by sample counts; the answer is a `Gradient`.

    Attributes:
        gradient: Gradient of this worker, or another vector to be averaged.
        algorithm: Name of the allreduce algorithm in `labkit.schedules.ALLREDUCE`.
        compressor: Compressor of the payload; None if the payload is sent uncompressed.
        fragment: Number of the fragment (a part of the weights) to which the vector belongs. Error
            feedback of compression is stored separately for each fragment of the weights.
    """

    gradient: Gradient
    algorithm: str
    compressor: Compressor | None = None
    fragment: int = 0


@dataclass(frozen=True)
class Begin:
    """Start an allreduce that runs during this worker's computation; only one may run at a time."""

    allreduce: AllReduceAction


@dataclass(frozen=True)
class Join:
    """Wait for the allreduce that `Begin` started; the answer is the mean gradient."""


@dataclass(frozen=True)
class States:
    """Request a worker's optimizer slots and layers' moving statistics as one flat vector."""


@dataclass(frozen=True)
class Adopt:
    """Replace the weights that this worker stores; the answer is the new weights.

    Attributes:
        weights: New weights, as a flat vector.
        states: New optimizer slots and moving statistics, see `States`; None if they stay
            unchanged.
    """

    weights: Vector = field(repr=False)
    states: Vector | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Forget:
    """Reset this worker's optimizer: its slots and its step counter."""


@dataclass(frozen=True)
class RestartPoint:
    """Mark a point at which this program can restart after a checkpoint is loaded.

    Attributes:
        state: Values of the program's variables (except its `Roles`) at this restart point.
    """

    state: Any = field(repr=False)


@dataclass(frozen=True)
class Wait:
    """Pause the program for a number of seconds."""

    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """Report this program's weights at the end of an epoch, so that they can be evaluated."""

    epoch: int
    weights: Vector = field(repr=False)


Computes: TypeAlias = Compute | Forward | Backward
Action: TypeAlias = (
    Computes | Curvature | Predict | Update | Code | Drop | Send | Receive | Wait | Snapshot
) | (AllReduceAction | Begin | Join | States | Adopt | Forget | RestartPoint)
Program: TypeAlias = Generator[Action, Any, None]


@dataclass(frozen=True)
class TimingModel:
    """The durations of computations, updates and delays in one run on the virtual clock.

    Attributes:
        compute: Compute time of a worker that has no slowdown.
        slow: Mapping from the number of each slow worker to its slowdown.
        seed: Seed of the random durations.
        measured: Measured seconds per gradient in this process; used only if `compute` has no fixed
            time.
        update: Seconds that a server needs for one update.
        later: Additional delays of gradient messages, in s; each key is a pair (worker, step).
        faults: Injected faults. A fault that slows down or pauses a worker changes the worker's
            compute times.
    """

    compute: ComputeTime
    slow: Mapping[int, Slowdown]
    seed: int
    measured: float = 0.0
    update: float = 0.0
    later: Mapping[tuple[int, int], float] = field(default_factory=dict)
    faults: Sequence[Fault] = ()

    @property
    def even(self) -> bool:
        """Whether each worker has the same compute time in all of its training steps."""
        calm = all(
            slowdown.distribution == "constant" and slowdown.pause is None
            for slowdown in self.slow.values()
        )
        return calm and self.compute.even and not (self.later or self.faults)

    def computed(self, worker: int, step: int, start: float, share: float = 1.0) -> float:
        """Return the end time in s of a computation that takes `share` of a full step's work."""
        seconds = share * self.compute.of(worker, step, self.seed, self.measured)
        for fault in self.faults:
            if fault.rank == worker and fault.hits(step):
                seconds *= fault.factor or 1.0
                start += fault.seconds or 0.0
        slow = self.slow.get(worker)
        if slow is None:
            return start + seconds
        factor = slow.factor(uniform_scalar(self.seed, worker, step))
        return slow.resumes(start, start + factor * seconds)

    def updated(self, server: int, start: float) -> float:
        """Return the end time of an update that a server starts at the time `start`."""
        return start + self.update

    def late(self, to: int, message: Message) -> float:
        """Return the injected delay of a message in s, which is added to the network's delay."""
        if not self.later or message.values is None:
            return 0.0
        return self.later.get((message.source, message.step), 0.0)
