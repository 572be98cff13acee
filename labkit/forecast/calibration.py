"""The calibration of a machine: measured costs, from which forecasts are computed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from labkit.common.canonical_json import JSON, NotPlain, as_json, read_plain_json
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.renamed import rename_classes
from labkit.common.validated import Checked
from labkit.network import Network

SCHEMA = 2
LONGEST = 2**26  # maximum size of a calibration file, bytes
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
SIZES = ("rows", "test_rows")  # data set options that change only the number of samples


class ModelDescription(Protocol):
    """The experiment's fields that describe the model, the data and the training."""

    @property
    def model(self) -> Any:
        """The model or its name; `labkit.Experiment` describes all fields."""

    @property
    def model_options(self) -> dict[str, Any]:
        """The options of a named model."""

    @property
    def dataset(self) -> Any:
        """The data set or its name."""

    @property
    def dataset_options(self) -> dict[str, Any]:
        """The options of a named data set."""

    @property
    def precision(self) -> str:
        """The precision of weights and computation, such as "float32"."""

    @property
    def optimizer(self) -> str:
        """The name of the optimizer."""


def model_of(experiment: ModelDescription) -> dict[str, JSON]:
    """Return the fields of an experiment that determine a rank's step time, except the batch size.

    The shape and dtype of a sample describe an array in the result. The source code describes a
    callable in the result.
    """
    data = experiment.dataset
    if isinstance(data, tuple):
        data = [
            [list(array.shape[1:]), str(array.dtype)] for array in data if hasattr(array, "dtype")
        ]
    options = {k: v for k, v in experiment.dataset_options.items() if k not in SIZES}
    return {
        "model": as_json(experiment.model),
        "model_options": as_json(experiment.model_options),
        "dataset": as_json(data),
        "dataset_options": as_json(options),
        "precision": experiment.precision,
        "optimizer": experiment.optimizer,
    }


