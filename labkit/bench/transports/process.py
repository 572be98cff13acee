"""Two processes that transfer arrays on request: MPI ranks, or TensorFlow tasks with gRPC.

    python -m labkit.bench.transports.process                 # one of two MPI ranks
    python -m labkit.bench.transports.process NUMBER ADDRESS… # a TensorFlow task

Each request and each answer is a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import psutil
from numpy.typing import NDArray

from labkit.communicator import AnyMailbox, Communicator, open_mailbox, world
from labkit.frameworks.tcp_counters import connections, open_socket, socket_inodes

if TYPE_CHECKING:
    import tensorflow as tf

# The constant WARM is the number of warm-up round trips. The constants LEAST and MOST limit the
# number of timed round trips.
WARM, LEAST, MOST = 3, 3, 200
# The round trips of one transport and one array size take BUDGET seconds.
BUDGET = 0.3
# The constant LIMIT is a timeout in seconds, which includes the measurements of other transports.
LIMIT = 3600.0
THERE, BACK = (0, 1), (1, 0)
# The constants SMALL_COUNT and LARGE_COUNT are the numbers of round trips per call for small and
# large arrays.
SMALL_COUNT, LARGE_COUNT = 32, 2
SMALL = 1 << 20  # The constant SMALL is the maximum size of a small array in bytes.


class ExchangeCost(TypedDict):
    """The cost of sending one array in one direction.

    Attributes:
        seconds: Half of the median round-trip time.
        processor: CPU seconds of both processes together, including busy waiting.
        tcp: Bytes that this process sends by TCP.
        right: Whether the returned array is bit-identical to the sent array.
    """

    seconds: float
    processor: float
    tcp: float
    right: bool


def array(nbytes: int, seed: int = 0) -> np.ndarray:
    """Return an array of random bytes, which no transport can compress."""
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8).copy()


def exchanges(seconds: float) -> int:
    """Return how many round trips of `seconds` each fit into the time budget."""
    return int(np.clip(BUDGET / seconds, LEAST, MOST))


def timed(calls: int, call: Callable[[], object]) -> list[float]:
    """Call a function `calls` times, and return the seconds of each call."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def sent_by_tcp() -> int:
    """Return how many sent bytes are acknowledged on this process's open TCP connections."""
    inodes = set(socket_inodes(os.getpid()))
    return sum(end.sent for end in connections(open_socket()) if end.inode in inodes)


