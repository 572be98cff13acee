"""Steps that are fed in several ways, with the time at which each input came and was made."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit import datasets
from labkit.bench.steps import Case, Model
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, short
from labkit.communicator import Communicator
from labkit.records.input_wait import INSIDE, SYNTHETIC, WAYS, Fed, InputTrace

if TYPE_CHECKING:
    import tensorflow as tf

    # An image or a batch of them, its classes, and when they began and ended to be made (s).
    Made: TypeAlias = "tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]"
    Records: TypeAlias = "tf.data.Dataset"

SIDE = 28  # pixels of what is trained on
MOST = 1024  # parallel calls, and batches kept ready
WARM = 4  # steps before a turn's timed ones, beside those that use up what lay ready


@dataclass(frozen=True)
class Feeding:
    """How the input is made.

    Attributes:
        dataset: images by name.
        rows: of it, written to a file as PNG, and read again and again.
        batch: images a step.
        enlarged: pixels to which an image is enlarged before its middle is cut out: more is more
            work.
        calls: batches that are made at a time, where they are made in parallel.
        ahead: batches kept ready, where there are any.
        widths: of the hidden layers that are trained.
    """

    dataset: str
    rows: int
    batch: int
    enlarged: int
    calls: int
    ahead: int
    widths: tuple[int, ...]

    def refuse_impossible(self) -> None:
        """Raise InvalidInput before anything starts."""
        shapes = datasets.check(self.dataset, {"rows": self.rows})
        if len(shapes.input_shape) != 3 or shapes.task != "classification":
            raise InvalidInput(
                f"dataset={self.dataset!r} has no images; give digits, mnist, fashion_mnist or "
                "cifar10"
            )
        if not 1 <= self.batch <= self.rows:
            raise InvalidInput(
                f"batch={short(self.batch)} of rows={short(self.rows)}: give 1 to as many as rows"
            )
        if not SIDE <= self.enlarged <= MOST:
            raise InvalidInput(f"enlarged={short(self.enlarged)}: give {SIDE} to {MOST:,} pixels")
        for name, value in (("calls", self.calls), ("ahead", self.ahead)):
            if not 1 <= value <= MOST:
                raise InvalidInput(f"{name}={short(value)}: give a whole number from 1 to {MOST:,}")


def measure(feeding: Feeding, steps: int = 20, repeats: int = 5) -> InputTrace:
    r"""Time training steps whose input is made in each of the ways of `WAYS`, interleaved.

    A real input is read from a file, decoded (PNG), enlarged, cut and standardised. In every
    repeat each way has a turn of `steps` steps, the order backwards every other time; a turn begins
    with new iterators and with as many untimed steps as use up what was made before them. The
    cache has been filled before. Training computes with one thread; input has threads of its own.

    Args:
        feeding: what is read, and how it is made.
        steps: of each turn, timed.
        repeats: turns of each way.

    Returns:
        One row a step and one a batch that was made meanwhile, all on one clock.

    Raises:
        InvalidInput: an impossible value.
    """
    feeding.refuse_impossible()
    for name, value in (("steps", steps), ("repeats", repeats)):
        if not 1 <= value <= MOST:
            raise InvalidInput(f"{name}={short(value)}: give a whole number from 1 to {MOST:,}")
    datasets.ensure(feeding.dataset)
    with Cluster(workers=1) as cluster:
        return cluster.call(_on_rank, feeding, steps, repeats)[0]


def _on_rank(communicator: Communicator, feeding: Feeding, steps: int, repeats: int) -> InputTrace:
    return take_turns(feeding, steps, repeats)


def take_turns(feeding: Feeding, steps: int, repeats: int) -> InputTrace:
    """The same in this process, whose TensorFlow has whatever threads it has."""
    model = Model(Case("fed", feeding.widths, feeding.batch), rank=0)
    taken: list[Fed] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images.tfrecord"
        nbytes = _write(feeding, file)
        ways = _ways(feeding, file, model)
        filled = _fill(ways["cache"], feeding)
        plain, inside = _trained(model), _inside(model, feeding)
        for repeat in range(repeats):
            # Backwards every other time: no way always follows the same one.
            for way in list(ways)[:: -1 if repeat % 2 else 1]:
                step = inside if way == INSIDE else plain
                turn = _turn(ways[way], step, steps, _lead(feeding))
                taken += [Fed(way, repeat, place, *times) for place, times in enumerate(turn)]
    return InputTrace(taken, nbytes, filled)


# One way: makes an iterator over batches.
Way = Callable[[], "Iterator[tuple[tf.Tensor, ...]]"]


def _ways(feeding: Feeding, file: Path, model: Model) -> dict[str, Way]:
    """An iterator for each way, made anew for each turn."""
    import tensorflow as tf

    records = tf.data.TFRecordDataset(str(file)).batch(feeding.batch, drop_remainder=True)
    again = records.repeat()
    made = tf.function(lambda encoded: _made(encoded, feeding))
    parallel = again.map(made, num_parallel_calls=feeding.calls)
    cached = records.map(made, num_parallel_calls=feeding.calls).cache().repeat()
    still = tf.constant(0.0, tf.float64)
    ready = (model.x, model.y, still, still)  # made before the first step
    ways: dict[str, Way] = {
        SYNTHETIC: lambda: iter(lambda: ready, None),
        # The step is handed what lies in the file, and makes its batch itself.
        INSIDE: lambda: ((each,) for each in _own_threads(again, feeding)),
        "map": lambda: iter(_own_threads(again.map(made), feeding)),
        "parallel calls": lambda: iter(_own_threads(parallel, feeding)),
        "prefetch": lambda: iter(_own_threads(parallel.prefetch(feeding.ahead), feeding)),
        "cache": lambda: iter(_own_threads(cached.prefetch(feeding.ahead), feeding)),
    }
    assert tuple(ways) == WAYS
    return ways


def _own_threads(records: Records, feeding: Feeding) -> Records:
    """With as many threads as calls, whatever number training has; nothing is tuned meanwhile."""
    import tensorflow as tf

    options = tf.data.Options()
    options.threading.private_threadpool_size = feeding.calls
    options.autotune.enabled = False
    return records.with_options(options)


def _write(feeding: Feeding, file: Path) -> int:
    """The rows as records of a class and a PNG; the bytes of the file."""
    import tensorflow as tf

    data = datasets.load(feeding.dataset, rows=feeding.rows)
    grey = data.x_train.mean(axis=-1, keepdims=True)  # one plane, as the model takes
    pixels = np.round(255 * grey / grey.max()).astype(np.uint8)
    with tf.io.TFRecordWriter(str(file)) as writer:
        for image, label in zip(pixels, data.y_train, strict=True):
            writer.write(bytes([int(label)]) + tf.io.encode_png(image).numpy())
    return file.stat().st_size


def _made(encoded: tf.Tensor, feeding: Feeding) -> Made:
    """A batch of records (batch,) as images (batch, 784) and classes (batch,)."""
    import tensorflow as tf

    # Control dependencies put the clock's readings before and behind all the work.
    with tf.control_dependencies([encoded]):
        start = tf.timestamp()
    with tf.control_dependencies([start]):
        encoded = tf.identity(encoded)
    kinds = (tf.float32, tf.int32)
    x, y = tf.map_fn(
        lambda record: _one(record, feeding.enlarged), encoded, fn_output_signature=kinds
    )
    with tf.control_dependencies([x, y]):
        stop = tf.timestamp()
    return x, y, start, stop


def _one(record: tf.Tensor, enlarged: int) -> tuple[tf.Tensor, tf.Tensor]:
    """An image (784,), standardised, and its class."""
    import tensorflow as tf

    label = tf.io.decode_raw(tf.strings.substr(record, 0, 1), tf.uint8)[0]
    image = tf.io.decode_png(tf.strings.substr(record, 1, -1), channels=1)
    image = tf.image.resize(image, (enlarged, enlarged))
    image = tf.image.resize_with_crop_or_pad(image, SIDE, SIDE)
    image = tf.image.per_image_standardization(image)
    return tf.reshape(image, (SIDE * SIDE,)), tf.cast(label, tf.int32)


# A step: given a batch, trains, and says when the batch was made.
Trains = Callable[..., tuple[float, float]]


def _trained(model: Model) -> Trains:
    """A step that is given what was made before."""
    import tensorflow as tf

    step = tf.function(lambda x, y: model.train(x, y, lambda gradients: gradients))

    def train(x: tf.Tensor, y: tf.Tensor, *made: tf.Tensor) -> tuple[float, float]:
        step(x, y).numpy()
        start, stop = (float(each.numpy()) for each in made)
        return start, stop

    return train


def _inside(model: Model, feeding: Feeding) -> Trains:
    """A step that makes its batch first, in the same graph."""
    import tensorflow as tf

    def made_first(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        x, y, start, stop = _made(encoded, feeding)
        return model.train(x, y, lambda gradients: gradients), start, stop

    step = tf.function(made_first)

    def train(encoded: tf.Tensor) -> tuple[float, float]:
        _, start, stop = (each.numpy() for each in step(encoded))
        return float(start), float(stop)

    return train


def _fill(way: Way, feeding: Feeding) -> float:
    """Go once through all batches, so that the cache has them; the seconds of that."""
    start = time.perf_counter()
    batches = way()
    for _ in range(feeding.rows // feeding.batch + 1):
        next(batches)
    return time.perf_counter() - start


def _lead(feeding: Feeding) -> int:
    """Untimed steps of a turn: until nothing is left of what was made before the first one."""
    return WARM + feeding.calls + feeding.ahead


def _turn(
    way: Way, train: Trains, steps: int, lead: int
) -> list[tuple[float, float, float, float, float]]:
    """Of each timed step: when it asked for its batch, had it, ended; when the batch was made."""
    batches, began = way(), time.time()
    kept = []
    for _ in range(lead + steps):
        # The clock of `tf.timestamp`, so that batches and steps are on one.
        asked = time.time()
        batch = next(batches)
        got = time.time()
        made_start, made_stop = train(*batch)
        stop = time.time()
        # What lies in memory or in the cache was made before.
        own = (made_start, made_stop) if made_start >= began else (float("nan"), float("nan"))
        kept.append((asked, got, stop, *own))
    return kept[lead:]
