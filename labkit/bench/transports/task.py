"""`python -m labkit.bench.transports.task NUMBER ADDRESS…`: a TensorFlow task with gRPC."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from labkit.bench.transports.timed import WARM, ExchangeCost, array, exchanges, sent_by_tcp, timed

if TYPE_CHECKING:
    import tensorflow as tf

SMALL_COUNT, LARGE_COUNT = 32, 2  # number of round trips per call, for small and large arrays
SMALL = 1 << 20  # maximum size of a small array in bytes


def round_trips_per_call(nbytes: int) -> int:
    """Return how many round trips one call makes, so that the call's overhead is negligible."""
    return SMALL_COUNT if nbytes <= SMALL else LARGE_COUNT


@cache
def traced(count: int) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Return a graph function that sends an array to the other task and back `count` times.

    The function returns the array and the array's first element; the element can be fetched without
    a copy of the array.
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


def case(nbytes: int, other: int) -> ExchangeCost:
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


def start(number: int, addresses: list[str]) -> object:
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


def main() -> None:
    """Print this process's id, then answer each line of stdin; task 1 always answers null."""
    number, addresses = int(sys.argv[1]), sys.argv[2:]
    server = start(number, addresses) if number else None
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    if number == 0:
        server = start(number, addresses)  # the other task is already listening
    for line in sys.stdin:
        task: dict[str, Any] = json.loads(line)
        result = None if number else case(task["bytes"], task["other"])
        print(json.dumps(result), flush=True)
    del server


if __name__ == "__main__":
    main()
