"""Stop strings: generated text ends before the first of some strings."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.errors import UserError


class StopStrings:
    """Text pushed piece by piece. What may be the beginning of a stop string is held back.

    `found` is the stop string that the text ended with; None until then.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if isinstance(strings, str) or not all(strings):
            raise UserError("stop strings are a list of texts, none of them empty")
        self._strings = tuple(strings)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that can be shown after this piece."""
        text = self._held + piece
        ends = {text.find(string): string for string in reversed(self._strings) if string in text}
        if ends:
            end = min(ends)
            self.found, self._held = ends[end], ""
            return text[:end]
        keep = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that `string` begins with."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if string.startswith(text[-size:])), 0)
