"""The forecast of an experiment: step time with an interval, bytes, cost and energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveInt

from labkit.common.errors import InvalidInput
from labkit.common.html import card, folded, line, pairs, table
from labkit.common.renamed import refuse_former_attributes
from labkit.common.units import bytes_text, duration_text, number_text, seconds_text
from labkit.common.validated import Checked
from labkit.forecast.calibration import Calibration, Provenance
from labkit.forecast.calibration_store import origin
from labkit.forecast.query import PARTS, Query, StepForecast
from labkit.forecast.residual_correction import add_input_stall, add_residual, single_rank_seconds

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON
    from labkit.network import Network

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SHOWN = 12  # A table with more than this number of links is shown collapsed.


class Prices(Checked):
    """Prices of nodes and bytes, and the length of the training; there are no default prices.

    Attributes:
        price_per_node_hour: Price of a node per hour.
        price_per_gb: Price per 10⁹ bytes that leave a rank.
        node_watts: Power of a node, W.
        ranks_per_node: Number of ranks per node.
        target_steps: Number of steps of the training; None: all steps of the experiment's epochs.
    """

    price_per_node_hour: Price | None = None
    price_per_gb: Price | None = None
    node_watts: Price | None = None
    ranks_per_node: PositiveInt | None = None
    target_steps: PositiveInt | None = None

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes that a number of ranks needs.

        Raises:
            InvalidInput: The number of ranks per node is unknown.
        """
        if self.ranks_per_node is None:
            raise InvalidInput(
                "price_per_node_hour and node_watts need the number of ranks on a node; give "
                "ranks_per_node=…"
            )
        return -(-ranks // self.ranks_per_node)


@refuse_former_attributes
@dataclass(frozen=True)
class Forecast:
    """The forecast of one training step of an experiment, and of its whole training.

    Attributes:
        label: Label of the experiment.
        where: Description of the network and the machine.
        workers: Number of ranks that train.
        ranks: Number of all ranks, including ranks that do not train, such as parameter servers.
        rows: Number of samples in a global batch.
        step: Step forecast of the strategy, with parts, bytes and memory.
        alone: Seconds of a step if a single rank trains on the whole global batch.
        own: Seconds of a step if a single rank trains on one worker's part of the global batch.
        prices: Prices that the caller of `forecast` passed.
        steps: Number of steps of the training; None: unknown.
        calibration: Hash of the calibration, eight hexadecimal digits.
        origin: Machine and date of the calibration.
    """

    label: str
    where: str
    workers: int
    ranks: int
    rows: int
    step: StepForecast
    alone: float
    own: float
    prices: Prices
    steps: int | None
    calibration: str
    origin: str

    @property
    def seconds(self) -> float:
        """The median duration of a step, s."""
        return self.step.seconds

    @property
    def interval(self) -> tuple[float, float]:
        """The interval, in s, that contains the typical step time of nine of ten runs."""
        low, high = self.step.spread
        return self.seconds * low, self.seconds * high

    @property
    def strong_efficiency(self) -> float:
        r"""Strong scaling efficiency \(T_1(B) / (n T_n(B))\) of n ranks on a batch of B samples."""
        return self.alone / (self.workers * self.seconds) if self.seconds else 1.0

    @property
    def weak_efficiency(self) -> float:
        r"""Weak scaling efficiency \(T_1(b) / T_n(n b)\) of n ranks with b samples per rank."""
        return self.own / self.seconds if self.seconds else 1.0

    @property
    def samples_per_s(self) -> float:
        """The samples per second that all ranks together train on."""
        return self.rows / self.seconds if self.seconds else float("inf")

    @property
    def training_seconds(self) -> float | None:
        """The seconds of all training steps, without start and validation; None if unknown."""
        return None if self.steps is None else self.steps * self.seconds

    @property
    def cost(self) -> float | None:
        """The price of the nodes and of the sent bytes; None if no price is given."""
        prices = self.prices
        if self.training_seconds is None or (prices.price_per_node_hour, prices.price_per_gb) == (
            None,
            None,
        ):
            return None
        nodes = prices.nodes(self.ranks) if prices.price_per_node_hour is not None else 0
        hours = nodes * self.training_seconds / 3600 * (prices.price_per_node_hour or 0.0)
        return hours + (self.steps or 0) * self.sent / 1e9 * (prices.price_per_gb or 0.0)

    @property
    def energy(self) -> float | None:
        """The energy in J that the nodes use for the training; None if no power is given."""
        if self.training_seconds is None or self.prices.node_watts is None:
            return None
        return self.prices.node_watts * self.prices.nodes(self.ranks) * self.training_seconds

    @property
    def sent(self) -> float:
        """The total bytes that all ranks send in a step."""
        return self.step.more["sent"]

    @property
    def sources(self) -> tuple[Provenance, ...]:
        """The origin of each number in the forecast."""
        return (Provenance(f"calibration {self.calibration}", self.origin), *self.step.sources)

    def to_json(self) -> dict[str, JSON]:
        """Return all numbers of the forecast as JSON."""
        step = self.step
        return {
            "label": self.label,
            "where": self.where,
            "workers": self.workers,
            "ranks": self.ranks,
            "rows": self.rows,
            "step_s": self.seconds,
            "low_s": self.interval[0],
            "high_s": self.interval[1],
            "parts_s": dict(step.parts),
            "link_bytes": dict(step.nbytes),
            "sent_bytes": self.sent,
            "memory_bytes": dict(step.memory),
            "more": dict(step.more),
            "strong": self.strong_efficiency,
            "weak": self.weak_efficiency,
            "samples_per_s": self.samples_per_s,
            "steps": self.steps,
            "training_s": self.training_seconds,
            "money": self.cost,
            "energy_j": self.energy,
            "prices": self.prices.model_dump(mode="json"),
            "calibration": self.calibration,
            "sources": [source._asdict() for source in self.sources],
        }

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self._shown_figures().items()]
        return "\n".join([f"{self.label} on {self.where}", *lines])

    def _repr_html_(self) -> str:
        parts = [pairs(self._shown_figures())]
        if self.step.nbytes:
            rows = [[name, bytes_text(n)] for name, n in self.step.nbytes.items()]
            shown = table(rows, ["link", "bytes per step"])
            parts.append(shown if len(rows) <= SHOWN else folded(f"{len(rows)} links", shown))
        parts.append(folded("how each number was obtained", pairs(dict(self.sources))))
        return card(f"Forecast of {self.label}", line(self.where), *parts)

    def _shown_figures(self) -> dict[str, str]:
        """Return the displayed numbers of the forecast, as a mapping from name to text."""
        low, high = map(seconds_text, self.interval)
        parts = {name: self.step.parts.get(name, 0.0) for name in PARTS}
        figures = {
            "step": f"{seconds_text(self.seconds)} (90% interval: {low} to {high})",
            "parts": ", ".join(f"{name} {seconds_text(s)}" for name, s in parts.items() if s),
            "samples/s": number_text(self.samples_per_s),
            "efficiency": f"{self.strong_efficiency:.1%} strong, {self.weak_efficiency:.1%} weak",
            "bytes sent per step": bytes_text(self.sent),
            "memory per rank": ", ".join(
                f"{name} {bytes_text(n)}" for name, n in self.step.memory.items()
            ),
        }
        if self.training_seconds is not None:
            figures["training"] = f"{self.steps:,} steps, {duration_text(self.training_seconds)}"
        if self.cost is not None:
            figures["price"] = number_text(self.cost)
        if self.energy is not None:
            figures["energy"] = f"{number_text(self.energy / 3.6e6)} kWh"
        return figures


