"""Benchmark rows of other frameworks ("peers"), like the rows of `labkit.bench.exchange`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.bench.exchange import USUAL
from labkit.bench.peers.meeting import Record
from labkit.bench.peers.processes import run
from labkit.bench.steps import CASES
from labkit.bench.timing import Row, added, head, spread
from labkit.common.errors import InvalidInput, LabkitError
from labkit.frameworks.environments import Installation, find


def validate_peers(names: Sequence[str], network: str | None) -> None:
    """Validate the names of the frameworks to compare, and the network.

    Raises:
        InvalidInput: A framework is unknown, or a network is given. Only labkit can emulate a
            network.
    """
    for name in names:
        find(name)
    if names and network is not None:
        raise InvalidInput(
            f"other frameworks (--peer) cannot run on the emulated network {network!r}; remove "
            "--network or --peer"
        )


class PeerComparison:
    """Other frameworks, measured alternately with labkit on the same cases and by the same rules.

    Each call of `turn` starts new processes on this machine; each process has one thread, and
    processes communicate over loopback. No process of a framework runs while another framework is
    measured, so frameworks do not slow each other down.

    Args:
        names: Names of other frameworks, such as "ddp" or "horovod".
        cases: Names of benchmark cases; names that are not in `labkit.bench.steps.CASES` are
            skipped.
        workers: Number of processes of each framework.

    Attributes:
        remarks: One sentence for each framework that is not installed, fails, or ends with unequal
            weights on its ranks.

    Raises:
        InvalidInput: A framework is unknown.
    """

    def __init__(self, names: Sequence[str], cases: Sequence[str], workers: int = 2) -> None:
        self._cases, self._workers = [case for case in cases if case in CASES], workers
        installations = [find(name) for name in dict.fromkeys(names)]
        # A missing or failed framework becomes a remark, and the other frameworks are still
        # measured.
        self.remarks = [peer for peer in installations if isinstance(peer, str)]
        self._records: dict[Installation, list[Record]] = {
            p: [] for p in installations if isinstance(p, Installation)
        }

    def turn(self) -> None:
        """Measure one repeat of every framework and case, with all kinds of steps."""
        for peer in list(self._records):
            try:
                self._records[peer] += run(peer, self._cases, self._workers, repeats=1)
            except LabkitError as error:
                self.remarks.append(str(error))
                del self._records[peer]

    def rows(self, local_rows: Sequence[Row] = ()) -> list[Row]:
        """Return three rows per framework and case: local step, step with exchange, allreduce.

        If the ranks end with unequal weights, the row of the step with exchange has no times, and
        `remarks` gets a sentence.

        Args:
            local_rows: Rows of labkit, with which the rows of other frameworks are compared.
                The comparison uses labkit's schedule `USUAL`, or labkit's first schedule if `USUAL`
                was not measured.
        """
        rows: list[Row] = []
        for peer, all_records in self._records.items():
            for case in self._cases:
                if records := [each for each in all_records if each["case"] == case]:
                    rows += self._of(peer, records, _ours(local_rows, case))
        return rows

    def _of(self, peer: Installation, records: Sequence[Record], ours: Row | None) -> Iterator[Row]:
        case, same = records[0]["case"], all(each["same_weights"] for each in records)
        if not same:
            self.remarks.append(
                f"{peer.name}: its ranks have unequal weights after steps of {case}, so its "
                "times are not shown"
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
                row |= _comparison(row, ours) if same else dict.fromkeys(TIMES)
            yield row


TIMES = ("median_ms", "min_ms", "p90_ms", "added_ms", "added_min_ms", "added_max_ms")


def _ours(own: Sequence[Row], case: str) -> Row | None:
    """Return the row of labkit's step with exchange for a case, or None if the row is missing."""
    exchanged = [row for row in own if row["case"] == case and row.get("same_weights")]
    return next((r for r in exchanged if r["what"] == USUAL), next(iter(exchanged), None))


def _comparison(theirs: Row, ours: Row | None) -> Row:
    """Return the ratio of labkit's added time to the other framework's added time.

    The result is empty if one of the two times is not positive, because noise then exceeds the
    added time.
    """
    if ours is None or not min(_added_ms(ours), _added_ms(theirs)) > 0:
        return {}
    return {"ours": ours["what"], "ours_to_theirs": _added_ms(ours) / _added_ms(theirs)}


def _added_ms(row: Row) -> float:
    return float(row["added_ms"] or 0)
