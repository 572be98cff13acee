"""The actions of programs: a program yields an action, and receives its answer on completion.

A program is a generator, one per worker and per server. Two runtimes execute the same generators:
MPI ranks on the wall clock (`labkit.programs.mpi_runtime`), and one process on the virtual clock
(`labkit.programs.virtual_runtime`). A program never reads the time; therefore both runtimes give
the same behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from labkit.common.state import record

if TYPE_CHECKING:
    from labkit.compression import Compressor

# A flat vector of the weights' dtype; programs never modify a vector in place.
Vector: TypeAlias = NDArray[Any]


@record()
@dataclass(frozen=True)
class Gradient:
    """The mean gradient of a worker's next batch.

    Attributes:
        values: Gradient with respect to all weights, as one flat vector.
        rows: Number of samples in the batch; for an empty batch, 0, and `values` are 0.
        loss: Loss of the batch at the weights of the request.
        step: Number of batches that the worker computed before this one.
        last: Whether training ends after this gradient.
        before: Gradients of the inputs of a backward pass, one per member that sent an input.
    """

    values: Vector
    rows: int
    loss: float
    step: int
    last: bool = False
    before: tuple[Vector, ...] = ()


class Place(NamedTuple):
    """The part of a model-parallel replica that one member of the replica computes.

    Attributes:
        worker: Number of the replica.
        member: Number of the member in the replica, from 0: a stage, or a machine of a grid.
        turn: Number of the member's pass over the batch, from 0.
        share: Fraction of the replica's computation that this pass takes.
    """

    worker: int
    member: int
    turn: int = 0
    share: float = 0.0


@record()
@dataclass(frozen=True)
class Passed:
    """The outputs of a replica member for the replica's next batch.

    Attributes:
        values: Outputs as flat vectors, one per receiving member.
        step: Number of batches that the replica computed before this one.
    """

    values: tuple[Vector, ...]
    step: int


@record()
@dataclass(frozen=True, eq=False)
class Message:
    """A message from one program to another.

    Attributes:
        source: Number of the sender: workers are 0, 1, …; servers follow.
        values: Payload as a flat vector; None for a message without payload.
        version: Version of the weights, as the number of updates that they have received.
        rows: Number of samples from which a gradient was computed.
        step: Step of the worker that sends or receives the message.
        ends: In a gradient: training ends. In an answer: no work is left. In a message without
            values that wants no answer: the worker has failed.
        wants: Whether the sender expects an answer.
        sent, delivered: Times of the send and of the delivery, s.
        held: In an answer: seconds from the delivery of the request to the send of this answer.
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
    """Compute the gradient of this worker's next batch at given weights, as a `Gradient`.

    Attributes:
        weights: Weights at which the gradient is computed, as a flat vector.
        soft: Soft targets in addition to the labels, as a flat vector; see `Predict`.
        share: Coefficient of the soft targets' term in the loss.
        penalty: Value of loss terms whose gradient is computed elsewhere. The value is added to the
            recorded loss.
    """

    weights: Vector
    soft: Vector | None = None
    share: float = 0.0
    penalty: float = 0.0


@dataclass(frozen=True)
class Curvature:
    """Compute the curvature of the loss of this worker's first batch, along blocks of the weights.

    The answer is a `Gradient` whose values are one row per block, flat. Each row is the Hessian
    times a vector that is ±1 on the block and 0 elsewhere.

    Attributes:
        weights: Weights at which the curvature is computed, as a flat vector.
        ends: Indices into the flat weights that bound the blocks: one more than there are blocks.
    """

    weights: Vector
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Predict:
    """Predict soft targets for a batch of any worker; the answer is a flat vector for `Compute`.

    Attributes:
        worker: Number of the worker whose batch is predicted.
        step: Number of the batch.
        weights: Weights for the prediction, as a flat vector.
    """

    worker: int
    step: int
    weights: Vector


