"""Verification of asynchronous strategies: independent NumPy servers replay the log of updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import keras
import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.keras import beyond_configuration
from labkit.programs import CodecChannel, Roles, ServerPieces
from labkit.programs.actions import Vector
from labkit.programs.event_log import Event

# A `Rule` is a function (weights, gradient, learning rate, update number from 1) that returns the
# updated weights.
Rule: TypeAlias = Callable[[Vector, Vector, float, int], Vector]
# A `GradientFunction` takes (worker, step, weights) and returns the gradient.
GradientFunction: TypeAlias = Callable[[int, int, Vector], Vector]
# The corrections in `RATE_CORRECTIONS` change only the learning rate.
RATE_CORRECTIONS = ("per_gradient", "mean")
# A `ChannelFactory` takes (worker, server) and creates one end of their message channel.
ChannelFactory: TypeAlias = Callable[[int, int], CodecChannel]
OFF = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "use_ema", "amsgrad")


def rule_of(optimizer: keras.optimizers.Optimizer) -> Callable[[int], Rule] | str:
    """Return a function that creates the update rule for n weights, or the reason for no rule."""
    config = optimizer.get_config()
    name = type(optimizer).__name__.lower()
    if name not in RULES:
        return f"no independent implementation of {type(optimizer).__name__} exists"
    if odd := [option for option in OFF if config.get(option)]:
        return f"the independent {type(optimizer).__name__} lacks {odd[0]}={config[odd[0]]}"
    if more := beyond_configuration(optimizer):
        return f"the independent {type(optimizer).__name__} lacks {next(iter(more))}"
    return lambda size: RULES[name](config, size)


class StalenessCorrection(NamedTuple):
    """The staleness correction of a strategy, implemented separately from the strategy.

    Attributes:
        remedy: Name of the staleness correction.
        average: Expected staleness of gradients, in updates.
        share: Constant factor of each gradient. The factor is 1 / number of workers for stale
            synchronous training without corrections. In all other cases, the factor of a gradient
            is 1.
        compensation: Factor λ of the delay compensation. The value 0 means no compensation.
    """

    remedy: str = "None"
    average: float = 0.0
    share: float = 1.0
    compensation: float = 0.0

    @classmethod
    def of(cls, strategy: Mapping[str, JSON], workers: int) -> StalenessCorrection:
        """Return the staleness correction that the recorded fields of a strategy define."""
        fields = {name: str(value) for name, value in strategy.items()}
        remedy = fields.get("staleness_correction", "None")
        average = workers - 1.0
        if "n" in fields:
            average = workers / (workers // int(fields["n"]))
        by_clock = fields["name"] == "StaleSynchronous" and remedy not in RATE_CORRECTIONS
        strength = float(fields["delay_compensation"]) if remedy == "delay_compensated" else 0.0
        return cls(remedy, average, 1 / workers if by_clock else 1.0, strength)

    def factor(self, staleness: int) -> float:
        """Return the learning rate's factor for a gradient; its staleness is given in updates."""
        old = {RATE_CORRECTIONS[0]: float(staleness), RATE_CORRECTIONS[1]: self.average}.get(
            self.remedy, 1.0
        )
        return self.share / max(old, 1.0)


