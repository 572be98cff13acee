"""What a strategy is asked of a forecast, and what it answers."""

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
    Source,
    Spread,
    StepCost,
    model_of,
)
from labkit.forecast.provenance import fits
from labkit.forecast.time_distributions import beyond, by_bytes, line_through, times
from labkit.network import Network, Slowdown
from labkit.programs.virtual_runtime import FORWARDS
from labkit.simulate import Fit

if TYPE_CHECKING:
    from labkit.compression import Compressor

NINE_TENTHS = NormalDist().inv_cdf(0.95) / NormalDist().inv_cdf(0.75)  # of median deviations
COMPUTED = ("forward", "backward", "update", "other")
PARTS = ("forward", "backward", "update", "other", "pack", "codec", "wire", "wait", "read", "whole")


@dataclass(frozen=True)
class StepForecast:
    """What a way to train takes for one global batch: as long as all workers need for its rows.

    Attributes:
        parts: s of the rank that is last, by names of `PARTS`; they add up to the step. "whole" is
            what a whole step takes more than the others, or less, see `as_whole`.
        rows: of the largest batch that a rank reads for it.
        spread: of the typical step of a run, as factors on its median: the middle nine tenths,
            as what was measured spreads from repeat to repeat.
        nbytes: that cross each link in a step, by its name.
        memory: bytes of the fullest rank, by kind: weights, gradients, optimizer, activations,
            buffers.
        sources: where figures are from.
        more: `sent`, the bytes of all ranks, and what else a strategy knows, by name, such as
            staleness or a bubble; of single steps the middle nine tenths, `step_low` and
            `step_high`, s.
    """

    parts: Mapping[str, float]
    rows: float
    spread: tuple[float, float] = (1.0, 1.0)
    nbytes: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    more: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Query:
    """An experiment somewhere, and what is known of machines; interpolates what was measured.

    Attributes:
        experiment: what is asked about, an `Experiment`.
        calibration: what was measured.
        network: on which ranks are, real or emulated; None: all on the machine of the calibration.
        emulated: whether ranks would run here and now on an emulated network, with its overheads,
            all of them on this machine's cores; else each has a machine like that one to itself.
    """

    experiment: Any
    calibration: Calibration
    network: Network | None = None
    emulated: bool = False

    @property
    def workers(self) -> int:
        """Of the experiment."""
        return int(self.experiment.workers)

    @property
    def fills_host(self) -> bool:
        """Whether all ranks are on one machine, and their threads take all of its cores."""
        cores = self.calibration.machine.get("cores") or float("inf")
        threads: int = self.workers * self.experiment.threads
        return self.network is None and threads >= cores

    @cached_property
    def rows(self) -> list[int]:
        """Of each worker's part of the batch."""
        shares = self.experiment.capacities or [1.0] * self.workers
        return np.diff(cut(self.experiment.batch_size, shares)).tolist()

    @cached_property
    def model(self) -> ModelCost:
        """What its model takes.

        Raises: InvalidInput, where nobody has measured it.
        """
        wanted = model_of(self.experiment)
        for each in self.calibration.models:
            if each.model == wanted:
                return each
        known = sorted({str(each.model["model"]) for each in self.calibration.models})
        raise InvalidInput(
            f"model={wanted['model']!r} with these options, rows, precision and optimizer is not "
            f"in this calibration, which has {', '.join(known) or 'none'}; measure it by "
            "`labkit calibrate`"
        )

    @cached_property
    def fits(self) -> dict[str, Fit]:
        """Latency, speed and adding by level of the machine of the calibration."""
        return fits(self.calibration)

    @property
    def error(self) -> float | None:
        """Of what a network takes, relative, in the middle nine tenths; None: nobody knows it.

        That of the fit to what was measured on a link, or within the host; the median of errors
        that are normal is so many times smaller than what nine in ten do not pass.
        """
        fit = self.fits.get("link", self.fits.get("host"))
        if self.virtual or self.network is None:
            return 0.0
        return None if fit is None else NINE_TENTHS * fit.error

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of weights and gradients."""
        return np.dtype("float64" if self.experiment.precision == "float64" else "float32")

    @property
    def slow(self) -> dict[int, Slowdown]:
        """Who of its workers is slow, on the network or by itself."""
        known = {**(self.network.slow if self.network else {}), **self.experiment.slow}
        return {rank: law for rank, law in known.items() if rank < self.workers}

    @property
    def together(self) -> int:
        """Ranks that compute on one machine at once."""
        if self.virtual:
            return 1
        return self.workers if self.emulated or self.network is None else 1

    @property
    def virtual(self) -> bool:
        """Whether one process would play all ranks, on a clock without overheads."""
        return bool(self.experiment.clock == "virtual")

    def memory(self, rows: float) -> dict[str, float]:
        """Bytes that a rank with the whole model holds in a step on so many rows, by kind."""
        weights = float(self.dtype.itemsize * self.model.parameters)
        return {
            "weights": weights,
            "gradients": weights,
            "optimizer": self.model.slots * weights,
            "activations": self.model.memory * rows,
        }

    def alone(self, rows: float) -> float:
        """Seconds of one rank's own step on so many rows, nobody beside it.

        A law says what a worker takes for its part of the batch, however many rows that is; one
        rank takes so long for each part, and updates once. Strong scaling is held against that.
        """
        law = self.experiment.compute
        if law is not None and law.mean is not None:
            parts = rows * self.workers / self.experiment.batch_size
            return float(law.mean * parts + (law.update or 0.0))
        return self.step(rows, together=1).seconds

    def step(self, rows: float, together: int | None = None) -> StepCost:
        """A rank's own step on so many rows, interpolated between those that were measured.

        Times are lines between two measured numbers of rows, and go on beyond the last two.

        Args:
            rows: of this rank's batch.
            together: ranks that compute beside it, itself among them; None: as it is asked for.

        Raises: InvalidInput, for more ranks at once, or other threads, than were measured.
        """
        together = self.together if together is None else together
        threads = self.experiment.threads
        steps = [each for each in self.model.steps if each.threads == threads]
        if not steps:
            known = sorted({each.threads for each in self.model.steps})
            raise InvalidInput(
                f"threads={threads} was not measured; the calibration has {known}: use these, or "
                "measure it by `labkit calibrate`"
            )
        most = max(each.together for each in steps)
        if together > most:
            raise InvalidInput(
                f"{together} ranks at once on one machine were not measured, {most} at most; "
                f"measure them by `labkit calibrate --workers {together}`, or give a network "
                "between machines"
            )
        beside = min({each.together for each in steps}, key=lambda n: abs(n - together))
        own = sorted((s for s in steps if s.together == beside), key=lambda each: each.rows)
        found = {name: _between(rows, own, name) for name in COMPUTED}
        return StepCost(rows=max(1, round(rows)), threads=threads, together=beside, **found)

    def computed(self, rows: float) -> StepCost:
        """The same in the experiment's own time: as measured, or the mean of what it says.

        Of what it says a third is the way forward, as on the virtual clock.
        """
        law = self.experiment.compute
        if law is None or law.mean is None:
            return self.step(rows)
        spreads = {
            name: Spread(median=seconds, low=seconds, high=seconds)
            for name, seconds in (
                ("forward", law.mean * FORWARDS),
                ("backward", law.mean * (1 - FORWARDS)),
                ("update", law.update or 0.0),
                ("other", 0.0),
            )
        }
        return StepCost(rows=max(1, round(rows)), threads=1, together=1, **spreads)

    def codec(self, compressor: Compressor, nbytes: float) -> CodecCost:
        """What a compressor takes for a gradient of so many bytes, from those beside it.

        Raises: InvalidInput, where nobody has measured it.
        """
        wanted = compressor.to_json()
        known = [each for each in self.calibration.codecs if each.compressor == wanted]
        if not known:
            raise InvalidInput(
                f"{compressor!r} was not measured in this calibration; measure it by "
                "`labkit calibrate`"
            )
        near = sorted(known, key=lambda each: abs(np.log(max(each.nbytes, 1) / max(nbytes, 1))))
        scale = nbytes / max(near[0].nbytes, 1)
        if len(near) == 1 or scale == 1:
            return _scaled(near[0], nbytes, scale)
        low, high = sorted(near[:2], key=lambda each: each.nbytes)
        share = (nbytes - low.nbytes) / (high.nbytes - low.nbytes)
        return CodecCost(
            compressor=wanted,
            nbytes=round(nbytes),
            encode=line_through(low.encode, high.encode, share),
            decode=line_through(low.decode, high.decode, share),
            payload=round(low.payload + share * (high.payload - low.payload)),
        )

    def knows(self, what: str) -> bool:
        """Whether an overhead was measured."""
        return any(overhead.what == what for overhead in self.calibration.overheads)

    def overhead(self, what: str, nbytes: float = 0) -> Source:
        """Where what `once` says is from."""
        known = [each for each in self.calibration.overheads if each.what == what]
        if not known:
            return Source(what, "not measured: counted as nothing")
        ranks = beyond(self.workers, (each.workers for each in known))
        sizes = beyond(nbytes, (each.nbytes for each in known)) if nbytes else ""
        return Source(what, f"measured{ranks and ranks + ' ranks'}{sizes and sizes + ' bytes'}")

    def computing(self, rows: float, how: str) -> Source:
        """Where what `step` says is from."""
        threads = self.experiment.threads
        known = (step.rows for step in self.model.steps if step.threads == threads)
        far = beyond(rows, known)
        return Source("forward, backward, update, other", f"measured, {how}{far and far + ' rows'}")

    def once(self, what: str, nbytes: float = 0) -> Spread:
        """An overhead at the number of ranks that is nearest; nothing where none was measured.

        Between two sizes that were measured, and beyond the last two, it is on their line.
        """
        known = [overhead for overhead in self.calibration.overheads if overhead.what == what]
        if not known:
            return Spread(median=0.0, low=0.0, high=0.0)
        near = min({each.workers for each in known}, key=lambda n: abs(n - self.workers))
        return by_bytes([(e.nbytes, e.seconds) for e in known if e.workers == near], nbytes)


def trust(asked: Query) -> list[Source]:
    """Where the width of what a network takes is from."""
    if asked.network is None or asked.virtual or asked.workers == 1:
        return []
    how = "no allreduce was measured: not counted, so that intervals are too narrow"
    if asked.error is not None:
        how = f"off by {asked.error:.0%} nine times in ten, by the fit to what was measured"
    return [Source("error of the network", how)]


def _between(rows: float, own: list[StepCost], name: str) -> Spread:
    """A part of a step at so many rows."""
    if len(own) == 1:
        return times(getattr(own[0], name), rows / own[0].rows if name != "update" else 1.0)
    place = int(np.clip(np.searchsorted([each.rows for each in own], rows), 1, len(own) - 1))
    low, high = own[place - 1], own[place]
    share = (rows - low.rows) / (high.rows - low.rows)
    return line_through(getattr(low, name), getattr(high, name), share)


def _scaled(known: CodecCost, nbytes: float, factor: float) -> CodecCost:
    return CodecCost(
        compressor=known.compressor,
        nbytes=round(nbytes),
        encode=times(known.encode, factor),
        decode=times(known.decode, factor),
        payload=round(known.payload * factor),
    )
