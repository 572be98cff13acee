"""The contract of a notebook's parameters cell, checked before a kernel starts."""

from __future__ import annotations

import ast
import difflib
import io
import json
import re
import tokenize
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from labkit.common.errors import InvalidInput, LabkitError, short
from labkit.common.safe_json import NotPlain
from labkit.jobs import annotation_types, cells
from labkit.records.safe_yaml import read_plain

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON


class Unknown:
    """The default of a parameter whose value only the kernel can compute."""


UNKNOWN = Unknown()
_LOGS = re.compile(r"\b(lk|labkit)\.log\(|\bimport log\b|\bglue\(")
FINITE = ConfigDict(allow_inf_nan=False)
Values: TypeAlias = "Mapping[str, JSON]"


@dataclass(frozen=True)
class Parameter:
    """One assignment of a parameters cell: `workers: int = 2  # ranks`.

    `own` says that its notebook logs its runs itself: then `model` may be anything.
    """

    name: str
    annotation: str
    default: JSON | Unknown
    help: str
    declaration: str
    own: bool = False

    @property
    def type(self) -> TypeAdapter[JSON]:
        """What checks and converts values; a type that cannot be read raises InvalidInput."""
        try:
            return TypeAdapter(annotation_types.read(self.annotation), config=FINITE)
        except (PydanticUserError, TypeError, ValueError) as error:  # NoType is a ValueError
            raise InvalidInput(
                f"the parameters cell declares `{self.declaration}`, but {self.annotation} is not "
                f"a type made of {', '.join(sorted(annotation_types.NAMED))}"
            ) from error

    def convert(self, value: JSON) -> JSON:
        """The value as the declared type; text is read by that type: "true" for bool is True.

        Raises:
            InvalidInput: the value is not of the type.
        """
        readings = _readings(value) if isinstance(value, str) else [(value, True)]
        kind = self.type
        for reading, strict in readings:
            try:
                text = json.dumps(reading, allow_nan=False)
            except (TypeError, ValueError):  # JSON has no such value
                continue
            try:
                # As JSON: a list may stand for a tuple, but True is no int and 2.0 neither.
                checked = kind.validate_json(text, strict=strict)
            except ValidationError:
                continue
            converted: JSON = kind.dump_python(checked, mode="json")
            return converted
        # The declaration lists the choices: once is enough.
        named = "a choice" if "Literal" in self.annotation else self.annotation
        raise InvalidInput(
            f"{self.name} = {short(value)} is not {named}: "
            f"the notebook declares `{self.declaration}`"
        )


Known: TypeAlias = Mapping[str, Parameter]  # what a notebook declares, by name


def declared(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook, in order: the assignments in its cell tagged `parameters`.

    Raises:
        InvalidInput: there is no such notebook, or its cell is not Python.
    """
    found = cells.read(notebook)
    tagged = [cell for cell in found if "parameters" in cell.tags]
    code = "\n".join(cell.source for cell in found if cell.kind == "code")
    own = _LOGS.search(code) is not None and "Experiment" not in code
    try:
        known = parse(tagged[0].source) if tagged else {}
        return {name: replace(each, own=own) for name, each in known.items()}
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__  # the last two: brackets in brackets
        raise InvalidInput(f"the parameters cell of {notebook} is not Python: {reason}") from error


def parse(source: str) -> dict[str, Parameter]:
    """Read annotated, commented assignments; other statements are left to the kernel."""
    # Python's parser drops comments; its tokens have them, by line.
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if not (isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name)):
            continue
        if value is None:  # `workers: int` alone gives the notebook no value to start from
            continue
        try:
            default = ast.literal_eval(value)
        except (ValueError, TypeError, MemoryError, RecursionError):  # `{[]: 1}`, `-"a"`, too deep
            default = UNKNOWN
        if isinstance(node, ast.AnnAssign):
            annotation = ast.unparse(node.annotation)
            if isinstance(node.annotation, ast.Constant):  # `workers: "int" = 2`
                annotation = str(node.annotation.value)
        else:
            known = type(default).__name__ in annotation_types.PLAIN
            annotation = type(default).__name__ if known else "Any"
        help = comments.get(node.end_lineno or 0, "")
        text = " ".join((ast.get_source_segment(source, node) or "").split())
        text = re.sub(r"\[ (.*?),? \]", r"[\1]", text)  # of several lines, as one
        declaration = f"{text}  # {help}" if help else text
        found[target.id] = Parameter(target.id, annotation, default, help, declaration)
    return found


def check(notebook: Path, given: Values, known: Known | None = None) -> dict[str, JSON]:
    """The given parameters, converted to what the notebook declares, or one sentence why not.

    A parameter with the name of an Experiment's field must be possible for that field (unless it is
    a choice whose default is not); a list of values, for each of its items. So the rules stand in
    one place, the Experiment. `known` is what the notebook declares, where that has been read.

    Raises:
        InvalidInput: an unknown name, a wrong type, an impossible value.
    """
    known = declared(notebook) if known is None else known
    check_names(notebook, given, known)
    values = {name: known[name].convert(value) for name, value in given.items()}
    # With the defaults: a given number of workers may not fit the batch that the notebook has.
    defaults = {name: parameter.default for name, parameter in known.items()}
    whole = known_values(defaults) | values
    own = {name for name, parameter in known.items() if parameter.own or _lists_its_own(parameter)}
    check_fields({name: value for name, value in whole.items() if name not in own})
    return values


def _lists_its_own(parameter: Parameter) -> bool:
    """Whether its choices are the notebook's: `strategy: Literal["ring", "servers"] = "ring"`."""
    from labkit.experiment import Experiment

    if "Literal" not in parameter.annotation or parameter.name not in Experiment.model_fields:
        return False
    try:
        Experiment(**known_values({parameter.name: parameter.default}))
    except InvalidInput:
        return True
    return False


