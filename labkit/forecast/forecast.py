"""A forecast: what an experiment would take, in seconds, bytes, money and energy, and how sure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveInt

from labkit.common.errors import InvalidInput
from labkit.common.html import card, folded, line, pairs, table
from labkit.common.units import bytes_text, duration_text, number_text, seconds_text
from labkit.common.validated import Checked
from labkit.forecast.calibration import Calibration, Source
from labkit.forecast.input_stall import fed
from labkit.forecast.provenance import origin
from labkit.forecast.query import PARTS, Query, StepForecast
from labkit.forecast.residual_correction import alone, as_whole

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON
    from labkit.network import Network

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SHOWN = 12  # links that are shown unfolded


class Prices(Checked):
    """What is paid, and how far the training goes: as given, nothing is assumed.

    Attributes:
        node_hour: price of a node for an hour.
        gigabyte: price of 10⁹ bytes that leave a rank.
        watts: of a node.
        ranks_a_node: how many ranks have a node together.
        target_steps: steps to the target; None: those of the experiment's epochs.
    """

    node_hour: Price | None = None
    gigabyte: Price | None = None
    watts: Price | None = None
    ranks_a_node: PositiveInt | None = None
    target_steps: PositiveInt | None = None

    def nodes(self, ranks: int) -> int:
        """How many there are. Raises: InvalidInput, where nobody has said how many ranks share."""
        if self.ranks_a_node is None:
            raise InvalidInput(
                "node_hour and watts are of a node; say how many ranks one has: ranks_a_node=…"
            )
        return -(-ranks // self.ranks_a_node)


@dataclass(frozen=True)
class Forecast:
    """What a step of an experiment takes, and the training of which it is one.

    Attributes:
        label: of the experiment.
        where: network and machine, in words.
        workers: ranks that train.
        ranks: these, and those beside them, such as servers on places of their own.
        rows: of a global batch.
        taken: what its strategy says of a step, with parts, bytes and memory.
        alone: s of one rank's own step on the whole batch, nobody beside it.
        own: s of one rank's own step on its part of the batch, nobody beside it.
        prices: as given.
        steps: to the target; None: nobody knows.
        calibration: eight hexadecimal digits of what was measured.
        origin: where and when that was.
    """

    label: str
    where: str
    workers: int
    ranks: int
    rows: int
    taken: StepForecast
    alone: float
    own: float
    prices: Prices
    steps: int | None
    calibration: str
    origin: str

    @property
    def seconds(self) -> float:
        """Of a step, the median."""
        return self.taken.seconds

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which the typical step of a run is, nine times in ten."""
        low, high = self.taken.spread
        return self.seconds * low, self.seconds * high

    @property
    def strong(self) -> float:
        r"""Efficiency \(T_1(B) / (n T_n(B))\): the global batch stays, ranks divide it."""
        return self.alone / (self.workers * self.seconds) if self.seconds else 1.0

    @property
    def weak(self) -> float:
        r"""Efficiency \(T_1(b) / T_n(n b)\): each rank's part stays, the batch grows."""
        return self.own / self.seconds if self.seconds else 1.0

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together."""
        return self.rows / self.seconds if self.seconds else float("inf")

    @property
    def training(self) -> float | None:
        """Seconds to the target, of steps alone: neither start nor validation."""
        return None if self.steps is None else self.steps * self.seconds

    @property
    def money(self) -> float | None:
        """Of nodes and bytes, to the target, in the currency of the prices; None: none is given."""
        prices = self.prices
        if self.training is None or (prices.node_hour, prices.gigabyte) == (None, None):
            return None
        nodes = prices.nodes(self.ranks) if prices.node_hour is not None else 0
        hours = nodes * self.training / 3600 * (prices.node_hour or 0.0)
        return hours + (self.steps or 0) * self.sent / 1e9 * (prices.gigabyte or 0.0)

    @property
    def energy(self) -> float | None:
        """Of the nodes, to the target, J; None: no watts are given."""
        if self.training is None or self.prices.watts is None:
            return None
        return self.prices.watts * self.prices.nodes(self.ranks) * self.training

    @property
    def sent(self) -> float:
        """Bytes that all ranks send in a step."""
        return self.taken.more["sent"]

    @property
    def sources(self) -> tuple[Source, ...]:
        """Which figure is from where."""
        return (Source(f"calibration {self.calibration}", self.origin), *self.taken.sources)

    def to_json(self) -> dict[str, JSON]:
        """All of it."""
        taken = self.taken
        return {
            "label": self.label,
            "where": self.where,
            "workers": self.workers,
            "ranks": self.ranks,
            "rows": self.rows,
            "step_s": self.seconds,
            "low_s": self.interval[0],
            "high_s": self.interval[1],
            "parts_s": dict(taken.parts),
            "link_bytes": dict(taken.nbytes),
            "sent_bytes": self.sent,
            "memory_bytes": dict(taken.memory),
            "more": dict(taken.more),
            "strong": self.strong,
            "weak": self.weak,
            "samples_per_s": self.samples_per_s,
            "steps": self.steps,
            "training_s": self.training,
            "money": self.money,
            "energy_j": self.energy,
            "prices": self.prices.model_dump(mode="json"),
            "calibration": self.calibration,
            "sources": [source._asdict() for source in self.sources],
        }

    def __str__(self) -> str:
        told = [f"{name}: {value}" for name, value in self._told().items()]
        return "\n".join([f"{self.label} on {self.where}", *told])

    def _repr_html_(self) -> str:
        parts = [pairs(self._told())]
        if self.taken.nbytes:
            rows = [[name, bytes_text(n)] for name, n in self.taken.nbytes.items()]
            shown = table(rows, ["link", "bytes a step"])
            parts.append(shown if len(rows) <= SHOWN else folded(f"{len(rows)} links", shown))
        parts.append(folded("where the figures are from", pairs(dict(self.sources))))
        return card(f"Forecast of {self.label}", line(self.where), *parts)

    def _told(self) -> dict[str, str]:
        """What is shown of it, in words."""
        low, high = map(seconds_text, self.interval)
        parts = {name: self.taken.parts.get(name, 0.0) for name in PARTS}
        told = {
            "step": f"{seconds_text(self.seconds)} (nine in ten: {low} to {high})",
            "parts": ", ".join(f"{name} {seconds_text(s)}" for name, s in parts.items() if s),
            "samples/s": number_text(self.samples_per_s),
            "efficiency": f"{self.strong:.1%} strong, {self.weak:.1%} weak",
            "bytes sent in a step": bytes_text(self.sent),
            "memory of a rank": ", ".join(
                f"{name} {bytes_text(n)}" for name, n in self.taken.memory.items()
            ),
        }
        if self.training is not None:
            told["training"] = f"{self.steps:,} steps, {duration_text(self.training)}"
        if self.money is not None:
            told["price"] = number_text(self.money)
        if self.energy is not None:
            told["energy"] = f"{number_text(self.energy / 3.6e6)} kWh"
        return told


def forecast(
    experiment: Any,
    calibration: Calibration,
    network: Network | None = None,
    emulated: bool = False,
    prices: Prices | None = None,
) -> Forecast:
    """What an experiment takes, as its strategy says.

    Args:
        experiment: an `Experiment`.
        calibration: what was measured.
        network: on which its ranks are, real or emulated; None: all on one machine.
        emulated: see `Query`.
        prices: and the target.

    Raises:
        InvalidInput: its strategy has no forecast, or something was not measured.
    """
    prices = prices or Prices()
    emulated = emulated and network is not None and experiment.clock == "wall"
    asked = Query(experiment, calibration, network, emulated)
    steps = prices.target_steps
    if steps is None and experiment.epoch_steps is not None:
        steps = experiment.epochs * experiment.epoch_steps
    taken = as_whole(asked, fed(asked, experiment.strategy.forecast(asked)))
    machine = calibration.machine.get("cpu", "the machine of the calibration")
    how = "one machine" if network is None else f"{'emulated ' * emulated}{network}"
    rows = experiment.batch_size
    return Forecast(
        label=experiment.label,
        where=f"{how}, ranks like {machine}",
        workers=asked.workers,
        ranks=asked.workers + experiment.strategy.extra_ranks(asked.workers),
        rows=rows,
        taken=taken,
        alone=alone(asked, rows),
        own=alone(asked, rows / asked.workers),
        prices=prices,
        steps=steps,
        calibration=calibration.hash8,
        origin=origin(calibration),
    )
