"""The plain output layer: one score per word of the vocabulary, then softmax."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.flops import Shape
from longspan.output.interface import OutputHead
from longspan.output.logits import scores

NO_TARGET = -100  # no token has this number


class SoftmaxHead(OutputHead):
    """log p(v) = log softmax(s)_v with the scores s = W h + b.

    A `softcap` c limits scores to -c ... c: s = c tanh((W h + b) / c). A head that is `tied` to an embedding
    uses its table for W and has no b; the table belongs to the embedding and is stored there.
    """

    def __init__(
        self,
        width: int,
        vocabulary_size: int,
        *,
        bias: bool = True,
        softcap: float | None = None,
        tied: nn.Embedding | None = None,
    ) -> None:
        super().__init__()
        self.scores = nn.Linear(width, vocabulary_size, bias=bias) if tied is None else None
        self.softcap = softcap
        self._embedding = (tied,)  # in a tuple, so that its weights are not listed here a second time

    @property
    def weight_VD(self) -> Tensor:
        (embedding,) = self._embedding
        layer = self.scores if embedding is None else embedding
        assert layer is not None
        return layer.weight

    def nll(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        scores_BTV = self._scores(hidden_BTD)
        nll = F.cross_entropy(scores_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
        return nll.view_as(targets_BT)

    def nll_ahead(self, hidden_BTD: Tensor, targets_BT: Tensor, ahead: int) -> list[Tensor]:
        """All from the same scores."""
        length, log_probs_NV = targets_BT.shape[1], self.log_probs(hidden_BTD).flatten(0, 1)
        found = []
        for i in range(ahead + 1):
            later_BT = F.pad(targets_BT[:, i:], (0, i), value=NO_TARGET)
            nll_N = F.nll_loss(log_probs_NV, later_BT.flatten(), ignore_index=NO_TARGET, reduction="none")
            found.append(nll_N.view_as(targets_BT)[:, : length - i])
        return found

    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        return torch.log_softmax(self._scores(hidden_BTD), dim=-1)

    def flops(self, shape: Shape) -> float:
        return 2.0 * self.weight_VD.numel()

    def _scores(self, hidden_BTD: Tensor) -> Tensor:
        """[B, T, V], float32."""
        bias_V = None if self.scores is None else self.scores.bias
        scores_BTV = scores(hidden_BTD, self.weight_VD, bias_V)
        if self.softcap is None:
            return scores_BTV
        return self.softcap * torch.tanh(scores_BTV / self.softcap)
