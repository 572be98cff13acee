"""Experiment: all that defines a run, checked before a rank starts, with a hash as its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import (
    Field,
    PositiveFloat,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from labkit import datasets, models
from labkit.common.canonical_json import JSON, as_json, digest, label_of
from labkit.common.data_partition import IID, concentration
from labkit.common.errors import InvalidInput
from labkit.common.options import lookup
from labkit.common.quantity_fields import PositiveSeconds, Seconds
from labkit.common.validated import Checked
from labkit.experiment import fault_injection
from labkit.experiment.captured_state import refuse_lost_state
from labkit.experiment.data import check_validation, labels_of, leaves, parse_data
from labkit.experiment.keras_names import check_names
from labkit.experiment.summary import brief, html_of
from labkit.network import ComputeTime, Fault, Network, Slowdown
from labkit.schedules.grid import Layer
from labkit.strategies import STRATEGIES, AllReduce, ProgramStrategy, Strategy
from labkit.strategies.validation import OPTIMIZERS, one_of

if TYPE_CHECKING:
    from labkit.forecast import Calibration, Forecast

SCHEMA = 1
UNSAID = (  # where they are not given
    *("compute", "slow", "later", "order", "lost", "shards"),
    *("faults", "bad_numbers", "check_every", "checksums"),
)
# Numbers above are slips of a finger; so is a seed that NumPy, which has 32 bits for it, refuses.
MOST_RANKS, MOST_STEPS = 10_000, 10**9
Given = TypeVar("Given")


class Experiment(Checked):
    """A question to the lab: a model, data, a way to train over ranks, and the world it runs in.

    Args:
        name: label of its runs; default: made of model, data set, strategy and workers.
        model: a name of `labkit.models.MODELS`, or a callable that returns a Keras model. A model
            that it has compiled keeps its loss, metrics and optimizer.
        model_options: of a named model, such as `{"widths": [512, 512]}`.
        dataset: a name of `labkit.datasets.DATASETS`, arrays `(x, y)`, a callable that returns a
            `tf.data.Dataset` of samples or of batches, the path of an .npz, .csv or .parquet file,
            of images in folders by class, or of a folder of Hugging Face's, or `hf:NAME`.
        dataset_options: of a named data set, such as `{"rows": 1000}`.
        validation: arrays or a callable, held out; a named data set brings its own test rows.
        strategy: what the workers exchange, and when; an object, or the name of one.
        workers: ranks.
        threads: TensorFlow's threads in each rank.
        network: a `Network`, or the name of one, to emulate; None: the real one.
        clock: "wall", or "virtual": one process plays all workers with real gradients, while
            what computing and messages take is modelled.
        compute: what a gradient takes on the virtual clock: a `ComputeTime`, seconds, or a list of
            them; None: measured once.
        later: (worker, step, s): on the virtual clock this gradient is so much longer on its way.
        order: (server, worker, step): in which servers take gradients on the virtual clock; those
            of the network, where nothing is given.
        lost: worker -> s, or (worker, s): on the virtual clock it is gone from then on, with what
            it was about to do. Servers hear of it; those that wait for nobody go on.
        slow: worker -> `Slowdown`, or a factor on its compute times, with or without a network.
        faults: what goes wrong, when and where; each a `Fault`.
        bad_numbers: what to do about a gradient that is infinite or not a number: "stop" with an
            error that names step, rank and layer; "skip" the step on all ranks (programs: the
            gradient); "clip": 0 in the place of such elements; None: nobody looks, which would be
            one more pass over all gradients. A loss that is scaled (precision="mixed_float16")
            takes care of its own overflows.
        check_every: steps from one comparison of the replicas' weights to the next; 0: none.
        checksums: whether one travels with each message that labkit sends itself.
        epochs: passes over the data.
        steps: cap on the steps of an epoch.
        batch_size: samples of all ranks together in one step.
        optimizer: name of a Keras optimizer.
        optimizer_options: its further arguments, such as `{"momentum": 0.9}`.
        learning_rate: for one worker; None: the optimizer's own default.
        learning_rate_scaling: "linear" multiplies the rate by the workers, "sqrt" by their root.
        warmup_epochs: over which the rate grows from that of one worker to the scaled one.
        loss: name of a Keras loss; default: what the task wants.
        metrics: names of Keras metrics; default: what the task wants.
        precision: Keras dtype policy.
        feed: "shard": each rank reads its rows; "scatter": rank 0 reads and scatters.
        capacities: a rank's share of each batch, a number a rank; default: equal.
        shards: which samples workers have: "iid", "by_label" (sorted and cut), or
            "dirichlet(0.3)", shares of labels drawn with this concentration (Hsu 2019, arXiv
            1909.06335). Where it is not "iid", each worker keeps its samples, and shuffles those.
        callbacks: a callable that returns a list of Keras callbacks for each rank.
        seed: of weights and shuffling.
        repeats: number of seeds to run, from `seed` on.
        gate: hold the run against one process before its speed is believed.
    """

    name: str = ""
    model: str | Callable[..., Any] = "mlp"
    model_options: dict[str, Any] = Field(default_factory=dict)
    dataset: str | Callable[..., Any] | tuple[Any, ...] = "digits"
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    validation: Callable[..., Any] | tuple[Any, ...] | None = None
    strategy: SerializeAsAny[Strategy] = AllReduce()
    workers: int = Field(default=1, gt=0, le=MOST_RANKS)
    threads: int = Field(default=1, gt=0, le=MOST_RANKS)
    network: str | Network | None = None
    clock: Literal["wall", "virtual"] = "wall"
    compute: ComputeTime | None = None
    slow: dict[int, Slowdown] = Field(default_factory=dict)
    later: tuple[tuple[int, int, PositiveSeconds], ...] = ()
    order: tuple[tuple[int, int, int], ...] = ()
    lost: tuple[tuple[int, Seconds], ...] = ()
    faults: tuple[Fault, ...] = ()
    bad_numbers: Literal["stop", "skip", "clip"] | None = None
    check_every: int = Field(default=0, ge=0)
    checksums: bool = False
    epochs: int = Field(default=1, gt=0, le=MOST_STEPS)
    steps: int | None = Field(default=None, gt=0, le=MOST_STEPS)
    batch_size: int = Field(default=256, gt=0, le=MOST_STEPS)
    optimizer: str = "sgd"
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    learning_rate: PositiveFloat | None = None
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    warmup_epochs: float = Field(default=0.0, ge=0, le=MOST_STEPS)
    loss: str | None = None
    metrics: tuple[str, ...] | None = None
    precision: Literal["float32", "float64", "mixed_float16", "mixed_bfloat16"] = "float32"
    feed: Literal["shard", "scatter"] = "shard"
    capacities: tuple[PositiveFloat, ...] | None = None
    shards: str = IID
    callbacks: Callable[..., Any] | None = None
    seed: int = Field(default=0, ge=0, lt=2**32)
    repeats: int = Field(default=1, gt=0, le=MOST_RANKS)
    gate: bool = True

    @field_validator("model")
    @classmethod
    def _model(cls, value: Given) -> Given:
        if hasattr(value, "count_params"):  # a Keras model is callable, too
            raise ValueError(
                "model is a Keras model; give a function that returns a new one, as each rank has "
                "its own: model=lambda: keras.models.clone_model(mine)"
            )
        if callable(value):
            refuse_lost_state(value)
        return value

    @field_validator("strategy", mode="before")
    @classmethod
    def _strategy(cls, value: Any) -> Any:
        return parse_strategy(value)

    @field_validator("network")
    @classmethod
    def _network(cls, value: str | Network | None) -> str | Network | None:
        Network.parse(value)
        return value

    @field_validator("compute", mode="before")
    @classmethod
    def _compute(cls, value: Any) -> Any:
        return ComputeTime.parse(value)

    @field_validator("slow", mode="before")
    @classmethod
    def _slow(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        factors = {w: {"compute": f} if isinstance(f, int | float) else f for w, f in value.items()}
        return {int(worker): slow for worker, slow in factors.items()}

    @field_validator("lost", mode="before")
    @classmethod
    def _lost(cls, value: Any) -> Any:
        return tuple(value.items()) if isinstance(value, dict) else value

    @field_validator("faults", mode="before")
    @classmethod
    def _faults(cls, value: Any) -> Any:
        return (value,) if isinstance(value, dict | Fault) else value

    @field_validator("optimizer")
    @classmethod
    def _optimizer(cls, value: str) -> str:
        return one_of("optimizer", value, OPTIMIZERS)

    @field_validator("shards")
    @classmethod
    def _shards(cls, value: str) -> str:
        concentration(value)
        return value

    @field_validator("dataset", "validation", mode="before")
    @classmethod
    def _arrays(cls, value: Any) -> Any:
        return parse_data(value)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # Without shapes only a model's own options are checked: what data of the user's own are,
        # ranks find out.
        shapes = None
        if isinstance(self.dataset, str):
            shapes = datasets.check(self.dataset, self.dataset_options)
        elif isinstance(self.dataset, tuple):
            check_validation(self.dataset, self.validation)
            shapes = datasets.shapes_of(self.dataset, labels_of(self.validation))
        if isinstance(self.model, str):
            models.check(self.model, self.model_options, shapes)
        if self.capacities is not None and len(self.capacities) != self.workers:
            raise InvalidInput(
                f"capacities has {len(self.capacities)} numbers for workers={self.workers}; "
                "give one a worker"
            )
        check_names(self.loss, self.metrics, self.optimizer, self.optimizer_options)
        self._check_clock()
        if self.shards != IID:
            named = shapes if isinstance(self.dataset, str) else None
            self._check_labels(named.task if named else None)
        if self.feed == "scatter" and callable(self.dataset):
            raise InvalidInput("feed='scatter' wants arrays or a named data set, not a callable")
        # Last: strategies may ask for blocks and rows, which have been checked by then.
        self.strategy.check(self)
        fault_injection.check(self)
        if isinstance(self.model, str):
            self._check_named_model(shapes)
        return self

    def _check_named_model(self, shapes: datasets.Shapes | None) -> None:
        if shapes is None:
            raise InvalidInput(
                f"model={self.model!r} needs arrays of one input and one output to know its "
                "shapes; give a callable that returns a keras.Model"
            )
        if isinstance(self.dataset, tuple):
            datasets.check_task(self.dataset, labels_of(self.validation), self.loss)
        loss = (self.loss or "").lower().replace("_", "")
        if shapes.task == "regression" and loss.startswith("sparse"):
            raise InvalidInput(
                f"loss={self.loss!r} wants classes as whole numbers, and these labels pose a "
                "regression: give y.astype(int)"
            )

    def _check_labels(self, task: str | None) -> None:
        if callable(self.dataset):
            raise InvalidInput(
                f"shards={self.shards!r} wants all labels before training, which a callable gives "
                "batch by batch; give arrays (x, y) or a named data set"
            )
        y = None if isinstance(self.dataset, str) else self.dataset[1]
        labels = isinstance(y, np.ndarray) and y.ndim == 1 and y.dtype.kind in "iu"
        if task != "classification" and not labels:
            what = f"a {task.replace('_', ' ')} has" if task else "this y does not have"
            raise InvalidInput(
                f"shards={self.shards!r} divides samples by one whole number each, their label, "
                f"which {what}{' not' if task else ''}; use shards='iid'"
            )

    def _check_clock(self) -> None:
        lost = dict(self.lost)
        for field, given in (("slow", self.slow), ("lost", lost)):
            if absent := [worker for worker in given if not 0 <= worker < self.workers]:
                raise InvalidInput(
                    f"{field}={absent} with workers={self.workers}; give 0 to workers - 1"
                )
        if self.callbacks is not None and self.plays:
            raise InvalidInput(
                "callbacks watch one model from step to step, but workers of programs (servers, or "
                "clock='virtual') have weights of their own; leave callbacks out"
            )
        if self.clock == "wall":
            if self.compute is not None or self.later or self.order or self.lost:
                raise InvalidInput(
                    "compute, later, order and lost say what the virtual clock counts; use "
                    "clock='virtual', or on the wall clock slow={worker: factor}"
                )
            if any(slow.transfer != 1.0 for slow in self.slow.values()):
                raise InvalidInput("slow with transfer wants links: give Network(slow=…)")
            return
        if not isinstance(self.strategy, ProgramStrategy):
            played = ", ".join(
                name for name, kind in STRATEGIES.items() if hasattr(kind, "program")
            )
            raise InvalidInput(
                f"{type(self.strategy).__name__} does not run on clock='virtual'; allowed: {played}"
            )
        if len(gone := self.gone) > (spare := self.strategy.tolerated_failures(self.workers)):
            name = type(self.strategy).__name__
            raise InvalidInput(
                f"lost={gone}: {name} of workers={self.workers} does without {spare} of "
                "them, and would wait for ever for another; use asynchronous servers, or "
                "ParameterServer(backups=…), and leave a worker"
            )

    @property
    def plays(self) -> bool:
        """Whether it is trained by programs."""
        return self.clock == "virtual" or self.strategy.plays

    @property
    def gone(self) -> list[int]:
        """Workers that do not come to the end of the training on the virtual clock."""
        virtual = self.clock == "virtual"
        killed = [each.rank for each in self.faults if virtual and each.kind == "kill"]
        return sorted({*dict(self.lost), *killed})

    @property
    def slowed(self) -> dict[int, Slowdown]:
        """Who is slow, on the network or by itself."""
        network = Network.parse(self.network)
        return {**(network.slow if network else {}), **self.slow}

    @property
    def ranks(self) -> int:
        """Processes that it wants: workers, their members, servers apart; or one, virtually."""
        return (
            1 if self.clock == "virtual" else self.workers + self.strategy.extra_ranks(self.workers)
        )

    @property
    def label(self) -> str:
        """Its name, or one made of what it runs."""
        if self.name:
            return self.name
        model, data = (v if isinstance(v, str) else label_of(v) for v in (self.model, self.dataset))
        data = datasets.label(data)
        return f"{model}-{data}-{type(self.strategy).__name__.lower()}-w{self.workers}"

    @property
    def blocks(self) -> int | None:
        """Parts between which its model may be cut; None where only ranks know."""
        if not isinstance(self.model, str):
            return None
        return models.blocks(self.model, self.model_options)

    @property
    def widest(self) -> int | None:
        """Units of the widest layer of its model that has slices; None where only ranks know."""
        if not isinstance(self.model, str) or not isinstance(self.dataset, str):
            return None
        shapes = datasets.check(self.dataset, self.dataset_options)
        return models.widest(self.model, self.model_options, shapes)

    @property
    def rows(self) -> int | None:
        """How many rows its training data have; None where only ranks know."""
        if isinstance(self.dataset, tuple):
            return len(leaves(self.dataset)[0])
        if callable(self.dataset):
            return None
        return datasets.count(self.dataset, self.dataset_options)

    @property
    def epoch_steps(self) -> int | None:
        """Steps of an epoch; None where only ranks know."""
        if self.rows is None:
            return self.steps
        return min(-(-self.rows // self.batch_size), self.steps or self.rows)

    @property
    def time_steps(self) -> int | None:
        """Steps of a sample that a recurrent model goes through; None where only ranks know.

        Raises InvalidInput for a named model that is not recurrent.
        """
        if isinstance(self.model, str):
            models.check_recurrent(self.model)
        if callable(self.dataset):
            return None
        if isinstance(self.dataset, str):
            return datasets.check(self.dataset, self.dataset_options).input_shape[0]
        steps: list[int] = list(getattr(self.dataset[0], "shape", ()))[1:2]
        return steps[0] if steps else None

    @property
    def planes(self) -> list[Layer] | None:
        """Layers of a named model as machines in a grid see them; None where only ranks know.

        Raises InvalidInput for a model that cannot be cut over a grid.
        """
        if not isinstance(self.model, str) or not isinstance(self.dataset, str):
            return None
        shapes = datasets.check(self.dataset, self.dataset_options)
        return models.planes(self.model, self.model_options, shapes)

    @cached_property
    def hash8(self) -> str:
        """Eight hexadecimal digits that name the content: equal experiments have equal ones."""
        # Without the name, which is a label: what computes the same has the same hash.
        return digest({k: v for k, v in self.to_json().items() if k != "name"})[:8]

    def to_json(self) -> dict[str, JSON]:
        """All fields as JSON values; callables by name and source, arrays by shape and checksum."""
        record: dict[str, JSON] = {"schema": SCHEMA}
        for field, known in type(self).model_fields.items():
            value = getattr(self, field)
            if field in UNSAID and value == known.get_default(call_default_factory=True):
                continue  # so that hashes stay
            record[field] = value.to_json() if isinstance(value, Strategy) else as_json(value)
        if isinstance(self.dataset, str):
            record |= datasets.recorded(self.dataset, self.dataset_options)
        return record

    def forecast(
        self,
        workers: int | None = None,
        network: str | Network | None = None,
        calibration: Calibration | str | Path | None = None,
        *,
        emulated: bool | None = None,
        **prices: float | None,
    ) -> Forecast:
        """What it would take, computed from what was measured: nothing is started.

        Args:
            workers: ranks; None: its own.
            network: between machines like the measured one; None: its own, or one machine.
            calibration: what was measured, or the file that `labkit calibrate` has written; None:
                what is kept of this machine.
            emulated: whether the network is emulated, with all ranks on one machine; None: its own
                network is, one that is given here is not.
            prices: see `labkit.forecast.Prices`: node_hour, gigabyte, watts, ranks_a_node and
                target_steps.

        Raises:
            InvalidInput: something was not measured, or the strategy has no forecast.
        """
        from labkit.forecast import Calibration, Prices, forecast
        from labkit.forecast.calibration_store import here

        asked = self if workers is None else self.replace(workers=workers)
        found = Network.parse(self.network if network is None else network)
        if calibration is None:
            calibration = here()
        elif not isinstance(calibration, Calibration):
            calibration = Calibration.load(Path(calibration))
        if emulated is None:
            emulated = network is None and found is not None
        return forecast(asked, calibration, found, emulated, Prices(**prices))

    def __repr__(self) -> str:
        return brief(self)

    def _repr_html_(self) -> str:
        return html_of(f"Experiment {self.label}", self)

    def replace(self, **fields: Any) -> Experiment:
        """The same experiment with other values, checked again."""
        # Not pydantic's `model_copy`, which checks nothing.
        return Experiment(**{f: getattr(self, f) for f in type(self).model_fields} | fields)


def parse_strategy(value: Any) -> Any:
    """A strategy given by its name, or as its `to_json` says it; anything else as it is."""
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, dict):
        fields = dict(value)
        return lookup(STRATEGIES, fields.pop("name", None), "strategy")(**fields)
    return value
