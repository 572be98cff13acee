"""The parameters cell of a notebook, validated before a kernel starts."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import typing
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pydantic import ConfigDict, PydanticUserError, TypeAdapter

from labkit.common.canonical_json import NotPlain
from labkit.common.errors import InvalidInput, LabkitError, short
from labkit.common.imports import optional
from labkit.common.nearest import listed
from labkit.jobs import annotation_types, cells
from labkit.jobs.annotation_types import UNTYPED, infer, python_source
from labkit.records.safe_yaml import read_plain

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON


class Unknown:
    """The type of `UNKNOWN`, the default of a parameter that only the kernel can compute."""


UNKNOWN = Unknown()
_LOGS = re.compile(r"\b(lk|labkit)\.log\(|\bimport log\b|\bglue\(")
# JSON has no infinite numbers, so records contain the text "Infinity" instead.
_CONFIG = ConfigDict(ser_json_inf_nan="strings")
_NOT_FINITE = re.compile(r"[-+]?(inf|infinity|nan)", re.IGNORECASE)
_CELL_MAGIC = re.compile(r"\s*%%(\w+).*\n?")
# Cells with the magics %%capture, %%prun and %%time contain Python.
_TRANSPARENT = ("capture", "prun", "time")
Values: TypeAlias = "Mapping[str, JSON]"


@dataclass(frozen=True)
class NotebookParameter:
    """One assignment of a parameters cell: `workers: int = 2  # ranks`.

    `own` is True if the notebook itself logs its runs with `lk.log`. A notebook that logs its own
    runs may use values that no Experiment accepts.
    """

    name: str
    annotation: str
    default: JSON | Unknown
    help: str
    declaration: str
    own: bool = False

    @cached_property
    def type(self) -> TypeAdapter[JSON]:
        """The pydantic adapter of the declared type; raises InvalidInput for an unreadable type."""
        try:
            return TypeAdapter(annotation_types.read(self.annotation or "Any"), config=_CONFIG)
        # The `except` clause includes NoType, which is a subclass of ValueError.
        except (PydanticUserError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"the parameters cell declares `{self.declaration}`, but {self.annotation} is not "
                f"a type made of {', '.join(sorted(annotation_types.NAMED))}"
            ) from error

    def convert(self, value: JSON) -> JSON:
        """Convert a value to the declared type, for example the text "true" to the bool True.

        Raises:
            InvalidInput: The value does not have the declared type.
        """
        # A recorded value may be a text such as "Infinity" for a number that JSON lacks.
        unparsed = [(value, True), (value, False)]
        readings = _readings(value) if isinstance(value, str) else unparsed
        kind = self.type
        if self.annotation == UNTYPED and isinstance(readings[0][0], str):
            raise InvalidInput(
                f"labkit cannot tell the type of {self.name} from `{self.declaration}`, so "
                f"{value!r} may be a text or another value; annotate the parameter, as in "
                f"`{self.name}: str = …`"
            )
        if (
            self.annotation in ("Any", UNTYPED)
            and isinstance(value, str)
            and _NOT_FINITE.fullmatch(value)
        ):
            raise InvalidInput(
                f"{self.name} = {value!r} may be a number or a text; annotate `{self.declaration}`,"
                f" as in `{self.name}: float | None = …`"
            )
        for reading, strict in readings:
            try:
                # Validation follows the rules of JSON. A list is valid as a tuple. The values True
                # and 2.0 are not valid as int.
                checked = _validate(kind, reading, strict)
                converted: JSON = json.loads(kind.dump_json(checked))
                # A value is accepted only if its JSON form keeps its meaning. For example, an
                # infinite number has the JSON form "Infinity". The type `float | str` would read
                # "Infinity" as a text.
                same = self.source(converted) == python_source(checked)
                if same and (strict or isinstance(value, str) or _equal(converted, value)):
                    return converted
            except ValueError:  # The errors of pydantic are subclasses of ValueError.
                continue
        # The error message contains the declaration, which already lists the choices of a Literal.
        named = "a choice" if "Literal" in self.annotation else self.annotation
        raise InvalidInput(
            f"{self.name} = {short(value)} is not {named}; "
            f"the notebook declares `{self.declaration}`"
        )

    def source(self, value: JSON) -> str:
        """Return the Python source of a value; a JSON list becomes a tuple if the type is tuple."""
        return python_source(_validate(self.type, value, strict=False))


def _equal(value: JSON, other: JSON) -> bool:
    """Return whether two values are equal as JSON, where True, 1 and 1.0 are different."""
    return json.dumps(value) == json.dumps(other)


def _validate(kind: TypeAdapter[JSON], value: object, strict: bool) -> JSON:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):  # the value is not JSON: a date, a path, or an infinite number
        return kind.validate_python(value, strict=True)
    return kind.validate_json(text, strict=strict)


Known: TypeAlias = Mapping[str, NotebookParameter]


def declared(notebook: Path) -> dict[str, NotebookParameter]:
    """Return a notebook's parameters: the assignments in its cell with the tag `parameters`.

    Raises:
        InvalidInput: The notebook is missing, or its parameters cell is not Python.
    """
    all_cells = cells.read(notebook)
    tagged = [cell for cell in all_cells if "parameters" in cell.tags]
    # papermill inserts values after the first cell with the tag `parameters`. A later cell with the
    # tag would overwrite the values.
    if len(tagged) > 1 or any(cell.kind != "code" for cell in tagged):
        kinds_found = " and ".join(f"a {cell.kind} cell" for cell in tagged[:3])
        raise InvalidInput(
            f"{notebook.name} has the tag `parameters` on {kinds_found}; keep it on one code cell"
        )
    code = "\n".join(cell.source for cell in all_cells if cell.kind == "code")
    logs_itself = _LOGS.search(code) is not None and "Experiment" not in code
    try:
        known = parse(tagged[0].source) if tagged else {}
        return {name: replace(parameter, own=logs_itself) for name, parameter in known.items()}
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError, MemoryError) as error:
        # The message of an error about too deeply nested brackets may be empty.
        reason = str(error) or type(error).__name__
        raise InvalidInput(f"the parameters cell of {notebook} is not Python: {reason}") from error


def parse(source: str) -> dict[str, NotebookParameter]:
    """Return the assignments of a cell as parameters, and ignore all other statements."""
    source = _plain_python(source)
    # Python's parser ignores comments, so the tokenizer finds the comment on each line.
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    parameters: dict[str, NotebookParameter] = {}
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if not (isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name)):
            continue
        # An annotation without a value, such as `workers: int`, declares no parameter.
        if value is None:
            continue
        annotation = _annotation(node) if isinstance(node, ast.AnnAssign) else "Final"
        # For `Final` and for a missing annotation, the default value determines the type.
        if annotation.split(".")[-1] == "Final":
            annotation = infer(
                value, {name: parameter.annotation for name, parameter in parameters.items()}
            )
        help = comments.get(node.end_lineno or 0, "")
        text = " ".join((ast.get_source_segment(source, node) or "").split())
        text = re.sub(r"\[ (.*?),? \]", r"[\1]", text)
        declaration = f"{text}  # {help}" if help else text
        default = _default(value)
        parameters[target.id] = NotebookParameter(target.id, annotation, default, help, declaration)
    return parameters


def only_assigns(source: str) -> bool:
    """Return whether a cell contains nothing but assignments of names."""
    try:
        body = ast.parse(_plain_python(source)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    kinds = (ast.Assign, ast.AnnAssign)
    targets = [
        node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        for node in body
        if isinstance(node, kinds)
    ]
    return len(targets) == len(body) > 0 and all(isinstance(t, ast.Name) for t in targets)


def _annotation(node: ast.AnnAssign) -> str:
    # An annotation may be in quotes, as in `workers: "int" = 2`.
    if isinstance(node.annotation, ast.Constant):
        return str(node.annotation.value)
    return ast.unparse(node.annotation)


def _plain_python(source: str) -> str:
    """Return a cell as Python: magics and shell commands become calls of IPython functions."""
    while match := _CELL_MAGIC.match(source):
        # `_TRANSPARENT` lists the cell magics that run Python code in the notebook's process. A
        # cell with any other cell magic sets no parameters.
        source = source[match.end() :] if match[1] in _TRANSPARENT else ""
    try:
        ast.parse(source)
    except SyntaxError:
        transformer = optional("IPython.core.inputtransformer2")
        return str(transformer.TransformerManager().transform_cell(source))
    return source


def _default(node: ast.expr) -> JSON | Unknown:
    """Return the value of a literal that JSON can represent, or UNKNOWN for other expressions."""
    try:
        value: JSON = ast.literal_eval(node)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, MemoryError, RecursionError):  # not a literal: `{[]: 1}`, `-"a"`
        return UNKNOWN
    return value


def validate_values(
    notebook: Path, raw_values: Values, declarations: Known | None = None
) -> dict[str, JSON]:
    """Return the given parameters, converted to the types that the notebook declares.

    A parameter with the name of an Experiment field must be valid for that field. In a list of
    values for an Experiment field, each item must be valid. A Literal parameter may have a default
    that its Experiment field rejects. A parameter with a rejected default is not checked. Only
    `Experiment` itself contains the rules for its fields. `declarations` contains the declared
    parameters. If `declarations` is None, the declared parameters are read from the notebook.

    Raises:
        InvalidInput: A parameter name is unknown, a type is wrong, or a value is not allowed.
    """
    if declarations is None:
        declarations, raw_values = declared(notebook), raw_values or _injected_values(notebook)
    # Some keyboards write ö as two characters, and Python normalizes identifiers. The code
    # therefore also normalizes the given parameter names.
    raw_values = {unicodedata.normalize("NFKC", name): value for name, value in raw_values.items()}
    check_names(notebook, raw_values, declarations)
    values = {name: declarations[name].convert(value) for name, value in raw_values.items()}
    # The defaults are also checked, because a given number of workers may not fit the default batch
    # size.
    defaults = {name: parameter.default for name, parameter in declarations.items()}
    all_values = known_values(defaults) | values
    unchecked = {
        name
        for name, parameter in declarations.items()
        if parameter.own or _has_own_choices(parameter)
    }
    check_fields({name: value for name, value in all_values.items() if name not in unchecked})
    return values


def _injected_values(notebook: Path) -> dict[str, JSON]:
    """Return parameter values that papermill injected into a notebook in an earlier execution.

    If papermill receives new values, it replaces the injected values; without new values, the
    injected ones stay unchanged.
    """
    cell = next(
        (
            candidate
            for candidate in cells.read(notebook)
            if "injected-parameters" in candidate.tags
        ),
        None,
    )
    if cell is None:
        return {}
    recorded = cells.papermill_parameters(notebook)
    injected = {name: candidate.default for name, candidate in parse(cell.source).items()}
    return known_values({n: recorded.get(n, v) if v is UNKNOWN else v for n, v in injected.items()})


def _has_own_choices(parameter: NotebookParameter) -> bool:
    """Return whether a Literal parameter has choices that Experiment rejects, such as "star"."""
    from labkit.experiment import Experiment

    if "Literal" not in parameter.annotation or parameter.name not in Experiment.model_fields:
        return False
    try:
        Experiment(**known_values({parameter.name: parameter.default}))
    except InvalidInput:
        return True
    return False


def known_values(values: Mapping[str, JSON | Unknown]) -> dict[str, JSON]:
    """Return only the values that are known before a kernel runs."""
    return {name: value for name, value in values.items() if not isinstance(value, Unknown)}


def largest(value: JSON | Unknown) -> int:
    """Return the largest integer in a parameter value (a number or a list); 1 if it has none."""
    numbers = value if isinstance(value, list) else [value]
    return max((number for number in numbers if type(number) is int), default=1)


def check_names(notebook: Path, names: Iterable[str], declarations: Known) -> None:
    """Raise an error for each name that the notebook does not declare; suggest similar names."""
    for name in names:
        if name not in declarations:
            raise InvalidInput(
                f"{notebook.name} has no parameter {short(name)}{listed(name, declarations)}"
            )


def check_fields(values: Values) -> None:
    """Validate values whose names are Experiment fields; test each item of a list separately.

    A missing data set is downloaded during the validation, so that ranks need not wait for the
    download.
    """
    from labkit import datasets

    for dataset in check_possible(values).get("dataset", []):
        try:
            datasets.ensure(str(dataset))
        except LabkitError as error:
            raise InvalidInput(f"dataset={dataset!r}: {error}") from error


def check_possible(values: Values) -> dict[str, list[JSON]]:
    """Validate values like `check_fields`, but download no data; return the items of each field."""
    from labkit.experiment import Experiment

    fields = {
        name: value if isinstance(value, list) and not _is_list_field(name) else [value]
        for name, value in values.items()
        if name in Experiment.model_fields
    }
    # The check does not test all combinations of values. The check tests each item only with the
    # first items of all other fields. A sweep of four lists of ten values has ten thousand
    # combinations. A test of all combinations would create an experiment for each combination.
    first = {name: items[0] for name, items in fields.items() if items}
    for name, items in fields.items():
        for item in items:
            Experiment(**first | {name: item})
    return fields


def _is_list_field(field: str) -> bool:
    """Return whether an Experiment field takes a list as one value; `workers` takes a number."""
    from labkit.experiment import Experiment

    annotation = Experiment.model_fields[field].annotation
    annotation_types = typing.get_args(annotation) or (annotation,)
    items = [
        typing.get_args(kind)[0] for kind in annotation_types if typing.get_origin(kind) is tuple
    ]
    # Experiment fields of the type `tuple[Any, ...]` contain arrays, which a parameters cell cannot
    # contain.
    return any(item is not typing.Any for item in items)


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InvalidInput: The file is unreadable.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidInput(f"{path} cannot be read: {reason}") from error


def read_yaml(text: str, origin: str) -> dict[str, JSON]:
    """Return the mapping in a YAML text; `origin` names the text in error messages.

    Raises:
        InvalidInput: The text is not YAML, or is not a mapping from names to values.
    """
    try:
        record = read_plain(text)
    except NotPlain as error:
        raise InvalidInput(f"{origin} {error}") from error
    if record is None:
        return {}
    if not isinstance(record, dict) or not all(isinstance(name, str) for name in record):
        raise InvalidInput(f"{origin} contains {text.strip()[:60]!r}; expected `name: value`")
    return record


def value_of(text: JSON) -> JSON:
    """Convert a text from the command line to a value, for a parameter without declared type."""
    return _readings(text)[0][0] if isinstance(text, str) else text


def _readings(text: str) -> list[tuple[JSON, bool]]:
    """Return possible values of a text, best first; a flag asks for an exact match of the type."""
    readings: list[tuple[JSON, bool]] = [(text, False)]
    if text.startswith("("):  # A text that begins with "(" may be a tuple in Python syntax.
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            readings.append((ast.literal_eval(text), True))
            return readings
    # A list may be given without brackets, as in 1,2,4.
    for place, source in enumerate((text, f"[{text}]")):
        try:
            value = read_plain(source)
        except NotPlain:  # a text such as "a: b: c" is not YAML, so it stays a text
            continue
        if not isinstance(value, str):  # a text in quotes stays unchanged, including its quotes
            readings.insert(2 * place, (value, True))
    # An empty text stays a text if the declared type allows texts, as in papermill.
    return readings if text else sorted(readings, key=lambda reading: reading[0] is None)
