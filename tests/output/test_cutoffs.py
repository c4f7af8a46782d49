"""The cheapest cuts against every way to cut, and the constants of the time of a product."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import UserError
from longspan.output.cutoffs import ScoreCost, TimeCost, best_cutoffs
from longspan.output.product_time import Measured, ProductTime, fit, measure, typical_error

from .all_cutoffs import all_cutoffs, score_cost, time_cost

# Few different counts, so that many cutoffs cost the same; sorted and not.
some_counts = st.lists(
    st.sampled_from([0, 1, 1, 1, 2, 3, 50]) | st.integers(0, 1000), min_size=1, max_size=11
)


@settings(max_examples=150, deadline=None)
@given(some_counts.filter(any), st.integers(1, 6), st.booleans(), st.sampled_from([0, 1, 2, 4, 30]))
def test_the_first_of_the_cheapest_of_all_ways(counts, num_clusters, in_order, floor):
    counts = sorted(counts, reverse=True) if in_order else counts
    num_clusters = min(num_clusters, len(counts))
    candidates = list(all_cutoffs(len(counts), num_clusters))

    cost = ScoreCost(counts, num_clusters)
    expected = min(candidates, key=lambda cuts: score_cost(counts, cuts))
    assert best_cutoffs(cost) == expected
    assert cost.total(expected) == score_cost(counts, expected)

    cost = TimeCost(counts, num_clusters, floor=floor)
    expected = min(candidates, key=lambda cuts: time_cost(counts, cuts, floor))
    assert best_cutoffs(cost) == expected
    assert floor > len(counts) or cost.total(expected) == time_cost(counts, expected, floor)


@pytest.mark.parametrize("floor", [0, 3, 40])
def test_zipf_with_a_long_tail_of_ones(floor):
    """Four clusters of 60 words, 34,220 choices: deep enough for several rounds of halving."""
    counts = [1 + 400 // (rank * rank) for rank in range(1, 61)]
    candidates = list(all_cutoffs(60, 4))
    assert best_cutoffs(ScoreCost(counts, 4)) == min(candidates, key=lambda cuts: score_cost(counts, cuts))
    expected = min(candidates, key=lambda cuts: time_cost(counts, cuts, floor))
    assert best_cutoffs(TimeCost(counts, 4, floor=floor)) == expected


@pytest.mark.parametrize("cost_of", [ScoreCost, lambda counts, k: TimeCost(counts, k, floor=300)])
def test_the_vocabulary_of_wikitext_103_takes_no_time(cost_of):
    counts = 1 + 8_000_000 // np.arange(1, 267_736)
    begun = time.perf_counter()
    cost = cost_of(counts, 5)
    cuts = best_cutoffs(cost)
    assert time.perf_counter() - begun < 5  # 0.4 s on an idle core
    for number, step in itertools.product(range(4), (-1000, -1, 1, 1000)):
        moved = [cut + step * (number == index) for index, cut in enumerate(cuts)]
        assert cost.total(moved) >= cost.total(cuts)


def test_as_many_clusters_as_words():
    assert best_cutoffs(ScoreCost([5, 3, 0, 0], 4)) == (1, 2, 3)


@pytest.mark.parametrize(
    ("counts", "num_clusters", "complaint"),
    [
        ([3, 2], 3, "a vocabulary of 2 cannot be split into 3 clusters"),
        ([3, 2], 0, "cannot be split into 0 clusters: use 1 or more"),
        ([], 1, "a vocabulary of 0 cannot be split into 1 clusters"),
        ([3, -2], 1, "must not be negative"),
        ([0, 0], 1, "nor all 0"),
        ([2**70, 1], 2, "too large for exact sums"),
        ([2**61, 1], 2, "too large for exact sums"),
    ],
)
def test_what_cannot_be_cut(counts, num_clusters, complaint):
    with pytest.raises(UserError, match=complaint):
        ScoreCost(counts, num_clusters)


def test_constants_are_found_again_in_times_that_obey_them():
    true = ProductTime(constant=4e-6, per_score=2e-11, floor=5e5)
    measured = [Measured(4**power, true.seconds(4**power)) for power in range(3, 14)]
    found = fit(measured)
    assert found.per_score == pytest.approx(2e-11, rel=0.02)
    assert found.seconds(0) == pytest.approx(true.seconds(0), rel=0.02)
    assert found.floor == pytest.approx(5e5, rel=0.1)
    assert typical_error(found, measured) < 0.02
    assert typical_error(true, [Measured(1, 2 * true.seconds(1))]) == pytest.approx(0.5)


def test_a_constant_is_never_negative():
    found = fit([Measured(4**power, 1e-9 * 4 ** (1.05 * power)) for power in range(3, 14)])
    assert found.constant >= 0
    assert found.per_score > 0


@pytest.mark.usefixtures("quick_measurement")
def test_three_shapes_of_every_size_are_measured():
    measured = measure(16, torch.device("cpu"))
    assert [point.scores for point in measured] == [64] * 3 + [4096] * 3
    assert all(0 < point.seconds < 1 for point in measured)
