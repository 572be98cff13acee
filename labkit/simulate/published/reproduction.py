"""Reproductions of published results: some results determine parameters, others are predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Parameters: TypeAlias = Mapping[str, float]  # keys: parameter name with its unit
Figures: TypeAlias = dict[str, float]
Verdict: TypeAlias = Literal[
    "predicted", "predicted from a fit", "reproduced", "by construction", "bound", "not reached"
]
NOTHING: Parameters = {}
VERDICTS: Mapping[Verdict, str] = {
    "predicted": "these values served neither to fit a parameter nor to choose the model's form",
    "predicted from a fit": "the parameters are fitted to fewer workers of the same "
    "set-up; the form of the model was chosen with these values known",
    "reproduced": "the value was fitted, or one number was free, or the form of the model was "
    "chosen with these values known",
    "by construction": "the cost model predicts this value for any choice of its parameters",
    "bound": "labkit's value is a computed bound [C], and the measured value is within it",
    "not reached": "the error is too large, or no published value is available for a fit",
}


@dataclass(frozen=True)
class Judged:
    """A published result, the value that labkit's model predicts for it, and a verdict.

    Args:
        source, mark: Origin of the result, and the letter for its type of source
            (`labkit.simulate.published.curves`).
        study, what: Names of the study and of the result.
        unit: Unit of the values.
        parameters: Parameters of the model, by name.
        fitted: Names of the published results to which the parameters are fitted.
        predicted: Value that the model predicts; None: no published result is available for the
            fit.
        published: Published value.
        points: Whether `error` is a difference; if not, it is a relative error.
        within: Largest allowed absolute error.
        reached: The `verdict` if the error is within the limit; the verdict "bound" instead
            requires that the error is not negative.

    `error` is predicted / published - 1; if `points` is true, it is predicted - published.
    `verdict` is the value of `reached`, or "not reached"; see `VERDICTS`.
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
    """A model that reproduces published measurements.

    Args:
        source, mark, name, unit, within, points: See `Judged`.
        figures: Published values by the name of the result.
        predict: Function (parameters, name of the result) -> value; None: no model can be fitted.
        fitted: Names of the published values that are passed to `fit`; all other values are unknown
            to `fit`.
        fit: Function from the `fitted` values to the parameters of the model.
        marks: Source letters of single values, if they differ from `mark`.
        verdicts: Verdicts of single values; the default is "reproduced" with a fit, and "predicted"
            without one.
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
        """Return one row per published value."""
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