def forecast(
    experiment: Any,
    calibration: Calibration,
    network: Network | None = None,
    emulated: bool = False,
    prices: Prices | None = None,
) -> Forecast:
    """Return the forecast of an experiment, computed from its strategy's forecast of a step.

    Args:
        experiment: An `Experiment`.
        calibration: Measured costs.
        network: Network of the ranks, real or emulated; None: all ranks on one machine.
        emulated: Whether the network is emulated on one machine, see `Query`.
        prices: Prices and number of training steps; None: no prices.

    Raises:
        InvalidInput: The strategy has no forecast, or the calibration lacks a necessary cost.
    """
    prices = prices or Prices()
    emulated = emulated and network is not None and experiment.clock == "wall"
    query = Query(experiment, calibration, network, emulated)
    steps = prices.target_steps
    if steps is None and experiment.epoch_steps is not None:
        steps = experiment.epochs * experiment.epoch_steps
    step = add_residual(query, add_input_stall(query, experiment.strategy.forecast(query)))
    machine = calibration.machine.get("cpu", "the machine of the calibration")
    network_name = "one machine" if network is None else f"{'emulated ' * emulated}{network}"
    rows = experiment.batch_size
    return Forecast(
        label=experiment.label,
        where=f"{network_name}, ranks like {machine}",
        workers=query.workers,
        ranks=query.workers + experiment.strategy.extra_ranks(query.workers),
        rows=rows,
        step=step,
        alone=single_rank_seconds(query, rows),
        own=single_rank_seconds(query, rows / query.workers),
        prices=prices,
        steps=steps,
        calibration=calibration.hash8,
        origin=origin(calibration),
    )
