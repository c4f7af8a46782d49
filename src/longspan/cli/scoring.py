"""What all forms of `longspan eval` share: the title above a score, and notes below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from longspan.cli.figures import lost_text

if TYPE_CHECKING:
    from longspan.language_model import LoadedModel


def title(where: Mapping[str, str]) -> str:
    """Which checkpoint of which run was scored on which text."""
    from longspan.data.corpus import WHOLE

    part = (
        f"all of {where['corpus']}"
        if where["split"] == WHOLE
        else "the {split} split of {corpus}".format(**where)
    )
    return "{run} ({checkpoint} checkpoint) on ".format(**where) + part


def notes_on(lm: LoadedModel, unknown: int, tokens: int) -> list[str]:
    """What to know about a score of so many tokens, some of them unknown."""
    notes = lost_text(lm.tokenizer, [(unknown, tokens)])
    if lm.config.search is not None:
        notes.append("this is a search: every block is the mixture of its candidates (soft)")
    return notes
