"""`Experiment`: the definition of a run, validated before any rank starts and named by a hash."""

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
from labkit.common.canonical_json import JSON, SCHEMA, as_json, digest, label_of
from labkit.common.errors import InvalidInput
from labkit.common.options import lookup
from labkit.common.rows import IID, concentration
from labkit.common.validated import Checked
from labkit.experiment import fault_injection
from labkit.experiment.data import (
    check_validation,
    labels_of,
    leaves,
    parse_data,
    refuse_lost_state,
)
from labkit.experiment.display import brief, html_of
from labkit.experiment.keras_names import check_names
from labkit.experiment.virtual_clock import VirtualClock
from labkit.network import Fault, Network, Slowdown
from labkit.schedules.grid_layers import GridLayer
from labkit.strategies import STRATEGIES, AllReduce, ProgramStrategy, Strategy
from labkit.strategies.validation import OPTIMIZERS, one_of

if TYPE_CHECKING:
    from labkit.forecast import Calibration, Forecast

# An experiment's record omits a field in the tuple `OPTIONAL_FIELDS` if the field has its default
# value.
OPTIONAL_FIELDS = (
    *("virtual", "stragglers", "data_partition"),
    *("faults", "on_nonfinite", "replica_check_interval", "checksums"),
)
# labkit rejects more than `MOST_RANKS` ranks or `MOST_STEPS` steps, because such numbers are
# probably typing errors. NumPy accepts seeds of at most 32 bits.
MOST_RANKS, MOST_STEPS = 10_000, 10**9
Given = TypeVar("Given")


