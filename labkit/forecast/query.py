"""The input of a strategy's forecast (`Query`), and its result (`StepForecast`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.forecast.calibration import (
    Calibration,
    CodecCost,
    ModelCost,
    Provenance,
    Spread,
    StepCost,
    interpolate,
    line_through,
    model_of,
    range_note,
    scale_spread,
)
from labkit.forecast.calibration_store import fits
from labkit.network import ComputeTime, Network, Slowdown
from labkit.programs.virtual_runtime import FORWARDS
from labkit.simulate import Fit

if TYPE_CHECKING:
    from labkit.compression import Compressor

# `NINE_TENTHS` assumes a normally distributed error. `NINE_TENTHS` is the 95th percentile of the
# error, divided by its median absolute value.
NINE_TENTHS = NormalDist().inv_cdf(0.95) / NormalDist().inv_cdf(0.75)
COMPUTED = ("forward", "backward", "update", "other")
PARTS = ("forward", "backward", "update", "other", "pack", "codec", "wire", "wait", "read", "whole")


@dataclass(frozen=True)
class StepForecast:
    """The forecast of one step: the time that all workers together need for a global batch.

    Attributes:
        parts: Seconds of each part of the step (`PARTS`), on the rank that finishes last. The sum
            of all parts is the step time. The part "whole" comes from `add_residual`. The part
            "whole" is a correction from measurements of whole steps.
        rows: Number of samples in the largest batch that a rank reads for the step.
        spread: Bounds of the 90% interval of a run's typical step time, divided by the median.
        nbytes: Bytes per step that cross each link, as a mapping from link name to bytes.
        memory: Bytes per memory category, on the rank that needs the most memory. The categories
            are weights, gradients, optimizer, activations and buffers.
        sources: Origin of each number in the forecast.
        more: Further numbers by name. `sent` is the number of bytes that all ranks together send.
            `step_low` and `step_high` bound the 90% interval of single steps, s. A strategy may add
            further numbers, such as staleness or bubble.
    """

    parts: Mapping[str, float]
    rows: float
    spread: tuple[float, float] = (1.0, 1.0)
    nbytes: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[Provenance, ...] = ()
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The total seconds of the step: the sum of its parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Query:
    """An experiment on a network, with costs interpolated between measurements of a calibration.

    Attributes:
        experiment: Experiment whose step is forecast.
        calibration: Measured costs.
        network: Network of the ranks, real or emulated; None: all ranks are on the calibrated
            machine.
        emulated: Whether the ranks run on an emulated network. Ranks on an emulated network have
            overheads of emulation, and share one machine's cores. If the network is not emulated,
            each rank has its own machine.
    """

    experiment: Any
    calibration: Calibration
    network: Network | None = None
    emulated: bool = False

    @property
    def workers(self) -> int:
        """The number of workers."""
        return int(self.experiment.workers)

    @property
    def fills_host(self) -> bool:
        """Whether all ranks are on one machine, and their threads occupy all its cores."""
        cores = self.calibration.machine.get("cores") or float("inf")
        threads: int = self.workers * self.experiment.threads
        return self.network is None and threads >= cores

    @cached_property
    def rows(self) -> list[int]:
        """The number of samples in each worker's part of the batch."""
        shares = self.experiment.batch_weights or [1.0] * self.workers
        return np.diff(cut(self.experiment.batch_size, shares)).tolist()

    @cached_property
    def model(self) -> ModelCost:
        """The measured cost of the experiment's model.

        Raises:
            InvalidInput: The calibration lacks the model.
        """
        description = model_of(self.experiment)
        for cost in self.calibration.models:
            if cost.model == description:
                return cost
        names = sorted({str(cost.model["model"]) for cost in self.calibration.models})
        raise InvalidInput(
            f"model={description['model']!r} with these options, rows, precision and optimizer is "
            f"not in this calibration, which has {', '.join(names) or 'none'}; measure it with "
            "`labkit calibrate`"
        )

    @cached_property
    def fits(self) -> dict[str, Fit]:
        """The fitted latency, bandwidth and addition time of the machine, one `Fit` per level."""
        return fits(self.calibration)

    @property
    def error(self) -> float | None:
        """The relative error of predicted network times (90% interval), or None if unknown.

        The error comes from the fit to measured allreduces on a link. Without such a fit, the error
        comes from the fit within a host. The fit to measured allreduces gives only the median
        error. A factor converts the median error to the 90% interval, because errors are assumed to
        be normally distributed.
        """
        fit = self.fits.get("link", self.fits.get("host"))
        if self.virtual or self.network is None:
            return 0.0
        return None if fit is None else NINE_TENTHS * fit.error

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of weights and gradients."""
        return np.dtype("float64" if self.experiment.precision == "float64" else "float32")

    @property
    def compute_time(self) -> ComputeTime | None:
        """The modelled compute time of a gradient; None if the forecast uses measured times."""
        virtual = self.experiment.virtual
        return None if virtual is None else virtual.compute_time

    @property
    def slowdowns(self) -> dict[int, Slowdown]:
        """The slowdown of each slow worker, as set by the network or by the experiment."""
        slowdowns = {
            **(self.network.stragglers if self.network else {}),
            **self.experiment.stragglers,
        }
        return {rank: slowdown for rank, slowdown in slowdowns.items() if rank < self.workers}

    @property
    def ranks_per_machine(self) -> int:
        """The number of ranks that compute on one machine at the same time."""
        if self.virtual:
            return 1
        return self.workers if self.emulated or self.network is None else 1

    @property
    def virtual(self) -> bool:
        """Whether one process simulates all ranks on the virtual clock, without overheads."""
        return bool(self.experiment.clock == "virtual")

    def memory(self, rows: float) -> dict[str, float]:
        """Return the bytes per memory category, for the whole model and `rows` samples."""
        weights = float(self.dtype.itemsize * self.model.parameters)
        return {
            "weights": weights,
            "gradients": weights,
            "optimizer": self.model.slots * weights,
            "activations": self.model.memory * rows,
        }

    def single_rank_seconds(self, rows: float) -> float:
        """Return the seconds of a single rank's step on a batch of `rows` samples.

        An experiment may specify a compute time for a worker's part of the batch. The specified
        compute time applies to any size of the part. A single rank takes the specified compute time
        once for each worker's part, and updates the weights once. The forecast of strong scaling
        uses the step of a single rank as its reference.
        """
        compute_time = self.compute_time
        if compute_time is not None and compute_time.mean is not None:
            n_parts = rows * self.workers / self.experiment.batch_size
            return float(compute_time.mean * n_parts + (compute_time.update or 0.0))
        return self.step(rows, ranks_at_once=1).seconds

    def step(self, rows: float, ranks_at_once: int | None = None) -> StepCost:
        """Return a rank's step cost for `rows` samples, interpolated between measured steps.

        Times are linear between two measured batch sizes. Outside the measured batch sizes, times
        are extrapolated from the two outermost sizes.

        Args:
            rows: Number of samples in the rank's batch.
            ranks_at_once: Number of ranks that compute on one machine at once, including this one.
                None means the number in the experiment.

        Raises:
            InvalidInput: The number of threads or ranks was not measured.
        """
        ranks_at_once = self.ranks_per_machine if ranks_at_once is None else ranks_at_once
        threads = self.experiment.threads
        steps = [measured for measured in self.model.steps if measured.threads == threads]
        if not steps:
            measured_threads = sorted({measured.threads for measured in self.model.steps})
            raise InvalidInput(
                f"threads={threads} was not measured; use a measured number ({measured_threads}), "
                "or measure it with `labkit calibrate`"
            )
        largest = max(measured.together for measured in steps)
        if ranks_at_once > largest:
            raise InvalidInput(
                f"{ranks_at_once} ranks at the same time on one machine were not measured, but at "
                f"most {largest}; measure them with `labkit calibrate --workers {ranks_at_once}`, "
                "or give a network between machines"
            )
        nearest = min(
            {measured.together for measured in steps}, key=lambda n: abs(n - ranks_at_once)
        )
        candidates = sorted(
            (s for s in steps if s.together == nearest), key=lambda measured: measured.rows
        )
        spreads = {name: _between(rows, candidates, name) for name in COMPUTED}
        return StepCost(rows=max(1, round(rows)), threads=threads, together=nearest, **spreads)

    def compute_step(self, rows: float) -> StepCost:
        """Return a rank's step cost, with the experiment's compute time if it specifies one.

        The forward pass takes a third of a specified compute time, as on the virtual clock.
        """
        compute_time = self.compute_time
        if compute_time is None or compute_time.mean is None:
            return self.step(rows)
        spreads = {
            name: Spread(median=seconds, low=seconds, high=seconds)
            for name, seconds in (
                ("forward", compute_time.mean * FORWARDS),
                ("backward", compute_time.mean * (1 - FORWARDS)),
                ("update", compute_time.update or 0.0),
                ("other", 0.0),
            )
        }
        return StepCost(rows=max(1, round(rows)), threads=1, together=1, **spreads)

    def codec(self, compressor: Compressor, nbytes: float) -> CodecCost:
        """Return the cost of a compressor for a gradient, interpolated between measured sizes.

        Raises:
            InvalidInput: The calibration lacks the compressor.
        """
        compressor_json = compressor.to_json()
        costs = [cost for cost in self.calibration.codecs if cost.compressor == compressor_json]
        if not costs:
            raise InvalidInput(
                f"{compressor!r} was not measured in this calibration; measure it with "
                "`labkit calibrate`"
            )
        by_distance = sorted(
            costs, key=lambda cost: abs(np.log(max(cost.nbytes, 1) / max(nbytes, 1)))
        )
        scale = nbytes / max(by_distance[0].nbytes, 1)
        if len(by_distance) == 1 or scale == 1:
            return _scaled(by_distance[0], nbytes, scale)
        low, high = sorted(by_distance[:2], key=lambda cost: cost.nbytes)
        share = (nbytes - low.nbytes) / (high.nbytes - low.nbytes)
        return CodecCost(
            compressor=compressor_json,
            nbytes=round(nbytes),
            encode=line_through(low.encode, high.encode, share),
            decode=line_through(low.decode, high.decode, share),
            payload=round(low.payload + share * (high.payload - low.payload)),
        )

    def has_overhead(self, kind: str) -> bool:
        """Return whether the calibration contains an overhead with the name `kind`."""
        return any(overhead.what == kind for overhead in self.calibration.overheads)

    def overhead_source(self, kind: str, nbytes: float = 0) -> Provenance:
        """Return how `overhead_cost` obtains its values, for display."""
        overheads = [entry for entry in self.calibration.overheads if entry.what == kind]
        if not overheads:
            return Provenance(kind, "not measured: counted as 0 s")
        ranks = range_note(self.workers, (entry.workers for entry in overheads))
        sizes = range_note(nbytes, (entry.nbytes for entry in overheads)) if nbytes else ""
        return Provenance(kind, f"measured{ranks and ranks + ' ranks'}{sizes and sizes + ' bytes'}")

    def compute_source(self, rows: float, method: str) -> Provenance:
        """Return how `step` obtains its values, for display."""
        threads = self.experiment.threads
        measured_rows = (step.rows for step in self.model.steps if step.threads == threads)
        note = range_note(rows, measured_rows)
        return Provenance(
            "forward, backward, update, other", f"measured, {method}{note and note + ' rows'}"
        )

    def overhead_cost(self, kind: str, nbytes: float = 0) -> Spread:
        """Return an overhead at the nearest measured number of ranks; 0 s if not measured.

        Between two measured sizes, the overhead is interpolated linearly. Above the largest
        measured size, the overhead is extrapolated.
        """
        overheads = [overhead for overhead in self.calibration.overheads if overhead.what == kind]
        if not overheads:
            return Spread(median=0.0, low=0.0, high=0.0)
        nearest = min({each.workers for each in overheads}, key=lambda n: abs(n - self.workers))
        return interpolate(
            [
                (overhead_.nbytes, overhead_.seconds)
                for overhead_ in overheads
                if overhead_.workers == nearest
            ],
            nbytes,
        )


def network_error_sources(query: Query) -> list[Provenance]:
    """Return the origin of the error of network times, or an empty list if no error applies."""
    if query.network is None or query.virtual or query.workers == 1:
        return []
    method = (
        "unknown, because no allreduce was measured; it is ignored, so the intervals are too narrow"
    )
    if query.error is not None:
        method = f"{query.error:.0%} at the 90% level, from the fit to measurements"
    return [Provenance("error of the network model", method)]


def _between(rows: float, steps: list[StepCost], name: str) -> Spread:
    """Return the spread of the part `name` of a step, interpolated to a batch of `rows` samples."""
    if len(steps) == 1:
        return scale_spread(
            getattr(steps[0], name), rows / steps[0].rows if name != "update" else 1.0
        )
    index = int(np.clip(np.searchsorted([step.rows for step in steps], rows), 1, len(steps) - 1))
    low, high = steps[index - 1], steps[index]
    share = (rows - low.rows) / (high.rows - low.rows)
    return line_through(getattr(low, name), getattr(high, name), share)


def _scaled(cost: CodecCost, nbytes: float, factor: float) -> CodecCost:
    return CodecCost(
        compressor=cost.compressor,
        nbytes=round(nbytes),
        encode=scale_spread(cost.encode, factor),
        decode=scale_spread(cost.decode, factor),
        payload=round(cost.payload * factor),
    )
