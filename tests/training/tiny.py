"""A small recurrent model: the least that satisfies the interface, so the trainer can know nothing more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longspan.models.interface import LanguageModel
from longspan.output import SoftmaxHead
from longspan.state import State


class TinyModel(LanguageModel):
    """h_t = tanh(mix(embedding_t) + keep(h_{t-1})), with dropout, a penalty and something to look at."""

    def __init__(self, vocabulary_size: int = 11, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.vocabulary_size = vocabulary_size
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.mix = nn.Linear(width, width)
        self.keep = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.span_LH = nn.Parameter(torch.full((1, 2), 0.5))
        self.head = SoftmaxHead(width, vocabulary_size)
        self.updates = 0

    def initial_state(self, batch_size: int) -> State:
        weight = self.embedding.weight
        return State({"hidden": weight.new_zeros(batch_size, weight.shape[1])})

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        inputs_BTD = self.dropout(self.mix(self.embedding(tokens_BT))) * (1 + self.span_LH.mean())
        hidden_BD, steps = state.tensor("hidden"), []
        for t in range(tokens_BT.shape[1]):
            hidden_BD = torch.tanh(inputs_BTD[:, t] + self.keep(hidden_BD))
            steps.append(hidden_BD)
        return torch.stack(steps, 1), State({"hidden": hidden_BD})

    def penalties(self) -> dict[str, Tensor]:
        return {"span": 0.1 * self.span_LH.sum()}

    @torch.no_grad()
    def after_update(self) -> None:
        self.span_LH.clamp_(0, 1)
        self.updates += 1

    def diagnostics(self) -> dict[str, Tensor]:
        return {"span_mean": self.span_LH.detach().mean() * 16, "spans_LH": self.span_LH.detach() * 16}

    def records(self) -> dict[str, dict[str, Any]]:
        return {"spans": {"limit": 16, "spans": (self.span_LH.detach() * 16).tolist()}}
