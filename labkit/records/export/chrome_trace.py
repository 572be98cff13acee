"""A run's timeline as other programs draw it."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.records.store import Record


def chrome_trace(rows: Iterable[Record]) -> Record:
    """Rows of a run's timeline in the Trace Event Format, which chrome://tracing and Perfetto open.

    Args:
        rows: with rank, kind, step, bucket, start, stop (seconds).
    """
    # A bucket travels while the rank computes: on one lane such events would hide each other.
    lanes = {"step": 0, "pack": 1, "wait": 1, "communicate": 2}
    names = {0: "step", 1: "training", 2: "communication"}
    events: list[Record] = []
    ranks = set()
    for row in rows:
        ranks.add(int(row["rank"]))
        # What a stage computes or sends stands in the lane of training, as "forward 0".
        lane = lanes.get(row["kind"], lanes["step"] + 1)
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
    for rank in sorted(ranks):
        events.append(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        events += [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}
            for tid, name in names.items()
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