class TransportPair:
    """Two ranks that send arrays to each other through a mailbox.

    Args:
        communicator: Communicator of the two ranks.
        transport: Name of a transport in `labkit.communicator.TRANSPORTS`.
        nbytes: Size of the arrays in bytes. One-sided messages with static placement need the size
            in advance.
    """

    def __init__(self, communicator: Communicator, transport: str, nbytes: int) -> None:
        self._communicator, self._patience = communicator, communicator.wait_policy
        self._carrier: AnyMailbox = open_mailbox(
            transport, communicator, {THERE: nbytes, BACK: nbytes}
        )

    def exchange(self, values: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Send an array to rank 1 and return the reply (called on rank 0)."""
        self._carrier.post(THERE, np.zeros(1), values)
        return self._letter()

    def answer(self) -> None:
        """Receive an array and send it back without a copy (on rank 1)."""
        self._carrier.post(BACK, np.zeros(1), self._letter())

    def rest(self) -> None:
        """Wait until all messages that this rank has posted are delivered."""
        self._patience.start_wait()
        polls = 0
        while not self._carrier.idle:
            self._patience.pause(polls)
            polls += 1

    def close(self) -> None:
        """Close the mailbox (collective)."""
        self._carrier.close()

    def _letter(self) -> NDArray[np.uint8]:
        self._patience.name_call("the receive of an array of a benchmark", collective=False)
        self._patience.start_wait()
        polls = 0
        while True:
            for letter in self._carrier.collect():
                return letter.values
            self._patience.pause(polls)
            polls += 1


def time_between_ranks(communicator: Communicator, transport: str, nbytes: int) -> ExchangeCost:
    """Measure round trips of an array within the time budget (collective)."""
    values, right = array(nbytes, seed=nbytes), True
    pair = TransportPair(communicator, transport, nbytes)
    seconds: list[float] = []
    if communicator.rank == 0:
        warm = timed(WARM, lambda: pair.exchange(values))
        right = bool(np.array_equal(pair.exchange(values), values))
        calls = exchanges(min(warm))
    else:
        for _ in range(WARM + 1):
            pair.answer()
        calls = 0
    pair.rest()
    calls = communicator.broadcast_object(calls, label="the number of timed exchanges")
    processor, tcp = time.process_time(), sent_by_tcp()
    if communicator.rank == 0:
        seconds = timed(calls, lambda: pair.exchange(values))
    else:
        for _ in range(calls):
            pair.answer()
    pair.rest()
    spent = np.sum(communicator.allgather(time.process_time() - processor)) / (2 * calls)
    sent = (sent_by_tcp() - tcp) / calls
    pair.close()
    half = float(np.median(seconds)) / 2 if seconds else 0.0
    return ExchangeCost(seconds=half, processor=float(spent), tcp=sent, right=right)


def run_task(communicator: Communicator, task: dict[str, Any]) -> object:
    """Run a requested measurement or training, and return the result of rank 0 (collective)."""
    if "training" in task:
        from labkit.bench.transports.measuring import ServerTraining, served, train_here

        training = ServerTraining(*task["training"])
        experiment = training.by(served(task["transport"]))
        return train_here(communicator, experiment, training.target)
    return time_between_ranks(communicator, task["transport"], task["bytes"])


def serve_ranks() -> None:
    """Answer each line of rank 0's standard input with one line of output, until the input ends."""
    communicator = world(timeout=LIMIT)
    first = communicator.rank == 0
    if first:
        print("ready", flush=True)
        sys.stdin.readline()
    while True:
        line = communicator.broadcast_object(
            sys.stdin.readline() if first else "", label="the next question"
        )
        if not line:
            break
        result = run_task(communicator, json.loads(line))
        if first:
            print(json.dumps(result), flush=True)


def round_trips_per_call(nbytes: int) -> int:
    """Return the number of round trips in one call, which makes the call's overhead negligible."""
    return SMALL_COUNT if nbytes <= SMALL else LARGE_COUNT


@cache
def traced(count: int) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Return a graph function that sends an array to the other task and back `count` times.

    The function returns the array and the array's first element. The caller fetches only the
    element, so that the array is not copied.
    """
    import tensorflow as tf

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow lacks types
    def moved(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for _ in range(count):
            for task in (1, 0):
                with tf.device(f"/job:worker/task:{task}/device:CPU:0"):
                    values = tf.identity(values)
        with tf.device("/job:worker/task:0/device:CPU:0"):
            return values, values[:1]

    function: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]] = moved
    return function


def time_between_tasks(nbytes: int, other: int) -> ExchangeCost:
    """Measure round trips of an array between two tasks within the time budget.

    Args:
        nbytes: Size of the array in bytes.
        other: Process id of the other TensorFlow task.
    """
    import tensorflow as tf

    count, sent = round_trips_per_call(nbytes), array(nbytes, seed=nbytes)
    with tf.device("/job:worker/task:0/device:CPU:0"):
        values = tf.constant(sent)
    call, process = traced(count), psutil.Process(other)
    warm = timed(WARM, lambda: call(values)[1].numpy())
    right = bool(np.array_equal(call(values)[0].numpy(), sent))

    def spent() -> float:
        theirs = process.cpu_times()
        return time.process_time() + theirs.user + theirs.system

    calls = max(1, exchanges(min(warm) / count) // count)
    processor, tcp = spent(), sent_by_tcp()
    seconds = timed(calls, lambda: call(values)[1].numpy())
    one_way = 2 * count * calls
    return ExchangeCost(
        seconds=float(np.median(seconds)) / (2 * count),
        processor=(spent() - processor) / one_way,
        tcp=(sent_by_tcp() - tcp) / (count * calls),
        right=right,
    )


def start_server(number: int, addresses: list[str]) -> object:
    """Start and return the server of task 1; on task 0, connect to both tasks and return None."""
    import tensorflow as tf

    spec = tf.train.ClusterSpec({"worker": addresses})
    if number:
        return tf.distribute.Server(spec, "worker", number, protocol="grpc")
    # Graph optimizers are disabled, because they could remove the identity operations that transfer
    # the array.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    tf.config.experimental_connect_to_cluster(spec, "worker", number, protocol="grpc")
    return None


def serve_task(number: int, addresses: list[str]) -> None:
    """Print the process id, then answer requests from standard input."""
    server = start_server(number, addresses) if number else None
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    if number == 0:
        # Task 1 is already listening when task 0 connects.
        server = start_server(number, addresses)
    for line in sys.stdin:
        task: dict[str, Any] = json.loads(line)
        result = None if number else time_between_tasks(task["bytes"], task["other"])
        print(json.dumps(result), flush=True)
    del server


def main(arguments: list[str]) -> None:
    """Serve as a TensorFlow task if there are command-line arguments, or else as an MPI rank."""
    if arguments:
        serve_task(int(arguments[0]), arguments[1:])
    else:
        serve_ranks()


if __name__ == "__main__":
    main(sys.argv[1:])
