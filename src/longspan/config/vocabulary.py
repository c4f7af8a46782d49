"""Options of the embedding and the output layer for large vocabularies."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal

from longspan.config.schema import option


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig:
    """Adaptive input and adaptive softmax: clusters of rare words have narrow embeddings."""

    cutoffs: tuple[int, ...] = option(
        (), help="cutoffs between clusters of the vocabulary, sorted by frequency; none: plain embeddings"
    )
    division: int = option(4, help="how many times narrower each cluster is than the one before")
    cluster_widths: tuple[int, ...] = option(
        (), help="in place of division: the width of each cluster, the first included"
    )
    tied: bool = option(False, help="use the embedding's tables and projections in the output layer")
    cluster_order: Literal["from-end", "forward"] = option(
        "from-end", help="cluster 1 is the last column of the first softmax (from-end) or its first"
    )

    def __post_init__(self) -> None:
        check_cutoffs(self.cutoffs)
        if self.division < 1:
            raise ValueError("division must be at least 1")
        if self.cluster_widths and self.division != VocabularyConfig.division:
            raise ValueError("division has no effect with cluster_widths: leave out one of them")
        for field in fields(self):
            if not self.cutoffs and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} has no effect without cutoffs")
        check_cluster_widths(self.cluster_widths, self.cutoffs)


def check_cluster_widths(widths: tuple[int, ...], cutoffs: tuple[int, ...]) -> None:
    """A `ValueError` if there are widths, but not one for each cluster."""
    if widths and len(widths) != len(cutoffs) + 1:
        raise ValueError(f"cluster_widths has {len(widths)} entries for {len(cutoffs) + 1} clusters")
    if any(width < 1 for width in widths):
        raise ValueError(f"cluster_widths must be at least 1, not {', '.join(map(str, widths))}")


def check_cutoffs(cutoffs: tuple[int, ...]) -> None:
    """A `ValueError` if a cluster is empty. The fit to a vocabulary is checked when a model is built."""
    if any(start >= end for start, end in pairwise((0, *cutoffs))):
        raise ValueError(f"cutoffs must be above 0 and increase, not {', '.join(map(str, cutoffs))}")
