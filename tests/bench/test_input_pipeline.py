"""Test training steps with each kind of input pipeline, and the errors of tracing benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from labkit.bench import input_pipeline
from labkit.bench.step_process import time_threads, trace_variants
from labkit.common.errors import InvalidInput
from labkit.records.timed_steps import INSIDE, SYNTHETIC, WAYS

FEEDING = input_pipeline.Feeding("digits", 64, 16, 28, calls=2, ahead=2, widths=(8,))


@pytest.mark.heavy
def test_every_way_gives_batches_that_were_made_before_they_came() -> None:
    trace = input_pipeline.take_turns(FEEDING, steps=3, repeats=2)
    assert trace.ways == list(WAYS)
    assert len(trace.fed) == len(WAYS) * 3 * 2
    assert trace.nbytes > 64 * 60  # 64 PNG images, each with 60 bytes before its first pixel
    for each in trace.fed:
        assert each.start <= each.got <= each.stop
        made_before = math.isnan(each.made_start)
        assert made_before == (each.way in (SYNTHETIC, "cache"))
        if not made_before:
            # A batch is complete when the step receives it, unless the step itself makes the batch.
            there = each.stop if each.way == INSIDE else each.got
            assert each.made_start <= each.made_stop <= there + 1e-5  # tolerance of the two clocks
        if each.way == INSIDE:
            assert each.got - 1e-5 <= each.made_start
        if each.way == "map":
            # This pipeline makes a batch only while a step waits for it, not while a step trains.
            assert each.start - 1e-5 <= each.made_start


REFUSED: dict[str, Callable[[], object]] = {
    "'shakespeare' has no images": replace(FEEDING, dataset="shakespeare").refuse_impossible,
    "batch=65, rows=64": replace(FEEDING, batch=65).refuse_impossible,
    "enlarged=27: give an edge of 28 to": replace(FEEDING, enlarged=27).refuse_impossible,
    "calls=0: give a whole": replace(FEEDING, calls=0).refuse_impossible,
    "repeats=0: give a whole": lambda: input_pipeline.measure(FEEDING, repeats=0),
    r"intra=\[0\]: give numbers of threads": lambda: time_threads(intra=[0]),
    r"inter=\[\]: give numbers of threads": lambda: time_threads(inter=[]),
    "each needs a process; give at most 64": lambda: time_threads(range(1, 10), range(1, 9)),
    r"batches=\[0\]: give batch sizes": lambda: time_threads(batches=[0]),
    "steps=0: give a whole number": lambda: time_threads(steps=0),
    r"widths=\[1, 1, 1, 1, 1\]: give the widths of 1 to 4": lambda: trace_variants(widths=[1] * 5),
    "inter=0: give a whole number": lambda: trace_variants(inter=0),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_impossible_is_refused_before_anything_starts(words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        REFUSED[words]()
