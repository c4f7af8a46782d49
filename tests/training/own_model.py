"""A user's model, of plain torch modules, and a module of theirs that uses every hook."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longspan.flops import Shape
from longspan.models.interface import LanguageModel
from longspan.output import SoftmaxHead
from longspan.state import State


class Gate(nn.Module):
    """y = x + scale * tanh(x W) (x + mean_n x V_n); `strength` is derived from `scale` by `refresh`."""

    heard: list[Any]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight_DD = nn.Parameter(torch.randn(width, width) / width)
        self.many_NDD = nn.Parameter(torch.randn(2, width, width) / width)
        self.lookup_3D = nn.Parameter(torch.randn(3, width) / width)
        self.scale_D = nn.Parameter(torch.full((width,), 0.5))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self.heard = []
        self.told: list[float] = []
        self.strength = 0.0

    def forward(self, x_BTD: Tensor) -> Tensor:
        more_BTD = (x_BTD[None] @ self.many_NDD[:, None]).mean(0) + self.lookup_3D.sum(0)
        return x_BTD + self.scale_D * torch.tanh(x_BTD @ self.weight_DD) * (x_BTD + more_BTD)

    def penalties(self) -> dict[str, Tensor]:
        return {"scale": 0.25 * self.scale_D.square().sum()}

    def after_update(self) -> None:
        self.updates += 1
        self.heard.append("after_update")

    def refresh(self) -> None:
        self.strength = float(self.scale_D.detach().sum())
        self.heard.append("refresh")

    def begin_epoch(self, number: int) -> None:
        self.heard.append(number)

    def progress(self, done: float) -> None:
        self.told.append(done)

    def diagnostics(self) -> dict[str, Tensor]:
        return {"gate/strength": self.scale_D.detach().sum(), "gate_all": self.scale_D.detach()}

    def records(self) -> dict[str, dict[str, Any]]:
        return {"gate-scales": {"updates": int(self.updates), "scales": self.scale_D.tolist()}}

    def flops(self, shape: Shape) -> float:
        return 2.0 * (self.weight_DD.numel() + self.many_NDD.numel()) + 100 / shape.block_length

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {
            "matrix": [self.weight_DD, self.many_NDD],
            "decay": [self.lookup_3D],
            "span": [self.scale_D],
        }


class OwnModel(LanguageModel):
    """A GRU with gates: no stack, and no word about their hooks."""

    def __init__(self, vocabulary_size: int = 11, width: int = 6, num_gates: int = 1) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.gates = nn.Sequential(*(Gate(width) for _ in range(num_gates)))
        self.head = SoftmaxHead(width, vocabulary_size)

    def initial_state(self, batch_size: int) -> State:
        return State({"hidden": self.embedding.weight.new_zeros(batch_size, self.gru.hidden_size)})

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        x_BTD, hidden_1BD = self.gru(self.embedding(tokens_BT), state.tensor("hidden")[None].contiguous())
        return self.gates(x_BTD), State({"hidden": hidden_1BD[0]})
