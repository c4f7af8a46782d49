"""An additional embedding layer: `(tokens_BT, state) -> (e_BTD, state)`. B batch, T block, D width."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from longspan.state import State


class InputLayer(nn.Module, ABC):
    """Its output is added to the embeddings of the tokens. A layer without memory has an empty state."""

    def initial_state(self, batch_size: int) -> State:
        """The state of `batch_size` texts that have not begun."""
        return State({})

    @abstractmethod
    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        """What to add to the embeddings, and the state after these tokens."""

    def compile_parts(self) -> None:
        """Compile what has the same shapes in every step: by default the whole layer."""
        self.compile()
