"""The runtime on the wall clock: each MPI rank executes the programs assigned to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.communicator import AnyMailbox, Communicator, Letter, computing
from labkit.exchange.compressed import BucketLayer, CompressedMean
from labkit.programs.actions import (
    Action,
    AllReduceAction,
    Backward,
    Begin,
    Compute,
    Computes,
    Curvature,
    Forward,
    Gradient,
    Join,
    Message,
    Passed,
    Predict,
    Program,
    Update,
    Vector,
    Wait,
)
from labkit.programs.event_log import Backend, EventLog
from labkit.programs.program_state import ProgramState
from labkit.programs.quiescence import Quiescence
from labkit.programs.runtime import Runtime, StateAttributes
from labkit.programs.virtual_allreduce import AllReduceState

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_WAIT = "a message of a program"

# The type `Spent` records a computation: its action, its result, and its start and stop times in s.
Spent: TypeAlias = tuple[Computes, "Gradient | Passed", float, float]


# The tuple _STATE names the attributes of the runtime that a checkpoint saves.
_STATE = ("_players", "_ready", "_near", "_far", "_wakes", "_begin")


class MpiRuntime(Runtime):
    """A runtime that executes one rank's programs, and exchanges messages with other ranks.

    A rank with one program computes in its main thread. A rank may have both a worker and a server.
    While the worker of a rank computes, the rank's server can answer gradient messages. A worker
    that shares its rank with a server computes in a second thread. Only the main thread calls MPI.

    Args:
        programs: Programs of this rank; each key is a program number.
        hosts: For each program number, the rank that executes the program.
        communicator: Communicator of all ranks.
        backend: Backend that computes gradients and applies them.
        event_log: Event log of steps and updates.
        dtype: Dtype of the vectors in messages.
        mailbox: Transport of messages; None for MPI's two-sided sends and receives.
        meanwhile: Whether a server may answer while the worker on the same rank computes.
        shapes: Shapes of the model's weights, for compression by layer.
        seed: Seed of the compressors' random numbers.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        hosts: Sequence[int],
        communicator: Communicator,
        backend: Backend,
        event_log: EventLog,
        dtype: DTypeLike,
        meanwhile: bool = True,
        mailbox: AnyMailbox | None = None,
        shapes: Sequence[tuple[int, ...]] = (),
        seed: int = 0,
    ) -> None:
        super().__init__(programs, hosts, backend, event_log)
        self._communicator, self._dtype = communicator, np.dtype(dtype)
        # The dict `_ready` holds answers that programs have not yet received.
        self._ready: dict[int, Any] = dict.fromkeys(programs)

        # The queue `_near` contains pairs (receiver, message) from this rank; the queue `_far`
        # contains pairs from other ranks.
        self._near: deque[tuple[int, Message]] = deque()
        self._far: deque[tuple[int, Message]] = deque()
        # The dict `_wakes` maps a program number to a time in s. At the stored time, the program's
        # `Wait` action ends.
        self._wakes: dict[int, float] = {}

        # The dict `_computes` maps a program number to its unfinished computation in the second
        # thread.
        self._computes: dict[int, Future[Spent]] = {}
        self._clock, self._mailbox = communicator.clock, mailbox or communicator.mailbox(hosts)
        # The attribute `_behind` is the clock time minus the time of this runtime, in s.
        self._behind = 0.0
        self._between: Callable[[MpiRuntime], None] | None = None
        # The attribute `still` is None if checkpoints are disabled.
        self.still: Quiescence | None = None
        self._slowdown_context: Callable[[], AbstractContextManager[None]] = computing(communicator)
        self._compute_thread = ThreadPoolExecutor(1) if len(programs) > 1 and meanwhile else None
        self._shapes, self._seed = shapes, seed
        # The dict `_means` contains the error feedback of the compressors, with one entry per
        # fragment of the weights.
        self._means: dict[int, CompressedMean] = {}

        # The dict `_restored_feedback` contains error feedback from a checkpoint, with one entry
        # per fragment of the weights.
        self._restored_feedback: dict[int, Mapping[str, Vector]] = {}
        # While `_allreduce_thread` runs an allreduce, no other thread calls MPI, so the rank sends
        # no other messages.
        self._allreduce_thread = ThreadPoolExecutor(1)
        self._under_way: Future[AllReduceState] | None = None

    def play(self, between: Callable[[MpiRuntime], None] | None = None) -> None:
        """Run the programs of this rank until all have ended.

        Args:
            between: Function that is called between two actions, for example to save a checkpoint.

        Raises:
            RankFailed, WaitTooLong: If a rank failed, or if a wait took too long; see
                `Communicator`.
        """
        patience = self._communicator.wait_policy
        self._between, self._begin = between, self._begin or self._now()
        patience.name_call(_WAIT, collective=False)
        try:
            patience.start_wait()
            polls = 0
            while not self._is_done():
                if between is not None:
                    between(self)
                if self._advance():
                    patience.start_wait()
                    polls = 0
                else:
                    patience.pause(polls)
                    polls += 1
        finally:
            self._allreduce_thread.shutdown()
            if self._compute_thread:
                self._compute_thread.shutdown()

    def _is_done(self) -> bool:
        if not all(player.over for player in self._players.values()) or not self._mailbox.idle:
            return False
        return self.still is None or self.still.all_ended()

    def _advance(self) -> bool:
        """Receive messages and resume all ready programs; return whether any program was ready."""
        self._receive_all()
        for number in [number for number, wakes in self._wakes.items() if wakes <= self._now()]:
            del self._wakes[number]
            self._ready[number] = None
        happens = False
        while self._ready or self._near or self._far:
            happens = True
            if self._ready:
                number = next(iter(self._ready))
                self._resume(number, self._ready.pop(number))
            else:
                self._deliver(*(self._near or self._far).popleft())
        return happens

    def _receive_all(self) -> None:
        """Receive messages from other ranks, and results of computations in the second thread."""
        for letter in self._mailbox.collect():
            self._far.append(self._decode(letter))
            if self.still is not None:
                self.still.count(got=1)
        for number in [number for number, future in self._computes.items() if future.done()]:
            self._ready[number] = self._finish_compute(number, *self._computes.pop(number).result())

    def _now(self) -> float:
        return self._clock.now() - self._behind

    # --- state -------------------------------------------------------------------------------

    def keeps(self, outside: Mapping[str, object]) -> None:
        """Enable checkpoints (see `Runtime.keeps`), and begin to count this rank's messages."""
        super().keeps(outside)
        self.still = Quiescence(self._communicator)

    def stands(self) -> int | None:
        """Pause until no messages are in transit, and return the total number of steps
        (collective).

        If another rank waits for this rank, the method returns None, because this rank must
        continue first.
        """
        # The assertion tells the type checker that `still` is not None.
        assert self.still is not None
        if self._under_way is not None:
            self._under_way.result()
        wait(self._computes.values())
        total_steps = self.still.wait(self._receive_all)
        self._communicator.wait_policy.name_call(_WAIT, collective=False)
        return total_steps

    @property
    def _state_attributes(self) -> StateAttributes:
        return [(self, _STATE), *super()._state_attributes]

    def keep(self, backend_state: Any = None) -> ProgramState:
        """Return this rank's state, see `VirtualRuntime.keep`; all ranks must be quiescent."""
        # The assertion tells the type checker that `still` is not None.
        assert self.still is not None
        meeting = None if self._under_way is None else self._under_way.result()
        means = {fragment: means.state_dict() for fragment, means in self._means.items()}
        own_state = self._now(), self.still.steps, meeting, self._restored_feedback | means
        return self._save_state(own_state, backend_state)

    def take(self, state: ProgramState, program: Callable[[int, Any], Program]) -> Any:
        """Restore this rank from `state`, and return the backend's part of `state`."""
        # The assertion tells the type checker that `still` is not None.
        assert self.still is not None
        (now, steps, meeting, self._restored_feedback), backend_state = self._restore_state(
            state, program
        )
        self._behind = self._clock.now() - now
        self.still.count(steps)
        if meeting is not None:
            self._under_way = Future()
            self._under_way.set_result(meeting)
        return backend_state

    def _offer_checkpoint(self, number: int) -> None:
        """Call the checkpoint function as if the program had not yet requested its current action.

        A restarted program receives its previous answer again. The restarted program then requests
        its current action again.
        """
        if self._between is not None:
            answers = self._players[number].heard
            self._ready[number] = answers.pop()
            self._between(self)
            answers.append(self._ready.pop(number))

    def _execute(self, number: int, action: Action) -> tuple[bool, Any]:
        """Execute an action; computations run in the rank's second thread, if it has one."""
        self._offer_checkpoint(number)
        match action:
            case Compute() | Forward() | Backward():
                if self._compute_thread is None:
                    return True, self._finish_compute(number, *self._compute(number, action))
                self._computes[number] = self._compute_thread.submit(self._compute, number, action)
            case Update(gradient, of, rate):
                self._event_log.record_update(number, of, self._now())
                with self._slowdown_context():
                    return True, self._backend.update(number, gradient, rate)
            case Curvature(weights, ends):
                with self._slowdown_context():
                    return True, self._backend.curved(number, weights, ends)
            case Predict(worker, step, weights):
                start = self._now()
                with self._slowdown_context():
                    predicted = self._backend.predictions(number, worker, step, weights)
                self._event_log.record_prediction(number, self._now() - start)
                return True, predicted
            case AllReduceAction():
                self._count_allreduce()
                return True, self._finish_allreduce(number, self._allreduce(number, action))
            case Begin(allreduce):
                self._count_allreduce()
                self._under_way = self._allreduce_thread.submit(self._allreduce, number, allreduce)
                return True, None
            case Join():
                # The assertion informs the type checker that the action `Join` follows the action
                # `Begin`.
                assert self._under_way is not None
                meeting, self._under_way = self._under_way.result(), None
                return True, self._finish_allreduce(number, meeting)
            case Wait(seconds):
                self._wakes[number] = self._now() + seconds
            case _:
                return super()._execute(number, action)
        return False, None

    def _run_codec(self, number: int, call: Callable[[], Vector]) -> Vector:
        start = self._now()
        with self._slowdown_context():
            result = call()
        self._event_log.add_codec_time(number, self._now() - start)
        return result

    # --- computing ---------------------------------------------------------------------------

    def _compute(self, number: int, action: Computes) -> Spent:
        start = self._now()
        with self._slowdown_context():
            result = self._execute_compute(number, action)
        return action, result, start, self._now()

    def _finish_compute(self, number: int, *computation: *Spent) -> Gradient | Passed:
        self._record_compute(number, *computation)
        if self.still is not None:
            self.still.count(steps=1)
        return computation[1]

    # --- allreduce ---------------------------------------------------------------------------

    def _count_allreduce(self) -> None:
        """Count a started allreduce, because ranks pause only when their counts are equal."""
        if self.still is not None:
            self.still.count(allreduces=1)

    def _allreduce(self, number: int, action: AllReduceAction) -> AllReduceState:
        """Compute the mean gradient over all ranks, weighted by their numbers of samples."""
        gradient, meter = action.gradient, self._communicator.traffic
        name = f"fragment {action.fragment} of the weights"
        header = np.array([gradient.rows, gradient.loss, gradient.last], np.float64)
        rows, loss, last = self._communicator.allreduce_small(header, name)
        before = meter.copy()
        values = gradient.values.copy()
        if action.compressor is None:
            self._communicator.mean(
                values, gradient.rows, action.algorithm, name, total=float(rows)
            )
        else:
            values *= values.dtype.type(gradient.rows / rows * self._communicator.size)
            self._compressed_mean(action, values, name)
        traffic = meter.since(before)
        wait, counts = (
            traffic.wait_seconds,
            (traffic.payload_bytes, traffic.wire_bytes, traffic.messages),
        )
        size = self._communicator.size
        mean = Gradient(values, int(rows), float(loss) / size, gradient.step, bool(last))
        return AllReduceState(mean, wait, self._now(), *counts)

    def _compressed_mean(self, action: AllReduceAction, values: Vector, name: str) -> None:
        """Replace `values` by their mean over all ranks, with compressed messages (collective)."""
        assert action.compressor is not None  # The assertion only informs the type checker.
        if action.fragment not in self._means:
            means = CompressedMean(self._communicator, action.compressor, self._seed)
            means.load_state_dict(self._restored_feedback.pop(action.fragment, {}))
            self._means[action.fragment] = means
        ends = [0, values.size]
        shapes: Sequence[tuple[int, ...]] = [values.shape]
        if action.compressor.by_layer:
            shapes = self._shapes
            ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)]).tolist()
        layers = [
            BucketLayer("", *edges, shape)
            for edges, shape in zip(pairwise(ends), shapes, strict=True)
        ]
        means = self._means[action.fragment]
        # The slices `pieces` are views of `values`, so that `reduce` updates `values` in place.
        pieces = [values[layer.start : layer.stop] for layer in layers]
        means.reduce(action.fragment, pieces, layers, action.algorithm, name)

    def _finish_allreduce(self, number: int, meeting: AllReduceState) -> Gradient:
        self._event_log.record_allreduce(number, meeting)
        return meeting.mean

    # --- messages ----------------------------------------------------------------------------

    def _send(self, source: int, to: int, message: Message) -> None:
        if self._record_sent(source, to, message):
            self._mailbox.post((source, to), *_encode(message))
            if self.still is not None:
                self.still.count(sent=1)
        else:
            self._near.append((to, message))

    def _decode(self, letter: Letter) -> tuple[int, Message]:
        has, version, rows, step, ends, sent, wait, wants = letter.words.tolist()
        values = letter.values.view(self._dtype) if has else None
        if values is not None and self.still is not None and self._mailbox.in_place:
            # A checkpoint's state refers to the values of the message. The mailbox overwrites its
            # buffer, so the message values are copied.
            values = values.copy()
            self._mailbox.free(letter.route)
        source, to = letter.route
        message = Message(source, values, int(version), int(rows), int(step), bool(ends), sent)
        return to, replace(message, held=wait, wants=bool(wants))


def _encode(message: Message) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Encode a message as a header of floats and the bytes of its values."""
    values = message.values
    words = (values is not None, message.version, message.rows, message.step, message.ends)
    flat = np.ascontiguousarray(values) if values is not None else np.empty(0)
    trailer = message.sent, message.held, message.wants
    return np.array([*words, *trailer], np.float64), flat.view(np.uint8)
