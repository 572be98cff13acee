"""Messages and volume of algorithms, counted from their schedules beside the textbook's formula."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.schedules import ALLREDUCE, named
from labkit.schedules.interpreter import count

if TYPE_CHECKING:
    import pandas


def counts_table(
    algorithms: Iterable[str] = tuple(ALLREDUCE), sizes: Iterable[int] = (2, 4, 8)
) -> pandas.DataFrame:
    """One row an algorithm and number of ranks: what is counted, what the formula says, equal.

    `volume` and `busiest_rank` are bytes sent, by all and by the rank that sends most, in units of
    the buffer n; `equal` holds every single rank against the formula.

    Args: algorithms: names of `labkit.schedules`; sizes: numbers of ranks.
    Raises: InvalidInput, for a name that does not exist.
    """
    import pandas as pd

    names, ranks = list(algorithms), list(sizes)
    return pd.DataFrame([_row(name, size) for name in names for size in ranks])


def _row(name: str, size: int) -> dict[str, str | int | float | bool]:
    counted, formula = count(named(name).schedule(size), size), named(name).counts(size)
    sent = counted.bytes(1.0)
    return {
        "algorithm": name,
        "ranks": size,
        "messages": int(counted.messages.sum()),
        "messages_formula": int(formula.messages.sum()),
        "volume": float(sent.sum()),
        "volume_formula": float(formula.bytes(1.0).sum()),
        "busiest_rank": float(sent.max()),
        # Rank by rank: totals may agree where ranks do not.
        "equal": counted == formula,
    }


def counts_reading(table: pandas.DataFrame) -> Markdown:
    """Whether all rows of `counts_table` agree, and who carries least and most."""
    wrong = table[~table["equal"]]
    found = [f"{len(table) - len(wrong)} of {len(table)} rows equal the formula, rank by rank"]
    found += [
        f"**{row.algorithm}** on {row.ranks} ranks does not: {row.messages} messages counted, "
        f"{row.messages_formula} by the formula"
        for row in wrong.itertuples()
    ]
    largest = table[table["ranks"] == table["ranks"].max()]
    most, least = largest["busiest_rank"].max(), largest["busiest_rank"].min()
    heavy = ", ".join(largest[largest["busiest_rank"] == most]["algorithm"])
    light = ", ".join(largest[largest["busiest_rank"] == least]["algorithm"])
    found.append(
        f"On {largest['ranks'].iloc[0]} ranks the busiest rank sends {least:.3g} n with {light}, "
        f"and {most:.3g} n with {heavy}"
    )
    return sentences(map(Finding, found))
