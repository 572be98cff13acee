"""A ledger of the samples of each rank and step, to check that each sample is used once.

The check compares hashes of the samples with the data set, so the result of the check does not
depend on how samples were assigned to ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from labkit.common.files import read_file

SUFFIX = ".ledger"


class SampleRecord(NamedTuple):
    """A ledger entry, which lists the samples on which one rank trained in one step.

    Attributes:
        step: Training step, counted from 0.
        rank: Number that the rank had at the start of the run, before any failure.
        world: Number of ranks that had failed before the attempt in which the rank trained on the
            samples. If the step is repeated after further ranks fail, the entry is ignored.
        samples: The hash of each sample.
    """

    step: int
    rank: int
    world: int
    samples: Sequence[str]


class Account(NamedTuple):
    """The totals of a ledger, after its comparison with the data set.

    Attributes:
        epochs, steps: Number of epochs that were checked, and number of steps that have entries.
        lost: Number of samples that are missing in an epoch, summed over all epochs.
        repeated: Number of samples that are used more than once in an epoch, or that the data set
            does not contain, summed over all epochs.
        steps_repeated: Number of attempts to run steps that were rolled back after ranks failed.
        steps_missing: Number of training steps for which no rank has an entry.
        by_rank: For each rank, its number of samples, without those of attempts that were rolled
            back.
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
        """Whether every sample of the data set is used exactly once in each epoch."""
        return not (self.lost or self.repeated or self.steps_missing)


def hashes(leaves: Sequence[np.ndarray]) -> list[str]:
    """Return each sample's hash, computed from the bytes of its row in all arrays."""
    rows = zip(*([row.tobytes() for row in leaf] for leaf in leaves), strict=True)
    return [hashlib.blake2b(b"".join(row), digest_size=8).hexdigest() for row in rows]


def encode_entry(entry: SampleRecord) -> bytes:
    """Return an entry as one line, so that a rank that dies can damage only its last line."""
    return json.dumps(entry).encode() + b"\n"


def read(folder: Path) -> list[SampleRecord]:
    """Return the entries of all ranks, except incomplete last lines from ranks that died."""
    entries = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        lines = read_file(path).rpartition(b"\n")[0]
        entries += [SampleRecord(*json.loads(splitline)) for splitline in lines.splitlines()]
    return entries


def audit(
    entries: Iterable[SampleRecord], samples: Sequence[np.ndarray], steps: int, epochs: int
) -> Account:
    """Compare the entries of a ledger with the data set, and return the totals.

    Args:
        entries: Entries of all ranks.
        samples: Arrays of the data set (inputs, targets), each with one row per sample.
        steps: Steps per epoch.
        epochs: Number of epochs that were trained.
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
    """Return the entries of the last attempt to run a step, which is the successful one."""
    last = max(entry.world for entry in entries)
    return [entry for entry in entries if entry.world == last]
