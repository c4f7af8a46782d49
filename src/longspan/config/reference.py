"""Every option with its type, default and help, collected from the declarations."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from longspan.config.formatting import dotted, shown, type_name
from longspan.config.schema import Choice, help_of


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
        name, hint = dotted(prefix, field.name), hints[field.name]
        if "choice" in field.metadata:
            yield from _registered(field.metadata["choice"], name)
            continue
        if "sections" in field.metadata:
            for entry, registered in field.metadata["sections"].items():
                if registered.config_class is not None:
                    yield from documented(registered.config_class, dotted(name, entry))
            continue
        inner = _tables_in(hint)
        if inner and _is_list(hint):
            yield from documented(inner[0], f"{name}.0")
            continue
        if inner:
            yield from _alternatives(inner, name)
            continue
        default = "required" if field.default is dataclasses.MISSING else shown(field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = shown(field.default_factory())
        yield Documented(name, type_name(hint), default, help_of(field))


def of_config(config: Any, prefix: str = "") -> Iterator[Documented]:
    """The options of one configuration: only those of its own classes, with its values as defaults."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = dotted(prefix, field.name), getattr(config, field.name)
        if (choice := field.metadata.get("choice")) is not None:
            tag, chosen = dotted(name, choice.tag), choice.registered.name_of(type(value))
            yield Documented(tag, " | ".join(choice.registered), shown(chosen), choice.help)
            yield from (option for option in of_config(value, name) if option.name != tag)
        elif dataclasses.is_dataclass(value):
            yield from of_config(value, name)
        elif isinstance(value, tuple | dict) and any(map(dataclasses.is_dataclass, _entries(value).values())):
            for key, entry in _entries(value).items():
                yield from of_config(entry, dotted(name, str(key)))
        elif "sections" not in field.metadata and not _tables_in(hints[field.name]):
            yield Documented(name, type_name(hints[field.name]), shown(value), help_of(field))


def _entries(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else dict(enumerate(value))


def _alternatives(tables: list[type], name: str) -> Iterator[Documented]:
    """The options of any of several tables, each once; the choice between the tables comes first."""
    seen: dict[str, Documented] = {}
    for table in tables:
        for found in documented(table, name):
            if found.name not in seen:
                seen[found.name] = found
            elif found.type != seen[found.name].type:
                both = f"{seen[found.name].type} | {found.type}"
                seen[found.name] = dataclasses.replace(seen[found.name], type=both)
    yield from seen.values()


def _registered(choice: Choice, name: str) -> Iterator[Documented]:
    """The tag, and the options of all classes that it can choose."""
    tag = dotted(name, choice.tag)
    yield Documented(tag, " | ".join(choice.registered), shown(choice.default_name), choice.help)
    classes = dict.fromkeys(map(choice.class_of, choice.registered))
    yield from (option for option in _alternatives(list(classes), name) if option.name != tag)


def _tables_in(hint: Any) -> list[Any]:
    arguments = typing.get_args(hint) or (hint,)
    return [argument for argument in arguments if dataclasses.is_dataclass(argument)]


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple
