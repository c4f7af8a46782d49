"""Streams of bytes as streams of text.

Bytes that are not UTF-8 become lone surrogates (Python's `surrogateescape`): nothing is lost, nothing fails.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator


def decoded(chunks: Iterable[bytes], *, lowercase: bool = False) -> Iterator[str]:
    """The same text; a character that two chunks share comes whole with the later one."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for chunk in chunks:
        text = decoder.decode(chunk)
        yield text.lower() if lowercase else text
    yield decoder.decode(b"", final=True)


def whole_words(texts: Iterable[str]) -> Iterator[str]:
    """The same text, cut only after a blank or the end of a line."""
    kept: list[str] = []
    for text in texts:
        cut = max(text.rfind("\n"), text.rfind(" ")) + 1
        if cut:
            yield "".join([*kept, text[:cut]])
            kept = []
        kept.append(text[cut:])
    rest = "".join(kept)
    if rest:
        yield rest
