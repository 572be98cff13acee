"""The ledger of samples that each rank trained on, and a check that every sample counts once.

The check compares hashes of the samples with the data set, and so does not rely on the plan that
assigns samples to ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from labkit.common.safe_files import read_file

SUFFIX = ".ledger"


class SampleRecord(NamedTuple):
    """A ledger entry: the samples on which one rank trained in one step.

    Attributes:
        step: Training step, counted from 0.
        rank: Number of the rank at the start of the run, before any failure.
        world: Number of ranks that had failed before. If the step is repeated after more failures,
            this entry does not count.
        samples: Hash of each sample.
    """

    step: int
    rank: int
    world: int
    samples: Sequence[str]


class Account(NamedTuple):
    """The totals of an audited ledger.

    Attributes:
        epochs, steps: Number of audited epochs, and number of steps with entries.
        lost: Total number, over all epochs, of samples that an epoch lacks.
        repeated: Total number of samples that an epoch repeats, or that are not in the data set.
        steps_repeated: Number of rolled-back attempts of steps after failures.
        steps_missing: Number of steps for which no rank has an entry.
        by_rank: Number of counted samples by rank.
    """

    epochs: int
    steps: int
    lost: int
    repeated: int
    steps_repeated: int
    steps_missing: int
    by_rank: dict[int, int]

    @property
    def is_exact(self) -> bool:
        """True if every sample of the data set occurs exactly once per epoch."""
        return not (self.lost or self.repeated or self.steps_missing)


def hashes(leaves: Sequence[np.ndarray]) -> list[str]:
    """Return a hash of each sample: of the bytes of its row in each array of the data set."""
    rows = zip(*([row.tobytes() for row in leaf] for leaf in leaves), strict=True)
    return [hashlib.blake2b(b"".join(row), digest_size=8).hexdigest() for row in rows]


def encode_entry(entry: SampleRecord) -> bytes:
    """Return an entry as one line; a rank that dies while writing can damage only this line."""
    return json.dumps(entry).encode() + b"\n"


def read(folder: Path) -> list[SampleRecord]:
    """Return all ranks' entries, without the incomplete last line of a rank that died."""
    entries = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        lines = read_file(path).rpartition(b"\n")[0]
        entries += [SampleRecord(*json.loads(splitline)) for splitline in lines.splitlines()]
    return entries


def audit(
    entries: Iterable[SampleRecord], samples: Sequence[np.ndarray], steps: int, epochs: int
) -> Account:
    """Compare a ledger's entries with the data set, and return the totals.

    Args:
        entries: Entries of all ranks.
        samples: Arrays of the data set (inputs, targets), each with one row per sample.
        steps: Steps per epoch.
        epochs: Number of trained epochs.
    """
    by_step: dict[int, list[SampleRecord]] = defaultdict(list)
    for entry in entries:
        by_step[entry.step].append(entry)
    counted = {step: _taken(group) for step, group in by_step.items()}
    expected, lost, repeated = Counter(hashes(samples)), 0, 0
    for epoch in range(epochs):
        numbers = range(epoch * steps, (epoch + 1) * steps)
        fed = Counter(s for n in numbers for entry in counted.get(n, ()) for s in entry.samples)
        lost += (expected - fed).total()
        repeated += (fed - expected).total()
    by_rank: Counter[int] = Counter()
    for entry in (entry for group in counted.values() for entry in group):
        by_rank[entry.rank] += len(entry.samples)
    repeated_steps = sum(len({entry.world for entry in group}) - 1 for group in by_step.values())
    missing = sum(step not in counted for step in range(epochs * steps))
    return Account(epochs, len(counted), lost, repeated, repeated_steps, missing, dict(by_rank))


def _taken(entries: Sequence[SampleRecord]) -> list[SampleRecord]:
    """Return the entries of a step's last attempt, which completed the step."""
    last = max(entry.world for entry in entries)
    return [entry for entry in entries if entry.world == last]
