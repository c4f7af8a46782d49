"""The cheapest split of a vocabulary into clusters, exactly, in O(K N log N).

N words, in the order of the vocabulary, are split into K clusters of at least one word. A cluster of
the words [i, j) has the area

    w(i, j) = (j - i) (P_j - P_i),   P_j = how often the first j words occur,

the number of scores if every occurrence scores all words of its cluster. There are two costs:

- `ScoreCost`: the sum of all areas.
- `TimeCost`: the time of the matrix products (Grave et al., 2016, section 4). Every token is scored against
  the first cluster and one column per further cluster, and no product is faster than one of area A:
  max(A, (c_1 + K - 1) P_N) + the sum over further clusters of max(A, w).

Why it is fast: for a <= b <= c <= d

    w(a, d) + w(b, c) - w(a, c) - w(b, d) = (d - c)(P_b - P_a) + (b - a)(P_d - P_c) >= 0,

and w(b, c) is the smallest of the four, w(a, d) the largest, so the inequality also holds of f(w) for any f
that is convex and does not fall, such as max(A, w). Hence the best end of a cluster does not move back when
its start moves forward. The best ends of all starts are found by divide and conquer, each between two known
ends. Costs are integers, so ties are exact; of several best splits the lexicographically first is returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from longspan.errors import UserError

Integers = npt.NDArray[np.int64]


class Cost(ABC):
    """The cost of clusters, in occurrences times words; `counts[i]` is how often word i occurs."""

    def __init__(self, counts: Iterable[int], num_clusters: int) -> None:
        counts = [int(count) for count in counts]  # Python's integers cannot overflow
        self.num_words, self.num_clusters, self.num_tokens = len(counts), num_clusters, sum(counts)
        if num_clusters < 1:
            raise UserError(f"a vocabulary cannot be split into {num_clusters} clusters: use 1 or more")
        if num_clusters > self.num_words:
            raise UserError(
                f"a vocabulary of {self.num_words} cannot be split into {num_clusters} clusters: use fewer"
            )
        if min(counts) < 0 or self.num_tokens == 0:
            raise UserError("counts are how often words occur: they must not be negative, nor all 0")
        if num_clusters * (self.num_words + num_clusters) * self.num_tokens >= 2**63:
            raise UserError("the counts are too large for exact sums: divide all of them by 1000")
        self._before = np.cumsum([0, *counts], dtype=np.int64)

    def area(self, starts: Integers, ends: Integers) -> Integers:
        """w(start, end) of each cluster."""
        return (ends - starts) * (self._before[ends] - self._before[starts])

    @abstractmethod
    def first(self, ends: Integers) -> Integers:
        """The cost of the first cluster, for each of its possible ends."""

    @abstractmethod
    def further(self, starts: Integers, ends: Integers) -> Integers:
        """The cost of any other cluster."""

    def total(self, cutoffs: Sequence[int]) -> int:
        """The cost of the vocabulary with these cutoffs."""
        bounds = np.array([*cutoffs, self.num_words], dtype=np.int64)
        return int(self.first(bounds[:1]).sum() + self.further(bounds[:-1], bounds[1:]).sum())


class ScoreCost(Cost):
    """Scores within clusters; the columns that stand for clusters are not counted."""

    def first(self, ends: Integers) -> Integers:
        return self.area(np.zeros_like(ends), ends)

    def further(self, starts: Integers, ends: Integers) -> Integers:
        return self.area(starts, ends)


class TimeCost(Cost):
    """Time of the matrix products, beyond a constant per product, in units of the time of one score.

    `floor` is the number of scores per token up to which a product takes no longer than an empty one.
    """

    def __init__(self, counts: Iterable[int], num_clusters: int, *, floor: float) -> None:
        super().__init__(counts, num_clusters)
        # A floor above the largest product makes all splits equal: a higher one would only overflow.
        self.floor = round(min(max(floor, 0.0), self.num_words + num_clusters) * self.num_tokens)

    def first(self, ends: Integers) -> Integers:
        return np.maximum(self.floor, (ends + self.num_clusters - 1) * self.num_tokens)

    def further(self, starts: Integers, ends: Integers) -> Integers:
        return np.maximum(self.floor, self.area(starts, ends))


def best_cutoffs(cost: Cost) -> tuple[int, ...]:
    """The K - 1 cutoffs of least cost; of several, the lexicographically smallest."""
    size, clusters = cost.num_words, cost.num_clusters
    if clusters == 1:
        return ()
    places = np.arange(size + 1, dtype=np.int64)
    # rest[i]: the least cost of the words from i on, in one cluster, then in two, and so on.
    rest = cost.further(places, np.full_like(places, size))
    rounds = []
    for number in range(2, clusters):
        starts = places[clusters - number : size - number + 1]
        ends = _best_ends(cost, rest, starts, size - number + 1)
        rest[starts] = cost.further(starts, ends) + rest[ends]
        rounds.append(ends)
    firsts = places[1 : size - clusters + 2]
    cuts = [int(firsts[np.argmin(cost.first(firsts) + rest[firsts])])]
    for ends in reversed(rounds):
        cuts.append(int(ends[cuts[-1] - len(cuts)]))  # the n-th cut is n at least: there `starts` begin
    return tuple(cuts)


def _best_ends(cost: Cost, rest: Integers, starts: Integers, last: int) -> Integers:
    """For each start the first end, `last` at most, that makes its cluster and the rest cheapest.

    `starts` are consecutive. Divide and conquer: every open start lies between two with known ends.
    """
    count = len(starts)
    ends = np.empty(count + 2, dtype=np.int64)  # ends[n + 1] is that of starts[n]; outermost are the limits
    ends[0], ends[-1] = starts[0] + 1, last
    step = 1 << (count.bit_length() - 1)
    while step:
        open_ = np.arange(step, count + 1, 2 * step)
        here = starts[open_ - 1]
        low = np.maximum(ends[open_ - step], here + 1)
        high = ends[np.minimum(open_ + step, count + 1)]
        ends[open_] = _cheapest(cost, rest, here, low, high)
        step //= 2
    return ends[1:-1]


def _cheapest(cost: Cost, rest: Integers, starts: Integers, low: Integers, high: Integers) -> Integers:
    """For each start the first of the cheapest ends from low to high, all ranges concatenated."""
    lengths = high - low + 1
    offsets = np.cumsum(lengths) - lengths
    ends = np.arange(lengths.sum()) + np.repeat(low - offsets, lengths)
    costs = cost.further(np.repeat(starts, lengths), ends) + rest[ends]
    least = np.minimum.reduceat(costs, offsets)
    cheapest = np.flatnonzero(costs == np.repeat(least, lengths))
    return ends[cheapest[np.searchsorted(cheapest, offsets)]]