class Spread(Checked):
    """Measured seconds of repeated work: the median, and the middle 90% of the values.

    Attributes:
        median, low, high: Seconds; low and high are the 5th and the 95th percentile.
        count: Number of measured repeats.
    """

    median: Seconds
    low: Seconds
    high: Seconds
    count: int = Field(default=1, ge=1)

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Return the spread of one or more measurements, s."""
        low, median, high = np.quantile(np.asarray(seconds, float), (0.05, 0.5, 0.95))
        return cls(median=float(median), low=float(low), high=float(high), count=len(seconds))


class LayerCost(Checked):
    """The measured cost of a layer, or of a block of layers.

    Attributes:
        name: Name of the layer.
        kind: Keras class of the layer. For a block, `kind` is the class that the block's trainable
            layers share. If the classes in a block differ, `kind` is "Functional".
        weights: Shapes of the trainable weights.
        forward, backward: The layer's share of the time of the model's forward and backward pass.
        out: Bytes of the layer's output for one sample.
    """

    name: str
    kind: str
    weights: tuple[tuple[int, ...], ...] = ()
    forward: Annotated[float, Field(ge=0, le=1)]
    backward: Annotated[float, Field(ge=0, le=1)]
    out: Count


class StepCost(Checked):
    """The cost of one rank's training step without communication, while other ranks also compute.

    Attributes:
        rows: Number of samples in this rank's batch.
        threads: Number of threads of this rank.
        together: Number of ranks that compute on this machine at the same time, including this one.
        forward, backward, update, other: Seconds of each part of the step. The part `other` is the
            overhead of Keras and Python.
    """

    rows: int = Field(gt=0)
    threads: int = Field(gt=0)
    together: int = Field(gt=0)
    forward: Spread
    backward: Spread
    update: Spread
    other: Spread

    @property
    def seconds(self) -> float:
        """The seconds of a step: the sum of the median times of its four parts."""
        return sum(
            spread.median for spread in (self.forward, self.backward, self.update, self.other)
        )


class ModelCost(Checked):
    """The cost of a model on this machine.

    Attributes:
        model: Description of the model, see `model_of`.
        layers: Costs of the model's layers, sorted in the order of the forward pass.
        steps: Measured costs of steps; forecasts interpolate between the batch sizes of these
            steps.
        read: Seconds to read a batch, one entry per number of samples; `steps` does not include
            these seconds.
        memory: Bytes that a step needs per sample, in addition to weights, gradients and optimizer.
        slots: Number of values that the optimizer stores per weight.
    """

    model: dict[str, Any]
    layers: tuple[LayerCost, ...]
    steps: tuple[StepCost, ...]
    read: dict[int, Spread] = Field(default_factory=dict)
    memory: Count = 0
    slots: Count = 0

    @property
    def parameters(self) -> int:
        """The number of trainable weights."""
        return sum(math.prod(shape) for layer in self.layers for shape in layer.weights)


class CodecCost(Checked):
    """The cost of a gradient compressor, measured while all ranks encode at the same time.

    Attributes:
        compressor: Compressor as JSON, see `Compressor.to_json`.
        nbytes: Bytes of the uncompressed gradient in float32.
        encode, decode: Seconds to encode and to decode; if encoding needs several calls, their sum.
        payload: Bytes of the compressed payload.
    """

    compressor: dict[str, Any]
    nbytes: Count
    encode: Spread
    decode: Spread
    payload: Count


class CollectiveCost(Checked):
    """The measured cost of an allreduce.

    Attributes:
        level: "memory", "host" (MPI within one host) or "link" (between hosts, or emulated).
        algorithm: Name of the algorithm.
        network: Name of the emulated network; None: the real network of the machine.
        workers: Number of ranks.
        nbytes: Bytes of the buffer that the allreduce sums.
        seconds: Seconds of the slowest rank.
    """

    level: Literal["memory", "host", "link"]
    algorithm: str
    network: str | None = None
    workers: int = Field(gt=1)
    nbytes: Count
    seconds: Spread


class Overhead(Checked):
    """An overhead of labkit, in addition to computation and transfer.

    The overhead "meeting" is the time of a barrier. The overhead "bucket" is the time to pass a
    gradient bucket to the exchange. The overhead "bucket" includes the packing and excludes the
    allreduce. The overhead "overlap" occurs during backpropagation, for each gradient bucket after
    the first. It is the time to pack the bucket and pass it to the exchange. The overhead "message"
    is the time between the sending and the reading of a message. The sender and the reader are
    different programs. The overhead "emulated" is the time that an emulated network adds to each
    communication round. The overhead "replicas" is the part of a step with gradient exchange that
    no other overhead explains.

    Attributes:
        what: Name of the overhead.
        workers: Number of participating ranks.
        nbytes: Bytes of the bucket or message.
        seconds: Seconds per occurrence.
    """

    what: str
    workers: int = Field(gt=0)
    nbytes: Count = 0
    seconds: Spread


class WayCost(Checked):
    """Measured times of complete training steps with one strategy, from separate runs.

    Attributes:
        model: Description of the model, see `model_of`.
        strategy: Strategy as JSON, as the strategy's method `to_json` returns it.
        workers: Number of ranks that train.
        threads: Threads per rank.
        batch: Number of samples in the global batch.
        network: Emulated network; None: a single rank.
        runs: Seconds of the typical step, one number per run.
    """

    model: dict[str, Any]
    strategy: dict[str, Any]
    workers: int = Field(gt=0)
    threads: int = Field(gt=0)
    batch: int = Field(gt=0)
    network: Network | None = None
    runs: Annotated[tuple[Seconds, ...], Field(min_length=1)]

    @property
    def seconds(self) -> Spread:
        """Typical time of a step, with the spread over several runs."""
        return Spread.of(self.runs)


class Provenance(NamedTuple):
    """The origin of a number in a forecast: what the number is, and how it was obtained."""

    what: str
    how: str


class Outdated(LabkitError):
    """The error for a calibration file of another labkit version."""


class Calibration(Checked):
    """All measured costs of a machine, stored in a file with its hardware and software versions.

    Attributes:
        made: Time of the measurement, ISO 8601, UTC.
        machine: Hardware and software versions, see
            `labkit.forecast.calibration_store.this_machine`.
        models, codecs, collectives, overheads: Measured costs of parts of steps: models,
            compressors, allreduces and overheads.
        ways: Measured costs of whole steps of strategies.
    """

    schema_version: int = SCHEMA
    made: str
    machine: dict[str, Any]
    models: tuple[ModelCost, ...] = ()
    codecs: tuple[CodecCost, ...] = ()
    collectives: tuple[CollectiveCost, ...] = ()
    overheads: tuple[Overhead, ...] = ()
    ways: tuple[WayCost, ...] = ()

    @cached_property
    def hash8(self) -> str:
        """The hash of the calibration, eight hexadecimal digits."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def save(self, path: Path) -> None:
        """Write the calibration to a file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_file = path.with_name(f".{path.name}.part")
        partial_file.write_text(self.model_dump_json(indent=1))
        partial_file.replace(path)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a calibration file.

        Raises:
            InvalidInput: The file is missing, or is not a calibration.
            Outdated: Another labkit version wrote the file in another format.
        """
        path = Path(path)
        if not path.is_file():
            raise InvalidInput(
                f"{path.name!r} is not a file; write one with `labkit calibrate -o FILE`"
            )
        try:
            if (size := path.stat().st_size) > LONGEST:
                raise NotPlain(f"has {size:,} bytes; a calibration has at most {LONGEST:,}")
            fields = read_plain_json(path.read_bytes())
        except NotPlain as error:
            raise InvalidInput(f"{path.name!r} holds no calibration: it {error}") from error
        except OSError as error:
            raise InvalidInput(f"{path.name!r} cannot be read: {error.strerror}") from error
        if not isinstance(fields, dict) or "schema_version" not in fields:
            raise InvalidInput(f"{path.name!r} holds no calibration: it has no schema_version")
        if fields["schema_version"] != SCHEMA:
            raise Outdated(
                f"{path.name!r} is a calibration of another labkit version; measure again with "
                "`labkit calibrate`"
            )
        # A calibration file may contain former class names, which `rename_classes` replaces by the
        # present names.
        return cls(**rename_classes({str(name): value for name, value in fields.items()}))