def replay(
    roles: Roles,
    events: Sequence[Event],
    rule: Callable[[int], Rule],
    rate: Callable[[int], float],
    compute_gradient: GradientFunction,
    make_channel: ChannelFactory,
    correction: StalenessCorrection,
) -> Vector:
    """Apply the logged updates in the logged order, and return the resulting weights.

    The replay computes each gradient again at the weight versions that the log names. The result
    differs from the trained weights if a worker used other weight versions than the log names.

    Args:
        roles: Roles of all processes: servers, workers, and the part of the weights on each server.
        events: Update events of all servers, see `labkit.programs.event_log.EventLog`.
        rule: Function that creates the update rule of each server.
        rate: Function from an update number (from 0) to the learning rate.
        compute_gradient: Function (worker, step, weights) that returns the worker's gradient.
        make_channel: Function (worker, server) that creates one end of their message channel.
        correction: The staleness correction of the strategy.

    Raises:
        LabkitError: If the log contradicts itself, so that no order of updates is consistent with
            it.
    """
    servers = {n: _Server(roles.part(n), roles.weights, rule) for n in roles.servers}
    versions_used: dict[tuple[int, int], dict[int, int]] = {}
    for event in events:
        key = int(event["worker"]), int(event["step"])
        versions_used.setdefault(key, {})[int(event["server"])] = int(event["version"])
    pending_fetches = Counter(
        (s, v) for versions in versions_used.values() for s, v in versions.items()
    )
    gradients = _Gradients(
        roles, servers, versions_used, pending_fetches, compute_gradient, make_channel, correction
    )
    pending = {server: _updates(events, server) for server in servers}
    while any(pending.values()):
        ready = [s for s, updates in pending.items() if updates and gradients.known(updates[0])]
        if not ready:
            raise LabkitError("the update log refers to weight versions that do not exist yet")
        for server in ready:
            number = len(servers[server].versions) - 1
            gradient, factor = gradients.mean(server, pending[server].pop(0))
            servers[server].apply(gradient, rate(number) * factor, pending_fetches, server)
    return roles.assemble_weights({number: server.weights for number, server in servers.items()})


class _Server:
    """The weights of a server, and the older versions that workers have not fetched yet."""

    def __init__(self, part: ServerPieces, weights: Vector, rule: Callable[[int], Rule]) -> None:
        self.weights: Vector = part.take(weights).copy()
        self.versions: list[Vector | None] = [self.weights]
        self._rule = rule(part.size)

    def apply(
        self,
        gradient: Vector,
        rate: float,
        pending_fetches: Mapping[tuple[int, int], int],
        number: int,
    ) -> None:
        if not pending_fetches.get((number, len(self.versions) - 1)):
            self.versions[-1] = None
        self.weights = self._rule(self.weights, gradient, rate, len(self.versions))
        self.versions.append(self.weights)


class _Gradients:
    """Computes each worker's gradients again, step by step, and decodes them as the servers do.

    For each worker, the decoded weights and the residual persist from one step to the next.
    """

    def __init__(
        self,
        roles: Roles,
        servers: Mapping[int, _Server],
        versions_used: Mapping[tuple[int, int], Mapping[int, int]],
        pending_fetches: Counter[tuple[int, int]],
        compute_gradient: GradientFunction,
        make_channel: ChannelFactory,
        correction: StalenessCorrection,
    ) -> None:
        self._roles, self._servers, self._versions_used, self._compute_gradient = (
            roles,
            servers,
            versions_used,
            compute_gradient,
        )
        self._correction = correction
        self._pending_fetches = pending_fetches
        self._gradients: dict[tuple[int, int], dict[int, Vector]] = {}
        self._weights_used: dict[tuple[int, int], dict[int, Vector]] = {}
        # The dict `_steps` holds the number of computed gradients of each worker.
        self._steps: dict[int, int] = {}
        pairs = [(worker, server) for worker in range(roles.workers) for server in roles.servers]
        self._ends = {
            pair: (make_channel(*pair), make_channel(*pair)) for pair in pairs
        }  # Each message channel has a worker's end and a server's end.

    def known(self, update: Sequence[Event]) -> bool:
        """Return whether all versions of weights that an update needs have been computed."""
        return all(
            version < len(self._servers[server].versions)
            for event in update
            for server, version in self._versions_used[_key(event)].items()
        )

    def mean(self, server: int, update: Sequence[Event]) -> tuple[Vector, float]:
        """Return an update's weighted mean gradient, and the factor for its learning rate."""
        state, part = self._servers[server], self._roles.part(server)
        total = np.zeros(part.size, self._roles.weights.dtype)
        rows = weight = 0.0
        for event in update:
            current_version, gradient_version = len(state.versions) - 1, int(event["version"])
            gradient = self._gradient_of(_key(event), server)
            if self._correction.compensation:
                moved = state.weights - self._weights_used[_key(event)].pop(server)
                gradient = gradient + self._correction.compensation * gradient**2 * moved
            share = event["rows"] * self._correction.factor(current_version - gradient_version)
            total += gradient * share
            rows, weight = rows + event["rows"], weight + share
        return total / weight, weight / rows

    def _gradient_of(self, key: tuple[int, int], server: int) -> Vector:
        worker, step = key
        while (number := self._steps.get(worker, 0)) <= step:
            self._gradients[worker, number] = self._compute(worker, number)
            self._steps[worker] = number + 1
        return self._gradients[key].pop(server)

    def _compute(self, worker: int, step: int) -> dict[int, Vector]:
        """Return a worker's next gradient, one part per server, as each server decodes its part."""
        weights: dict[int, Vector] = {}
        for server, version in self._versions_used[worker, step].items():
            version_weights = self._servers[server].versions[version]
            # The server stores a version of the weights until all workers have fetched the version.
            assert version_weights is not None
            self._pending_fetches[server, version] -= 1
            worker_end, server_end = self._ends[worker, server]
            weights[server] = (
                worker_end.answered(server_end.answer(version_weights)) if step else version_weights
            )
        if self._correction.compensation:
            self._weights_used[worker, step] = dict(weights)
        gradient = self._compute_gradient(worker, step, self._roles.assemble_weights(weights))
        return {
            server: server_end.pushed(worker_end.push(self._roles.part(server).take(gradient)))
            for server in self._roles.servers
            for worker_end, server_end in [self._ends[worker, server]]
        }


