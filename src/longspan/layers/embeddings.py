"""Token embeddings that are wider for frequent words.

Shapes: B batch, T block, D width, V vocabulary, K width of a cluster's table, S words in a cluster.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.errors import UserError
from longspan.flops import Shape


class AdaptiveEmbedding(nn.Module):
    """Adaptive input representations (Baevski and Auli, 2018): x = sqrt(D) P_i e.

    The vocabulary, sorted by frequency, is cut at `cutoffs` into clusters. Cluster i has a table of width
    floor(table_width / division^i), or cluster_widths[i] if these are given, and a projection P_i to the
    model's width D, the first cluster too.

    With `one_table` (Transformer-XL without division) every word has a row in the same table, and there is
    one projection, only if `table_width` is not D. The clusters then matter only to the output layer.

    Without cutoffs there is one cluster. Fresh weights give embeddings of unit variance.
    """

    def __init__(
        self,
        vocabulary_size: int,
        width: int,
        *,
        cutoffs: Sequence[int] = (),
        division: int = 1,
        table_width: int | None = None,
        cluster_widths: Sequence[int] = (),
        one_table: bool = False,
    ) -> None:
        super().__init__()
        if one_table and (division != 1 or cluster_widths):
            raise ValueError("one table has one width: division must be 1, without cluster_widths")
        self.num_embeddings = vocabulary_size
        self.width = width
        self.bounds = cluster_bounds(vocabulary_size, cutoffs)
        self.table_widths = list(cluster_widths) or narrowing_widths(
            table_width or width, division, len(self.bounds) - 1
        )
        self.one_table = one_table
        shapes = list(zip(self.cluster_sizes, self.table_widths, strict=True))
        if one_table:
            shapes = [(vocabulary_size, self.table_widths[0])]
        projected = not one_table or self.table_widths[0] != width
        self.tables = nn.ParameterList(new_table(size, table_width) for size, table_width in shapes)
        self.projections = nn.ParameterList(
            new_projection(width, table_width) for _, table_width in shapes if projected
        )

    @property
    def cluster_sizes(self) -> list[int]:
        """How many words each cluster has."""
        return [end - start for start, end in pairwise(self.bounds)]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if self.one_table:
            rows_BTK = F.embedding(tokens_BT, self.tables[0])
            x_BTD = F.linear(rows_BTK, self.projections[0]) if self.projections else rows_BTK
            return x_BTD * math.sqrt(self.width)
        # Each cluster reads every token and keeps its own: shapes do not depend on the text, and since the
        # tables become narrow so quickly this costs little more than the first cluster alone.
        # A token outside the vocabulary indexes a missing row of the first or last table and raises.
        parts, outside = [], sys.maxsize
        for number, (start, end) in enumerate(pairwise([-outside, *self.bounds[1:-1], outside])):
            inside_BT = (tokens_BT >= start) & (tokens_BT < end)
            places_BT = (tokens_BT - self.bounds[number]).where(inside_BT, 0)
            rows_BTK = F.embedding(places_BT, self.tables[number]) * inside_BT[..., None]
            parts.append(F.linear(rows_BTK, self.projections[number]))
        return reduce(torch.add, parts) * math.sqrt(self.width)

    def flops(self, shape: Shape) -> float:
        return sum(2.0 * projection_DK.numel() for projection_DK in self.projections)

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"embedding": [*self.tables], "no_decay": [*self.projections]}

    def cluster_tables(self) -> list[Tensor]:
        """The rows of each cluster."""
        return list(self.tables[0].split(self.cluster_sizes)) if self.one_table else list(self.tables)

    def cluster_projections(self) -> list[Tensor | None]:
        """The projection that each cluster's rows go through."""
        if self.one_table:
            return [self.projections[0] if self.projections else None] * (len(self.bounds) - 1)
        return list(self.projections)


def cluster_bounds(vocabulary_size: int, cutoffs: Sequence[int]) -> list[int]:
    """The first word of each cluster, then the size of the vocabulary."""
    bounds = [0, *cutoffs, vocabulary_size]
    if any(start >= end for start, end in pairwise(bounds)):
        raise UserError(
            f"cutoffs {', '.join(map(str, cutoffs))} do not fit a vocabulary of {vocabulary_size}: they must "
            f"increase and lie between 1 and {vocabulary_size - 1} (option model.vocabulary.cutoffs)"
        )
    return bounds


def new_table(size: int, table_width: int) -> nn.Parameter:
    """Rows of unit length, on average."""
    return nn.Parameter(torch.randn(size, table_width) / math.sqrt(table_width))


def new_projection(width: int, table_width: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(width, table_width) / math.sqrt(width))


def narrowing_widths(first: int, division: int, num_clusters: int) -> list[int]:
    """The widths of the clusters' tables, each `division` times narrower than the one before."""
    widths = [first // division**number for number in range(num_clusters)]
    if widths[-1] < 1:
        raise UserError(
            f"division {division} leaves no width for the last of {num_clusters} clusters of a table {first} "
            "wide: use a smaller division or fewer cutoffs"
        )
    return widths
