"""Streams of bytes as streams of text.

Bytes that are not UTF-8 become lone surrogates (Python's `surrogateescape`), so nothing is lost.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

_LONGEST_WORD = 1 << 28  # characters


def decoded(chunks: Iterable[bytes], *, lowercase: bool = False) -> Iterator[str]:
    """The same text; a character across two chunks comes with the later one."""
    texts = _decoded(chunks)
    # In whole lines: lower case can depend on the next character, such as a sigma at the end of a word.
    return map(str.lower, whole_lines(texts)) if lowercase else texts


def _decoded(chunks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for chunk in chunks:
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)


def whole_lines(texts: Iterable[str]) -> Iterator[str]:
    """The same text, cut only after a newline or, if a line is longer than a chunk, before a blank.

    A word without end, which could be larger than memory, is cut where it is very long.
    """
    kept: list[str] = []
    for text in texts:
        cut = text.rfind("\n") + 1 or max(text.rfind(" "), 0)
        if cut:
            yield "".join([*kept, text[:cut]])
            kept = []
        elif sum(map(len, kept)) >= _LONGEST_WORD:
            yield "".join(kept)
            kept = []
        kept.append(text[cut:])
    rest = "".join(kept)
    if rest:
        yield rest


def lines(text: str) -> list[str]:
    """The lines of a text with their newlines; unlike `splitlines`, only a newline ends a line."""
    parts = [f"{line}\n" for line in text.split("\n")]
    parts[-1] = parts[-1][:-1]
    return parts if parts[-1] else parts[:-1]


def readable(text: str) -> str:
    """The same text with U+FFFD where bytes were not UTF-8, for code that does not accept surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
