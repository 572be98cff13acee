"""Transfer of the variables that cells have defined, from old engines to restarted engines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import ipyparallel

# Each rank transfers at most 256 MiB of variables. More bytes would block the controller, which
# forwards the variables.
MOST = 2**28
POLL_INTERVAL = 0.05  # seconds

# `Values` maps the name of each variable to its pickled value.
Values: TypeAlias = dict[str, bytes]


class CellVariables(NamedTuple):
    """For each rank: its saved variables if it has answered, and names of lost variables."""

    values: Mapping[int, Values]
    lost: Mapping[int, list[str]]

    @property
    def sentence(self) -> str:
        """Text that lists the preserved and the lost variables; "" if cells have defined none."""
        names: dict[str, list[int]] = {}
        for rank, values in self.values.items():
            for name in values:
                names.setdefault(name, []).append(rank)
        parts = [_listed(names, "kept")]
        names = {}
        for rank, lost in self.lost.items():
            for name in lost:
                names.setdefault(name, []).append(rank)
        parts.append(_listed(names, "lost"))
        return "; ".join(filter(None, parts))


def save_variables(
    client: ipyparallel.Client, engines: Mapping[int, int], stuck: list[int], seconds: float
) -> CellVariables:
    """Return the variables that cells have defined on those ranks that still answer.

    Args:
        client: Client of the cluster.
        engines: Engine id of each rank.
        stuck: Ranks that do not answer. The variables of a rank in `stuck` count as lost. The other
            ranks report their names.
        seconds: Maximum seconds to wait for the other ranks.
    """
    calls = {r: client[e].apply_async(_pack, MOST) for r, e in engines.items() if r not in stuck}
    end = time.monotonic() + seconds
    while not all(call.ready() for call in calls.values()) and time.monotonic() < end:
        time.sleep(POLL_INTERVAL)
    replies = {
        rank: call.get() for rank, call in calls.items() if call.ready() and call.successful()
    }
    values = {rank: packed for rank, (packed, _) in replies.items()}
    lost = {rank: names for rank, (_, names) in replies.items()}
    all_names = sorted({name for packed, names in replies.values() for name in (*packed, *names)})
    return CellVariables(
        values, lost | {rank: all_names for rank in engines if rank not in replies}
    )


def restore_variables(
    client: ipyparallel.Client, engines: Mapping[int, int], saved: CellVariables
) -> CellVariables:
    """Define saved variables on new engines; return which variables are restored or lost."""
    calls = {
        rank: client[engines[rank]].apply_async(_unpack, values)
        for rank, values in _non_empty(saved)
    }
    failed = {rank: call.get() for rank, call in calls.items()}
    values = {
        rank: {name: value for name, value in packed.items() if name not in failed.get(rank, [])}
        for rank, packed in saved.values.items()
    }
    lost = {rank: [*names, *failed.get(rank, [])] for rank, names in saved.lost.items()}
    return CellVariables(values, lost)


def _non_empty(saved: CellVariables) -> list[tuple[int, Values]]:
    return [(rank, values) for rank, values in saved.values.items() if values]


def _listed(names: Mapping[str, list[int]], what: str) -> str:
    words = [f"{name} (rank {', '.join(map(str, ranks))})" for name, ranks in sorted(names.items())]
    return f"{what}: {', '.join(words)}" if words else ""


def _pack(budget: int) -> tuple[Values, list[str]]:
    """Return this engine's pickled variables, at most `budget` bytes, and names of the rest."""
    import cloudpickle
    from IPython import get_ipython

    shell = get_ipython()
    values, lost = {}, []
    for name, value in list(shell.user_ns.items()):
        if name.startswith("_") or name in shell.user_ns_hidden:
            continue
        try:
            packed = cloudpickle.dumps(value)
        except Exception:  # pickling an object may raise any exception
            lost.append(name)
            continue
        budget -= len(packed)
        if budget >= 0:
            values[name] = packed
        else:
            lost.append(name)
    return values, lost


def _unpack(values: Values) -> list[str]:
    """Define the variables on this engine, and return the names of those that fail to unpickle."""
    import pickle
    from types import FunctionType

    from IPython import get_ipython

    namespace, lost = get_ipython().user_ns, []
    for name, packed in values.items():
        try:
            value = pickle.loads(packed)
        except Exception:  # unpickling an object may raise any exception
            lost.append(name)
            continue
        if isinstance(value, FunctionType) and value.__module__ == "__main__":
            # The unpickled function gets the namespace of the engine. The function can thus use
            # variables that later cells define.
            function_type = value
            value = FunctionType(
                function_type.__code__,
                namespace,
                function_type.__name__,
                function_type.__defaults__,
                function_type.__closure__,
            )
            value.__kwdefaults__ = function_type.__kwdefaults__
        namespace[name] = value
    return lost
