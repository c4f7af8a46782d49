"""The plain output layer: one score per word of the vocabulary, then softmax."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.heads.interface import Head


class SoftmaxHead(Head):
    """log p(v) = log softmax(W h + b)_v."""

    def __init__(self, width: int, vocabulary_size: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, vocabulary_size)

    def nll(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        scores_BTV = self.scores(hidden_BTD).float()
        nll = F.cross_entropy(scores_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
        return nll.view_as(targets_BT)

    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        return torch.log_softmax(self.scores(hidden_BTD).float(), dim=-1)
