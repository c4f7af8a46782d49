"""JSON that every reader accepts: numbers that are not finite become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON; NaN and the infinities, for which JSON has no words, are null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except (ValueError, TypeError):  # NaN, or a mapping that is no dict: rare, and the check below is slow
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
