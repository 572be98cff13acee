"""What cells have defined on engines, carried over when these start anew."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import ipyparallel

MOST = 2**28  # bytes of one rank; more would hold up the controller, through which they go
LOOK_EVERY = 0.05  # seconds

Values: TypeAlias = dict[str, bytes]  # pickled, by name


class Carried(NamedTuple):
    """Variables of ranks that still answer, and the names of those that are lost, by rank."""

    values: Mapping[int, Values]
    lost: Mapping[int, list[str]]

    @property
    def sentence(self) -> str:
        """What is kept and what is lost, in words; "" where cells have defined nothing."""
        names: dict[str, list[int]] = {}
        for rank, values in self.values.items():
            for name in values:
                names.setdefault(name, []).append(rank)
        told = [_told(names, "kept")]
        names = {}
        for rank, lost in self.lost.items():
            for name in lost:
                names.setdefault(name, []).append(rank)
        told.append(_told(names, "lost"))
        return "; ".join(filter(None, told))


def take(
    client: ipyparallel.Client, engines: Mapping[int, int], stuck: list[int], seconds: float
) -> Carried:
    """What cells have defined on the ranks that are not stuck.

    Args:
        client: of the cluster.
        engines: the engine of each rank.
        stuck: ranks that do not answer: theirs are lost, by the names that others have.
        seconds: that the others get.
    """
    asked = {r: client[e].apply_async(_pack, MOST) for r, e in engines.items() if r not in stuck}
    end = time.monotonic() + seconds
    while not all(call.ready() for call in asked.values()) and time.monotonic() < end:
        time.sleep(LOOK_EVERY)
    told = {rank: call.get() for rank, call in asked.items() if call.ready() and call.successful()}
    values = {rank: found for rank, (found, _) in told.items()}
    lost = {rank: names for rank, (_, names) in told.items()}
    known = sorted({name for found, names in told.values() for name in (*found, *names)})
    return Carried(values, lost | {rank: known for rank in engines if rank not in told})


def give(client: ipyparallel.Client, engines: Mapping[int, int], carried: Carried) -> Carried:
    """Define the same on new engines; what of it could be defined there."""
    asked = {rank: client[engines[rank]].apply_async(_unpack, own) for rank, own in _some(carried)}
    failed = {rank: call.get() for rank, call in asked.items()}
    values = {
        rank: {name: value for name, value in own.items() if name not in failed.get(rank, [])}
        for rank, own in carried.values.items()
    }
    lost = {rank: [*names, *failed.get(rank, [])] for rank, names in carried.lost.items()}
    return Carried(values, lost)


def _some(carried: Carried) -> list[tuple[int, Values]]:
    return [(rank, own) for rank, own in carried.values.items() if own]


def _told(names: Mapping[str, list[int]], what: str) -> str:
    words = [f"{name} (rank {', '.join(map(str, ranks))})" for name, ranks in sorted(names.items())]
    return f"{what}: {', '.join(words)}" if words else ""


def _pack(most: int) -> tuple[Values, list[str]]:
    """What cells have defined here, pickled, and the names of what cannot travel."""
    import cloudpickle
    from IPython import get_ipython

    shell = get_ipython()
    found, lost = {}, []
    for name, value in list(shell.user_ns.items()):
        if name.startswith("_") or name in shell.user_ns_hidden:
            continue
        try:
            packed = cloudpickle.dumps(value)
        except Exception:  # whatever an object's own code raises: it cannot travel
            lost.append(name)
            continue
        most -= len(packed)
        if most >= 0:
            found[name] = packed
        else:
            lost.append(name)
    return found, lost


def _unpack(values: Values) -> list[str]:
    """Define them here; the names of those that could not be made again."""
    import pickle
    from types import FunctionType

    from IPython import get_ipython

    space, lost = get_ipython().user_ns, []
    for name, packed in values.items():
        try:
            value = pickle.loads(packed)
        except Exception:  # as above
            lost.append(name)
            continue
        if isinstance(value, FunctionType) and value.__module__ == "__main__":
            # A cell's function sees what later cells define, not a copy of what was.
            function_type = value
            value = FunctionType(
                function_type.__code__,
                space,
                function_type.__name__,
                function_type.__defaults__,
                function_type.__closure__,
            )
            value.__kwdefaults__ = function_type.__kwdefaults__
        space[name] = value
    return lost