class Experiment(Checked):
    """The definition of a run: model, data, strategy, workers, network and training options.

    Args:
        name: Label of the runs; default: model, data set, strategy and number of workers.
        model: Name in `labkit.models.MODELS`, or a callable that returns a Keras model. If the
            callable compiles the model, the experiment uses the loss, metrics and optimizer of this
            model.
        model_options: Options of a named model, such as `{"widths": [512, 512]}`.
        dataset: Name in `labkit.datasets.DATASETS`, a pair of arrays `(x, y)`, or a callable. A
            callable for `dataset` returns a `tf.data.Dataset` of samples or batches. The parameter
            `dataset` may be the path of an .npz, .csv or .parquet file. The path of a folder with
            one subfolder of images per class is also valid. The path of a saved Hugging Face data
            set is also valid. The form `hf:NAME` loads a Hugging Face data set by its name.
        dataset_options: Options of a named data set, such as `{"rows": 1000}`.
        validation: Test data if `dataset` is not a name: arrays `(x, y)`, or a callable. A named
            data set has its own test rows.
        strategy: The training method: a strategy object such as `Pipeline()`, or the name of a
            strategy in `labkit.strategies.STRATEGIES`.
        workers: Number of workers. Each worker is a model replica, or one of the ranks that share a
            model.
        threads: Number of TensorFlow threads of each rank.
        network: Network to emulate, as a `Network` or a name in `labkit.network.PRESETS`. With
            None, ranks use the real network without added delays.
        clock: With "wall", MPI ranks train in real time. With "virtual", one process computes the
            gradients of all workers. A time model then supplies the durations of computations and
            messages.
        virtual: A `VirtualClock` with the modelled times; implies clock="virtual".
        stragglers: Slow workers: a dict of worker -> `Slowdown`, or of worker -> factor of at least
            1. The factor of a slow worker multiplies its compute times.
        faults: A `Fault`, or a list of faults, to inject into the run.
        on_nonfinite: Action on a gradient with infinite or NaN elements. The value "stop" raises an
            error that names the step, the rank and the layer. "skip" omits the update on all ranks;
            a parameter server omits only the affected gradient. "clip" sets infinite and NaN
            elements to 0. None disables the check, which saves one pass over all gradients. With
            precision="mixed_float16", loss scaling handles overflows, whatever the value of
            `on_nonfinite` is.
        replica_check_interval: Number of steps between comparisons of the replicas' weights; with
            0, weights are not compared. If the weights differ, training ends with an error.
        checksums: Whether labkit adds a checksum to each message between ranks. If a checksum is
            wrong, training ends with an error.
        epochs: Number of passes over the training data.
        steps_per_epoch: Maximum number of steps of an epoch; with None, an epoch uses all training
            data.
        batch_size: Number of samples of one step, summed over all workers.
        optimizer: Name of a Keras optimizer.
        optimizer_options: Arguments of the optimizer, such as `{"momentum": 0.9}`.
        learning_rate: Learning rate for one worker, to which `learning_rate_scaling` applies; None:
            the optimizer's default.
        learning_rate_scaling: Factor on the learning rate. The factor is 1 for "none", and the
            number of workers for "linear". For "sqrt", the factor is the square root of the number
            of workers.
        warmup_epochs: Number of epochs at the start of training with a growing learning rate. The
            learning rate grows linearly from `learning_rate` to the scaled rate.
        loss: Name of a Keras loss. None means cross-entropy for classes, and mean squared error for
            regression targets.
        metrics: Names of Keras metrics. None means accuracy for classes, and mean absolute error
            for regression targets.
        precision: Keras dtype policy.
        input_mode: With "shard", each rank reads its own rows. With "scatter", rank 0 reads all
            rows, and sends each rank its rows by MPI scatter.
        batch_weights: One positive number per worker, the weight of the worker. A worker's share of
            each batch is proportional to its weight. With None, all workers have equal shares of
            each batch.
        data_partition: Distribution of the samples over workers. "iid": all workers draw from all
            samples. "by_label": samples are sorted by label, then cut into one shard per worker.
            "dirichlet(0.3)": each worker's label shares are drawn from a Dirichlet distribution
            with concentration 0.3 (Hsu 2019, arXiv 1909.06335). Unless the partition is "iid", each
            worker shuffles only its own samples.
        callbacks: A callable that returns a list of Keras callbacks; each rank calls it once.
        seed: Random seed of initial weights and of shuffling.
        repeats: Number of runs, with seeds `seed`, `seed` + 1, …
        verify: Whether to compare the method with training in one process before the run. Exact
            methods must reach the same weights. Lossy compressors must satisfy conservation laws of
            sent values and residuals. A run that fails the equivalence check is trained, but
            figures do not show its speed.

    `Cluster.run` and `lk.run` train an experiment and return a `Run`.

    Example:
        >>> Experiment(model="mlp", dataset="digits", strategy="ParameterServer", workers=2).ranks
        3

    Raises:
        InvalidInput: A value is impossible, or conflicts with another; no rank has started.
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
    virtual: VirtualClock | None = None
    stragglers: dict[int, Slowdown] = Field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    on_nonfinite: Literal["stop", "skip", "clip"] | None = None
    replica_check_interval: int = Field(default=0, ge=0)
    checksums: bool = False
    epochs: int = Field(default=1, gt=0, le=MOST_STEPS)
    steps_per_epoch: int | None = Field(default=None, gt=0, le=MOST_STEPS)
    batch_size: int = Field(default=256, gt=0, le=MOST_STEPS)
    optimizer: str = "sgd"
    optimizer_options: dict[str, Any] = Field(default_factory=dict)
    learning_rate: PositiveFloat | None = None
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    warmup_epochs: float = Field(default=0.0, ge=0, le=MOST_STEPS)
    loss: str | None = None
    metrics: tuple[str, ...] | None = None
    precision: Literal["float32", "float64", "mixed_float16", "mixed_bfloat16"] = "float32"
    input_mode: Literal["shard", "scatter"] = "shard"
    batch_weights: tuple[PositiveFloat, ...] | None = None
    data_partition: str = IID
    callbacks: Callable[..., Any] | None = None
    seed: int = Field(default=0, ge=0, lt=2**32)
    repeats: int = Field(default=1, gt=0, le=MOST_RANKS)
    verify: bool = True

    @model_validator(mode="before")
    @classmethod
    def _fill_virtual(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if fields.get("virtual") is not None:
            return {"clock": "virtual"} | fields
        if fields.get("clock") == "virtual":
            return fields | {"virtual": VirtualClock()}
        return fields

    @field_validator("model")
    @classmethod
    def _model(cls, value: Given) -> Given:
        # A Keras model is callable, so a check for functions does not reject the model.
        if hasattr(value, "count_params"):
            raise ValueError(
                "model is a Keras model, but each rank needs a new one; give a function that "
                "returns a new model: model=lambda: keras.models.clone_model(mine)"
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

    @field_validator("stragglers", mode="before")
    @classmethod
    def _stragglers(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        factors = {w: {"compute": f} if isinstance(f, int | float) else f for w, f in value.items()}
        return {int(worker): slow for worker, slow in factors.items()}

    @field_validator("faults", mode="before")
    @classmethod
    def _faults(cls, value: Any) -> Any:
        return (value,) if isinstance(value, dict | Fault) else value

    @field_validator("optimizer")
    @classmethod
    def _optimizer(cls, value: str) -> str:
        return one_of("optimizer", value, OPTIMIZERS)

    @field_validator("data_partition")
    @classmethod
    def _data_partition(cls, value: str) -> str:
        concentration(value)
        return value

    @field_validator("dataset", "validation", mode="before")
    @classmethod
    def _arrays(cls, value: Any) -> Any:
        return parse_data(value)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # If the data set is a function, only the ranks call the function. If the data's shapes are
        # unknown, labkit validates only the options of a named model. The validation takes place
        # before the ranks start.
        shapes = None
        if isinstance(self.dataset, str):
            shapes = datasets.check(self.dataset, self.dataset_options)
        elif isinstance(self.dataset, tuple):
            check_validation(self.dataset, self.validation)
            shapes = datasets.shapes_of(self.dataset, labels_of(self.validation))
        if isinstance(self.model, str):
            models.check(self.model, self.model_options, shapes)
        if self.batch_weights is not None and len(self.batch_weights) != self.workers:
            raise InvalidInput(
                f"batch_weights has {len(self.batch_weights)} numbers for "
                f"workers={self.workers}; give one number per worker"
            )
        check_names(self.loss, self.metrics, self.optimizer, self.optimizer_options)
        self._check_clock()
        if self.data_partition != IID:
            named = shapes if isinstance(self.dataset, str) else None
            self._check_labels(named.task if named else None)
        if self.input_mode == "scatter" and callable(self.dataset):
            raise InvalidInput(
                "input_mode='scatter' cannot read a callable data set; give arrays or the name "
                "of a data set"
            )
        # The strategy is validated after the data set, because the strategy's validation reads the
        # experiment's blocks and rows.
        self.strategy.check(self)
        fault_injection.check(self)
        if isinstance(self.model, str):
            self._check_named_model(shapes)
        return self

    def _check_named_model(self, shapes: datasets.Shapes | None) -> None:
        if shapes is None:
            raise InvalidInput(
                f"model={self.model!r} takes its shapes from arrays of one input and one output, "
                "but the data have another form; give model= a callable that returns a keras.Model"
            )
        if isinstance(self.dataset, tuple):
            datasets.check_task(self.dataset, labels_of(self.validation), self.loss)
        loss = (self.loss or "").lower().replace("_", "")
        if shapes.task == "regression" and loss.startswith("sparse"):
            raise InvalidInput(
                f"loss={self.loss!r} requires classes as whole numbers, but these labels are "
                "real numbers: give y.astype(int)"
            )

    def _check_labels(self, task: str | None) -> None:
        if callable(self.dataset):
            raise InvalidInput(
                f"data_partition={self.data_partition!r} requires all labels before training, "
                "but a callable data set yields labels batch by batch: give arrays (x, y) or the "
                "name of a data set"
            )
        y = None if isinstance(self.dataset, str) else self.dataset[1]
        labels = isinstance(y, np.ndarray) and y.ndim == 1 and y.dtype.kind in "iu"
        if task != "classification" and not labels:
            what = (
                f"a {task.replace('_', ' ')} task has no class labels"
                if task
                else "y is not a one-dimensional array of integers"
            )
            raise InvalidInput(
                f"data_partition={self.data_partition!r} divides samples by their class label, "
                f"but {what}; use data_partition='iid'"
            )

    def _check_clock(self) -> None:
        failures = dict(self.virtual.worker_failures) if self.virtual else {}
        for field, workers in (("stragglers", self.stragglers), ("worker_failures", failures)):
            if unknown := [worker for worker in workers if not 0 <= worker < self.workers]:
                raise InvalidInput(
                    f"{field}={unknown} names workers outside workers={self.workers}; give worker "
                    "numbers from 0 to workers - 1"
                )
        if self.callbacks is not None and self.uses_programs:
            raise InvalidInput(
                "callbacks need one model that is trained step by step, but with servers or "
                "clock='virtual' each worker has its own weights; remove callbacks"
            )
        if self.clock == "wall":
            self._check_wall_clock()
            return
        if not isinstance(self.strategy, ProgramStrategy):
            allowed = ", ".join(
                name for name, kind in STRATEGIES.items() if hasattr(kind, "program")
            )
            raise InvalidInput(
                f"{type(self.strategy).__name__} does not run on clock='virtual'; allowed: "
                f"{allowed}"
            )
        if len(failed := self.failed_workers) > (
            most := self.strategy.tolerated_failures(self.workers)
        ):
            name = type(self.strategy).__name__
            raise InvalidInput(
                f"worker_failures={failed}: {name} with workers={self.workers} tolerates {most} "
                "failures, and with more it would wait forever; use asynchronous servers or "
                "ParameterServer(backup_workers=…), and let at least one worker survive"
            )

    def _check_wall_clock(self) -> None:
        if self.virtual is not None:
            raise InvalidInput(
                "virtual=VirtualClock(…) models times, but clock='wall' measures times; remove "
                "virtual, or use clock='virtual'; to slow workers down on the wall clock, give "
                "stragglers={worker: factor}"
            )
        if any(slowdown.transfer != 1.0 for slowdown in self.stragglers.values()):
            raise InvalidInput(
                "stragglers with slower transfers require an emulated network; use "
                "network=Network(stragglers=…)"
            )

    @property
    def uses_programs(self) -> bool:
        """Whether workers train by running lists of send, receive and update actions (programs).

        Programs of actions run for parameter servers, and for every strategy on the virtual clock.
        """
        return self.clock == "virtual" or self.strategy.uses_programs

    @property
    def failed_workers(self) -> list[int]:
        """Workers that fail during the training on the virtual clock."""
        if self.virtual is None:
            return []
        killed = [fault.rank for fault in self.faults if fault.kind == "kill"]
        return sorted({*dict(self.virtual.worker_failures), *killed})

    @property
    def slowdowns(self) -> dict[int, Slowdown]:
        """Slowdown of each straggler, including stragglers that the network defines."""
        network = Network.parse(self.network)
        return {**(network.stragglers if network else {}), **self.stragglers}

    @property
    def ranks(self) -> int:
        """Number of MPI ranks: workers plus separate servers, or 1 on the virtual clock."""
        return (
            1 if self.clock == "virtual" else self.workers + self.strategy.extra_ranks(self.workers)
        )

    @property
    def label(self) -> str:
        """The experiment's name; default: model, data set, strategy and number of workers."""
        if self.name:
            return self.name
        model, data = (v if isinstance(v, str) else label_of(v) for v in (self.model, self.dataset))
        data = datasets.label(data)
        return f"{model}-{data}-{type(self.strategy).__name__.lower()}-w{self.workers}"

    @property
    def blocks(self) -> int | None:
        """Number of blocks of a named model, between which it can be cut; None for other models."""
        if not isinstance(self.model, str):
            return None
        return models.blocks(self.model, self.model_options)

    @property
    def max_slices(self) -> int | None:
        """Units of the widest layer that can be sliced; None without a named model and data."""
        if not isinstance(self.model, str) or not isinstance(self.dataset, str):
            return None
        shapes = datasets.check(self.dataset, self.dataset_options)
        return models.max_slices(self.model, self.model_options, shapes)

    @property
    def rows(self) -> int | None:
        """Number of training rows; None for a callable data set."""
        if isinstance(self.dataset, tuple):
            return len(leaves(self.dataset)[0])
        if callable(self.dataset):
            return None
        return datasets.count(self.dataset, self.dataset_options)

    @property
    def epoch_steps(self) -> int | None:
        """Number of steps per epoch; None if a callable data set has no `steps_per_epoch`."""
        if self.rows is None:
            return self.steps_per_epoch
        return min(-(-self.rows // self.batch_size), self.steps_per_epoch or self.rows)

    @property
    def time_steps(self) -> int | None:
        """Time steps per sample of a recurrent model; None for a callable data set.

        Raises:
            InvalidInput: The model is named and not recurrent.
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
    def grid_layers(self) -> list[GridLayer] | None:
        """Layers that `SpatialParallel` divides; None if model or data set has no name.

        Raises:
            InvalidInput: The model cannot be divided over a grid.
        """
        if not isinstance(self.model, str) or not isinstance(self.dataset, str):
            return None
        shapes = datasets.check(self.dataset, self.dataset_options)
        return models.grid_layers(self.model, self.model_options, shapes)

    @cached_property
    def hash8(self) -> str:
        """Hash of all fields except the name, as eight hexadecimal digits."""
        # Experiments that define the same computation have the same hash, even if their names
        # differ.
        return digest({k: v for k, v in self.to_json().items() if k != "name"})[:8]

    def to_json(self) -> dict[str, JSON]:
        """Return all fields as JSON: callables as name and source, arrays as shape and checksum."""
        record: dict[str, JSON] = {"schema": SCHEMA}
        for field, known in type(self).model_fields.items():
            value = getattr(self, field)
            if field in OPTIONAL_FIELDS and value == known.get_default(call_default_factory=True):
                continue
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
        """Forecast time, traffic, memory and cost from a calibration, without starting a rank.

        Args:
            workers: Number of workers; None: the experiment's number of workers.
            network: Network that connects machines like the calibrated machine. None means the
                experiment's network or, if that is also None, a single machine.
            calibration: A calibration, or the file that `labkit calibrate` wrote. None means the
                stored calibration of this machine.
            emulated: Whether the network is emulated on one machine that all ranks share. None
                means True for the experiment's own network, and False for the argument `network`.
            prices: Fields of `labkit.forecast.Prices`: price_per_node_hour, price_per_gb,
                node_watts, ranks_per_node and target_steps.

        Raises:
            InvalidInput: The calibration lacks a measurement, or the strategy has no forecast.
        """
        from labkit.forecast import Calibration, Prices, forecast
        from labkit.forecast.calibration_store import local_calibration

        experiment = self if workers is None else self.replace(workers=workers)
        link = Network.parse(self.network if network is None else network)
        if calibration is None:
            calibration = local_calibration()
        elif not isinstance(calibration, Calibration):
            calibration = Calibration.load(Path(calibration))
        if emulated is None:
            emulated = network is None and link is not None
        return forecast(experiment, calibration, link, emulated, Prices(**prices))

    def __repr__(self) -> str:
        return brief(self)

    def _repr_html_(self) -> str:
        return html_of(f"Experiment {self.label}", self)

    def replace(self, **fields: Any) -> Experiment:
        """Return a validated copy of the experiment, in which the given fields have new values.

        Raises: InvalidInput, under the same conditions as the constructor.
        """
        # If the caller changes one of the fields `clock` and `virtual`, the other field is set to
        # match.
        if fields.get("clock") == "wall":
            fields.setdefault("virtual", None)
        elif fields.get("virtual") is not None:
            fields.setdefault("clock", "virtual")
        # labkit does not call pydantic's `model_copy`, because `model_copy` does not validate the
        # changed fields.
        return Experiment(**{f: getattr(self, f) for f in type(self).model_fields} | fields)


def parse_strategy(value: Any) -> Any:
    """Return a strategy from its name or its JSON; return any other value unchanged."""
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, dict):
        fields = dict(value)
        return lookup(STRATEGIES, fields.pop("name", None), "strategy")(**fields)
    return value
