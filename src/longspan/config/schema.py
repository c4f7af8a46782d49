"""From TOML tables to typed, validated dataclasses and back.

A configuration is a tree of frozen dataclasses whose fields are declared with `option`, so that each is
documented once: help texts, reference pages and error messages are read off the declaration.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import tomli_w

from longspan.errors import UserError, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


def option(default: Any = dataclasses.MISSING, *, help: str) -> Any:
    """A documented field; without a default it must be given."""
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def section(cls: type, *, help: str) -> Any:
    """A field that holds a table of its own, by default `cls` with all its defaults."""
    return dataclasses.field(default_factory=cls, metadata={"help": help})


def read(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Build `cls` from a TOML table; an unknown key, a wrong type or a missing value is a `UserError`."""
    if not isinstance(table, Mapping):
        raise UserError(f"'{where}' must be a table of options, not {_shown(table)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise UserError(f"unknown key '{_dotted(where, key)}'{nearest(name, fields)}")
        values[name] = _convert(hints[name], value, _dotted(where, name))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise UserError(f"'{_dotted(where, name)}' is missing: {field.metadata['help']}")
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


def parse_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise UserError(f"{source} is not valid TOML: {problem}") from None


def format_toml(table: Mapping[str, Any]) -> str:
    return tomli_w.dumps(dict(table))


def override(table: dict[str, Any], dotted: str, text: str) -> None:
    """Set one value in a TOML table from a command-line option such as `model.num-layers` and `4`.

    A number in the path picks an entry of a list: `stage.0.steps`.
    """
    *path, last = dotted.replace("-", "_").split(".")
    here: Any = table
    for part in path:
        if isinstance(here, list):
            here = here[_index(here, part, dotted)]
        else:
            here = here.setdefault(part, {})
        if not isinstance(here, (dict, list)):
            raise UserError(f"unknown key '{dotted}': '{part}' is a single value")
    if isinstance(here, list):
        here[_index(here, last, dotted)] = _from_text(text)
    else:
        here[last] = _from_text(text)


@dataclasses.dataclass(frozen=True)
class Documented:
    """One option as help texts and reference pages show it."""

    name: str
    type: str
    default: str
    help: str


def documented(cls: type, prefix: str = "") -> Iterator[Documented]:
    """Every option of `cls` and the tables below it, with dotted names."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, hint = _dotted(prefix, field.name), hints[field.name]
        inner = _tables_in(hint)
        if inner:
            for number, table in enumerate(inner):
                yield from documented(table, f"{name}.{number}" if _is_list(hint) else name)
            continue
        default = "required" if field.default is dataclasses.MISSING else _shown(field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = _shown(field.default_factory())
        yield Documented(name, _type_name(hint), default, field.metadata["help"])


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        choices = [argument for argument in arguments if argument is not type(None)]
        if value is None:
            return None
        if len(choices) > 1:
            return _convert_tagged(choices, value, where)
        return _convert(choices[0], value, where)
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type, hint), value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"'{where}' must be a list, not {_shown(value)}")
        return tuple(_convert(arguments[0], entry, f"{where}.{i}") for i, entry in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            allowed = ", ".join(str(argument) for argument in arguments)
            raise UserError(
                f"'{where}' must be one of {allowed}, not {_shown(value)}"
                f"{nearest(str(value), map(str, arguments))}"
            )
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise UserError(f"'{where}' must be a table, not {_shown(value)}")
        return {key: _convert(arguments[1], entry, f"{where}.{key}") for key, entry in value.items()}
    return _convert_scalar(hint, value, where)


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise UserError(f"'{where}' must be {_type_name(hint)}, not {_shown(value)}")
    return value


def _convert_tagged(choices: Sequence[Any], value: Any, where: str) -> Any:
    """Several dataclasses share a field; its `Literal` type in each says which one is meant."""
    tag = dataclasses.fields(choices[0])[0].name
    by_tag = {typing.get_args(typing.get_type_hints(choice)[tag])[0]: choice for choice in choices}
    if not isinstance(value, Mapping) or tag not in value:
        raise UserError(f"'{_dotted(where, tag)}' is missing: one of {', '.join(by_tag)}")
    if value[tag] not in by_tag:
        hint = nearest(str(value[tag]), by_tag)
        raise UserError(
            f"'{_dotted(where, tag)}' must be one of {', '.join(by_tag)}, not {_shown(value[tag])}{hint}"
        )
    return read(by_tag[value[tag]], value, where)


def _tables_in(hint: Any) -> list[Any]:
    arguments = typing.get_args(hint) or (hint,)
    return [argument for argument in arguments if dataclasses.is_dataclass(argument)]


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _from_text(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _index(entries: list[Any], part: str, dotted: str) -> int:
    if not part.isdigit() or int(part) >= len(entries):
        raise UserError(f"'{dotted}': '{part}' is not one of the {len(entries)} entries, counted from 0")
    return int(part)


def _dotted(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else str(value)


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin is tuple:
        return f"a list of {_type_name(arguments[0])}"
    if origin is dict:
        return "a table"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(a) for a in arguments if a is not type(None))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names[hint] if hint in names else str(hint)
