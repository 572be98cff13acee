"""How long products and copies take by size, on one device and between two."""

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

HOPS = 16  # from device to device and back, in one graph
LINK = (4, 2**16, 2**20, 2**22)  # bytes of a tensor that hops
FLOAT = 4  # bytes


def links(clock: Clock, asked: DeviceRequest) -> tuple[list[Row], float, float]:
    """Rows of copies between the first two logical devices; their latency, s, and bytes/s.

    A tensor hops to and fro in one graph, so that what a hop takes is what a send, a receive and an
    identity take there. The latency is that of the smallest; the bandwidth is infinite where the
    largest takes no longer, as between devices that share their memory.
    """
    import tensorflow as tf

    pair = asked.names[:2]
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
        taken = _timed(clock, partial(_read, hopping, value), asked.repeats)
        told: Row = {"from": pair[0], "to": pair[1], "bytes": size}
        rows.append(told | _spread([each / (2 * HOPS) for each in taken]))
    least, most = float(rows[0]["seconds"]), float(rows[-1]["seconds"])
    longer = most - least
    return rows, least, (LINK[-1] - LINK[0]) / longer if longer > 0 else float("inf")


def products_and_copies(clock: Clock, asked: DeviceRequest, pair: tuple[str, str]) -> list[Row]:
    """Rows of n × n products on both devices, of such a matrix from one to the other and back, and
    of the whole way: two matrices go there, and their product comes back.

    Each is waited for: the devices are idle before and after it. The matrices of a product are on
    its device already. A processor has as many threads for it as the model's operations, a GPU
    computes float32 as TensorFlow lets it by default, which may be by TF32.
    """
    import tensorflow as tf

    rows: list[Row] = []
    for size in asked.sizes:
        here = []
        for device in pair:
            with tf.device(f"/{device}"):
                matrix = tf.random.uniform((size, size), seed=asked.seed)
            here.append(matrix)
            taken = _timed(clock, partial(_done, _product(device), matrix), asked.repeats)
            rows.append(_row("product", size, device, asked.threads) | _spread(taken))
        for source, target in ((0, 1), (1, 0)):
            move = partial(_done, _move(pair[target]), here[source])
            taken = _timed(clock, move, asked.repeats)
            way = f"{pair[source]} to {pair[target]}"
            rows.append(_row("copy", size, way, asked.threads) | _spread(taken))
        other = tf.identity(here[0])
        whole = partial(_done, _there_and_back(pair), here[0], other)
        taken = _timed(clock, whole, asked.repeats)
        way = f"{pair[0]} to {pair[1]} and back"
        rows.append(_row(WAY, size, way, asked.threads) | _spread(taken))
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


def _read(work: Callable[[tf.Tensor], tf.Tensor], given: tf.Tensor) -> None:
    """Until the result is in the memory of Python."""
    work(given).numpy()


def _done(work: Callable[..., tf.Tensor], *given: tf.Tensor) -> None:
    """Until it is done: a GPU is handed work and goes on by itself."""
    import tensorflow as tf

    work(*given)
    tf.test.experimental.sync_devices()


def _timed(clock: Clock, work: Callable[[], object], repeats: int) -> list[float]:
    work()  # the first one compiles
    found = []
    for _ in range(repeats):
        start = clock.now()
        work()
        found.append(clock.now() - start)
    return found


def _spread(taken: list[float]) -> Row:
    return {"seconds": median(taken), "seconds_low": min(taken), "seconds_high": max(taken)}