def known_values(values: Mapping[str, JSON | Unknown]) -> dict[str, JSON]:
    """Those values that are known before a kernel runs."""
    return {name: value for name, value in values.items() if not isinstance(value, Unknown)}


def largest(value: JSON | Unknown) -> int:
    """The largest number that a parameter asks for, of ranks or threads; 1 where none is known."""
    numbers = value if isinstance(value, list) else [value]
    return max((number for number in numbers if type(number) is int), default=1)


def check_names(notebook: Path, names: Iterable[str], known: Known) -> None:
    """Refuse a name that the notebook does not declare, with the nearest that it does."""
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
            allowed = ", ".join(known) or "none"
            raise InvalidInput(
                f"{notebook.name} has no parameter {short(name)}{hint}; allowed: {allowed}"
            )


def check_fields(values: Values) -> None:
    """Check those values whose names are fields of Experiment, each item of a list with the rest.

    A data set that is not there yet is fetched: better now than by ranks that wait for it.
    """
    from labkit import datasets

    for dataset in check_possible(values).get("dataset", []):
        try:
            datasets.ensure(str(dataset))
        except LabkitError as error:
            raise InvalidInput(f"dataset={dataset!r}: {error}") from error


def check_possible(values: Values) -> dict[str, list[JSON]]:
    """Check as `check_fields` does, without a look at the data; the items of each field."""
    from labkit.experiment import Experiment

    fields = {
        name: value if isinstance(value, list) and not _takes_lists(name) else [value]
        for name, value in values.items()
        if name in Experiment.model_fields
    }
    # Not every combination: an item is held against the first of all others, or a sweep of four
    # lists of ten would build ten thousand experiments before anything starts.
    first = {name: items[0] for name, items in fields.items() if items}
    for name, items in fields.items():
        for item in items:
            Experiment(**first | {name: item})
    return fields


def _takes_lists(field: str) -> bool:
    """Whether a list is one value of this field (`capacities`), not several of them (`workers`)."""
    from labkit.experiment import Experiment

    annotation = Experiment.model_fields[field].annotation
    annotation_types = typing.get_args(annotation) or (annotation,)
    items = [
        typing.get_args(kind)[0] for kind in annotation_types if typing.get_origin(kind) is tuple
    ]
    # tuple[Any, ...] stands for arrays, which no parameters cell holds.
    return any(item is not typing.Any for item in items)


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        InvalidInput: it cannot be read.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidInput(f"{path} cannot be read: {reason}") from error


def read_yaml(text: str, origin: str) -> dict[str, JSON]:
    """A mapping from YAML; `origin` names the text in an error.

    Raises:
        InvalidInput: the text is not YAML, or not a mapping of names to values.
    """
    try:
        record = read_plain(text)
    except NotPlain as error:
        raise InvalidInput(f"{origin} {error}") from error
    if record is None:
        return {}
    if not isinstance(record, dict) or not all(isinstance(name, str) for name in record):
        raise InvalidInput(f"{origin} gives {text.strip()[:60]!r}; expected `name: value`")
    return record


def value_of(text: JSON) -> JSON:
    """What a text of the command line means where no notebook declares its type."""
    return _readings(text)[0][0] if isinstance(text, str) else text


def _readings(text: str) -> list[tuple[JSON, bool]]:
    """What a text may mean, the likeliest first, and whether it must fit the type exactly."""
    readings: list[tuple[JSON, bool]] = [(text, False)]
    for place, source in enumerate((text, f"[{text}]")):  # 1,2,4 is a list where one is declared
        try:
            value = read_plain(source)
        except NotPlain:  # a text like "a: b: c" can only be text
            continue
        if not isinstance(value, str):  # a text means itself, quotes and all
            readings.insert(2 * place, (value, True))
    return readings
