"""Measures the tensors that a forward pass keeps for its backward pass. Shapes: B lanes, T block, D width.

A few lanes are read with `saved_tensors_hooks`, and more lanes keep proportionally more. A model that would
take too long reads shorter blocks. Weights, buffers and the carried state are not counted: they are there
before. The model and all random generators are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from longspan.flops import Shape
from longspan.hooks import added_penalties
from longspan.models import LanguageModel, Stack
from longspan.state import State

LANES = 2, 3  # not 1: with a single lane more tensors are contiguous, and fewer are copied
MAX_FLOPS = {"cpu": 5e9, "cuda": 5e13}  # of a pass; all of them take about a second
SHORTEST = 64  # tokens of a block that is read to measure
MAX_BLOCKS = 16  # that are read to fill a memory that grows


@dataclass(frozen=True)
class Line:
    """fixed + per_lane * lanes, in bytes."""

    fixed: float
    per_lane: float

    def at(self, lanes: int) -> int:
        return max(0, round(self.fixed + self.per_lane * lanes))


@dataclass(frozen=True)
class Activations:
    """What one block of tokens needs.

    `plain` is what the forward pass keeps, and `recomputed` the same with activation checkpointing: the
    inputs of all blocks of the model, and everything of the largest one. None if the model has no blocks.
    `state` is the carried state when it is largest.
    """

    plain: Line
    recomputed: Line | None
    state: Line


def measure_activations(
    model: LanguageModel, block_length: int, autocast: torch.autocast | None = None
) -> Activations:
    """Activations and carried state for blocks of this length, under `autocast` if there is one.

    A memory that grows is filled first, unless the blocks of this length take too long.
    """
    device = next(model.parameters()).device
    length = _affordable(model, block_length, device)
    reader = _Reader(model, device, autocast)
    with _undisturbed(model, device):
        whole = length == block_length
        state = reader.largest_state(length) if whole else reader.first_state()
        few, more = (reader.kept(lanes, length, state) for lanes in LANES)
        short = few if whole else reader.kept(LANES[0], length // 2, state)

    def line(kept: Callable[[_Kept], int | None]) -> Line | None:
        """What is fixed follows from the lanes; the rest grows with the length of the block."""
        of_few, of_more, of_short = kept(few), kept(more), kept(short)
        if of_few is None or of_more is None or of_short is None:
            return None
        per_lane = (of_more - of_few) / (LANES[1] - LANES[0])
        per_token = 0.0 if whole else (of_few - of_short) / (length - length // 2) / LANES[0]
        return Line(of_few - LANES[0] * per_lane, per_lane + per_token * (block_length - length))

    plain = line(_Kept.plain)
    assert plain is not None
    return Activations(plain, line(_Kept.recomputed), state=Line(0, _size(state)))


class _Kept:
    """The tensors that one forward pass keeps, each counted once; those in `known` not at all."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {_address(tensor) for tensor in known}
        self._outside: dict[int, int] = {}  # bytes by address
        self._inputs: dict[int, int] = {}  # of blocks
        self._blocks: list[dict[int, int]] = []
        self._alive: list[Tensor] = []  # so that no address is used twice

    def plain(self) -> int:
        return sum(reduce(or_, self._blocks, self._outside).values())

    def recomputed(self) -> int | None:
        """With activation checkpointing; None if there are no blocks."""
        if not self._blocks:
            return None
        largest = max(sum(block.values()) for block in self._blocks)
        return sum((self._inputs | self._outside).values()) + largest

    def counting(self) -> saved_tensors_hooks:
        return self._counting(self._outside)

    def around_block(self, block: nn.Module, h_BTD: Tensor, state: State, *more: Any) -> Any:
        for tensor in tree_leaves((h_BTD, more)):
            if isinstance(tensor, Tensor):
                self._count(tensor, self._inputs)
        self._blocks.append({})
        with self._counting(self._blocks[-1]):
            return block(h_BTD, state, *more)

    def release(self) -> None:
        self._alive.clear()

    def _counting(self, counts: dict[int, int]) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: self._count(tensor, counts), lambda tensor: tensor)

    def _count(self, tensor: Tensor, counts: dict[int, int]) -> Tensor:
        if _address(tensor) not in self._known:
            counts[_address(tensor)] = tensor.untyped_storage().nbytes()
        self._alive.append(tensor.detach())
        return self._alive[-1]  # the tensor itself would refer to the graph that keeps it


class _Reader:
    def __init__(self, model: LanguageModel, device: torch.device, autocast: torch.autocast | None) -> None:
        self.model, self.device = model, device
        self.autocast = autocast or torch.autocast(device.type, enabled=False)

    def kept(self, lanes: int, length: int, state: State) -> _Kept:
        state = State.join([state] * lanes)
        known = [*self.model.parameters(), *self.model.buffers(), *state.flatten().values()]
        kept = _Kept(known)
        text_BT = self._tokens(lanes, length + 1)
        with ExitStack() as contexts:
            contexts.enter_context(torch.enable_grad())
            contexts.enter_context(self.autocast)
            contexts.enter_context(kept.counting())
            contexts.enter_context(added_penalties())
            if isinstance(self.model, Stack):
                contexts.enter_context(_around_block(self.model, kept))
            hidden_BTD, _ = self.model(text_BT[:, :-1], state)
            self.model.head.nll(hidden_BTD, text_BT[:, 1:])
        kept.release()
        return kept

    @torch.no_grad()
    def largest_state(self, length: int) -> State:
        """The state of one lane in full: a memory may grow from block to block, or change its precision."""
        states = [self.model.initial_state(1)]
        while len(states) <= MAX_BLOCKS:
            states.append(self._read(states[-1], length))
            if _shapes(states[-1]) in map(_shapes, states[:-1]):
                break
        return max(states[1:], key=_size)

    @torch.no_grad()
    def first_state(self) -> State:
        """The state of one lane before a text, in the precision that it has later."""
        state = self.model.initial_state(1)
        after = self._read(state, 1).flatten()
        return State.unflatten({name: leaf.to(after[name].dtype) for name, leaf in state.flatten().items()})

    def _read(self, state: State, length: int) -> State:
        with self.autocast:
            _, after = self.model(self._tokens(1, length), state)
        return after

    def _tokens(self, lanes: int, length: int) -> Tensor:
        return torch.randint(self.model.vocabulary_size, (lanes, length), device=self.device)


def _affordable(model: LanguageModel, block_length: int, device: torch.device) -> int:
    """The length of the blocks to measure with."""
    flops = max(LANES) * block_length * model.flops(Shape(max(LANES), block_length))
    most = MAX_FLOPS.get(device.type, MAX_FLOPS["cpu"])
    if flops <= most:
        return block_length
    return min(block_length, max(SHORTEST, int(block_length * most / flops)))


@contextmanager
def _undisturbed(model: LanguageModel, device: torch.device) -> Iterator[None]:
    """Inside, the model is in training; random generators, buffers and gradients are as before afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    was_training = model.training
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            model.train()
            yield
        finally:
            model.train(was_training)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@contextmanager
def _around_block(model: Stack, kept: _Kept) -> Iterator[None]:
    before, model.around_block = model.around_block, kept.around_block
    try:
        yield
    finally:
        model.around_block = before


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shapes(state: State) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in state.flatten().values()]


def _size(state: State) -> int:
    return sum(map(_bytes, state.flatten().values()))
