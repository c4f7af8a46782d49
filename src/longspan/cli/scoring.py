"""What all forms of `longspan eval` share: the title above a score."""

from __future__ import annotations

from collections.abc import Mapping


def title(where: Mapping[str, str]) -> str:
    """Which checkpoint of which run was scored on which text."""
    from longspan.data.corpus import WHOLE

    part = (
        f"all of {where['corpus']}"
        if where["split"] == WHOLE
        else "the {split} split of {corpus}".format(**where)
    )
    return "{run} ({checkpoint} checkpoint) on ".format(**where) + part
