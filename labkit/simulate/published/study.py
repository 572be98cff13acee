"""A published study: figures, of which some fit a model, and the others judge it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Parameters: TypeAlias = Mapping[str, float]  # by name, with its unit
Figures: TypeAlias = dict[str, float]
Verdict: TypeAlias = Literal["predicted", "reproduced", "not reached"]
NOTHING: Parameters = {}


@dataclass(frozen=True)
class Reproduction:
    """A published figure beside ours.

    Args: source, mark: where it is from, and how (`labkit.simulate.published.curves`); study, what:
    which figure; unit; parameters: of the model; fitted: figures that they are from; predicted:
    ours, None: there is nothing to fit on; published; error: predicted / published - 1, or where
    `points` their difference; within: what is allowed of it; verdict: "reproduced" where the figure
    itself was fitted, "predicted" where it was not, "not reached" where the error is too large.
    """

    source: str
    mark: str
    study: str
    what: str
    unit: str
    parameters: Parameters
    fitted: tuple[str, ...]
    predicted: float | None
    published: float
    points: bool
    within: float

    @property
    def error(self) -> float | None:
        if self.predicted is None:
            return None
        if self.points:
            return self.predicted - self.published
        return self.predicted / self.published - 1

    @property
    def verdict(self) -> Verdict:
        if self.error is None or abs(self.error) > self.within:
            return "not reached"
        return "reproduced" if self.what in self.fitted else "predicted"


@dataclass(frozen=True)
class Study:
    """A model of what somebody measured.

    Args: source, mark, name, unit, within, points: see `Reproduction`; figures: name -> value;
    fitted: names of those that `fit` gets, and none else; fit: these -> parameters; predict:
    (parameters, name) -> value; a study without it has nothing to be fitted on.
    """

    source: str
    mark: str
    name: str
    unit: str
    figures: Figures
    predict: Callable[[Parameters, str], float] | None = None
    fitted: tuple[str, ...] = ()
    fit: Callable[[Figures], Parameters] = field(default=lambda known: NOTHING)
    within: float = 0.15
    points: bool = False

    def reproduce(self) -> list[Reproduction]:
        """A row a figure."""
        parameters = self.fit({name: self.figures[name] for name in self.fitted})
        return [
            Reproduction(
                source=self.source,
                mark=self.mark,
                study=self.name,
                what=name,
                unit=self.unit,
                parameters=parameters,
                fitted=self.fitted,
                predicted=self.predict(parameters, name) if self.predict else None,
                published=published,
                points=self.points,
                within=self.within,
            )
            for name, published in self.figures.items()
        ]
