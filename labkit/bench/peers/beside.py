"""Rows of peers, in the form of those of `labkit.bench.exchange`."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.bench.peers.meeting import Record
from labkit.bench.peers.processes import run
from labkit.bench.steps import CASES
from labkit.bench.timing import Row, added, head, spread
from labkit.common.errors import InvalidInput, LabkitError
from labkit.frameworks.environments import Found, find


def check(names: Sequence[str], network: str | None) -> None:
    """Refuse what peers cannot do, before anything is measured.

    Raises:
        InvalidInput: a peer that does not exist, or a network that only labkit can emulate.
    """
    for name in names:
        find(name)
    if names and network is not None:
        raise InvalidInput(
            f"peers run on this machine's own network, not on {network!r}: leave out --network"
        )


def measure(
    names: Sequence[str], cases: Sequence[str], workers: int = 2, repeats: int = 5
) -> tuple[list[Row], list[str]]:
    """Measure what is installed of these peers on the same cases, by the same rule as labkit's own.

    Args:
        names: of `PEERS`.
        cases: names of `labkit.bench.steps.CASES`; others have no peer.
        workers: processes of one thread, on this machine, over loopback.
        repeats: rounds over the peer's kinds of steps; a median each.

    Returns:
        Three rows a peer and case: its local step, its exchanged step, its bare allreduce; and a
        remark for each peer that is not installed, or failed.

    Raises:
        InvalidInput: a peer that does not exist.
    """
    rows: list[Row] = []
    remarks: list[str] = []
    known = [case for case in cases if case in CASES]
    for peer in [find(name) for name in dict.fromkeys(names)]:
        if isinstance(peer, str):
            # A peer that is absent or fails is a remark: the others are measured all the same.
            remarks.append(peer)
            continue
        try:
            found = run(peer, known, workers, repeats)
        except LabkitError as error:
            remarks.append(str(error))
            continue
        rows += [row for record in found for row in _rows(peer, record, workers)]
    return rows, remarks


def _rows(peer: Found, record: Record, workers: int) -> list[Row]:
    rows = []
    for kind, medians in record["seconds"].items():
        what = peer.name if kind == "step" else f"{peer.name} {kind}"
        row = head("exchange", record["case"], what, workers, repeats=len(medians))
        row |= {"peer": peer.name, "version": record["version"], **spread(medians)}
        row["bytes"] = 4 * CASES[record["case"]].parameters
        if kind == "step":
            row |= added(record["added"][kind]) | {"same_weights": record["same_weights"]}
        rows.append(row)
    return rows
