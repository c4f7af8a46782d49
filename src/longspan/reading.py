"""Reading tokens into a state, block by block. Shapes: B = 1 text, T tokens, D width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from longspan.models.interface import LanguageModel
    from longspan.state import State

Ids: TypeAlias = "Sequence[int] | npt.NDArray[Any] | Tensor"
Progress: TypeAlias = "Callable[[int, int], None]"  # tokens read so far, and all of them

READ_BLOCK = 512  # tokens per block: it bounds the memory needed for a long text
TAIL = 16  # last tokens to keep: the text after them may depend on them (blanks, incomplete characters)


@dataclass(frozen=True)
class TextState:
    """The state after a text: everything needed to continue as if reading had never stopped.

    A value: continuing from it does not change it, and any number of continuations can start from it.
    """

    state: State  # of the model
    hidden_D: Tensor  # after the last token; it predicts the next one
    tail: tuple[int, ...]  # the last tokens
    tokens: int  # number of tokens read


def begin(model: LanguageModel, ids: Ids, progress: Progress | None = None) -> TextState:
    """The state after the first tokens of a text, at least one."""
    for _, after in blocks(model, ids, None):
        if progress is not None:
            progress(after.tokens, len(ids))
    return after


def read(
    model: LanguageModel,
    ids: Ids,
    before: TextState,
    length: int | None = None,
    progress: Progress | None = None,
) -> TextState:
    """The state after more tokens; `before` if there are none."""
    start = before.tokens
    for _, before in blocks(model, ids, before, length):  # noqa: B020 (from the old one to the new one)
        if progress is not None:
            progress(before.tokens - start, len(ids))
    return before


def nats_of(
    model: LanguageModel, ids: Ids, before: TextState, length: int | None = None
) -> tuple[list[float], TextState]:
    """The nats of each token, given `before` and the tokens before it, and the state after them."""
    nats, after = list[float](), before
    for of_block, after in nats_in_blocks(model, ids, before, length):  # noqa: B007 (the last one is returned)
        nats += of_block
    return nats, after


def nats_in_blocks(
    model: LanguageModel, ids: Ids, before: TextState, length: int | None = None
) -> Iterator[tuple[list[float], TextState]]:
    """The nats of the tokens of every block, and the state after it."""
    ids_T = torch.as_tensor(ids, dtype=torch.long, device=before.hidden_D.device)
    done = 0
    for hidden_TD, after in blocks(model, ids_T, before, length):
        asked_TD = torch.cat([before.hidden_D[None], hidden_TD[:-1]])
        targets_T = ids_T[done : done + len(hidden_TD)]
        with torch.no_grad():
            nats: list[float] = model.head.nll(asked_TD[None], targets_T[None])[0].tolist()
        before, done = after, done + len(hidden_TD)
        yield nats, after


def blocks(
    model: LanguageModel,
    ids: Ids,
    before: TextState | None,
    length: int | None = None,
) -> Iterator[tuple[Tensor, TextState]]:
    """The hidden states of every block of `length` tokens, [T, D], and the state after it."""
    state = model.initial_state(1) if before is None else before.state
    tail, count = ((), 0) if before is None else (before.tail, before.tokens)
    ids_BT = torch.as_tensor(ids, dtype=torch.long, device=next(model.parameters()).device)[None]
    for block_BT in torch.split(ids_BT, length or READ_BLOCK, dim=1) if ids_BT.shape[1] else ():
        with torch.no_grad():
            hidden_BTD, state = model(block_BT, state)
        tail = (*tail, *block_BT[0, -TAIL:].tolist())[-TAIL:]
        count += block_BT.shape[1]
        yield hidden_BTD[0], TextState(state, hidden_BTD[0, -1].clone(), tail, count)
