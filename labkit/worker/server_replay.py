"""The gate of what is not exact: servers written anew, in NumPy, replay what was written down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import keras
import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError
from labkit.programs import CodecChannel, Parts, Roles
from labkit.programs.actions import Vector
from labkit.programs.event_log import Event

# Of weights, a gradient, a rate and the number of the update, from 1: the new weights.
Rule: TypeAlias = Callable[[Vector, Vector, float, int], Vector]
# Of a worker, a step and the weights that it had: its gradient.
Asked: TypeAlias = Callable[[int, int, Vector], Vector]
RATED = ("per_gradient", "mean")  # remedies that change the learning rate
# Of the numbers of a worker and a server: one end of what they say to each other.
Talks: TypeAlias = Callable[[int, int], CodecChannel]
OFF = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "use_ema", "amsgrad")


def rule_of(optimizer: keras.optimizers.Optimizer) -> Callable[[int], Rule] | str:
    """What makes a rule for so many weights; or why there is none."""
    config = optimizer.get_config()
    name = type(optimizer).__name__.lower()
    if name not in RULES:
        return f"no independent {type(optimizer).__name__} replays the servers' updates"
    if odd := [option for option in OFF if config.get(option)]:
        return f"no independent {type(optimizer).__name__} knows {odd[0]}={config[odd[0]]}"
    return lambda size: RULES[name](config, size)


class Mending(NamedTuple):
    """What a strategy does about staleness, written anew from its fields.

    Attributes:
        remedy: its name.
        average: the staleness that is expected.
        share: of a gradient in its clock; 1 where each counts whole.
        compensation: λ of a delay-compensated gradient.
    """

    remedy: str = "None"
    average: float = 0.0
    share: float = 1.0
    compensation: float = 0.0

    @classmethod
    def of(cls, strategy: Mapping[str, JSON], workers: int) -> Mending:
        """That of a strategy as its record has it."""
        fields = {name: str(value) for name, value in strategy.items()}
        remedy = fields.get("remedy", "None")
        average = workers - 1.0
        if "splits" in fields:
            average = workers / (workers // int(fields["splits"]))
        by_clock = fields["name"] == "StaleSynchronous" and remedy not in RATED
        strength = float(fields["compensation"]) if remedy == "delay_compensated" else 0.0
        return cls(remedy, average, 1 / workers if by_clock else 1.0, strength)

    def factor(self, staleness: int) -> float:
        """Of the learning rate."""
        old = {RATED[0]: float(staleness), RATED[1]: self.average}.get(self.remedy, 1.0)
        return self.share / max(old, 1.0)


def replay(
    roles: Roles,
    events: Sequence[Event],
    rule: Callable[[int], Rule],
    rate: Callable[[int], float],
    asked: Asked,
    talks: Talks,
    mending: Mending,
) -> Vector:
    """The weights after the updates that were written down, in their order.

    Every gradient is computed anew, at the weights of the versions that its worker is said to have
    had; so who was given other ones is found out.

    Args:
        roles: who held what.
        events: of all servers, see `labkit.programs.event_log.EventLog`.
        rule: how a server's optimizer changes so many weights.
        rate: the learning rate of an update, by its number from 0.
        asked: computes gradients.
        talks: makes ends of talks, new ones.
        mending: what is done about staleness.

    Raises:
        LabkitError: what was written down cannot have happened in any order.
    """
    servers = {n: _Server(roles.part(n), roles.weights, rule) for n in roles.servers}
    had: dict[tuple[int, int], dict[int, int]] = {}
    for event in events:
        key = int(event["worker"]), int(event["step"])
        had.setdefault(key, {})[int(event["server"])] = int(event["version"])
    wanted = Counter((s, v) for versions in had.values() for s, v in versions.items())
    gradients = _Gradients(roles, servers, had, wanted, asked, talks, mending)
    left = {server: _updates(events, server) for server in servers}
    while any(left.values()):
        ready = [s for s, updates in left.items() if updates and gradients.known(updates[0])]
        if not ready:
            raise LabkitError("the interleaving tells of weights that were not there yet")
        for server in ready:
            number = len(servers[server].versions) - 1
            found, factor = gradients.mean(server, left[server].pop(0))
            servers[server].apply(found, rate(number) * factor, wanted, server)
    return roles.whole({number: server.weights for number, server in servers.items()})


class _Server:
    """Weights of a server, and those of its versions that somebody has fetched."""

    def __init__(self, part: Parts, weights: Vector, rule: Callable[[int], Rule]) -> None:
        self.weights: Vector = part.take(weights).copy()
        self.versions: list[Vector | None] = [self.weights]
        self._rule = rule(part.size)

    def apply(
        self, gradient: Vector, rate: float, wanted: Mapping[tuple[int, int], int], number: int
    ) -> None:
        if not wanted.get((number, len(self.versions) - 1)):
            self.versions[-1] = None
        self.weights = self._rule(self.weights, gradient, rate, len(self.versions))
        self.versions.append(self.weights)


class _Gradients:
    """Gradients as servers understand them, by worker and step, each computed after the one before.

    What a worker has of a server's weights, and what waits at it, goes from step to step.
    """

    def __init__(
        self,
        roles: Roles,
        servers: Mapping[int, _Server],
        had: Mapping[tuple[int, int], Mapping[int, int]],
        wanted: Counter[tuple[int, int]],
        asked: Asked,
        talks: Talks,
        mending: Mending,
    ) -> None:
        self._roles, self._servers, self._had, self._asked = roles, servers, had, asked
        self._mending = mending
        self._wanted = wanted
        self._found: dict[tuple[int, int], dict[int, Vector]] = {}
        self._then: dict[tuple[int, int], dict[int, Vector]] = {}  # the weights they are of
        self._steps: dict[int, int] = {}  # that a worker's gradients were computed of
        pairs = [(worker, server) for worker in range(roles.workers) for server in roles.servers]
        self._ends = {pair: (talks(*pair), talks(*pair)) for pair in pairs}  # worker's, server's

    def known(self, update: Sequence[Event]) -> bool:
        """Whether all that an update was made of can be computed by now."""
        return all(
            version < len(self._servers[server].versions)
            for event in update
            for server, version in self._had[_key(event)].items()
        )

    def mean(self, server: int, update: Sequence[Event]) -> tuple[Vector, float]:
        """What a server applied, by rows and staleness, and at which part of the rate."""
        held, part = self._servers[server], self._roles.part(server)
        found = np.zeros(part.size, self._roles.weights.dtype)
        rows = weight = 0.0
        for event in update:
            now, then = len(held.versions) - 1, int(event["version"])
            own = self._of(_key(event), server)
            if self._mending.compensation:
                moved = held.weights - self._then[_key(event)].pop(server)
                own = own + self._mending.compensation * own**2 * moved
            share = event["rows"] * self._mending.factor(now - then)
            found += own * share
            rows, weight = rows + event["rows"], weight + share
        return found / weight, weight / rows

    def _of(self, key: tuple[int, int], server: int) -> Vector:
        worker, step = key
        while (number := self._steps.get(worker, 0)) <= step:
            self._found[worker, number] = self._computed(worker, number)
            self._steps[worker] = number + 1
        return self._found[key].pop(server)

    def _computed(self, worker: int, step: int) -> dict[int, Vector]:
        """What servers understand of the gradient of a worker's next step."""
        weights: dict[int, Vector] = {}
        for server, version in self._had[worker, step].items():
            held = self._servers[server].versions[version]
            assert held is not None  # kept as long as it is wanted
            self._wanted[server, version] -= 1
            mine, its = self._ends[worker, server]
            weights[server] = mine.answered(its.answer(held)) if step else held
        if self._mending.compensation:
            self._then[worker, step] = dict(weights)
        gradient = self._asked(worker, step, self._roles.whole(weights))
        return {
            server: its.pushed(mine.push(self._roles.part(server).take(gradient)))
            for server in self._roles.servers
            for mine, its in [self._ends[worker, server]]
        }


