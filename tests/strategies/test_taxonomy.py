"""Test that each strategy's fields give its place in the field's taxonomy, in few terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations, product
from typing import Any, ClassVar, get_args

import pytest

from labkit.common.errors import InvalidInput
from labkit.compression import (
    COMPRESSORS,
    FAMILIES,
    Chain,
    ErrorFeedback,
    Int8,
    PowerSGD,
    TopK,
    samples,
)
from labkit.exchange import SCHEDULES
from labkit.experiment.experiment import Experiment
from labkit.schedules import PIPELINE
from labkit.strategies import AXES, STRATEGIES, AllReduce, Cell, ParameterServer, Pipeline, Strategy

WORKERS = (2, 4)
WORDS = (*SCHEDULES, *PIPELINE)  # names that a text field may accept
NUMBERS = (0, 1, 2)
CUTS = ((1, 2), (2, 1))  # grids
MOST = 2  # fields that are changed together


def values(kind: type[Strategy], name: str) -> list[Any]:
    """Return values to try for a field; the constructor refuses the invalid ones."""
    annotation = kind.model_fields[name].annotation
    literals = [v for part in (annotation, *get_args(annotation)) for v in get_args(part)]
    chosen = [v for v in literals if isinstance(v, str | bool)]
    return [*chosen, *WORDS, *NUMBERS, True, False, *CUTS]


def alternatives(kind: type[Strategy]) -> Iterator[Strategy]:
    """Yield the default strategy and its valid variants with a few changed fields."""
    names = [name for name in kind.model_fields if name != "compressor"]
    for count in range(MOST + 1):
        for some in combinations(names, count):
            for given in product(*(values(kind, name) for name in some)):
                try:
                    yield kind(**dict(zip(some, given, strict=True)))
                except InvalidInput:
                    continue


def arrived(kind: type[Strategy]) -> dict[Cell, tuple[Strategy, int]]:
    """Return each taxonomy cell that uncompressed variants reach, with the variant and workers."""
    found: dict[Cell, tuple[Strategy, int]] = {}
    for made, workers in product(alternatives(kind), WORKERS):
        with suppress(InvalidInput, ZeroDivisionError):  # the variant refuses so many workers
            found.setdefault(made.cell(workers), (made, workers))
    return found


def compressed(made: Strategy, workers: int) -> Iterator[Cell]:
    """Yield the cells of a strategy with compressors that an experiment accepts for it."""
    for family in FAMILIES:
        fit = [s for s in samples() if s.family == family and not made.incompatibility(s)]
        for each in fit:
            strategy = made.model_copy(update={"compressor": each})
            try:
                Experiment(strategy=strategy, workers=workers, model="mlp")
            except InvalidInput:
                continue
            yield strategy.cell(workers)
            break


@pytest.mark.battery(4, 6)
@pytest.mark.parametrize("kind", STRATEGIES.values(), ids=list(STRATEGIES))
def test_the_cells_of_a_strategy_are_those_that_its_fields_lead_to(kind: type[Strategy]) -> None:
    found = arrived(kind)
    cells = set(found)
    if "compressor" in kind.model_fields:
        cells |= {cell for led in found.values() for cell in compressed(*led)}
    assert cells == set(kind.cells())
    assert kind().cell(max(WORKERS)) in cells


@pytest.mark.parametrize("kind", STRATEGIES.values(), ids=list(STRATEGIES))
def test_a_strategy_stands_at_its_first_places_by_default(kind: type[Strategy]) -> None:
    first = kind.cells()[0]
    assert kind().cell(2) == first
    assert first.compression == "none"


def test_places_are_refused_where_the_class_is_written() -> None:
    with pytest.raises(InvalidInput, match=r"Wrong\.architecture=\('peers',\).*'collective'"):

        class Wrong(Strategy):
            architecture: ClassVar[tuple[str, ...]] = ("peers",)

    with pytest.raises(InvalidInput, match=r"Text\.scheduling='overlap' is not a tuple"):

        class Text(Strategy):
            scheduling: ClassVar[tuple[str, ...]] = "overlap"  # type: ignore[assignment]

    with pytest.raises(InvalidInput, match="different places"):

        class Twice(Strategy):
            scheduling: ClassVar[tuple[str, ...]] = ("overlap", "overlap")


def test_what_members_of_other_families_say_is_on_the_axes_too() -> None:
    assert (
        {sample.family for sample in samples()}
        == set(FAMILIES)
        == set(AXES["compression"]) - {"none"}
    )
    assert {type(sample).__name__ for sample in samples()} == set(COMPRESSORS)
    assert set(SCHEDULES) <= set(AXES["scheduling"])
    assert {each.scheduling for each in PIPELINE.values()} <= set(AXES["scheduling"])
    assert {each.synchronization for each in PIPELINE.values()} <= set(AXES["synchronization"])


def test_fields_and_workers_say_where_one_stands() -> None:
    priority = AllReduce(schedule="priority", compressor=ErrorFeedback(inner=PowerSGD()))
    said = ("collective", "synchronous", "data", "low rank", "priority")
    assert priority.cell(2) == said
    assert Pipeline(stages=2).cell(2).parallelism == "model by layers"
    assert Pipeline(stages=2).cell(4).parallelism == "hybrid"
    assert Pipeline(schedule="pipedream").cell(2).synchronization == "stale synchronous"
    apart = ParameterServer(synchronous=False, stages=2)
    assert apart.cell(2)[:3] == ("parameter servers", "asynchronous", "hybrid")
    chain = Chain(first=TopK(ratio=0.1), second=Int8())
    assert chain.family == "hybrid"
