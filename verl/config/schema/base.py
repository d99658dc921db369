"""Declaring settings, and reading the declarations back."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from verl.config.schema.conditions import OnlyIf

MISSING = "???"
"""The value of a required setting that is not given, as Hydra writes it."""

CUSTOM_FUNCTION = "package.module:function"
"""How a setting that accepts a user's function as well as built-in names is written."""


class RegisteredName(str):
    """A name of a registry. Names can be registered at any time before a value is checked."""

    @classmethod
    def list_names(cls) -> Iterable[str]:
        """Return the names that are accepted now."""
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls._check, core_schema.str_schema())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"enum": list(cls.list_names())}

    @classmethod
    def _check(cls, value: str) -> str:
        if value not in cls.list_names():
            raise PydanticCustomError("unknown_name", "is not registered")
        return value


class Section(BaseModel):
    """A group of settings; immutable, and unknown keys are rejected."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # `trainer.experiment_name=7` is a name
        protected_namespaces=(),  # `model_path` and the like are settings here
        validate_default=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind is not bool and bool not in get_args(kind):
            raise ValueError(f"must be {_type_name(kind)}")  # pydantic accepts True as 1
        return value


def setting(
    default: Any = None,
    *,
    unit: str | None = None,
    planned: tuple[Any, ...] = (),
    required: bool = False,
    only_if: OnlyIf | tuple[OnlyIf, ...] = (),
    **constraints: Any,
) -> Any:
    """Declare one setting. The docstring below it is its documentation: one line.

    Args:
        default: The value if none is given.
        unit: What a number counts.
        planned: Values that are refused as not supported yet.
        required: A run does not start without this setting.
        only_if: When the setting has an effect; the first condition that does not hold is reported.
        constraints: ge, gt, le, lt of pydantic.
    """
    marks: Any = {"unit": unit, "planned": planned, "required": required, "only_if": _as_tuple(only_if)}
    return Field(MISSING if required else default, json_schema_extra=marks, **constraints)


def section(kind: type[Section], doc: str, *, only_if: OnlyIf | tuple[OnlyIf, ...] = ()) -> Any:
    """Declare a section inside another; `only_if` applies to all settings in it.

    A condition of a section does not apply to the settings that it reads.
    """
    marks: Any = {"unit": None, "planned": (), "required": False, "only_if": _as_tuple(only_if)}
    return Field(default_factory=kind, description=doc, json_schema_extra=marks)


def _as_tuple(only_if: OnlyIf | tuple[OnlyIf, ...]) -> tuple[OnlyIf, ...]:
    return only_if if isinstance(only_if, tuple) else (only_if,)


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting or section, as the loader, the validation and the reference page see it."""

    path: tuple[str, ...]
    owner: type[Section]
    annotation: Any
    default: Any
    unit: str | None
    planned: tuple[Any, ...]
    required: bool
    section: type[Section] | None
    only_if: tuple[OnlyIf, ...]
    """Conditions of its sections, outermost first, then its own; with absolute keys."""

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def doc(self) -> str:
        """The description of a section, or the docstring of a setting."""
        name = self.path[-1]
        owners = (kind for kind in self.owner.__mro__ if issubclass(kind, Section) and name in kind.__annotations__)
        owner = next(owners)
        return self.owner.model_fields[name].description or _read_docs(owner.__module__).get((owner.__name__, name), "")

    @property
    def open(self) -> bool:
        """Whether any key is accepted below this one: a dictionary that is passed on unchanged."""
        if self.section is not None:
            return self.section.model_config.get("extra") == "allow"
        return get_origin(self.annotation) is dict

    @property
    def choices(self) -> tuple[Any, ...]:
        """The accepted names, for a setting that takes one of a few (or a list of them); empty for all others."""
        return tuple(_choices(self.annotation))

    @property
    def takes_custom_function(self) -> bool:
        """Whether the setting also takes a function of the user."""
        return CustomFunction in get_args(self.annotation)

    @property
    def type_name(self) -> str:
        """The type in words, for the reference page and messages."""
        return "a section" if self.section is not None else _type_name(self.annotation)


@cache
def collect_settings(root: type[Section]) -> dict[str, Setting]:
    """Return every section and setting below `root` by its dotted key, in the order of declaration."""
    return {setting.key: setting for setting in _walk(root)}


def _walk(kind: type[Section], parent: Setting | None = None) -> Iterator[Setting]:
    for name, field in kind.model_fields.items():
        setting = _read(kind, name, field, parent)
        yield setting
        if setting.section is not None:
            yield from _walk(setting.section, setting)


def _read(owner: type[Section], name: str, field: FieldInfo, parent: Setting | None) -> Setting:
    marks: Any = field.json_schema_extra
    path, kind = (*parent.path, name) if parent else (name,), field.annotation
    key = ".".join(path)
    assert isinstance(marks, dict), f"{key} must be declared with setting() or section()"
    return Setting(
        path=path,
        owner=owner,
        annotation=kind,
        default=field.get_default(call_default_factory=True),
        unit=marks["unit"],
        planned=marks["planned"],
        required=marks["required"],
        section=kind if isinstance(kind, type) and issubclass(kind, Section) else None,
        only_if=(
            *(condition for condition in (parent.only_if if parent else ()) if key not in condition.keys),
            *(condition.resolve(key) for condition in marks["only_if"]),
        ),
    )


@cache
def _read_docs(module: str) -> dict[tuple[str, str], str]:
    """Return (class, name) -> the docstring below the declaration of a setting."""
    docs = {}
    classes = ast.parse(inspect.getsource(sys.modules[module])).body
    for kind in (node for node in classes if isinstance(node, ast.ClassDef)):
        for field, below in pairwise(kind.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(doc))):
                    docs[kind.name, name] = doc
    return docs


def _choices(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, type) and issubclass(annotation, RegisteredName):
        yield from annotation.list_names()
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _choices(part)


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def _type_name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is CustomFunction:
        return CUSTOM_FUNCTION
    if isinstance(annotation, type) and issubclass(annotation, RegisteredName):
        return " | ".join(annotation.list_names())
    if origin is Annotated:
        return _type_name(parts[0])
    if origin is Literal:
        return " | ".join(str(choice) for choice in parts)
    if origin in (Union, types.UnionType):
        return " | ".join(_type_name(part) for part in parts)
    if origin is list:
        return f"a list of {_type_name(parts[0]).removeprefix('a ')}"
    if origin is tuple:
        return f"a list of {len(parts)} {_type_name(parts[0]).removeprefix('a ')}s"
    if origin is dict:
        return "a dictionary"
    return _WORDS[annotation]


def _never_or_positive(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("must be -1 (never) or at least 1")
    return value


_MODULE_AND_FUNCTION = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"


def _module_and_function(value: str) -> str:
    if not re.fullmatch(_MODULE_AND_FUNCTION, value):
        raise ValueError(f"must be written as {CUSTOM_FUNCTION}")
    return value


class _OneOrMany:
    """Annotation of a list: a text or a number in place of the list is its only item."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._wrap, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [many, many["items"]]}

    @staticmethod
    def _wrap(value: Any) -> Any:
        return [value] if isinstance(value, str | int) else value


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

Interval = Annotated[
    int,
    AfterValidator(_never_or_positive),
    WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]}),
]
"""An interval in steps; -1: never."""

CustomFunction = Annotated[
    str,
    AfterValidator(_module_and_function),
    WithJsonSchema({"type": "string", "pattern": f"^{_MODULE_AND_FUNCTION}$"}),
]
"""A function of the user. Only the form is checked here; the run imports it."""

OneOrMany = _OneOrMany()
"""Accepts a single item in place of a list."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
