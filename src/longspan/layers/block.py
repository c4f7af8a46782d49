"""The interface of all blocks of a stack: `(h_BTD, state) -> (h_BTD, state)`. B batch, T block, D width."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

from torch import Tensor, nn

from longspan.errors import UserError
from longspan.state import State

Step: TypeAlias = "Callable[..., Tensor]"
"""Single tokens through a block, h_1BD -> h_1BD: texts are rows of one matrix product. See also `RowStep`.

A block with value embeddings also gets those of the tokens, [1, B, D].
"""

PrepareState: TypeAlias = "Callable[[State], State]"


class Block(nn.Module, ABC):
    """One step of a stack. A block without memory has an empty state."""

    from_plugin: bool = False

    def initial_state(self, batch_size: int) -> State:
        """The state of `batch_size` texts that have not begun."""
        return State({})

    @abstractmethod
    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        """The hidden states after this block, and its state after them."""

    def shape_key(self) -> Hashable:
        """Everything, besides input shapes, that decides which operations `forward` runs on which shapes."""
        return ()

    def compile_parts(self) -> None:
        """Compile what has the same shapes in every step: by default the whole block."""
        self.compile()

    def decoding_state(self, state: State) -> State:
        """The same state in a form that makes single tokens cheap while the weights are fixed."""
        return state

    def step_from(self, state: State) -> Step | None:
        """`forward` for single tokens: it starts from a state and updates its own copy.

        For evaluation with fixed weights: what does not depend on the token may be prepared. On a GPU a step
        can be captured as a CUDA graph; its buffers keep their addresses. None if there is no such step.
        """
        return carried(self, self.decoding_state, state)


class RowStep(ABC):
    """A `Step` whose texts can be replaced while others go on."""

    @abstractmethod
    def __call__(self, h_1BD: Tensor, *more: Tensor) -> Tensor: ...

    @abstractmethod
    def begin(self, state: State) -> RowStep:
        """The same step for the texts of a state; it shares what was prepared from the weights."""

    @abstractmethod
    def put(self, row: int, source: Any, source_row: int = 0) -> None:
        """Replace the text of a row by one of `source`, a step of the same block or model."""


class MemorylessStep(RowStep):
    """The step of a block without memory."""

    def __init__(self, read: Step) -> None:
        self._read = read

    def __call__(self, h_1BD: Tensor, *more: Tensor) -> Tensor:
        return self._read(h_1BD, *more)

    def begin(self, state: State) -> MemorylessStep:
        return self

    def put(self, row: int, source: Any, source_row: int = 0) -> None:
        """There is nothing to replace."""


class KeptStep(RowStep):
    """The step by `forward` of a block whose state has a fixed shape, on any device.

    The new state is written over the old one: a captured step reads and writes the same buffers every time.
    """

    def __init__(self, block: Block, state: State) -> None:
        self._block = block
        batch_size = len(next(iter(state.flatten().values())))
        # In the precision of the weights: the text may have been read in another one.
        self._kept = block.initial_state(batch_size)
        self._keep(state)

    def __call__(self, h_1BD: Tensor, *more: Tensor) -> Tensor:
        inputs = (x.transpose(0, 1) for x in more)
        h_B1D, after = self._block(h_1BD.transpose(0, 1), self._kept, *inputs)
        self._keep(after)
        return h_B1D.transpose(0, 1)

    def begin(self, state: State) -> KeptStep:
        return KeptStep(self._block, state)

    def put(self, row: int, source: Any, source_row: int = 0) -> None:
        assert isinstance(source, KeptStep)
        others = source._kept.flatten()
        for name, leaf in self._kept.flatten().items():
            leaf[row] = others[name][source_row]

    def _keep(self, state: State) -> None:
        leaves = state.flatten()
        for name, leaf in self._kept.flatten().items():
            leaf.copy_(leaves[name])


class CarriedStep(RowStep):
    """Keeps the state of a block, or of a model, from one call of `forward` to the next.

    `prepare` gives the form of the state for decoding.
    """

    def __init__(
        self, read: Callable[..., tuple[Tensor, State]], prepare: PrepareState, state: State
    ) -> None:
        self._read, self._prepare = read, prepare
        self.state = prepare(state)

    def __call__(self, x_1B: Tensor, *more: Tensor) -> Tensor:
        h_BTD, self.state = self._read(x_1B.transpose(0, 1), self.state, *(x.transpose(0, 1) for x in more))
        return h_BTD.transpose(0, 1)

    def begin(self, state: State) -> CarriedStep:
        return CarriedStep(self._read, self._prepare, state)

    def put(self, row: int, source: Any, source_row: int = 0) -> None:
        assert isinstance(source, CarriedStep)
        leaves, others = self.state.flatten(), source.state.flatten()
        replaced = {name: leaf.clone() for name, leaf in leaves.items()}  # a state is never changed in place
        for name, leaf in replaced.items():
            leaf[row] = others[name][source_row]
        self.state = State.unflatten(replaced)


def carried(read: Callable[..., tuple[Tensor, State]], prepare: PrepareState, state: State) -> RowStep | None:
    """The step by `forward`; only on a CPU."""
    if any(leaf.device.type != "cpu" for leaf in state.flatten().values()):
        return None
    return CarriedStep(read, prepare, state)


def checked(result: Any, block: nn.Module, name: str, h_BTD: Tensor) -> tuple[Tensor, State]:
    """What a block returned for `h_BTD`; a `UserError` that names the block if it is something else."""
    if isinstance(result, tuple) and len(result) == 2:
        out_BTD, after = result
        if isinstance(out_BTD, Tensor) and out_BTD.shape == h_BTD.shape and isinstance(after, State):
            return out_BTD, after
    parts = result if isinstance(result, tuple) else (result,)
    said = ", ".join(
        f"{type(part).__name__}{list(part.shape) if isinstance(part, Tensor) else ''}" for part in parts
    )
    raise UserError(
        f"block {name} ({type(block).__name__}) must return hidden states of the shape {list(h_BTD.shape)} "
        f"and a State, not ({said})"
    )
