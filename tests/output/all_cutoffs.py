"""All cutoffs of a vocabulary, and their costs computed from the definitions."""

from __future__ import annotations

import itertools


def score_cost(counts: list[int], cuts: tuple[int, ...]) -> int:
    bounds = [0, *cuts, len(counts)]
    return sum((end - start) * sum(counts[start:end]) for start, end in itertools.pairwise(bounds))


def time_cost(counts: list[int], cuts: tuple[int, ...], floor: int) -> int:
    """`floor` in scores per token."""
    area = floor * sum(counts)
    bounds = [*cuts, len(counts)]
    first = max(area, (bounds[0] + len(cuts)) * sum(counts))
    return first + sum(max(area, (j - i) * sum(counts[i:j])) for i, j in itertools.pairwise(bounds))


def all_cutoffs(num_words: int, num_clusters: int) -> itertools.combinations:
    """In lexicographic order, so that `min` finds the first of equals."""
    return itertools.combinations(range(1, num_words), num_clusters - 1)
