"""The interface of all models: `tokens, state -> hidden, state`.

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

    `block_invariant` declares whether the outputs depend only on the text and not on how it was cut into
    blocks; the contract tests check it. `context` is the number of tokens after which a text begins anew;
    None if it never does.

    The last methods are the hooks of `longspan.hooks`. They collect the results of all modules inside the
    model. A model may override them, and call `super()` for the results of its modules.
    """

    head: OutputHead
    vocabulary_size: int
    block_invariant: bool = True
    context: int | None = None
    collects_hooks = True  # an outer model does not call the hooks inside this one again

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_refresh_after_loading)  # type: ignore[no-untyped-call]

    @abstractmethod
    def initial_state(self, batch_size: int) -> State:
        """The state of `batch_size` texts that have not begun."""

    @abstractmethod
    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        """Read one block: hidden_BTD and the state after it. The input state is not changed."""

    def log_probs(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        """Log-probabilities of the next token at every position, [B, T, V], and the new state."""
        hidden_BTD, state = self(tokens_BT, state)
        return self.head.log_probs(hidden_BTD), state

    def decoding_state(self, state: State) -> State:
        """The same state in a form that makes single tokens cheap while the weights are fixed."""
        return state

    def step_from(self, state: State) -> Step | None:
        """`forward` for single tokens, tokens_1B -> hidden_1BD, starting from a state; see `Block.step_from`.

        None if the model has nothing faster than `forward`.
        """
        return None

    def shape_key(self, state: State) -> Hashable | None:
        """Everything, besides input shapes, that decides which operations `forward` runs on which shapes.

        While it stays the same, a captured CUDA graph may be replayed. None if values on the device decide.
        """
        return ()

    def penalties(self) -> dict[str, Tensor]:
        """Named terms added to the training loss and to nothing else."""
        return hooks.penalties(self)

    def begin_epoch(self, number: int) -> None:
        """Called before every step of a run with the number of its epoch, counted from 0."""
        hooks.call_hook(self, "begin_epoch", number)

    def progress(self, done: float) -> None:
        """Called before every step of a run with the fraction of the training that is done.

        At its end it is 1. It is saved with the weights, and a model that they are loaded into is told it. A
        model that was never told is a finished one.
        """
        hooks.call_hook(self, "progress", done)

    def after_update(self) -> None:
        """Called once after every optimizer step."""
        hooks.call_hook(self, "after_update")
        self.refresh()

    def refresh(self) -> None:
        """Recompute what is derived from the weights, such as window sizes.

        `after_update` and `load_state_dict` call it. Call it after any other change of the weights.
        """
        hooks.call_hook(self, "refresh")

    def diagnostics(self) -> dict[str, Tensor]:
        """Named tensors for inspection; scalars become metrics."""
        return hooks.diagnostics(self)

    def records(self) -> dict[str, dict[str, Any]]:
        """The fields, as JSON values, that a run appends to `<name>.jsonl` at every logged step."""
        return hooks.records(self)

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters that modules declare for each of `hooks.GROUPS`."""
        return hooks.optimizer_groups(self)

    def flops(self, shape: Shape) -> float:
        """FLOPs of the forward pass per token."""
        return flops_inside(self, shape)


def _refresh_after_loading(model: nn.Module, _: Any) -> None:
    assert isinstance(model, LanguageModel)
    model.refresh()
