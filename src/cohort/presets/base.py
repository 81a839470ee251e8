"""What all parts of an objective share: typed numbers with ranges, exclusions, words, and readable errors.

A part is declared once, as a class: its rule's name, its numbers with their ranges, what it cannot be combined with,
its formula in words, and its source. The function that computes it is in ``cohort.objective``, registered under the
class. A part without numbers is a word of ``words.WORDS``.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from cohort.errors import ConfigError, did_you_mean

Bound = Annotated[float, Field(ge=0)]
"""A bound on a ratio, or a threshold; infinity is no bound."""
Positive = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ddof = Annotated[int, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]


class Checked(BaseModel):
    """A frozen model with strict types whose errors are a ``ConfigError`` in plain words."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    def __init__(self, **settings: object) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise PartError(error, type(self)) from None

    @model_validator(mode="before")
    @classmethod
    def _absent(cls, settings: object) -> object:
        """Read "none" as None where a setting may be absent."""
        if not isinstance(settings, Mapping):
            return settings
        optional = {name for name, field in cls.model_fields.items() if NoneType in typing.get_args(field.annotation)}
        return {name: None if value == "none" and name in optional else value for name, value in settings.items()}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in self.problems():
            raise ConfigError(problem)
        return self

    def problems(self) -> Iterable[str]:
        """Why the settings do not fit each other, each reason a sentence."""
        return ()


class Part(Checked):
    """A rule with its numbers."""

    formula: ClassVar[str] = ""
    """The rule in words: a format string over its numbers."""
    source: ClassVar[str] = ""
    """The paper."""
    bounds: ClassVar[str] = ""
    """What errors call ``low`` and ``high`` where they are bounds on a ratio, which must contain 1."""
    rule: str

    def problems(self) -> Iterable[str]:
        """See ``Checked``: bounds on a ratio that are out of order, or do not contain 1."""
        numbers = self.numbers()
        return bounds_problems(self.bounds, numbers["low"], numbers["high"]) if self.bounds else ()

    def words(self) -> str:
        """The formula with its numbers."""
        return self.formula.format(**dict(self))

    def numbers(self) -> dict[str, object]:
        """The settings of the rule, without its name."""
        return {name: value for name, value in self if name != "rule"}

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        return iter(self.numbers().items())


class PartError(ConfigError):
    """The settings of a part or an objective do not fit; keeps the details, so that a path can be put before them."""

    def __init__(self, error: ValidationError, kind: type[BaseModel]) -> None:
        self.error, self.kind = error, kind
        field = kind.model_fields.get("rule")
        super().__init__("\n".join(sentences(error, kind, (field.default,) if field else ())))


def sentences(error: ValidationError, kind: type[BaseModel], path: tuple[str | int, ...] = ()) -> Iterator[str]:
    """Each error in a sentence that names the setting, what was expected and what came."""
    for item in error.errors():
        at = (*path, *item["loc"])
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, PartError):
            tagged = len(item["loc"]) > 1 and at[-1] == inner.kind.model_fields["rule"].default
            at = at[:-1] if tagged else at  # the tag of a union is not a setting
            yield from sentences(inner.error, inner.kind, at)
        else:
            yield _sentence(item, kind, "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in at)[1:])


def _sentence(item: ErrorDetails, kind: type[BaseModel], name: str) -> str:
    got, context = item["input"], item.get("ctx", {})
    expected = {
        "float_type": "a number",
        "int_type": "a whole number",
        "bool_type": "true or false",
        "string_type": "text",
        "finite_number": "a finite number",
        "literal_error": context.get("expected"),
        "tuple_type": "a list of tables",
    }
    match item["type"]:
        case "extra_forbidden":
            known = [key for key in kind.model_fields if key != "rule"]
            rule = kind.model_fields["rule"].default if "rule" in kind.model_fields else "an objective"
            numbers = f"; {rule} has {', '.join(known) or 'no numbers'}"
            return f"unknown setting {name}{did_you_mean(item['loc'][-1], known) or numbers}"
        case "value_error":  # a check of several settings names them itself
            return f"{name}: {context['error']}" if item["loc"] else str(context["error"])
        case "greater_than" | "greater_than_equal" | "less_than_equal":
            return f"{name}: expected {_range(kind, name.rpartition('.')[2])}, got {got!r}"
        case known_type if known_type in expected:
            words = [word.strip("'") for word in str(context.get("expected", "")).replace(" or ", ", ").split(", ")]
            hint = did_you_mean(got, words) if known_type == "literal_error" else ""
            return f"{name}: expected {expected[known_type]}, got {got!r}{hint}"
    return f"{name}: {item['msg'][0].lower()}{item['msg'][1:]}, got {got!r}"


def _range(kind: type[BaseModel], key: str) -> str:
    """The range of a setting in words."""
    schema = kind.model_json_schema()["properties"].get(key, {})
    limits = {name: number for part in (schema, *schema.get("anyOf", ())) for name, number in part.items()}
    low, high = limits.get("minimum", limits.get("exclusiveMinimum")), limits.get("maximum")
    if low is None or high is None:
        return f"a number {'of at least' if 'minimum' in limits else 'above'} {low}"
    return f"a number in {'[' if 'minimum' in limits else '('}{low:g}, {high:g}]"


def one_of(words: Iterable[str]) -> BeforeValidator:
    """Validate that a setting is one of the declared words."""
    known = tuple(words)

    def check(value: object) -> object:
        if value in known:
            return value
        raise ConfigError(f"expected one of {', '.join(known)}, got {value!r}{did_you_mean(value, known)}")

    return BeforeValidator(check)


def kinds(annotation: object) -> dict[str, type[Part]]:
    """The classes of parts in a type, by the names of their rules."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return {annotation.model_fields["rule"].default: annotation}
    return {rule: kind for inner in typing.get_args(annotation) for rule, kind in kinds(inner).items()}


def require(condition: bool, message: str) -> None:
    """Raise a ``ConfigError`` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def bounds_problems(rule: str, low: Any, high: Any, why: str = "") -> Iterator[str]:
    """Whether bounds on a ratio are out of order or do not contain 1; ``why`` ends the message about the latter."""
    if low >= high:
        yield f"{rule}: low ({low:g}) must be below high ({high:g}); both are bounds on the ratio itself"
    if not low <= 1 <= high:
        yield f"{rule}: [{low:g}, {high:g}] must contain 1{why}"