def _updates(events: Sequence[Event], server: int) -> list[list[Event]]:
    """Return the events of one server, grouped by weight update."""
    updates: dict[int, list[Event]] = {}
    for event in events:
        if event["server"] == server and event["update"] >= 0:
            updates.setdefault(int(event["update"]), []).append(event)
    return [updates[number] for number in sorted(updates)]


def _key(event: Event) -> tuple[int, int]:
    return int(event["worker"]), int(event["step"])


def _sgd(config: Mapping[str, float], size: int) -> Rule:
    """Return the update rule of SGD with or without (Nesterov) momentum."""
    momentum, nesterov = _cast(config["momentum"]), config["nesterov"]
    speed = np.zeros(size)

    def apply(weights: Vector, gradient: Vector, rate: float, number: int) -> Vector:
        speed[:] = momentum * speed - rate * gradient
        new_weights: Vector = weights + (momentum * speed - rate * gradient if nesterov else speed)
        return new_weights

    return apply


def _adagrad(config: Mapping[str, float], size: int) -> Rule:
    total = np.full(size, config["initial_accumulator_value"])

    def apply(weights: Vector, gradient: Vector, rate: float, number: int) -> Vector:
        total[:] += gradient**2
        new_weights: Vector = weights - rate * gradient / np.sqrt(total + config["epsilon"])
        return new_weights

    return apply


def _adam(config: Mapping[str, float], size: int) -> Rule:
    first, second = np.zeros(size), np.zeros(size)
    beta_1, beta_2 = config["beta_1"], config["beta_2"]

    def apply(weights: Vector, gradient: Vector, rate: float, number: int) -> Vector:
        first[:] = beta_1 * first + (1 - beta_1) * gradient
        second[:] = beta_2 * second + (1 - beta_2) * gradient**2
        powers = _cast(beta_1) ** number, _cast(beta_2) ** number
        unbiased = rate * np.sqrt(1 - powers[1]) / (1 - powers[0])
        new_weights: Vector = weights - unbiased * first / (np.sqrt(second) + config["epsilon"])
        return new_weights

    return apply


def _cast(number: float) -> float:
    """Round a number to float32, as Keras does with Python numbers even if weights are float64."""
    return float(np.float32(number))


RULES: dict[str, Callable[[Mapping[str, float], int], Rule]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adam": _adam,
}
