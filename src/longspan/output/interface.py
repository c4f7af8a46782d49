"""The interface of every output layer. Shapes: B batch, T block, D width, V vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class OutputHead(nn.Module, ABC):
    """From hidden states to probabilities of the next token."""

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """The log-probabilities, so that a head can be the last layer of an `nn.Sequential`."""
        return self.log_probs(hidden_BTD)

    @abstractmethod
    def nll(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Nats per token, float32, [B, T], never reduced: the caller reduces and counts."""

    def nll_ahead(self, hidden_BTD: Tensor, targets_BT: Tensor, ahead: int) -> list[Tensor]:
        """`nll` of each position's own target, then of the targets 1, 2, ... `ahead` positions later.

        Only targets of the block count: the i-th tensor is [B, T - i]. A head that can share work between
        them overrides this.
        """
        length = targets_BT.shape[1]
        return [self.nll(hidden_BTD[:, : length - i], targets_BT[:, i:]) for i in range(ahead + 1)]

    @abstractmethod
    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        """Log-probabilities over the vocabulary, float32, [B, T, V]."""
