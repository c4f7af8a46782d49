"""Adaptive softmax: first the frequent words and the clusters of rare ones, then the words of one cluster.

Shapes: B batch, T block, N = B T tokens, D width, V vocabulary, F words of the first cluster and one column
per further cluster, S words in a cluster, K width of a cluster's table, R tokens in a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.compile_fallback import not_compiled
from longspan.flops import Shape
from longspan.layers.embeddings import AdaptiveEmbedding, narrowing_widths, new_projection, new_table
from longspan.output.interface import OutputHead
from longspan.output.logits import scores

ClusterOrder = Literal["from-end", "forward"]


class AdaptiveSoftmaxHead(OutputHead):
    """p(v) = p(v's cluster) p(v | cluster), over the clusters of an `AdaptiveEmbedding`.

    Cluster i scores its words by E_i P_i^T h + b_i (Grave et al., 2017; Baevski and Auli, 2018), without P_i
    where the embedding has none. The first cluster shares its softmax with one column per further cluster,
    scored from P_0^T h by `cluster_weight` and `cluster_bias`.

    Tables E and projections P have the shapes of the embedding's. `tie_tables` uses the embedding's tables,
    and `tie_projections` its projections, for all clusters or for each. Tied weights belong to the embedding
    and are stored there. With its own `division` the head's tables are D, D / division, D / division^2 ...
    wide, with `cluster_widths` as wide as these say, whatever the embedding's are; then nothing can be tied.
    `cluster_order` is the order of the cluster columns: with "from-end" the last one is cluster 1
    (adaptive-span and Transformer-XL in PyTorch), with "forward" the first one (Transformer-XL in TensorFlow,
    Hugging Face). Biases and cluster columns start at zero.
    """

    def __init__(
        self,
        embedding: AdaptiveEmbedding,
        *,
        tie_tables: bool = False,
        tie_projections: bool | Sequence[bool] = False,
        cluster_order: ClusterOrder = "from-end",
        division: int | None = None,
        cluster_widths: Sequence[int] = (),
    ) -> None:
        super().__init__()
        sizes, widths = embedding.cluster_sizes, embedding.table_widths
        if cluster_widths:
            widths = list(cluster_widths)
        elif division is not None:
            widths = narrowing_widths(embedding.width, division, len(sizes))
        num_tails = len(sizes) - 1
        if isinstance(tie_projections, bool):
            tie_projections = [tie_projections] * len(sizes)
        if len(tie_projections) != len(sizes):
            raise ValueError(f"{len(tie_projections)} choices of tied projections for {len(sizes)} clusters")
        self._embedding = (embedding,)  # in a tuple, so that its weights are not listed here a second time
        self.bounds = embedding.bounds
        self.tie_tables = tie_tables
        self.tables = nn.ParameterList(
            new_table(size, width) for size, width in zip(sizes, widths, strict=True) if not tie_tables
        )
        self.projections = nn.ParameterDict(
            {
                str(number): new_projection(embedding.width, widths[number])
                for number, projection_DK in enumerate(embedding.cluster_projections())
                if not tie_projections[number]
                and (projection_DK is not None or widths[number] != embedding.width)
            }
        )
        self.biases = nn.ParameterList(torch.zeros(size) for size in sizes)
        columns = range(sizes[0], sizes[0] + num_tails)
        self.columns = list(columns if cluster_order == "forward" else reversed(columns))
        self.cluster_weight = nn.Parameter(torch.zeros(num_tails, widths[0])) if num_tails else None
        self.cluster_bias = nn.Parameter(torch.zeros(num_tails)) if num_tails else None

    def nll(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_ND, targets_N = hidden_BTD.flatten(0, -2), targets_BT.flatten()
        first, *tails = self._clusters()
        first_N = targets_N
        for start, column in zip(self.bounds[1:], self.columns, strict=False):
            first_N = first_N.where(targets_N < start, column)
        nll_N = F.cross_entropy(first.scores(hidden_ND), first_N, reduction="none")
        # A target beyond the vocabulary goes to the last cluster and is an error there, as in plain softmax.
        for (start, end), tail in zip(pairwise([*self.bounds[1:-1], sys.maxsize]), tails, strict=True):
            nll_N = _add_within(nll_N, hidden_ND, targets_N - start, end - start, tail)
        return nll_N.view_as(targets_BT)

    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        first, *tails = self._clusters()
        first_BTF = first.scores(hidden_BTD).log_softmax(dim=-1)
        parts = [first_BTF[..., : self.bounds[1]]]
        for column, tail in zip(self.columns, tails, strict=True):
            parts.append(first_BTF[..., column, None] + tail.scores(hidden_BTD).log_softmax(dim=-1))
        return torch.cat(parts, dim=-1)

    def flops(self, shape: Shape) -> float:
        return sum(
            2.0 * matrix.numel()
            for cluster in self._clusters()
            for matrix in (cluster.table_SK, cluster.projection_DK)
            if matrix is not None
        )

    def _clusters(self) -> list[_Cluster]:
        """The weights of every softmax, own or tied; the first with the cluster columns."""
        (embedding,) = self._embedding
        tables = embedding.cluster_tables() if self.tie_tables else list(self.tables)
        projections = embedding.cluster_projections()
        for number, own_DK in self.projections.items():
            projections[int(number)] = own_DK
        biases = list(self.biases)
        if self.cluster_weight is not None and self.cluster_bias is not None:
            tables[0] = torch.cat([tables[0], self.cluster_weight])
            biases[0] = torch.cat([biases[0], self.cluster_bias])
        return [_Cluster(*weights) for weights in zip(tables, projections, biases, strict=True)]


class _Cluster(NamedTuple):
    """One softmax: over the words of a cluster, or the first one's over words and clusters."""

    table_SK: Tensor
    projection_DK: Tensor | None
    bias_S: Tensor

    def scores(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., S], float32."""
        if self.projection_DK is not None:
            hidden = F.linear(hidden, self.projection_DK.mT)
        return scores(hidden, self.table_SK, self.bias_S)


@not_compiled(reason="the number of tokens in a cluster changes from block to block")
def _add_within(nll_N: Tensor, hidden_ND: Tensor, places_N: Tensor, size: int, cluster: _Cluster) -> Tensor:
    """Adds -log p(word | cluster) to the tokens of the cluster, computed only for them.

    A cluster without tokens is computed with no rows, so that its weights get zero gradients, not None.
    """
    rows_R = ((places_N >= 0) & (places_N < size)).nonzero().squeeze(1)
    within_R = F.cross_entropy(cluster.scores(hidden_ND[rows_R]), places_N[rows_R], reduction="none")
    return nll_N.index_add(0, rows_R, within_R)
