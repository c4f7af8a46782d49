"""A decoder whose texts can be replaced while the others go on. Shapes: B batch."""

from __future__ import annotations

from torch import Tensor

from longspan.generation import Decoder
from longspan.kernels.linear import ALIKE
from longspan.layers.block import RowStep
from longspan.models import LanguageModel
from longspan.state import State


class RowDecoder(Decoder):
    """Reads one token for every row. A model without a `RowStep` carries its state through `forward`.

    The shapes of states must not change from token to token.
    """

    def __init__(self, model: LanguageModel, state: State, like: RowDecoder | None = None) -> None:
        self._like = like
        super().__init__(model, state)

    def begin(self, state: State) -> RowDecoder:
        """A decoder for the texts of a state; it shares what was prepared from the weights."""
        return RowDecoder(self._model, state, self)

    def put(self, row: int, source: RowDecoder, source_row: int = 0) -> None:
        """Replace the text of a row by one of `source`."""
        with self._without_gradients():
            if isinstance(self._step, RowStep):
                self._step.put(row, source._step, source_row)
                return
            others = source._state.flatten()
            if self._captured is None:  # a state is never changed in place; that of a captured step is ours
                self._state = self._state.map(Tensor.clone)
            for name, leaf in self._state.flatten().items():
                leaf[row] = others[name][source_row]

    def _first_step(self, state: State) -> RowStep | None:
        step = self._like._step if self._like is not None else None
        if isinstance(step, RowStep):
            return step.begin(state)
        token = ALIKE.set(True)
        try:
            step = None if self._like is not None else self._model.step_from(state)
        finally:
            ALIKE.reset(token)
        return step if isinstance(step, RowStep) else None
