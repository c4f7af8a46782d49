"""How options, values and types are written in messages and reference pages."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal


def dotted(where: str, name: str) -> str:
    """The full name of an option inside the table `where`."""
    return f"{where}.{name}" if where else name


def shown(value: Any) -> str:
    """A value as a user would write it, on one line."""
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)


def type_name(hint: Any) -> str:
    """What kind of value an option takes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin is tuple:
        return f"a list of {type_name(arguments[0])}"
    if origin is dict:
        return "a table"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in arguments if a is not type(None))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names[hint] if hint in names else str(hint)
