"""`python -m labkit.bench.transports.task NUMBER ADDRESS…`: TensorFlow's tasks, joined by gRPC."""

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

from labkit.bench.transports.timed import WARM, Found, array, exchanges, sent_by_tcp, timed

if TYPE_CHECKING:
    import tensorflow as tf

OFTEN, SELDOM = 32, 2  # exchanges a call, of small arrays and of large ones
SMALL = 1 << 20  # bytes


def in_a_call(nbytes: int) -> int:
    """Exchanges a call: so many that the call itself hardly counts."""
    return OFTEN if nbytes <= SMALL else SELDOM


@cache
def traced(count: int) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """A graph that moves an array to the other task's processor and back, so often.

    It gives the array, and a little of it, which can be looked at without a copy of all.
    """
    import tensorflow as tf

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def moved(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for _ in range(count):
            for task in (1, 0):
                with tf.device(f"/job:worker/task:{task}/device:CPU:0"):
                    values = tf.identity(values)
        with tf.device("/job:worker/task:0/device:CPU:0"):
            return values, values[:1]

    found: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]] = moved
    return found


def case(nbytes: int, other: int) -> Found:
    """Exchange an array there and back, as often as fits the budget.

    Args:
        nbytes: of the array.
        other: number of the other task's process.
    """
    import tensorflow as tf

    count, sent = in_a_call(nbytes), array(nbytes, seed=nbytes)
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
    return Found(
        seconds=float(np.median(seconds)) / (2 * count),
        processor=(spent() - processor) / one_way,
        tcp=(sent_by_tcp() - tcp) / (count * calls),
        right=right,
    )


def start(number: int, addresses: list[str]) -> object:
    """This task's server; task 0 also runs what is asked for."""
    import tensorflow as tf

    spec = tf.train.ClusterSpec({"worker": addresses})
    if number:
        return tf.distribute.Server(spec, "worker", number, protocol="grpc")
    # An identity on another device is what moves the array: no optimizer may take it out.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    tf.config.experimental_connect_to_cluster(spec, "worker", number, protocol="grpc")
    return None


def main() -> None:
    """Answer lines with lines; task 1 only says its number."""
    number, addresses = int(sys.argv[1]), sys.argv[2:]
    server = start(number, addresses) if number else None
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    if number == 0:
        server = start(number, addresses)  # only now: the other one listens
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        found = None if number else case(asked["bytes"], asked["other"])
        print(json.dumps(found), flush=True)
    del server


if __name__ == "__main__":
    main()
