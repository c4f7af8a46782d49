"""Options changed from Python: `model__num_layers=6`, or `{"model.num_layers": 6}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from longspan.config.schema import override
from longspan.errors import UserError


def override_all(table: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set the values in a TOML table as the command line would; `schema.read` then checks them.

    In a name `__` stands for a dot. None removes the value of a recipe.
    """
    for name, value in values.items():
        override(table, name.replace("__", "."), _as_text(name, value))


def _as_text(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str | PurePath):
        return str(value)
    try:
        return json.dumps(value)
    except TypeError:
        raise UserError(f"'{name}' must be text, a number, true or false, or a list of them") from None
