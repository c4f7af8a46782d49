"""What every model is: `tokens, state -> hidden, state`.

Training, evaluation, generation, export and serving are written once, against this class.
Shapes: B batch, T block, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from longspan.state import State

if TYPE_CHECKING:
    from longspan.output import OutputHead


class LanguageModel(nn.Module, ABC):
    """A model that reads text in order and carries a state from block to block.

    `block_invariant` declares whether the outputs depend only on the text and not on how it was cut
    into blocks; the contract tests hold the model to what it declares.
    """

    head: OutputHead
    vocabulary_size: int
    block_invariant: bool = True

    @abstractmethod
    def initial_state(self, batch_size: int) -> State:
        """The state of `batch_size` texts that have not begun."""

    @abstractmethod
    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one block: hidden_BTD and the state after it. The state that came in is not changed."""

    def log_probs(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        """Log-probabilities of the next token at every position, [B, T, V], and the new state."""
        hidden_BTD, state = self(tokens_BT, state)
        return self.head.log_probs(hidden_BTD), state

    def decoding_state(self, state: State) -> State:
        """The same state in the form that makes single tokens cheap while the weights stay fixed."""
        return state

    def shape_key(self, state: State) -> Hashable | None:
        """What decides, besides the shapes that go in, which operations `forward` runs on which shapes.

        While it stays the same a recording of them may be replayed; None if for a state of these shapes
        `forward` asks the device.
        """
        return ()

    def penalties(self) -> dict[str, Tensor]:
        """Named terms added to the training loss and to nothing else."""
        return {}

    def begin_epoch(self, number: int) -> None:
        """Called before every step of a run: the text is read for the first time (0), the second (1) ..."""

    def after_update(self) -> None:
        """Called once after every optimizer step: project parameters, refresh what is derived from them."""

    def diagnostics(self) -> dict[str, Tensor]:
        """What there is to see inside, by name: spans per layer and head, and the like."""
        return {}
