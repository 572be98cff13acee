"""Measured times of matrix products on a device and of copies between two devices, by size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from labkit.communicator.clock import Clock
from labkit.records.placed import WAY, Row
from labkit.worker.devices.request import DeviceRequest

if TYPE_CHECKING:
    import tensorflow as tf

HOPS = 16  # number of round trips between two devices in one graph
LINK = (4, 2**16, 2**20, 2**22)  # sizes of the copied tensor in bytes
FLOAT = 4  # bytes of a float32


def links(clock: Clock, request: DeviceRequest) -> tuple[list[Row], float, float]:
    """Return rows on copies between the first two devices, the latency (s) and bandwidth (bytes/s).

    One graph copies a tensor back and forth; each copy takes a send, a receive and an identity
    operation. The latency is the time of one copy of the smallest tensor. The bandwidth is infinite
    if a copy of the largest tensor takes no longer than one of the smallest, as between devices
    that share memory.
    """
    import tensorflow as tf

    pair = request.names[:2]
    rows: list[Row] = []
    for size in LINK:
        with tf.device(f"/{pair[0]}"):
            value = tf.zeros((size // FLOAT,))

        def hop(x: tf.Tensor) -> tf.Tensor:
            for number in range(2 * HOPS):
                with tf.device(f"/{pair[1 - number % 2]}"):
                    x = tf.identity(x)
            with tf.device(f"/{pair[0]}"):
                return x[:1]

        hopping = tf.function(hop, autograph=False)
        seconds = _timed(clock, partial(_read_result, hopping, value), request.repeats)
        row: Row = {"from": pair[0], "to": pair[1], "bytes": size}
        rows.append(row | _spread([duration / (2 * HOPS) for duration in seconds]))
    least, most = float(rows[0]["seconds"]), float(rows[-1]["seconds"])
    longer = most - least
    return rows, least, (LINK[-1] - LINK[0]) / longer if longer > 0 else float("inf")


def products_and_copies(clock: Clock, request: DeviceRequest, pair: tuple[str, str]) -> list[Row]:
    """Measure n × n matrix products on two devices, copies between them, and round trips.

    In a round trip, two matrices are copied to the second device, and their product is copied back.
    The timer of each measurement stops only when the devices are idle. In rows without a round
    trip, the matrices are already on the device that multiplies them. A CPU uses as many threads as
    the request specifies. A GPU computes float32 with TensorFlow's default settings, which may
    include TF32.
    """
    import tensorflow as tf

    rows: list[Row] = []
    for size in request.sizes:
        matrices = []
        for device in pair:
            with tf.device(f"/{device}"):
                matrix = tf.random.uniform((size, size), seed=request.seed)
            matrices.append(matrix)
            seconds = _timed(clock, partial(_wait_for, _product(device), matrix), request.repeats)
            rows.append(_row("product", size, device, request.threads) | _spread(seconds))
        for source, target in ((0, 1), (1, 0)):
            move = partial(_wait_for, _move(pair[target]), matrices[source])
            seconds = _timed(clock, move, request.repeats)
            way = f"{pair[source]} to {pair[target]}"
            rows.append(_row("copy", size, way, request.threads) | _spread(seconds))
        other = tf.identity(matrices[0])
        round_trip = partial(_wait_for, _there_and_back(pair), matrices[0], other)
        seconds = _timed(clock, round_trip, request.repeats)
        way = f"{pair[0]} to {pair[1]} and back"
        rows.append(_row(WAY, size, way, request.threads) | _spread(seconds))
    return rows


def _row(what: str, size: int, device: str, threads: int) -> Row:
    nbytes = FLOAT * size * size
    return {"what": what, "n": size, "device": device, "bytes": nbytes, "threads": threads}


def _product(device: str) -> Callable[[tf.Tensor], tf.Tensor]:
    import tensorflow as tf

    def multiply(matrix: tf.Tensor) -> tf.Tensor:
        with tf.device(f"/{device}"):
            return tf.matmul(matrix, matrix)

    return multiply


def _there_and_back(pair: tuple[str, str]) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    import tensorflow as tf

    def multiply(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        with tf.device(f"/{pair[1]}"):
            product = tf.matmul(tf.identity(left), tf.identity(right))
        with tf.device(f"/{pair[0]}"):
            return tf.identity(product)

    return multiply


def _move(device: str) -> Callable[[tf.Tensor], tf.Tensor]:
    import tensorflow as tf

    def move(matrix: tf.Tensor) -> tf.Tensor:
        with tf.device(f"/{device}"):
            return tf.identity(matrix)

    return move


def _read_result(work: Callable[[tf.Tensor], tf.Tensor], argument: tf.Tensor) -> None:
    """Call a function, and copy its result to a NumPy array."""
    work(argument).numpy()


def _wait_for(work: Callable[..., tf.Tensor], *argument: tf.Tensor) -> None:
    """Call a function, and wait until all devices are idle, because GPU calls return early."""
    import tensorflow as tf

    work(*argument)
    tf.test.experimental.sync_devices()


def _timed(clock: Clock, work: Callable[[], object], repeats: int) -> list[float]:
    work()  # the first call compiles, so its time is not measured
    seconds = []
    for _ in range(repeats):
        start = clock.now()
        work()
        seconds.append(clock.now() - start)
    return seconds


def _spread(seconds: list[float]) -> Row:
    return {"seconds": median(seconds), "seconds_low": min(seconds), "seconds_high": max(seconds)}
