"""A benchmark of input pipelines: the times of training steps and of their input batches."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit import datasets
from labkit.bench.steps import BenchModel, ModelCase
from labkit.cluster import Cluster
from labkit.common.errors import InvalidInput, short
from labkit.communicator import Communicator
from labkit.records.timed_steps import INSIDE, SYNTHETIC, WAYS, FedStep, InputTrace

if TYPE_CHECKING:
    import tensorflow as tf

    # A `Made` tuple contains an image or a batch, and the classes. A `Made` tuple also contains
    # start and end of the preparation in seconds.
    Made: TypeAlias = "tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]"
    Records: TypeAlias = "tf.data.Dataset"

SIDE = 28  # The constant SIDE is the width and height of a training image in pixels.
MOST = 1024  # The constant MOST is the maximum value of each numeric option.
# In each repeat, an input pipeline first runs one untimed step per prefetched batch. The constant
# WARM is the number of further untimed steps.
WARM = 4


@dataclass(frozen=True)
class Feeding:
    """Options of the measured input pipelines.

    Attributes:
        dataset: Name of an image data set.
        rows: Number of rows of the data set. The rows are written to a file as PNG images and read
            repeatedly.
        batch: Number of images per step.
        enlarged: Width and height in pixels of the enlarged image before the crop. More pixels mean
            more preparation time per image.
        calls: Number of batches that a parallel `map` of tf.data prepares concurrently.
        ahead: Number of batches to prefetch.
        widths: Numbers of units of the hidden layers.
    """

    dataset: str
    rows: int
    batch: int
    enlarged: int
    calls: int
    ahead: int
    widths: tuple[int, ...]

    def refuse_impossible(self) -> None:
        """Raise InvalidInput if an option is out of range."""
        shapes = datasets.check(self.dataset, {"rows": self.rows})
        if len(shapes.input_shape) != 3 or shapes.task != "classification":
            raise InvalidInput(
                f"dataset={self.dataset!r} has no images; give digits, mnist, fashion_mnist or "
                "cifar10"
            )
        if not 1 <= self.batch <= self.rows:
            raise InvalidInput(
                f"batch={short(self.batch)}, rows={short(self.rows)}: give a batch of at least 1 "
                "sample and at most the number of rows"
            )
        if not SIDE <= self.enlarged <= MOST:
            raise InvalidInput(
                f"enlarged={short(self.enlarged)}: give an edge of {SIDE} to {MOST:,} pixels"
            )
        for name, value in (("calls", self.calls), ("ahead", self.ahead)):
            if not 1 <= value <= MOST:
                raise InvalidInput(f"{name}={short(value)}: give a whole number from 1 to {MOST:,}")


def measure(feeding: Feeding, steps: int = 20, repeats: int = 5) -> InputTrace:
    r"""Measure training steps with each input pipeline of `WAYS`, in turn.

    Images are read from a file, decoded (PNG), enlarged, cropped and standardised. In every repeat,
    each pipeline feeds `steps` successive steps. Every second repeat measures the pipelines in
    reverse order. In each repeat, a pipeline starts with a new iterator. Untimed steps first
    consume the batches that the pipeline has prefetched. The pipeline "cache" fills its cache
    before the first repeat. Training uses one thread; the input pipeline has its own threads.

    Args:
        feeding: Options of the input pipeline.
        steps: Number of timed steps of each pipeline in a repeat.
        repeats: Number of repeats. Each repeat measures every pipeline once.

    Returns: One row per step. All times of a step and of its batch are on one clock.

    Raises:
        InvalidInput: An option is out of range.
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
    """Run the measurement of `measure` in this process; training uses its thread settings."""
    model = BenchModel(ModelCase("fed", feeding.widths, feeding.batch), rank=0)
    taken: list[FedStep] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images.tfrecord"
        nbytes = _write(feeding, file)
        ways = _ways(feeding, file, model)
        filled = _fill(ways["cache"], feeding)
        plain, inside = _trained(model), _inside(model, feeding)
        for repeat in range(repeats):
            # Every second repeat times the pipelines in reverse order. A pipeline may affect the
            # pipeline that is timed next.
            for way in list(ways)[:: -1 if repeat % 2 else 1]:
                step = inside if way == INSIDE else plain
                turn = _turn(ways[way], step, steps, _lead(feeding))
                taken += [FedStep(way, repeat, place, *times) for place, times in enumerate(turn)]
    return InputTrace(taken, nbytes, filled)


# A function of type `Way` creates an iterator over the batches of one input pipeline.
Way = Callable[[], "Iterator[tuple[tf.Tensor, ...]]"]


