"""Export of a run's timeline as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.common.units import seconds_text
from labkit.records.store import Record

# Rows of a rank in the trace. Buckets are exchanged during computation, and need a lane of their
# own, because events on one lane hide each other.
LANES = {"step": 0, "pack": 1, "wait": 1, "communicate": 2}
NAMES = ("step", "training", "communication", "predicted, even steps", "predicted, odd steps")


def chrome_trace(rows: Iterable[Record], clocks: Iterable[Record] = ()) -> Record:
    """Return a timeline in the Trace Event Format, which chrome://tracing and Perfetto open.

    Args:
        rows: Timeline rows with rank, kind, step, bucket, start, stop (seconds). Rows of predicted
            events get separate lanes.
        clocks: For each rank, its clock's offset from rank 0 and the offset's uncertainty.
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
                # The Trace Event Format has microseconds.
                "ts": 1e6 * row["start"],
                "dur": 1e6 * (row["stop"] - row["start"]),
                "args": {"step": int(row["step"])},
            }
        )
    for rank in sorted({rank for rank, _ in lanes}):
        events.append(_metadata_event("process_name", rank, name=f"rank {rank}"))
        events += [
            _metadata_event("thread_name", rank, lane, name=NAMES[lane])
            for lane in range(len(NAMES))
            if lane < 3 or (rank, lane) in lanes
        ]
    for clock in clocks:
        label = (
            f"clock {seconds_text(clock['offset_s'])} ahead, ± {seconds_text(clock['within_s'])}"
        )
        events.append(_metadata_event("process_labels", int(clock["rank"]), labels=label))
    # The mark comes first, so that a check before overwriting needs only the head of the file.
    mark = {"generator": "labkit"}
    return {"otherData": mark, "traceEvents": events, "displayTimeUnit": "ms"}


def _lane(row: Record) -> int:
    kind = str(row["kind"])
    if kind.startswith("predicted "):
        # A predicted step may overlap the next one, so predicted steps alternate between two lanes.
        return 3 + int(row["step"]) % 2
    # Pipeline stages' actions, such as "forward 0", use the lane of training.
    return LANES.get(kind, 1)


def _metadata_event(event_name: str, rank: int, lane: int | None = None, **words: str) -> Record:
    thread = {} if lane is None else {"tid": lane}
    return {"name": event_name, "ph": "M", "pid": rank, "args": words} | thread
