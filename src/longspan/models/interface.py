"""What every model is: `tokens, state -> hidden, state`.

Training, evaluation, generation, export and serving are written once, against this class.
Shapes: B batch, T block, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from longspan import hooks
from longspan.flops import Shape, flops_inside
from longspan.state import State

if TYPE_CHECKING:
    from longspan.layers.block import Step
    from longspan.output import OutputHead


class LanguageModel(nn.Module, ABC):
    """A model that reads text in order and carries a state from block to block.

    `block_invariant` declares whether the outputs depend only on the text and not on how it was cut
    into blocks; the contract tests hold the model to what it declares.

    The last methods are the hooks of `longspan.hooks`. They ask all modules inside the model; a model with
    something to add overrides them, and calls `super()` for the answers of its modules.
    """

    head: OutputHead
    vocabulary_size: int
    block_invariant: bool = True
    collects_hooks = True  # a model around this one does not ask the modules inside it again

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_refresh_after_loading)  # type: ignore[no-untyped-call]

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

    def step_from(self, state: State) -> Step | None:
        """`forward` for single tokens, tokens_1B -> hidden_1BD, going on from a state; see `Block.step_from`.

        None where the model has no faster way than `forward`.
        """
        return None

    def shape_key(self, state: State) -> Hashable | None:
        """What decides, besides the shapes that go in, which operations `forward` runs on which shapes.

        While it stays the same a recording of them may be replayed; None if for a state of these shapes
        `forward` asks the device.
        """
        return ()

    def penalties(self) -> dict[str, Tensor]:
        """Named terms added to the training loss and to nothing else."""
        return hooks.penalties(self)

    def begin_epoch(self, number: int) -> None:
        """Called before every step of a run: the text is read for the first time (0), the second (1) ..."""
        hooks.ask(self, "begin_epoch", number)

    def after_update(self) -> None:
        """Called once after every optimizer step."""
        hooks.ask(self, "after_update")
        self.refresh()

    def refresh(self) -> None:
        """Derive from the weights what is derived from them.

        `after_update` and `load_state_dict` do so; after any other change of the weights call it.
        """
        hooks.ask(self, "refresh")

    def diagnostics(self) -> dict[str, Tensor]:
        """What there is to see inside, by name: scalars for the metrics, and tensors."""
        return hooks.diagnostics(self)

    def records(self) -> dict[str, dict[str, Any]]:
        """What a run appends to `<name>.jsonl` at every logged step: fields that JSON can hold."""
        return hooks.records(self)

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters that modules have declared to belong to one of `hooks.GROUPS`."""
        return hooks.optimizer_groups(self)

    def flops(self, shape: Shape) -> float:
        """FLOPs of the forward pass per token."""
        return flops_inside(self, shape)


def _refresh_after_loading(model: nn.Module, _: Any) -> None:
    assert isinstance(model, LanguageModel)
    model.refresh()
