"""Text for a terminal: control characters are shown, not sent.

A model may generate any character, and a file name may contain any. A terminal would obey some of them: ESC
and BEL can change its title, its colours or its contents.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but newline and tab


def visible(text: str) -> str:
    """The text with control characters written as `\\x1b`; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@contextmanager
def control_characters_shown() -> Iterator[None]:
    """Inside, what is printed on a terminal is made `visible`. Output to a file or a pipe is unchanged."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_filtered(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def console(stream: TextIO | None = None, *, stderr: bool = False, width: int | None = None) -> Console:
    """rich's console, whose own control characters are sent; text given to it must be made `visible`."""
    from rich.console import Console

    stream = stream or (sys.stderr if stderr else sys.stdout)
    return Console(file=getattr(stream, "unfiltered", stream), width=width)


class _Filter:
    """A stream that makes visible what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def unfiltered(self) -> TextIO:
        return self._stream

    def write(self, text: str) -> int:
        self._stream.write(visible(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _filtered(stream: TextIO) -> TextIO:
    return cast(TextIO, _Filter(stream)) if stream is not None and stream.isatty() else stream
