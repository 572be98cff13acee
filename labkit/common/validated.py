"""The base class of objects that users construct: immutable, and validated on construction."""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from labkit.common.errors import InvalidInput, short
from labkit.common.nearest import hint, listed, literal_strings
from labkit.common.renamed import missing_attribute

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _WithoutInherited(ModelMetaclass):
    """Metaclass that hides attributes inherited from pydantic in `help()` and `dir()`."""

    def __dir__(self) -> list[str]:
        shown = {"__doc__", "__init__"}
        hidden = {name for name in super().__dir__() if name.startswith("__")} - shown
        return [
            name for name in super().__dir__() if name not in {*dir(BaseModel), *hidden} - shown
        ]


class _Default:
    """The default value of a field, as a signature displays it."""

    def __init__(self, field: FieldInfo) -> None:
        self._value = field.get_default(call_default_factory=True)

    def __repr__(self) -> str:
        value = self._value
        if isinstance(value, Checked) and value == type(value).model_construct():
            return f"{type(value).__name__}()"
        return repr(value)


class Checked(BaseModel, metaclass=_WithoutInherited):
    """An immutable pydantic model whose constructor raises `InvalidInput` for invalid values.

    The error message contains the invalid value and what is allowed instead. Fields are passed to
    the constructor as keyword arguments. One field, declared with `Field(kw_only=False)`, may also
    be passed as the first positional argument.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Make `help()` display fields and defaults, without the types that pydantic works with."""
        parameters = [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY
                if f.kw_only is not False
                else Parameter.POSITIONAL_OR_KEYWORD,
                default=Parameter.empty if f.is_required() else _Default(f),
            )
            for name, f in cls.model_fields.items()
        ]
        cls.__signature__ = Signature(sorted(parameters, key=lambda parameter: parameter.kind))

    def __init__(self, *given: Any, **fields: Any) -> None:
        """Validate the given field values and construct the object.

        Raises:
            InvalidInput: A field is unknown or its value is invalid; the message says what is
                allowed.
        """
        try:
            super().__init__(**_named(type(self), given, fields))
        # Pydantic's own message is replaced, because it contains internal types and links to a
        # website.
        except ValidationError as error:
            raise InvalidInput(_sentence(type(self), error)) from None

    # Type checkers see only the declared fields, because `__getattr__` would accept every name.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                fields = type(self).model_fields
                raise missing_attribute(type(self).__name__, name, fields) from None


def by_position(kind: type[BaseModel]) -> str | None:
    """Return the name of the field that may be passed as a positional argument, or None."""
    return next((name for name, f in kind.model_fields.items() if f.kw_only is False), None)


def _named(kind: type[BaseModel], given: tuple[Any, ...], fields: dict[str, Any]) -> dict[str, Any]:
    """Return all fields by name, including a field that was passed as a positional argument."""
    if not given:
        return fields
    name, called = by_position(kind), kind.__name__
    if name is None:
        names = ", ".join(f"{name}=…" for name in kind.model_fields)
        raise InvalidInput(
            f"{called}({short(given[0])}) does not name the field of this value: give fields by "
            f"name, as in {called}({names})"
        )
    if len(given) > 1:
        others = ", ".join(f"{other}=…" for other in kind.model_fields if other != name)
        raise InvalidInput(
            f"{called}({', '.join(map(short, given))}): only {name} may be given without its "
            f"name; give all other fields by name{f', {called}(…, {others})' if others else ''}"
        )
    if name in fields:
        raise InvalidInput(
            f"{called}({short(given[0])}, {name}={short(fields[name])}) gives {name} twice"
        )
    return {name: given[0]} | fields


def _sentence(kind: type[BaseModel], error: ValidationError) -> str:
    errors = sorted(error.errors(), key=_rank)
    first = errors[0]
    # labkit's own validator has written the message of an error with the type "value_error".
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    # An error has no location if the argument's name is invalid text, such as a lone surrogate.
    if not first["loc"]:
        return f"{kind.__name__} cannot have {short(first['input'])}: {first['msg']}"
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        fields = list(kind.model_fields) or ["no fields"]
        return f"{kind.__name__} has no {short(field)}{listed(field, fields, 'it has')}"
    if first["type"] == "missing":
        return f"{kind.__name__} needs {field!r}: give {field}=…"
    # For a field with a union type, pydantic reports one error for each type of the union.
    rules = dict.fromkeys(e["msg"] for e in errors if e["loc"][0] == first["loc"][0])
    allowed = " or ".join(rule[0].lower() + rule[1:] for rule in rules)
    place = field + "".join(f"[{part}]" for part in first["loc"][1:] if isinstance(part, int))
    near = hint(first["input"], literal_strings(kind.model_fields[field].annotation))
    return f"{place}={short(first['input'])} is impossible{near}: {allowed}"


def _rank(error: Any) -> int:
    """Return the sort key of an error; unknown names come first, as they may cause other errors."""
    return {"extra_forbidden": 0, "missing": 2}.get(error["type"], 1)
