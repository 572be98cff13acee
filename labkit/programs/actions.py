"""What a program may ask for: each action is a record, and its answer comes when it is done.

A program is a generator, one for each worker and each server. Two interpreters carry the same
generators out: MPI ranks on the wall clock (`labkit.programs.mpi_runtime`), and one process on the
virtual clock (`labkit.programs.virtual_runtime`). A program never asks for the time; therefore both
do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

from labkit.common.state import record

if TYPE_CHECKING:
    from labkit.compression import Compressor

Vector: TypeAlias = NDArray[Any]  # flat, of the dtype of the weights; nobody writes into one


@record()
@dataclass(frozen=True)
class Gradient:
    """The mean gradient of a worker's next batch.

    Attributes:
        values: flat, of all weights.
        rows: of the batch; 0 where there were none, and values are 0 then.
        loss: of the batch at the weights that it was asked for.
        step: how many batches this worker had before.
        last: someone wants training to end.
        before: of a pass back, the gradients of what was given to it, one for each who gave.
    """

    values: Vector
    rows: int
    loss: float
    step: int
    last: bool = False
    before: tuple[Vector, ...] = ()


class Place(NamedTuple):
    """Which part of a replica somebody plays.

    Attributes:
        worker: the number of the replica.
        member: of it, from 0: a stage, or a machine of a grid.
        turn: of its passes, from 0.
        share: of the replica's work, in this pass.
    """

    worker: int
    member: int
    turn: int = 0
    share: float = 0.0


@record()
@dataclass(frozen=True)
class Passed:
    """What a member of a replica passes on, of the replica's next batch.

    Attributes:
        values: flat, one for each who reads of it.
        step: how many batches the replica had before.
    """

    values: tuple[Vector, ...]
    step: int


@record()
@dataclass(frozen=True, eq=False)
class Message:
    """What one program says to another.

    Attributes:
        source: who says it: workers are 0, 1, …, servers come after them.
        values: flat, or None for words without values.
        version: of the weights it is about: updates that they had behind them.
        rows: behind a gradient.
        step: of the worker that it is from or for.
        ends: of a gradient: someone wants training to end; of an answer: there is no more to do;
            of a goodbye, which has no values and wants nothing: its worker is lost.
        wants: an answer.
        sent, delivered: s; when it was handed over, and when it was there.
        held: s from the delivery of what it answers to its own departure.
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
    """The gradient of this worker's next batch at these weights; answered by a `Gradient`.

    Attributes:
        weights: flat.
        soft: what the predictions are to resemble beside the labels, flat; see `Predict`.
        share: the weight of that in the loss.
        penalty: what is written down with the loss, of terms whose gradient is taken elsewhere.
    """

    weights: Vector
    soft: Vector | None = None
    share: float = 0.0
    penalty: float = 0.0


@dataclass(frozen=True)
class Curve:
    """The curvature of the loss of this worker's first batch, along blocks of the weights.

    Answered by a `Gradient` whose values are one row a block, flat: the Hessian times a vector of
    ±1 on the block, and of 0 elsewhere.

    Attributes:
        weights: flat, at which.
        ends: where blocks begin and end; one number more than there are blocks.
    """

    weights: Vector
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Predict:
    """Predictions for a batch of whichever worker, as `Compute` takes them; answered flat.

    Attributes:
        worker: whose batch.
        step: its number.
        weights: at which.
    """

    worker: int
    step: int
    weights: Vector


@dataclass(frozen=True)
class Forward:
    """A pass of a member over the replica's next batch; answered by `Passed`.

    Attributes:
        place: whose, and which of its passes.
        weights: of the member.
        values: what others have passed on to it, see `labkit.programs.passes.Pass`.
    """

    place: Place
    weights: Vector
    values: tuple[Vector, ...]


@dataclass(frozen=True)
class Backward:
    """A pass back over what has gone forward; answered by a `Gradient`.

    That of a member's weights, of rows and loss is in the answer to its last one back.

    Attributes:
        place: whose, and which of its passes.
        values: the gradients of what it has passed on, one for each who has read it.
    """

    place: Place
    values: tuple[Vector, ...]


@dataclass(frozen=True)
class Update:
    """Let the optimizer apply a gradient to the weights that this one holds.

    Answered by the new weights, flat.

    Attributes:
        gradient: flat, of the part that is held here.
        of: the messages that it was made of, for the diary.
        rate: factor on the optimizer's learning rate in this update.
    """

    gradient: Vector
    of: tuple[Message, ...] = ()
    rate: float = 1.0


@dataclass(frozen=True)
class Code:
    """Encode or decode what travels; answered by what the call returns."""

    call: Callable[[], Vector]


@dataclass(frozen=True)
class Drop:
    """A gradient came too late, or is of no rows, and is not applied; written down."""

    message: Message


@dataclass(frozen=True)
class Send:
    """Hand a message to the links; answered at once, without values.

    Attributes:
        to: who gets it.
        message: what.
        answers: what it answers.
    """

    to: int
    message: Message
    answers: Message | None = None


@record()
@dataclass(frozen=True)
class Receive:
    """The next message that is there, from one source or from whoever comes first."""

    source: int | None = None


@record()
@dataclass(frozen=True)
class AllReduce:
    """The mean of what all workers bring, weighted by their rows; answered by a `Gradient`.

    Attributes:
        gradient: of this worker, or whatever else is to be averaged.
        algorithm: a name of `labkit.schedules.ALLREDUCE`.
        compressor: how it is said in fewer bytes.
        fragment: of the weights, by its number; each has a memory of what compression left out.
    """

    gradient: Gradient
    algorithm: str
    compressor: Compressor | None = None
    fragment: int = 0


@dataclass(frozen=True)
class Begin:
    """An allreduce that goes on while this worker computes; answered at once. One at a time."""

    allreduce: AllReduce


@dataclass(frozen=True)
class Join:
    """The mean of the allreduce that was begun, once it is there."""


@dataclass(frozen=True)
class States:
    """What this worker keeps beside its weights, flat: the optimizer's slots, moving statistics."""


@dataclass(frozen=True)
class Adopt:
    """From now on these are the weights that this worker holds; answered by them.

    Attributes:
        weights: flat.
        states: see `States`; None: as they are.
    """

    weights: Vector = field(repr=False)
    states: Vector | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Forget:
    """The optimizer of this worker begins anew: its slots, and its count of steps."""


@dataclass(frozen=True)
class Mark:
    """Here this program can begin again; answered at once.

    Attributes:
        state: what it knows beside its roles; given to it, it goes on from here.
    """

    state: Any = field(repr=False)


@dataclass(frozen=True)
class Wait:
    """Let so many seconds pass."""

    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """An epoch is over: these are the weights that this one holds, to be evaluated aside."""

    epoch: int
    weights: Vector = field(repr=False)


Computes: TypeAlias = Compute | Forward | Backward
Action: TypeAlias = (
    Computes | Curve | Predict | Update | Code | Drop | Send | Receive | Wait | Snapshot
) | (AllReduce | Begin | Join | States | Adopt | Forget | Mark)
Program: TypeAlias = Generator[Action, Any, None]