@dataclass(frozen=True)
class Forward:
    """Run a replica member's forward pass over the next batch; the answer is a `Passed`.

    Attributes:
        place: Replica, member, and number of the member's pass.
        weights: Weights of the replica member, as a flat vector.
        values: Outputs of other members that the pass reads, see `labkit.programs.passes.Pass`.
    """

    place: Place
    weights: Vector
    values: tuple[Vector, ...]


@dataclass(frozen=True)
class Backward:
    """Run the backward pass of a completed forward pass; the answer is a `Gradient`.

    The answer to a member's last backward pass holds the gradient of the member's weights, the
    number of samples and the loss.

    Attributes:
        place: Replica, member, and number of the member's pass.
        values: Gradients of the member's outputs, one per member that received an output.
    """

    place: Place
    values: tuple[Vector, ...]


@dataclass(frozen=True)
class Update:
    """Apply a gradient with the optimizer to the weights that this program holds.

    The answer holds the new weights as a flat vector.

    Attributes:
        gradient: Gradient of the weights that this program holds, as a flat vector.
        of: Messages that contributed to the gradient, for the event log.
        rate: Factor on the optimizer's learning rate in this update.
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
    """Record a gradient that a server does not apply: it is too late, or its batch is empty."""

    message: Message


@dataclass(frozen=True)
class Send:
    """Send a message; the program continues at once.

    Attributes:
        to: Number of the receiving program.
        message: Message to send.
        answers: Earlier message that `message` answers; None: `message` is no answer.
    """

    to: int
    message: Message
    answers: Message | None = None


@record()
@dataclass(frozen=True)
class Receive:
    """Receive the next message, from one source or from any source."""

    source: int | None = None


@record()
@dataclass(frozen=True)
class AllReduceAction:
    """Average the workers' gradients, weighted by their samples; the answer is a `Gradient`.

    Attributes:
        gradient: Gradient of this worker, or another vector to average.
        algorithm: Name of the allreduce algorithm in `labkit.schedules.ALLREDUCE`.
        compressor: Compressor of the payload; None: the payload is sent uncompressed.
        fragment: Number of the fragment of the weights that the vector covers. Each fragment has
            its own error feedback.
    """

    gradient: Gradient
    algorithm: str
    compressor: Compressor | None = None
    fragment: int = 0


@dataclass(frozen=True)
class Begin:
    """Start an allreduce that runs while this worker computes; at most one allreduce may run."""

    allreduce: AllReduceAction


@dataclass(frozen=True)
class Join:
    """Wait for the allreduce that `Begin` has started; the answer is the mean gradient."""


@dataclass(frozen=True)
class States:
    """Return this worker's optimizer slots and layers' moving statistics as one flat vector."""


@dataclass(frozen=True)
class Adopt:
    """Replace the weights that this worker holds; the answer holds the new weights.

    Attributes:
        weights: New weights, as a flat vector.
        states: New optimizer slots and statistics, see `States`; None: they stay unchanged.
    """

    weights: Vector = field(repr=False)
    states: Vector | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Forget:
    """Reset this worker's optimizer: its slots, and its count of steps."""


@dataclass(frozen=True)
class RestartPoint:
    """Mark a point where this program can restart after a checkpoint is loaded.

    Attributes:
        state: Variables of the program, without its `Roles`, from which the program restarts.
    """

    state: Any = field(repr=False)


@dataclass(frozen=True)
class Wait:
    """Pause the program for a number of seconds."""

    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """Report the weights of this program at the end of an epoch, for evaluation."""

    epoch: int
    weights: Vector = field(repr=False)


Computes: TypeAlias = Compute | Forward | Backward
Action: TypeAlias = (
    Computes | Curvature | Predict | Update | Code | Drop | Send | Receive | Wait | Snapshot
) | (AllReduceAction | Begin | Join | States | Adopt | Forget | RestartPoint)
Program: TypeAlias = Generator[Action, Any, None]
