"""Adaptive input and softmax, and n-gram embeddings, in plain PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from longspan.nn import AdaptiveEmbedding, AdaptiveSoftmaxHead, NgramEmbeddings

from .plain import every_weight_learns, round_trips

V, D = 23, 16


def embedding() -> AdaptiveEmbedding:
    return AdaptiveEmbedding(V, D, cutoffs=(5, 12), division=2)


def test_adaptive_embedding_is_its_formula() -> None:
    layer = embedding().double()
    for word, cluster, place in ((0, 0, 0), (4, 0, 4), (5, 1, 0), (11, 1, 6), (12, 2, 0), (22, 2, 10)):
        row = layer.projections[cluster] @ layer.tables[cluster][place]
        torch.testing.assert_close(layer(torch.tensor([[word]]))[0, 0], math.sqrt(D) * row)
    assert [table.shape[1] for table in layer.tables] == [16, 8, 4]
    every_weight_learns(layer, layer(torch.arange(V)))
    round_trips(layer, embedding().double())


@pytest.mark.parametrize("tied", [False, True])
def test_adaptive_softmax_in_a_sequential_model(tied: bool) -> None:
    def model() -> nn.Sequential:
        words = embedding()
        head = AdaptiveSoftmaxHead(words, tie_tables=tied, tie_projections=tied)
        return nn.Sequential(words, nn.Linear(D, D), head)

    made = model().double()
    head = made[-1]
    assert isinstance(head, AdaptiveSoftmaxHead)
    nn.init.normal_(head.cluster_weight)
    tokens, targets = torch.arange(V).view(1, V), torch.arange(V).flip(0).view(1, V)
    log_probs = made(tokens)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(1, V))
    hidden = made[:-1](tokens)
    nll = head.nll(hidden, targets)
    torch.testing.assert_close(nll, -log_probs.gather(-1, targets[..., None])[..., 0])
    # Rows without a time dimension do as well.
    assert torch.equal(head.nll(hidden[0], targets[0]), nll[0])
    every_weight_learns(made, nll)
    round_trips(made, model().double())
    assert "0.tables.0" in made.state_dict()
    assert ("2.tables.0" in made.state_dict()) != tied  # tied weights are saved once


class TestNgrams:
    def test_every_ngram_has_its_own_row(self) -> None:
        layer = NgramEmbeddings(3, 5, sizes=(1, 2), rows=100).double()
        for table in layer.layer.tables:
            nn.init.normal_(table.weight)  # type: ignore[arg-type]
        one, two = (table.weight for table in layer.layer.tables)
        out, before = layer(torch.tensor([[2, 0, 1]]))
        digits = [0, 3, 1, 2]  # nothing, then token + 1
        for t in range(3):
            row = digits[t] * 4 + digits[t + 1]
            torch.testing.assert_close(out[0, t], one[digits[t + 1]] + two[row])
        assert before.tolist() == [[2]]

    def test_blocks_with_what_came_before_are_one_block(self) -> None:
        layer = NgramEmbeddings(7, 4, sizes=(2, 3), rows=20, table_width=2).double()
        for table in layer.layer.tables:
            nn.init.normal_(table.weight)  # type: ignore[arg-type]
        tokens = torch.randint(7, (2, 12))
        whole, _ = layer(tokens)
        first, before = layer(tokens[:, :5])
        second, _ = layer(tokens[:, 5:], before)
        assert torch.equal(torch.cat([first, second], dim=1), whole)
        begun, _ = layer(tokens[:, 5:])
        assert not torch.equal(begun, second)
        every_weight_learns(layer, whole)
        round_trips(layer, NgramEmbeddings(7, 4, sizes=(2, 3), rows=20, table_width=2).double())

    def test_rows_are_dropped_from_the_second_epoch_on(self) -> None:
        torch.manual_seed(2)
        layer = NgramEmbeddings(7, 4, sizes=(2,), rows=100, dropout=0.5)
        nn.init.ones_(layer.layer.tables[0].weight)  # type: ignore[arg-type]
        tokens = torch.randint(7, (2, 50))
        assert set(layer(tokens)[0].unique().tolist()) == {1.0}
        layer.begin_epoch(1)
        assert set(layer(tokens)[0].unique().tolist()) == {0.0, 2.0}
        assert set(layer.eval()(tokens)[0].unique().tolist()) == {1.0}
