"""A run's timeline as other programs draw it."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.common.units import seconds_text
from labkit.records.store import Record

# A bucket travels while the rank computes: on one lane such events would hide each other.
LANES = {"step": 0, "pack": 1, "wait": 1, "communicate": 2}
NAMES = ("step", "training", "communication", "predicted, even steps", "predicted, odd steps")


def chrome_trace(rows: Iterable[Record], clocks: Iterable[Record] = ()) -> Record:
    """Rows of a run's timeline in the Trace Event Format, which chrome://tracing and Perfetto open.

    Args:
        rows: with rank, kind, step, bucket, start, stop (seconds); what is predicted has lanes of
            its own beside what was measured.
        clocks: of each rank, how far its clock was found to be ahead of rank 0's, and within what.
    """
    events: list[Record] = []
    lanes = set()
    for row in rows:
        lane = _lane(row)
        lanes.add((int(row["rank"]), lane))
        bucket = "" if row["bucket"] < 0 else f" {row['bucket']:.0f}"
        events.append(
            {
                "name": f"{row['kind']}{bucket}",
                "cat": row["kind"],
                "ph": "X",
                "pid": int(row["rank"]),
                "tid": lane,
                # The format counts microseconds.
                "ts": 1e6 * row["start"],
                "dur": 1e6 * (row["stop"] - row["start"]),
                "args": {"step": int(row["step"])},
            }
        )
    for rank in sorted({rank for rank, _ in lanes}):
        events.append(_named("process_name", rank, name=f"rank {rank}"))
        events += [
            _named("thread_name", rank, lane, name=NAMES[lane])
            for lane in range(len(NAMES))
            if lane < 3 or (rank, lane) in lanes
        ]
    for clock in clocks:
        said = f"clock {seconds_text(clock['offset_s'])} ahead, ± {seconds_text(clock['within_s'])}"
        events.append(_named("process_labels", int(clock["rank"]), labels=said))
    # First, so that who asks before replacing a trace need not read all of it.
    mark = {"generator": "labkit"}
    return {"otherData": mark, "traceEvents": events, "displayTimeUnit": "ms"}


def _lane(row: Record) -> int:
    kind = str(row["kind"])
    if kind.startswith("predicted "):
        # A step may be predicted to last into the next one, which then stands beside it.
        return 3 + int(row["step"]) % 2
    # What a stage computes or sends stands in the lane of training, as "forward 0".
    return LANES.get(kind, 1)


def _named(what: str, rank: int, lane: int | None = None, **words: str) -> Record:
    thread = {} if lane is None else {"tid": lane}
    return {"name": what, "ph": "M", "pid": rank, "args": words} | thread
