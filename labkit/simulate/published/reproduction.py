"""A model of published figures, of which some fit it, and the others judge it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Parameters: TypeAlias = Mapping[str, float]  # by name, with its unit
Figures: TypeAlias = dict[str, float]
Verdict: TypeAlias = Literal[
    "predicted", "predicted from a fit", "reproduced", "by construction", "bound", "not reached"
]
NOTHING: Parameters = {}
VERDICTS: Mapping[Verdict, str] = {
    "predicted": "no parameter was fitted, nor was the form chosen by these figures",
    "predicted from a fit": "beyond all figures, of the same set-up, that parameters are from; "
    "the form was chosen with them in sight",
    "reproduced": "fitted, or one figure was free, or the form was chosen with them in sight",
    "by construction": "the model can say nothing else, whatever its parameters",
    "bound": "ours is a bound, computed [C], and what was measured is within it",
    "not reached": "the error is too large, or there is nothing to fit a model on",
}


@dataclass(frozen=True)
class Judged:
    """A published figure beside ours.

    Args: source, mark: where it is from, and how (`labkit.simulate.published.curves`); study, what:
    which figure; unit; parameters: of the model; fitted: figures that they are from; predicted:
    ours, None: there is nothing to fit on; published; error: predicted / published - 1, or where
    `points` their difference; within: what is allowed of it; reached: the verdict where it is
    that small, or of a bound not negative; verdict: see `VERDICTS`.
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
    reached: Verdict

    @property
    def error(self) -> float | None:
        if self.predicted is None:
            return None
        if self.points:
            return self.predicted - self.published
        return self.predicted / self.published - 1

    @property
    def verdict(self) -> Verdict:
        if self.error is None:
            return "not reached"
        bound = self.reached == "bound"
        reached = self.error >= 0 if bound else abs(self.error) <= self.within
        return self.reached if reached else "not reached"


@dataclass(frozen=True)
class Reproduction:
    """A model of what somebody measured.

    Args: source, mark, name, unit, within, points: see `Judged`; figures: name -> value; fitted:
    names of those that `fit` gets, and none else; fit: these -> parameters; predict: (parameters,
    name) -> value; without it there is nothing to fit on; marks, verdicts: of single figures, where
    they are not `mark`, and "reproduced" where there is a fit, else "predicted".
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
    marks: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    def reproduce(self) -> list[Judged]:
        """A row a figure."""
        usual: Verdict = "reproduced" if self.fitted else "predicted"
        parameters = self.fit({name: self.figures[name] for name in self.fitted})
        return [
            Judged(
                source=self.source,
                mark=self.marks.get(name, self.mark),
                study=self.name,
                what=name,
                unit=self.unit,
                parameters=parameters,
                fitted=self.fitted,
                predicted=self.predict(parameters, name) if self.predict else None,
                published=published,
                points=self.points,
                within=self.within,
                reached=self.verdicts.get(name, usual),
            )
            for name, published in self.figures.items()
        ]