def _updates(events: Sequence[Event], server: int) -> list[list[Event]]:
    """What each of a server's updates was made of."""
    found: dict[int, list[Event]] = {}
    for event in events:
        if event["server"] == server and event["update"] >= 0:
            found.setdefault(int(event["update"]), []).append(event)
    return [found[number] for number in sorted(found)]


def _key(event: Event) -> tuple[int, int]:
    return int(event["worker"]), int(event["step"])


def _sgd(config: Mapping[str, float], size: int) -> Rule:
    """With or without momentum."""
    momentum, nesterov = _cast(config["momentum"]), config["nesterov"]
    speed = np.zeros(size)

    def apply(weights: Vector, gradient: Vector, rate: float, number: int) -> Vector:
        speed[:] = momentum * speed - rate * gradient
        found: Vector = weights + (momentum * speed - rate * gradient if nesterov else speed)
        return found

    return apply


def _adagrad(config: Mapping[str, float], size: int) -> Rule:
    total = np.full(size, config["initial_accumulator_value"])

    def apply(weights: Vector, gradient: Vector, rate: float, number: int) -> Vector:
        total[:] += gradient**2
        found: Vector = weights - rate * gradient / np.sqrt(total + config["epsilon"])
        return found

    return apply


def _adam(config: Mapping[str, float], size: int) -> Rule:
    first, second = np.zeros(size), np.zeros(size)
    keeps, keeps_squares = config["beta_1"], config["beta_2"]

    def apply(weights: Vector, gradient: Vector, rate: float, number: int) -> Vector:
        first[:] = keeps * first + (1 - keeps) * gradient
        second[:] = keeps_squares * second + (1 - keeps_squares) * gradient**2
        powers = _cast(keeps) ** number, _cast(keeps_squares) ** number
        unbiased = rate * np.sqrt(1 - powers[1]) / (1 - powers[0])
        found: Vector = weights - unbiased * first / (np.sqrt(second) + config["epsilon"])
        return found

    return apply


def _cast(number: float) -> float:
    """As Keras casts a number of Python's: by way of float32, also to float64."""
    return float(np.float32(number))


RULES: dict[str, Callable[[Mapping[str, float], int], Rule]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adam": _adam,
}
