"""Export of a run's timeline as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.common.units import seconds_text
from labkit.records.store import Record

# The dict `LANES` maps each kind of event to a lane. A lane is one of a rank's rows in the display.
# Gradient buckets are exchanged during the computation of gradients. Exchanges of gradient buckets
# have a separate lane, because overlapping events on one lane would hide each other.
LANES = {"step": 0, "pack": 1, "wait": 1, "communicate": 2}
NAMES = ("step", "training", "communication", "predicted, even steps", "predicted, odd steps")


def chrome_trace(rows: Iterable[Record], clocks: Iterable[Record] = ()) -> Record:
    """Return a timeline in the Trace Event Format, which chrome://tracing and Perfetto open.

    Args:
        rows: Timeline rows, each with rank, kind, step, bucket, start and stop (in seconds).
            Predicted events have separate lanes.
        clocks: Offset of each rank's clock from rank 0's clock, and the offset's uncertainty.
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
                # The Trace Event Format measures times in microseconds.
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
    # The key `otherData` comes first, so that the file's head shows who wrote it. Labkit may
    # overwrite a file only if labkit wrote the file.
    mark = {"generator": "labkit"}
    return {"otherData": mark, "traceEvents": events, "displayTimeUnit": "ms"}


def _lane(row: Record) -> int:
    kind = str(row["kind"])
    if kind.startswith("predicted "):
        # A predicted training step may overlap the next one, so predicted steps alternate between
        # two lanes.
        return 3 + int(row["step"]) % 2
    # Actions of pipeline stages, such as "forward 0", appear in the display's row for training.
    return LANES.get(kind, 1)


def _metadata_event(event_name: str, rank: int, lane: int | None = None, **words: str) -> Record:
    thread = {} if lane is None else {"tid": lane}
    return {"name": event_name, "ph": "M", "pid": rank, "args": words} | thread
