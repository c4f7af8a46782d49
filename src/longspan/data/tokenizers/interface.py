"""What every tokenizer offers."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from longspan.errors import UserError

Ids: TypeAlias = npt.NDArray[Any]

SETTINGS = "tokenizer.json"


class TokenStream(ABC):
    """Tokens in, text out, as early as the text is certain."""

    @abstractmethod
    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is still in pieces."""

    @abstractmethod
    def flush(self) -> str:
        """What is left when no more tokens come; an incomplete character becomes U+FFFD."""


class ByteStream(TokenStream):
    """For tokens that stand for the same bytes whatever came before."""

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
    """Text to token ids and back; a value that is saved with every run."""

    form: ClassVar[str]  # what a token is; several kinds may have one form
    kind: str  # as the configuration calls it, and as it is registered
    lowercase: bool = False  # whether upper case is lost
    unknown_id: int | None = None  # the token that stands for whatever the vocabulary lacks

    @property
    @abstractmethod
    def vocabulary_size(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """The ids of a text; a `UserError` names what the vocabulary lacks."""

    @abstractmethod
    def encode_split(self, chunks: Iterable[bytes]) -> Iterator[Ids]:
        """The ids of a whole split, with whatever this way of preparing adds at its end."""

    @abstractmethod
    def pieces(self) -> list[bytes]:
        """The text that each token stands for; that of a word includes the blank after it."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What `from_settings` needs, as JSON."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> Tokenizer:
        """The tokenizer that `save` put into `folder`."""

    def stream(self) -> TokenStream:
        """A decoder for tokens that come one at a time."""
        return ByteStream(self.pieces())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens; bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream()
        return "".join([*(stream.push(int(token)) for token in ids), stream.flush()])

    def save(self, folder: Path) -> None:
        """Write everything `load_tokenizer` needs into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"form": self.form, "kind": self.kind, **self.settings()}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def id_type(vocabulary_size: int) -> np.dtype[Any]:
    """The smallest unsigned integers that can hold every id."""
    return np.min_scalar_type(max(vocabulary_size - 1, 0))


def lacking(what: str, missing: Iterable[str]) -> UserError:
    """The error for text that a vocabulary cannot say."""
    shown = sorted(set(missing))
    names = ", ".join(repr(entry) for entry in shown[:8]) + (" ..." if len(shown) > 8 else "")
    return UserError(
        f"the vocabulary lacks the {what} {names}: leave them out, or train with the byte tokenizer"
    )
