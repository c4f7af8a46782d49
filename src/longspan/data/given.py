"""Tokens that a program gives instead of a corpus: arrays in memory, or blocks from an iterator.

Shapes: B lanes, T tokens of a block.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.data.corpus import SPLITS
from longspan.data.lanes import LanePosition, TokenBlock
from longspan.data.token_file import Counted
from longspan.data.tokenizers import Tokenizer
from longspan.errors import UserError, nearest

_CHUNK = 1 << 20  # tokens that are looked at together

Blocks: TypeAlias = "Iterable[Any] | Callable[[int], Iterable[Any]]"


@dataclass(frozen=True)
class TokenArray:
    """A split in memory. How much text it stands for is known only if its tokenizer is."""

    tokens: npt.NDArray[Any]
    num_bytes: int | None = None
    num_characters: int | None = None
    num_words: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)


class BlockStream:
    """Blocks of training tokens from an iterable, or from a function that gives those from a number on.

    A block is an integer array [B, T + 1], a pair of arrays (tokens, targets) of [B, T], or a triple with a
    flag that is true where the carried state must begin anew. Only a function can go back to a position, so
    only with a function can a run be resumed.
    """

    start = LanePosition()

    def __init__(self, blocks: Blocks, vocabulary_size: int) -> None:
        self._blocks = blocks
        self._vocabulary_size = vocabulary_size
        self._shape: tuple[int, int] | None = None
        self._iterator: Iterator[Any] | None = None
        self._upcoming = 0  # the number of the block that the iterator gives next
        self._latest: TokenBlock | None = None  # asked for again where a new stage begins

    @property
    def can_go_back(self) -> bool:
        return callable(self._blocks)

    def expect(self, batch_size: int, longest: int) -> None:
        """Every block must have this many lanes, and at most `longest` tokens in each."""
        self._shape = batch_size, longest

    def next(self, position: LanePosition) -> TokenBlock | None:
        """The block at `position`; nothing when the blocks have ended."""
        number = position.blocks
        if self._latest is not None and self._latest.position.blocks == number + 1:
            return self._latest
        if self._iterator is None or self._upcoming != number:
            self._iterator = self._from(number)
            self._upcoming = number
        try:
            given = next(self._iterator)
        except StopIteration:
            return None
        self._upcoming += 1
        tokens_BT, targets_BT, begins = self._checked(given, number)
        after = LanePosition(number + 1, position.offset + tokens_BT.shape[1], position.epoch)
        self._latest = TokenBlock(tokens_BT, targets_BT, begins or number == 0, after)
        return self._latest

    def epoch_length(self, epoch: int) -> float:
        return math.inf

    def _from(self, number: int) -> Iterator[Any]:
        if callable(self._blocks):
            return iter(self._blocks(number))
        if number or self._iterator is not None:
            raise UserError(
                "training blocks from an iterator are read once: to go back to an earlier block, give a "
                "function that returns the blocks from a number on"
            )
        return iter(self._blocks)

    def _checked(self, given: Any, number: int) -> tuple[Tensor, Tensor, bool]:
        name, begins = f"training block {number}", False
        if isinstance(given, tuple):
            if len(given) not in (2, 3):
                raise UserError(f"{name} must be (tokens, targets) or (tokens, targets, begins)")
            tokens, targets, begins = given if len(given) == 3 else (*given, False)
            tokens, targets = (as_integers(part, name, dimensions=2) for part in (tokens, targets))
        else:
            both = as_integers(given, name, dimensions=2)
            tokens, targets = both[:, :-1], both[:, 1:]
        if tokens.shape != targets.shape or tokens.size == 0:
            raise UserError(f"{name} has tokens of shape {tokens.shape} and targets of {targets.shape}")
        if self._shape is not None and (
            tokens.shape[0] != self._shape[0] or tokens.shape[1] > self._shape[1]
        ):
            lanes, longest = self._shape
            raise UserError(
                f"{name} has {tokens.shape[0]} lanes of {tokens.shape[1]} tokens: training.batch_size is "
                f"{lanes} and training.block_length {longest}"
            )
        for part in (tokens, targets):
            _check_range(part, self._vocabulary_size, name)
        tokens_BT, targets_BT = (torch.from_numpy(part.astype(np.int64)) for part in (tokens, targets))
        return tokens_BT, targets_BT, bool(begins)


@dataclass(frozen=True)
class GivenTokens:
    """What a run trains on and is scored on, where a program gives the tokens."""

    fingerprint: str
    tokenizer: Tokenizer
    splits: dict[str, TokenArray]
    blocks: BlockStream | None  # instead of the train split
    name: str = field(default="the tokens that were given", init=False)


def given_tokens(data: Mapping[str, Any], tokenizer: Tokenizer) -> GivenTokens:
    """The splits of `data`: `train` and `valid`, and `test` if there is one.

    Each is a one-dimensional array of token ids; `train` may be blocks instead (see `BlockStream`). How much
    text tokens stand for is what `tokenizer` makes of them, and is not known if they are only numbers.
    """
    for split in data:
        if split not in SPLITS:
            raise UserError(f"data has a split '{split}'{nearest(split, SPLITS)} (train, valid and test)")
    for split in ("train", "valid"):
        if split not in data:
            raise UserError(f"data has no '{split}' split: give arrays of token ids for train and valid")
    blocks = None
    if not _is_array(data["train"]):
        blocks = BlockStream(data["train"], tokenizer.vocabulary_size)
    splits = {
        split: token_array(data[split], tokenizer, f"the {split} split")
        for split in SPLITS
        if split in data and (split != "train" or blocks is None)
    }
    return GivenTokens(_fingerprint(splits, tokenizer), tokenizer, splits, blocks)


def token_array(ids: Any, tokenizer: Tokenizer, name: str = "data") -> TokenArray:
    """Token ids as a split, once they are known to be ids of this tokenizer."""
    tokens = as_integers(ids, name, dimensions=1)
    if len(tokens) == 0:
        raise UserError(f"{name} is empty: give at least two tokens")
    for chunk in _chunks(tokens):
        _check_range(chunk, tokenizer.vocabulary_size, name)
    if not tokenizer.knows_text:
        return TokenArray(tokens)
    pieces = tokenizer.pieces()
    text = Counted(b"".join([pieces[token] for token in chunk]) for chunk in _chunks(tokens))
    for _ in text:
        pass
    return TokenArray(tokens, text.num_bytes, text.num_characters, text.num_words)


def as_integers(values: Any, name: str, dimensions: int) -> npt.NDArray[Any]:
    """A numpy or torch array, or nested lists, as an array of integers with so many dimensions."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != dimensions or array.dtype.kind not in "iu":
        raise UserError(
            f"{name} must be an integer array with {dimensions} dimension{'s' * (dimensions > 1)}, not "
            f"{array.dtype} of shape {array.shape}"
        )
    return array


def _is_array(values: Any) -> bool:
    is_list = (
        isinstance(values, list | tuple)
        and len(values) > 0
        and all(isinstance(value, int | np.integer) for value in values)
    )
    return isinstance(values, Tensor | np.ndarray) or is_list


def _check_range(tokens: npt.NDArray[Any], vocabulary_size: int, name: str) -> None:
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        raise UserError(f"{name} has the token {wrong}, but the vocabulary is 0 to {vocabulary_size - 1}")


def _fingerprint(splits: Mapping[str, TokenArray], tokenizer: Tokenizer) -> str:
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{tokenizer.vocabulary_size} {[(name, len(a)) for name, a in splits.items()]}".encode())
    for array in splits.values():
        for chunk in _chunks(array.tokens):
            digest.update(chunk.astype("<i8").tobytes())
    return digest.hexdigest()


def _chunks(tokens: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(tokens), _CHUNK):
        yield tokens[start : start + _CHUNK]
