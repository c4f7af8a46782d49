"""SHA-RNN's output layer: a vocabulary that may be split by frequency.

Shapes: B batch, T block, D width, V vocabulary, N selected positions, K scores of the first softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.errors import UserError
from longspan.flops import Shape
from longspan.output.interface import OutputHead
from longspan.output.logits import scores


class SplitSoftmaxHead(OutputHead):
    """log p(v) = log softmax(E h + b)_v, with E the embedding's weights if `tied`, else a `table` of its own.

    With `splits` the first softmax is over the words before the first split and one entry for each part of
    the vocabulary after it. A word of a part has the probability of its entry times that of a softmax within
    the part. The entries are in reverse order: the last one is the first part's.
    """

    def __init__(self, embedding: nn.Embedding, splits: tuple[int, ...] = (), *, tied: bool = True) -> None:
        super().__init__()
        edges = (*splits, embedding.num_embeddings)
        if splits and splits[-1] >= edges[-1]:
            raise UserError(f"the last split, {splits[-1]}, must be below the vocabulary's size, {edges[-1]}")
        self._embedding = (embedding,)  # the model owns it: in a tuple it is not registered again
        self.table = None if tied else nn.Embedding(embedding.num_embeddings, embedding.embedding_dim)
        self.bias_V = nn.Parameter(torch.zeros(embedding.num_embeddings))
        if splits:
            self.part_vectors = nn.Parameter(torch.zeros(len(splits), embedding.embedding_dim))
            self.part_bias = nn.Parameter(torch.zeros(len(splits)))
        self.edges = edges

    @property
    def weight_VD(self) -> Tensor:
        (embedding,) = self._embedding
        return embedding.weight if self.table is None else self.table.weight

    def nll(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_ND = hidden_BTD.flatten(0, 1)
        targets_N = targets_BT.flatten().contiguous()  # for `bucketize`, which warns of strides
        first_NK = self._first(hidden_ND)
        if len(self.edges) == 1:
            return F.cross_entropy(first_NK, targets_N, reduction="none").view_as(targets_BT)
        part_N = torch.bucketize(targets_N, self._boundaries(targets_N), right=True)
        entry_N = torch.where(part_N == 0, targets_N, first_NK.shape[1] - part_N)
        nll_N = F.cross_entropy(first_NK, entry_N, reduction="none")
        for part in range(1, len(self.edges)):
            (chosen_N,) = torch.nonzero(part_N == part, as_tuple=True)
            places_N = targets_N[chosen_N] - self.edges[part - 1]
            within_N = F.cross_entropy(self._within(part, hidden_ND[chosen_N]), places_N, reduction="none")
            nll_N = nll_N.index_add(0, chosen_N, within_N)
        return nll_N.view_as(targets_BT)

    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        first_BTK = torch.log_softmax(self._first(hidden_BTD), dim=-1)
        within = [
            first_BTK[..., -part, None] + torch.log_softmax(self._within(part, hidden_BTD), dim=-1)
            for part in range(1, len(self.edges))
        ]
        return torch.cat([first_BTK[..., : self.edges[0]], *within], dim=-1)

    def flops(self, shape: Shape) -> float:
        num_words, width = self.weight_VD.shape
        return 2.0 * (num_words + len(self.edges) - 1) * width

    def _first(self, hidden: Tensor) -> Tensor:
        weight, bias = self.weight_VD[: self.edges[0]], self.bias_V[: self.edges[0]]
        if len(self.edges) > 1:
            weight, bias = torch.cat([weight, self.part_vectors]), torch.cat([bias, self.part_bias])
        return scores(hidden, weight, bias)

    def _within(self, part: int, hidden: Tensor) -> Tensor:
        words = slice(self.edges[part - 1], self.edges[part])
        return scores(hidden, self.weight_VD[words], self.bias_V[words])

    def _boundaries(self, like: Tensor) -> Tensor:
        return torch.tensor(self.edges[:-1], device=like.device)
