"""Counting and ordering symbols.

Counts are dictionaries in order of first appearance, so every order can be derived from them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from longspan.data.text import whole_lines
from longspan.data.workers import Workers, processes_for
from longspan.data.workers.tasks import UTF_8

EOS = "<eos>"
UNKNOWN = "<unk>"

Symbol = TypeVar("Symbol", int, str)


def in_order(counts: dict[Symbol, int], order: Literal["frequency", "first-seen", "sorted"]) -> list[Symbol]:
    """The symbols: most frequent first (ties: seen first comes first), as they were first seen, or sorted."""
    if order == "sorted":
        return sorted(counts)
    return list(counts) if order == "first-seen" else sorted(counts, key=lambda symbol: -counts[symbol])


def words_of(text: str) -> list[str]:
    """Words are separated by whitespace; the end of a line is a word too."""
    return text.replace("\n", f" {EOS} ").split()


def count_words(texts: Iterable[str], num_bytes: int = 0) -> dict[str, int]:
    """Words of a whole split, of about so many bytes; a last line without a newline gets an end too."""
    ended = True

    def followed() -> Iterator[str]:
        nonlocal ended
        for text in whole_lines(texts):
            yield text
            ended = text.endswith("\n")

    counts: Counter[str] = Counter()
    processes = processes_for(num_bytes)
    if processes == 1:
        for text in followed():
            counts.update(words_of(text))
    else:
        with Workers("count-words", processes) as workers:
            for part in workers.map(text.encode(*UTF_8) for text in followed()):
                counts.update(json.loads(part))
    if not ended:
        counts[EOS] += 1
    return counts


def count_bytes(chunks: Iterable[bytes]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for chunk in chunks:
        here = np.bincount(np.frombuffer(chunk, dtype=np.uint8), minlength=256)
        present = np.flatnonzero(here).tolist()
        for byte in sorted(set(present) - counts.keys(), key=chunk.find):
            counts[byte] = 0
        for byte in present:
            counts[byte] += int(here[byte])
    return counts


def count_characters(texts: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for text in texts:
        here = np.bincount(code_points(text))
        present = [chr(code) for code in np.flatnonzero(here).tolist()]
        for character in sorted(set(present) - counts.keys(), key=text.find):
            counts[character] = 0
        for character in present:
            counts[character] += int(here[ord(character)])
    return counts


def code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
