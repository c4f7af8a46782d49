"""The interface of every tokenizer."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from longspan.data.text import decoded, whole_lines
from longspan.errors import UserError

Ids: TypeAlias = npt.NDArray[Any]

SETTINGS = "tokenizer.json"


class TokenStream(ABC):
    """Decodes tokens one by one and returns text as soon as it is complete."""

    @abstractmethod
    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""

    @abstractmethod
    def flush(self) -> str:
        """The rest after the last token; an incomplete character becomes U+FFFD."""


class ByteStream(TokenStream):
    """For tokens whose bytes do not depend on the tokens before."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class Tokenizer(ABC):
    """Text to token ids and back; it is saved with every run."""

    form: ClassVar[str]  # what a token is; several kinds may have one form
    kind: str  # the name in the configuration, and as it is registered
    lowercase: bool = False  # whether text is lower-cased
    unknown_id: int | None = None  # the token for text outside the vocabulary

    @property
    def knows_text(self) -> bool:
        """Whether tokens have a known text; if not, bits per byte, character and word are unknown too."""
        return True

    @property
    @abstractmethod
    def vocabulary_size(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """The ids of a text; a `UserError` names what is not in the vocabulary."""

    @abstractmethod
    def encode_split(self, chunks: Iterable[bytes]) -> Iterator[Ids]:
        """The ids of a whole split, with what this tokenizer adds at its end."""

    @abstractmethod
    def pieces(self) -> list[bytes]:
        """The bytes of each token; those of a word include the blank after it."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The input of `from_settings`, as JSON."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> Tokenizer:
        """The tokenizer that `save` wrote to `folder`."""

    def stream(self) -> TokenStream:
        """A decoder for tokens that come one at a time."""
        return ByteStream(self.pieces())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens; bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream()
        return "".join([*(stream.push(int(token)) for token in ids), stream.flush()])

    def save(self, folder: Path) -> None:
        """Write everything that `load_tokenizer` needs to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"form": self.form, "kind": self.kind, **self.settings()}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


class TextTokenizer(Tokenizer):
    """A tokenizer that encodes a split text by text, each on its own: several processes can do it."""

    def texts(self, chunks: Iterable[bytes]) -> Iterator[str]:
        """The texts of a split, with what this tokenizer adds at its end."""
        return whole_lines(decoded(chunks))

    def encode_text(self, text: str) -> Ids:
        """The ids of a text of a split."""
        return self.encode(text)

    def encode_split(self, chunks: Iterable[bytes]) -> Iterator[Ids]:
        return map(self.encode_text, self.texts(chunks))


def id_type(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest unsigned integers that can hold every id."""
    return np.min_scalar_type(max(vocabulary_size - 1, 0))


def lacking(what: str, missing: Iterable[str]) -> UserError:
    """The error for text outside the vocabulary."""
    shown = sorted(set(missing))
    names = ", ".join(repr(entry) for entry in shown[:8]) + (" ..." if len(shown) > 8 else "")
    return UserError(
        f"the vocabulary does not have the {what} {names}: remove them, or train with the byte "
        "tokenizer (--data.tokenizer.kind byte)"
    )
