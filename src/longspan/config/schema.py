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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import tomli_w

from longspan.config.formatting import dotted, shown, type_name
from longspan.errors import UserError, nearest
from longspan.registry import Table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

_DEEPEST = 50  # levels of tables and lists in a TOML file


@dataclasses.dataclass(frozen=True)
class Choice:
    """A table whose key `tag` names an entry of the registry, which says of which class it is.

    A class may have a field for the tag. Where it has none, the registry knows the tag of the class.
    """

    tag: str
    registered: Table[Any]
    default: type
    help: str

    def class_of(self, name: str) -> type:
        return self.registered[name].config_class or self.default

    @property
    def default_name(self) -> str:
        return getattr(self.default, self.tag, None) or self.registered.name_of(self.default) or ""


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str | Callable[[], str],
    old_name: str | None = None,
    first: Callable[[Any], None] | None = None,
) -> Any:
    """A documented field; without a default it must be given.

    `old_name` is still read, with a warning. `first` is called with the value before other options are read.
    """
    metadata = {"help": help, "old_name": old_name, "first": first}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, *, help: str) -> Any:
    """A field that holds a table of its own, by default `cls` with all its defaults."""
    return dataclasses.field(default_factory=cls, metadata={"help": help})


def chosen_section(cls: type, tag: str, registered: Table[Any], *, help: str, tag_help: str) -> Any:
    """A field that holds a table of one of the registered classes, by default `cls` with all its defaults."""
    choice = Choice(tag, registered, cls, tag_help)
    return dataclasses.field(default_factory=cls, metadata={"help": help, "choice": choice})


def sections(registered: Table[Any], *, help: str) -> Any:
    """A field that holds a table for each of some registered names, of the class that the name has."""
    return dataclasses.field(default_factory=dict, metadata={"help": help, "sections": registered})


def help_of(field: dataclasses.Field[Any]) -> str:
    text = field.metadata["help"]
    return text() if callable(text) else text


