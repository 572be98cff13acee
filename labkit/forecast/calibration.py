"""What a machine has been seen to take: the measured times from which forecasts are made."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self

import numpy as np
from pydantic import Field

from labkit.common.canonical_json import JSON, as_json
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.safe_json import NotPlain, read_plain_json
from labkit.common.validated import Checked
from labkit.network import Network

SCHEMA = 2
LONGEST = 2**26  # bytes of a file
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
SIZES = ("rows", "test_rows")  # options of data sets that say nothing of a row


class Modelled(Protocol):
    """What an experiment says of its model, its rows, and how it is trained on one rank."""

    @property
    def model(self) -> Any:
        """See `labkit.Experiment`, as for the others."""

    @property
    def model_options(self) -> dict[str, Any]:
        """Of a named one."""

    @property
    def dataset(self) -> Any:
        """Its data."""

    @property
    def dataset_options(self) -> dict[str, Any]:
        """Of a named one."""

    @property
    def precision(self) -> str:
        """Its policy."""

    @property
    def optimizer(self) -> str:
        """Its name."""


def model_of(experiment: Modelled) -> dict[str, JSON]:
    """What of an experiment decides how long a step of one rank takes, but for its batch.

    Of arrays only the shape and kind of a row counts, of a callable its source.
    """
    data = experiment.dataset
    if isinstance(data, tuple):
        data = [[list(each.shape[1:]), str(each.dtype)] for each in data if hasattr(each, "dtype")]
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
    """Seconds that something took in so many repeats: the median, and the middle nine tenths.

    Attributes:
        median, low, high: s; low and high are the 5th and the 95th percentile.
        count: repeats.
    """

    median: Seconds
    low: Seconds
    high: Seconds
    count: int = Field(default=1, ge=1)

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Of measured seconds, one or more."""
        low, median, high = np.quantile(np.asarray(seconds, float), (0.05, 0.5, 0.95))
        return cls(median=float(median), low=float(low), high=float(high), count=len(seconds))


class LayerCost(Checked):
    """A layer of a model, in the order of its forward pass.

    Attributes:
        name: of the layer.
        kind: its Keras class; of several in one block that of all that train, or "Functional".
        weights: shapes of what it trains.
        forward, backward: its share of the model's pass forward, and back.
        out: bytes that it hands on for one row.
    """

    name: str
    kind: str
    weights: tuple[tuple[int, ...], ...] = ()
    forward: Annotated[float, Field(ge=0, le=1)]
    backward: Annotated[float, Field(ge=0, le=1)]
    out: Count


class StepCost(Checked):
    """A step of one rank without any exchange, while others compute beside it.

    Attributes:
        rows: of the batch of this rank.
        threads: of this rank.
        together: ranks that compute on this machine at once, this one among them.
        forward, backward, update, other: s; other is what Keras and Python add to these.
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
        """All of it, medians, s."""
        return sum(
            spread.median for spread in (self.forward, self.backward, self.update, self.other)
        )


class ModelCost(Checked):
    """What a model takes on this machine.

    Attributes:
        model: which one, see `model_of`.
        layers: that train or hand something on.
        steps: as measured; forecasts interpolate between their rows.
        read: s to read a batch, by its rows; no step waits for that.
        memory: bytes of a step beside weights, gradients and optimizer, for one row.
        slots: values that the optimizer keeps for each weight.
    """

    model: dict[str, Any]
    layers: tuple[LayerCost, ...]
    steps: tuple[StepCost, ...]
    read: dict[int, Spread] = Field(default_factory=dict)
    memory: Count = 0
    slots: Count = 0

    @property
    def parameters(self) -> int:
        """Weights that train."""
        return sum(math.prod(shape) for layer in self.layers for shape in layer.weights)


class CodecCost(Checked):
    """What a compressor takes for a gradient, while all ranks of the calibration encode.

    Attributes:
        compressor: as `Compressor.to_json` says it.
        nbytes: of the gradient, as float32.
        encode, decode: s; of what encodes in several calls, all of them.
        payload: bytes.
    """

    compressor: dict[str, Any]
    nbytes: Count
    encode: Spread
    decode: Spread
    payload: Count


class CollectiveCost(Checked):
    """An allreduce that was measured.

    Attributes:
        level: "memory", "host" (MPI within one host) or "link" (between hosts, or emulated).
        algorithm: its name.
        network: that was emulated; None: the machine's own.
        workers: ranks.
        nbytes: of the buffer.
        seconds: of the slowest rank.
    """

    level: Literal["memory", "host", "link"]
    algorithm: str
    network: str | None = None
    workers: int = Field(gt=1)
    nbytes: Count
    seconds: Spread


class Overhead(Checked):
    """What labkit itself takes, once, beside computing and carrying bytes.

    meeting: a barrier. bucket: a bucket handed to the exchange and back, packed, without its
    allreduce. overlap: the same of a further bucket while backpropagation goes on. message: one
    of programs, from its post until it is read. emulated: what a round on an emulated network
    takes longer than that network. replicas: what a step of replicas that exchange takes besides.

    Attributes:
        what: its name.
        workers: ranks that took part.
        nbytes: of the bucket or message.
        seconds: once.
    """

    what: str
    workers: int = Field(gt=0)
    nbytes: Count = 0
    seconds: Spread


class WayCost(Checked):
    """Whole steps of a way to train, as runs took them that were begun anew each time.

    Attributes:
        model: which one, see `model_of`.
        strategy: as its `to_json` says it.
        workers: ranks that train.
        threads: of each.
        batch: rows of all of them.
        network: that was emulated; None: one rank alone.
        runs: s of the typical step of each run.
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
        """Of the typical step, over the runs."""
        return Spread.of(self.runs)


class Source(NamedTuple):
    """Where a figure of a forecast is from: what it is, and how it is known."""

    what: str
    how: str


class Outdated(LabkitError):
    """A calibration that another labkit has written."""


class Calibration(Checked):
    """All that was measured on a machine, kept in a file, with the machine and its versions.

    Attributes:
        made: when, ISO 8601, UTC.
        machine: hardware and versions, see `labkit.forecast.calibration_store.this_machine`.
        models, codecs, collectives, overheads: parts of steps that were measured.
        ways: whole steps likewise.
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
        """Eight hexadecimal digits that name the content."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.part")
        beside.write_text(self.model_dump_json(indent=1))
        beside.replace(path)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read it.

        Raises:
            InvalidInput: there is no such file, or it is none of these.
            Outdated: it is of another labkit.
        """
        path = Path(path)
        if not path.is_file():
            raise InvalidInput(f"{path.name!r} is no file; make one by `labkit calibrate -o FILE`")
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
                f"{path.name!r} is a calibration of another labkit; make it anew by "
                "`labkit calibrate`"
            )
        return cls(**{str(name): value for name, value in fields.items()})