NOTHING = Spread(median=0.0, low=0.0, high=0.0)


def scale_spread(spread: Spread, factor: float) -> Spread:
    """Return a spread whose median and bounds are multiplied by a factor."""
    median, low, high = (factor * value for value in (spread.median, spread.low, spread.high))
    return Spread(median=median, low=low, high=high, count=spread.count)


def add_spreads(first: Spread, second: Spread) -> Spread:
    """Return the spread of the sum of two independent times; their deviations add as squares."""
    median = first.median + second.median
    down = np.hypot(first.median - first.low, second.median - second.low)
    up = np.hypot(first.high - first.median, second.high - second.median)
    return Spread(median=median, low=max(0.0, median - float(down)), high=median + float(up))


def percentile_range(seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 5th and the 95th percentile of times."""
    # `np.quantile` is not used, because its first call imports modules, which takes longer than a
    # forecast.
    positions = np.linspace(0.0, 1.0, len(seconds))
    low, high = np.interp((0.05, 0.95), positions, np.sort(seconds)).tolist()
    return low, high


def widen(spread: Spread, by: float) -> Spread:
    """Widen a spread by an independent deviation of `by` seconds, below and above the median."""
    middle = spread.median
    low = max(0.0, middle - float(np.hypot(middle - spread.low, by)))
    high = middle + float(np.hypot(spread.high - middle, by))
    return Spread(median=middle, low=low, high=high, count=spread.count)


def line_through(low: Spread, high: Spread, share: float) -> Spread:
    """Interpolate linearly between two spreads: share 0 gives `low`, and share 1 gives `high`.

    The median is at least 0 s. The relative bounds of the result (bound / median) are those of the
    nearer spread, `low` or `high`.
    """
    median = max(0.0, low.median + share * (high.median - low.median))
    nearest = low if share < 0.5 else high
    factors = [
        bound / nearest.median if nearest.median else 1.0 for bound in (nearest.low, nearest.high)
    ]
    return Spread(
        median=median, low=median * factors[0], high=median * factors[1], count=nearest.count
    )


def interpolate(measured: Iterable[tuple[float, Spread]], nbytes: float) -> Spread:
    """Interpolate between measured sizes, and extrapolate above the largest measured size.

    A size below the smallest measured size gets the spread of the smallest measured size.
    """
    points = sorted(measured, key=lambda point: point[0])
    if len(points) == 1 or nbytes <= points[0][0]:
        return points[0][1]
    index = int(np.clip(np.searchsorted([size for size, _ in points], nbytes), 1, len(points) - 1))
    (low, lower), (high, upper) = points[index - 1], points[index]
    return line_through(lower, upper, (nbytes - low) / (high - low))


def range_note(value: float, measured: Iterable[float]) -> str:
    """Return a note if a value is outside the measured range; otherwise, return an empty text."""
    values = list(measured)
    if values and value > max(values):
        return f", beyond the largest measured ({max(values):,g})"
    if values and value < min(values):
        return f", beyond the smallest measured ({min(values):,g})"
    return ""