def read(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Build `cls` from a TOML table; an unknown key, a wrong type or a missing value is a `UserError`.

    Options that an earlier version had, the names in `cls.REMOVED`, are read if they were off.
    """
    if not isinstance(table, Mapping):
        raise UserError(f"'{where}' must be a table of options, not {shown(table)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name, field in fields.items():
        first = field.metadata.get("first")
        if first is not None and name in table:
            first(convert(hints[name], table[name], dotted(where, name)))
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = _current_name(key.replace("-", "_"), fields, where)
        if name in values:
            raise UserError(f"'{dotted(where, name)}' is given twice, once by its old name: keep one")
        if name in getattr(cls, "REMOVED", ()):
            if value:
                raise UserError(f"'{dotted(where, key)}' was removed (docs/log.md says why): leave it out")
            continue
        if name not in fields:
            raise UserError(f"unknown key '{dotted(where, key)}'{nearest(name, fields)}")
        values[name] = _convert_field(fields[name], hints[name], value, dotted(where, name))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise UserError(f"'{dotted(where, name)}' is missing: {help_of(field)}")
    try:
        return cls(**values)
    except ValueError as problem:
        raise UserError(f"{where or 'configuration'}: {problem}") from None


def write(config: Any) -> dict[str, Any]:
    """The table that `read` would turn into `config`; options that are None are left out.

    So are empty plugins and options of blocks: few runs have any.
    """
    table: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, choice = getattr(config, field.name), field.metadata.get("choice")
        if choice is not None:
            table[field.name] = {choice.tag: choice.registered.name_of(type(value))} | write(value)
        elif dataclasses.is_dataclass(value):
            table[field.name] = write(value)
        elif "sections" in field.metadata or field.metadata.get("first") is not None:
            if value:
                table[field.name] = _written(value)
        elif value is not None:
            table[field.name] = _written(value)
    return table


def _written(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return write(value)
    if isinstance(value, tuple):
        return [_written(entry) for entry in value]
    return {key: _written(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def parse_toml(content: bytes, source: str) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(content.decode("utf-8-sig"))  # editors may write a BOM
        if _is_deeper(table, _DEEPEST):  # dotted keys nest without recursion in the parser
            raise ValueError("it is nested too deeply")
    except UnicodeDecodeError:
        raise UserError(f"{source} is not UTF-8 text: save it as UTF-8") from None
    except ValueError as problem:
        raise UserError(f"{source} is not valid TOML: {problem}") from None
    except RecursionError:
        raise UserError(f"{source} is not valid TOML: it is nested too deeply") from None
    return table


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether tables and lists are nested in more levels than these."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(entry, levels - 1) for entry in entries)


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
        fitting = [choice for choice in choices if (typing.get_origin(choice) is tuple) == is_list] or choices
        if len(fitting) == 1:
            return convert(fitting[0], value, where)
        if any(map(dataclasses.is_dataclass, fitting)):
            return _convert_tagged(fitting, value, where)
        return _convert_word_or_scalar(hint, fitting, value, where)
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type, hint), value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"'{where}' must be a list, not {shown(value)}: write it as in '[1, 2]'")
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
    if hint not in (int, float, bool, str):
        raise UserError(
            f"'{where}' is declared as {type_name(hint)}: an option is int, float, bool, str, Literal, "
            "tuple[TYPE, ...], dict[str, TYPE], one of these or None, or a dataclass"
        )
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise UserError(f"'{where}' must be {type_name(hint)}, not {shown(value)}")
    return value


def _convert_word_or_scalar(hint: Any, choices: Sequence[Any], value: Any, where: str) -> Any:
    """A fixed word or a scalar, such as `Literal["auto"] | bool`."""
    for choice in choices:
        words = typing.get_args(choice)
        if type(value) is choice or (isinstance(value, str) and value in words):
            return value
    raise UserError(f"'{where}' must be {type_name(hint)}, not {shown(value)}")


def _convert_tagged(choices: Sequence[Any], value: Any, where: str) -> Any:
    """Several dataclasses share a field; its `Literal` type in each says which one is meant.

    Where the field is not given, it is the first.
    """
    tag = dataclasses.fields(choices[0])[0].name
    by_tag = {typing.get_args(typing.get_type_hints(choice)[tag])[0]: choice for choice in choices}
    chosen = _tag_of(value, tag, next(iter(by_tag)), where)
    if chosen not in list(by_tag):
        raise UserError(_not_among(by_tag, chosen, dotted(where, tag)))
    return read(by_tag[chosen], value, where)


def _convert_field(field: dataclasses.Field[Any], hint: Any, value: Any, where: str) -> Any:
    choice, registered = field.metadata.get("choice"), field.metadata.get("sections")
    if isinstance(value, _Typed) and (choice or registered) is not None:
        value = _as_toml(value)
    if choice is not None:
        return _convert_registered(choice, value, where)
    if registered is not None:
        return _convert_sections(registered, value, where)
    return convert(hint, value, where)


def _convert_registered(choice: Choice, value: Any, where: str) -> Any:
    """The table as the class that its tag is registered with."""
    chosen = _tag_of(value, choice.tag, choice.default_name, where)
    if not isinstance(chosen, str) or chosen not in choice.registered:
        raise UserError(
            f"{_not_among(choice.registered, chosen, dotted(where, choice.tag))} (if a plugin registers it, "
            "name the plugin in plugins = [...] or with --plugin)"
        )
    cls = choice.class_of(chosen)
    if choice.tag not in {field.name for field in dataclasses.fields(cls)}:
        value = {key: entry for key, entry in value.items() if key != choice.tag}
    return read(cls, value, where)


def _convert_sections(registered: Table[Any], value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"'{where}' must be a table of tables, not {shown(value)}")
    for name in value:
        if name not in registered or registered[name].config_class is None:
            known = [name for name, entry in registered.items() if entry.config_class is not None]
            options = f"those with options: {', '.join(known)}" if known else "none has options"
            raise UserError(f"unknown key '{dotted(where, name)}': no such {registered.what} ({options})")
    return {
        name: read(registered[name].config_class, table, dotted(where, name)) for name, table in value.items()
    }


def _tag_of(value: Any, tag: str, default: str, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise UserError(f"'{where}' must be a table of options, not {shown(value)}")
    return value.get(tag, default)


def _not_among(names: Iterable[str], chosen: Any, where: str) -> str:
    known = list(names)
    return f"'{where}' must be one of {', '.join(known)}, not {shown(chosen)}{nearest(str(chosen), known)}"


def _takes_text(hint: Any) -> bool:
    """`str`, `str | None` and choices between words."""
    if typing.get_origin(hint) in (Literal, typing.Union, types.UnionType):
        return any(argument is str or isinstance(argument, str) for argument in typing.get_args(hint))
    return hint is str


def _as_toml(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text  # further lines would be further keys


def _index(entries: list[Any], part: str, name: str) -> int:
    if not part.isdecimal() or int(part) >= len(entries):
        raise UserError(f"'{name}': '{part}' is not one of the {len(entries)} entries, counted from 0")
    return int(part)
