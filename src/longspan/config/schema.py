"""From TOML tables to typed, validated dataclasses and back.

A configuration is a tree of frozen dataclasses whose fields are declared with `option`, so that each is
documented once: help texts, reference pages (reference.py) and error messages use the declaration.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import tomli_w

from longspan.config.formatting import dotted, shown, type_name
from longspan.errors import UserError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def option(default: Any = dataclasses.MISSING, *, help: str, old_name: str | None = None) -> Any:
    """A documented field; without a default it must be given. `old_name` is still read, with a warning."""
    metadata = {"help": help, "old_name": old_name}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, *, help: str) -> Any:
    """A field that holds a table of its own, by default `cls` with all its defaults."""
    return dataclasses.field(default_factory=cls, metadata={"help": help})


def read(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Build `cls` from a TOML table; an unknown key, a wrong type or a missing value is a `UserError`."""
    if not isinstance(table, Mapping):
        raise UserError(f"'{where}' must be a table of options, not {shown(table)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = _current_name(key.replace("-", "_"), fields, where)
        if name in values:
            raise UserError(f"'{dotted(where, name)}' is given twice, once by its old name: keep one")
        if name not in fields:
            raise UserError(f"unknown key '{dotted(where, key)}'{nearest(name, fields)}")
        values[name] = convert(hints[name], value, dotted(where, name))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise UserError(f"'{dotted(where, name)}' is missing: {field.metadata['help']}")
    try:
        return cls(**values)
    except ValueError as problem:
        raise UserError(f"{where or 'configuration'}: {problem}") from None


def write(config: Any) -> dict[str, Any]:
    """The table that `read` would turn into `config`; options that are None are left out."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            table[field.name] = write(value)
        elif isinstance(value, tuple):
            table[field.name] = [write(v) if dataclasses.is_dataclass(v) else v for v in value]
        elif value is not None:
            table[field.name] = value
    return table


def parse_toml(content: bytes, source: str) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(content.decode("utf-8-sig"))  # editors may write a BOM
    except UnicodeDecodeError:
        raise UserError(f"{source} is not UTF-8 text: save it as UTF-8") from None
    except ValueError as problem:
        raise UserError(f"{source} is not valid TOML: {problem}") from None
    return table


def format_toml(table: Mapping[str, Any]) -> str:
    return tomli_w.dumps(dict(table))


class _Typed(str):
    """A value from the command line: how it is read depends on the option."""


def override(table: dict[str, Any], name: str, text: str) -> None:
    """Set one value in a TOML table from a command-line option such as `model.num-layers` and `4`.

    A number in the path picks an entry of a list: `stage.0.steps`. Where `read` finds an option that takes
    text, `1984` and `true` stay text; elsewhere they are TOML. `none` removes the value of a recipe.
    """
    *path, last = name.replace("-", "_").split(".")
    here: Any = table
    for part in path:
        here = here[_index(here, part, name)] if isinstance(here, list) else here.setdefault(part, {})
        if not isinstance(here, (dict, list)):
            raise UserError(f"unknown key '{name}': '{part}' is a single value")
    here[_index(here, last, name) if isinstance(here, list) else last] = _Typed(text)


def convert(hint: Any, value: Any, where: str) -> Any:
    """The value in the declared type: lists become tuples; a misfit is a `UserError` about `where`."""
    if isinstance(value, _Typed):
        value = str(value) if _takes_text(hint) else _as_toml(value)
        if value == "none" and type(None) in typing.get_args(hint):
            return None
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        choices = [argument for argument in arguments if argument is not type(None)]
        if value is None:
            return None
        is_list = isinstance(value, (list, tuple))
        fitting = [choice for choice in choices if (typing.get_origin(choice) is tuple) == is_list]
        if len(fitting or choices) > 1:
            return _convert_tagged(fitting or choices, value, where)
        return convert((fitting or choices)[0], value, where)
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type, hint), value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"'{where}' must be a list, not {shown(value)}")
        return tuple(convert(arguments[0], entry, f"{where}.{i}") for i, entry in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            allowed = ", ".join(str(argument) for argument in arguments)
            raise UserError(
                f"'{where}' must be one of {allowed}, not {shown(value)}"
                f"{nearest(str(value), map(str, arguments))}"
            )
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise UserError(f"'{where}' must be a table, not {shown(value)}")
        return {key: convert(arguments[1], entry, f"{where}.{key}") for key, entry in value.items()}
    return _convert_scalar(hint, value, where)


def _current_name(name: str, fields: Mapping[str, dataclasses.Field[Any]], where: str) -> str:
    """The current name of an option, with a warning if `name` is an old one."""
    for new, field in fields.items():
        if name == field.metadata.get("old_name"):
            message = f"'{dotted(where, name)}' is now called '{dotted(where, new)}': please rename it"
            warnings.warn(message, FutureWarning, stacklevel=2)
            return new
    return name


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise UserError(f"'{where}' is too large: it must fit in 64 bits")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise UserError(f"'{where}' must be {type_name(hint)}, not {shown(value)}")
    return value


def _convert_tagged(choices: Sequence[Any], value: Any, where: str) -> Any:
    """Several dataclasses share a field; its `Literal` type in each says which one is meant.

    Where the field is not given, it is the first.
    """
    tag = dataclasses.fields(choices[0])[0].name
    by_tag = {typing.get_args(typing.get_type_hints(choice)[tag])[0]: choice for choice in choices}
    if not isinstance(value, Mapping):
        raise UserError(f"'{where}' must be a table of options, not {shown(value)}")
    chosen = value.get(tag, next(iter(by_tag)))
    if chosen not in list(by_tag):
        hint = nearest(str(chosen), by_tag)
        raise UserError(
            f"'{dotted(where, tag)}' must be one of {', '.join(by_tag)}, not {shown(chosen)}{hint}"
        )
    return read(by_tag[chosen], value, where)


def _takes_text(hint: Any) -> bool:
    """`str`, `str | None` and choices between words."""
    if typing.get_origin(hint) in (Literal, typing.Union, types.UnionType):
        return any(argument is str or isinstance(argument, str) for argument in typing.get_args(hint))
    return hint is str


def _as_toml(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _index(entries: list[Any], part: str, name: str) -> int:
    if not part.isdecimal() or int(part) >= len(entries):
        raise UserError(f"'{name}': '{part}' is not one of the {len(entries)} entries, counted from 0")
    return int(part)
