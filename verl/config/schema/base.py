"""How a setting is declared, and how the declarations are read back."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

__all__ = [
    "CUSTOM_FUNCTION",
    "MISSING",
    "CustomFunction",
    "Dtype",
    "Interval",
    "OneOrMany",
    "Section",
    "Setting",
    "collect_settings",
    "section",
    "setting",
]

MISSING = "???"
"""The value of a required setting that nobody has given: Hydra's own mark for it."""

CUSTOM_FUNCTION = "package.module:function"
"""How a function of the user's own is written, where a setting takes one beside the names that are shipped."""


class Section(BaseModel):
    """A group of settings: unknown keys are refused, and nothing changes once the run has started."""

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
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind is not bool and bool not in get_args(kind):
            raise ValueError(f"must be {_type_name(kind)}")  # Python would take True for 1
        return value


def setting(
    default: Any,
    doc: str,
    *,
    unit: str | None = None,
    planned: bool | tuple[Any, ...] = False,
    required: bool = False,
    **constraints: Any,
) -> Any:
    """Declare one setting. `constraints` are pydantic's: ge, gt, le, lt.

    `planned=True`: any value but the default is refused as not built yet; `planned=("a", "b")`: these values are.
    Building the feature means removing the mark.
    """
    marks: Any = {
        "unit": unit,
        "planned": list(planned) if isinstance(planned, tuple) else planned,
        "required": required,
    }
    return Field(MISSING if required else default, description=doc, json_schema_extra=marks, **constraints)


def section(kind: type[Section], doc: str, *, planned: bool = False) -> Any:
    """Declare a section inside another; `planned=True` refuses every value in it that is not the default."""
    marks: Any = {"unit": None, "planned": planned, "required": False}
    return Field(default_factory=kind, description=doc, json_schema_extra=marks)


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting or section, as the loader, the checks and the reference page see it."""

    path: tuple[str, ...]
    annotation: Any
    default: Any
    doc: str
    unit: str | None
    planned: bool | tuple[Any, ...]
    required: bool
    section: type[Section] | None
    planned_parent: str | None
    """The key of the section above that is not built yet, if there is one."""

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def open(self) -> bool:
        """Whether keys below this one may be anything: a dictionary that is handed on as it is."""
        if self.section is not None:
            return self.section.model_config.get("extra") == "allow"
        return _strip(self.annotation) is dict

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a setting that takes one of a few words (or a list of them); empty for all others."""
        return tuple(_choices(self.annotation))

    @property
    def takes_custom_function(self) -> bool:
        """Whether, beside its choices, the setting takes a function of the user's own."""
        return CustomFunction in get_args(self.annotation)

    @property
    def type_name(self) -> str:
        """The type in words, for the reference page and for messages."""
        return "a section" if self.section is not None else _type_name(self.annotation)


@cache
def collect_settings(root: type[Section]) -> dict[str, Setting]:
    """Every section and setting below `root` by its dotted key, in the order of declaration."""
    return {found.key: found for found in _walk(root, (), None)}


def _walk(kind: type[Section], above: tuple[str, ...], planned_parent: str | None) -> Iterator[Setting]:
    for name, field in kind.model_fields.items():
        found = _read(field, (*above, name), planned_parent)
        yield found
        if found.section is not None:
            yield from _walk(found.section, found.path, planned_parent or (found.key if found.planned else None))


def _read(field: FieldInfo, path: tuple[str, ...], planned_parent: str | None) -> Setting:
    marks = field.json_schema_extra
    assert isinstance(marks, dict), f"{'.'.join(path)} must be declared with setting() or section()"
    planned = marks["planned"]
    kind = field.annotation
    return Setting(
        path=path,
        annotation=kind,
        default=field.get_default(call_default_factory=True),
        doc=field.description or "",
        unit=marks["unit"],  # type: ignore[arg-type]
        planned=tuple(planned) if isinstance(planned, list) else bool(planned),
        required=bool(marks["required"]),
        section=kind if isinstance(kind, type) and issubclass(kind, Section) else None,
        planned_parent=planned_parent,
    )


def _strip(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return _strip(get_args(annotation)[0])
    return get_origin(annotation) or annotation


def _choices(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is Annotated:
        yield from _choices(get_args(annotation)[0])
    else:
        for part in get_args(annotation):
            yield from _choices(part)


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def _type_name(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is CustomFunction:
        return CUSTOM_FUNCTION
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


def _module_and_function(value: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise ValueError(f"must be written as {CUSTOM_FUNCTION}")
    return value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Interval = Annotated[int, AfterValidator(_never_or_positive)]
"""A frequency in steps: -1 is never."""

CustomFunction = Annotated[str, AfterValidator(_module_and_function)]
"""A function of the user's own. Only the form is checked here; the run finds out whether it can be imported."""

OneOrMany = BeforeValidator(_one_or_many)
"""For a list that may be written as its only item."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
