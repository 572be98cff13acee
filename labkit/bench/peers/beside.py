"""Rows of peers, in the form of those of `labkit.bench.exchange`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.bench.exchange import USUAL
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


class Beside:
    """Peers that are measured in turns, on the same cases, by the same rule as labkit's own steps.

    Each turn is of fresh processes of one thread, on this machine, over loopback: between turns
    nothing of a peer is there that could slow down others.

    Args:
        names: of `PEERS`.
        cases: names of `labkit.bench.steps.CASES`; others have no peer.
        workers: processes of each.

    Attributes:
        remarks: a sentence for each peer that is not installed, or failed, or ended with weights
            that are not equal.

    Raises:
        InvalidInput: a peer that does not exist.
    """

    def __init__(self, names: Sequence[str], cases: Sequence[str], workers: int = 2) -> None:
        self._cases, self._workers = [case for case in cases if case in CASES], workers
        found = [find(name) for name in dict.fromkeys(names)]
        # A peer that is absent or fails is a remark: the others are measured all the same.
        self.remarks = [peer for peer in found if isinstance(peer, str)]
        self._told: dict[Found, list[Record]] = {p: [] for p in found if isinstance(p, Found)}

    def turn(self) -> None:
        """Measure each of them once more: a repeat of every kind of step and case."""
        for peer in list(self._told):
            try:
                self._told[peer] += run(peer, self._cases, self._workers, repeats=1)
            except LabkitError as error:
                self.remarks.append(str(error))
                del self._told[peer]

    def rows(self, own: Sequence[Row] = ()) -> list[Row]:
        """What was measured: three rows a peer and case: its local step, its exchanged step, its
        bare allreduce.

        An exchanged step after which weights were not equal has no times, and is remarked.

        Args:
            own: rows of labkit's own; those of its `USUAL` schedule, or else its first one, are
                what peers are held against.
        """
        rows: list[Row] = []
        for peer, told in self._told.items():
            for case in self._cases:
                if records := [each for each in told if each["case"] == case]:
                    rows += self._of(peer, records, _ours(own, case))
        return rows

    def _of(self, peer: Found, records: Sequence[Record], ours: Row | None) -> Iterator[Row]:
        case, same = records[0]["case"], all(each["same_weights"] for each in records)
        if not same:
            self.remarks.append(
                f"{peer.name}: weights were not equal among ranks after steps of {case}, so that "
                "no speed is shown"
            )
        for kind in records[0]["seconds"]:
            what = peer.name if kind == "step" else f"{peer.name} {kind}"
            row = head("exchange", case, what, self._workers, repeats=len(records))
            row |= {"peer": peer.name, "version": records[0]["version"]}
            row["bytes"] = 4 * CASES[case].parameters
            medians = [value for each in records for value in each["seconds"][kind]]
            row |= spread(medians)
            if kind == "step":
                row |= {"same_weights": same} | added(
                    [value for each in records for value in each["added"][kind]]
                )
                row |= _held(row, ours) if same else dict.fromkeys(TIMES)
            yield row


TIMES = ("median_ms", "min_ms", "p90_ms", "added_ms", "added_min_ms", "added_max_ms")


def _ours(own: Sequence[Row], case: str) -> Row | None:
    """Labkit's exchanged step of a case, that peers are held against."""
    exchanged = [row for row in own if row["case"] == case and row.get("same_weights")]
    return next((r for r in exchanged if r["what"] == USUAL), next(iter(exchanged), None))


def _held(theirs: Row, ours: Row | None) -> Row:
    """What ours adds to its local step, as a multiple of what theirs adds to its own.

    Nothing where one of them is lost in the noise: it adds no time at all.
    """
    if ours is None or not min(_number(ours), _number(theirs)) > 0:
        return {}
    return {"ours": ours["what"], "ours_to_theirs": _number(ours) / _number(theirs)}


def _number(row: Row) -> float:
    return float(row["added_ms"] or 0)