def _ways(feeding: Feeding, file: Path, model: BenchModel) -> dict[str, Way]:
    """Return, for each pipeline name, the function that creates the pipeline's iterator."""
    import tensorflow as tf

    records = tf.data.TFRecordDataset(str(file)).batch(feeding.batch, drop_remainder=True)
    again = records.repeat()
    made = tf.function(lambda encoded: _made(encoded, feeding))
    parallel = again.map(made, num_parallel_calls=feeding.calls)
    cached = records.map(made, num_parallel_calls=feeding.calls).cache().repeat()
    still = tf.constant(0.0, tf.float64)
    # In the synthetic pipeline, every training step receives the same batch, which is ready before
    # the first step.
    ready = (model.x, model.y, still, still)
    ways: dict[str, Way] = {
        SYNTHETIC: lambda: iter(lambda: ready, None),
        # The next pipeline decodes records inside the training step.
        INSIDE: lambda: ((each,) for each in _own_threads(again, feeding)),
        "map": lambda: iter(_own_threads(again.map(made), feeding)),
        "parallel calls": lambda: iter(_own_threads(parallel, feeding)),
        "prefetch": lambda: iter(_own_threads(parallel.prefetch(feeding.ahead), feeding)),
        "cache": lambda: iter(_own_threads(cached.prefetch(feeding.ahead), feeding)),
    }
    assert tuple(ways) == WAYS
    return ways


def _own_threads(records: Records, feeding: Feeding) -> Records:
    """Give the pipeline one private thread per concurrent `map` call, and disable autotuning."""
    import tensorflow as tf

    options = tf.data.Options()
    options.threading.private_threadpool_size = feeding.calls
    options.autotune.enabled = False
    return records.with_options(options)


def _write(feeding: Feeding, file: Path) -> int:
    """Write each row as a record (class byte, PNG image); return the file's size in bytes."""
    import tensorflow as tf

    data = datasets.load(feeding.dataset, rows=feeding.rows)
    # The model expects grey images with one channel.
    grey = data.x_train.mean(axis=-1, keepdims=True)
    pixels = np.round(255 * grey / grey.max()).astype(np.uint8)
    with tf.io.TFRecordWriter(str(file)) as writer:
        for image, label in zip(pixels, data.y_train, strict=True):
            writer.write(bytes([int(label)]) + tf.io.encode_png(image).numpy())
    return file.stat().st_size


def _made(encoded: tf.Tensor, feeding: Feeding) -> Made:
    """Decode records; return images (batch, 784), classes (batch,), start time and end time."""
    import tensorflow as tf

    # Control dependencies put the first timestamp before all work. Control dependencies put the
    # second timestamp after all work.
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
    """Decode a record into a standardised image (784,) and its class."""
    import tensorflow as tf

    label = tf.io.decode_raw(tf.strings.substr(record, 0, 1), tf.uint8)[0]
    image = tf.io.decode_png(tf.strings.substr(record, 1, -1), channels=1)
    image = tf.image.resize(image, (enlarged, enlarged))
    image = tf.image.resize_with_crop_or_pad(image, SIDE, SIDE)
    image = tf.image.per_image_standardization(image)
    return tf.reshape(image, (SIDE * SIDE,)), tf.cast(label, tf.int32)


# A function of type `Trains` runs one training step. A `Trains` function returns start and end of
# the batch's preparation in seconds.
Trains = Callable[..., tuple[float, float]]


def _trained(model: BenchModel) -> Trains:
    """Return a training step that receives a prepared batch."""
    import tensorflow as tf

    step = tf.function(lambda x, y: model.train(x, y, lambda gradients: gradients))

    def train(x: tf.Tensor, y: tf.Tensor, *made: tf.Tensor) -> tuple[float, float]:
        step(x, y).numpy()
        start, stop = (float(each.numpy()) for each in made)
        return start, stop

    return train


def _inside(model: BenchModel, feeding: Feeding) -> Trains:
    """Return a training step whose graph also prepares the batch."""
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
    """Iterate once over all batches to fill the cache; return the seconds for this iteration."""
    start = time.perf_counter()
    batches = way()
    for _ in range(feeding.rows // feeding.batch + 1):
        next(batches)
    return time.perf_counter() - start


def _lead(feeding: Feeding) -> int:
    """Return how many untimed steps consume the batches that a pipeline prefetches at its start."""
    return WARM + feeding.calls + feeding.ahead


def _turn(
    way: Way, train: Trains, steps: int, lead: int
) -> list[tuple[float, float, float, float, float]]:
    """Return five times per step: batch requested, received, step end, preparation start, end."""
    batches, began = way(), time.time()
    times = []
    for _ in range(lead + steps):
        # `time.time` reads the same clock as TensorFlow's operation `tf.timestamp`.
        requested = time.time()
        batch = next(batches)
        arrived = time.time()
        made_start, made_stop = train(*batch)
        stop = time.time()
        # Batches from memory or the cache are prepared before the timed steps. Preparation times of
        # batches from memory or the cache are NaN.
        prepared = (made_start, made_stop) if made_start >= began else (float("nan"), float("nan"))
        times.append((requested, arrived, stop, *prepared))
    return times[lead:]
