"""A recurrent block. Shapes: B batch, T block, D width."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from longspan.layers.block import Block
from longspan.state import State


class Recurrent(Block):
    """out = dropout(LSTM(LN(h))): the LSTM's output takes the place of h, there is no residual."""

    def __init__(self, width: int, *, dropout: float, epsilon: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, epsilon)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.dropout = dropout

    def initial_state(self, batch_size: int) -> State:
        zeros_BD = self.norm.weight.new_zeros(batch_size, self.lstm.hidden_size)
        return State({"hidden": zeros_BD, "cell": zeros_BD.clone()})

    def compile_parts(self) -> None:
        """Nothing: the LSTM is one operation already."""

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        x_BTD = self.norm(h_BTD)
        before = (state.tensor("hidden")[None], state.tensor("cell")[None])
        out_BTD, (hidden_1BD, cell_1BD) = self.lstm(x_BTD, before)
        # Under autocast the LSTM answers in half precision; what is carried and added up stays full.
        after = State({"hidden": hidden_1BD[0].to(x_BTD.dtype), "cell": cell_1BD[0].to(x_BTD.dtype)})
        return F.dropout(out_BTD.to(x_BTD.dtype), self.dropout, self.training), after
