"""Adaptive input and adaptive softmax against a distribution that is written out word by word."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.config import (
    AdaptiveSpanConfig,
    AllAttentionConfig,
    RunConfig,
    StageConfig,
    TransformerXLConfig,
    VocabularyConfig,
    schema,
)
from longspan.config.transformer_xl import XLVocabularyConfig
from longspan.errors import UserError
from longspan.layers.embeddings import AdaptiveEmbedding
from longspan.models import build
from longspan.optim import build_optimizers
from longspan.output import AdaptiveSoftmaxHead
from longspan.training.step import Updater

VOCABULARY, WIDTH = 23, 16
TIED = AllAttentionConfig(
    num_layers=1, width=WIDTH, num_persistent=2, vocabulary=VocabularyConfig(cutoffs=(5, 9), tied=True)
)


@st.composite
def layers(draw) -> tuple[AdaptiveEmbedding, AdaptiveSoftmaxHead]:
    cutoffs = sorted(draw(st.sets(st.integers(1, VOCABULARY - 1), max_size=4)))
    one_table = draw(st.booleans())
    widths = draw(
        st.none() | st.lists(st.integers(1, 20), min_size=1 + len(cutoffs), max_size=1 + len(cutoffs))
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    embedding = AdaptiveEmbedding(
        VOCABULARY,
        WIDTH,
        cutoffs=cutoffs,
        division=1 if one_table else draw(st.sampled_from([1, 2])),
        table_width=draw(st.sampled_from([None, WIDTH + 4])),
        cluster_widths=() if one_table or widths is None else widths,
        one_table=one_table,
    )
    if one_table and widths is not None:  # only the head has clusters of its own widths
        head = AdaptiveSoftmaxHead(embedding, tie_tables=False, tie_projections=False, cluster_widths=widths)
        return _moved(embedding, head)
    head = AdaptiveSoftmaxHead(
        embedding,
        tie_tables=draw(st.booleans()),
        tie_projections=draw(
            st.booleans() | st.lists(st.booleans(), min_size=len(cutoffs) + 1, max_size=len(cutoffs) + 1)
        ),
        cluster_order=draw(st.sampled_from(["from-end", "forward"])),
    )
    return _moved(embedding, head)


def _moved(
    embedding: AdaptiveEmbedding, head: AdaptiveSoftmaxHead
) -> tuple[AdaptiveEmbedding, AdaptiveSoftmaxHead]:
    with torch.no_grad():  # biases and cluster columns begin at zero, where mistakes would not show
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter))
    return embedding.double(), head.double()


def written_out(embedding: AdaptiveEmbedding, head: AdaptiveSoftmaxHead, hidden_D: Tensor) -> Tensor:
    """log p of every word for one hidden state, one word at a time."""
    starts, num_tails = embedding.bounds, len(embedding.bounds) - 2
    tables = torch.cat(embedding.cluster_tables()) if embedding.one_table else None

    def score(word: int, cluster: int) -> Tensor:
        place = word - starts[cluster]
        if not head.tie_tables:
            row_K = head.tables[cluster][place]
        else:
            row_K = embedding.tables[cluster][place] if tables is None else tables[word]
        return row_K @ project(cluster) + head.biases[cluster][place]

    def project(cluster: int) -> Tensor:
        if str(cluster) in head.projections:
            return head.projections[str(cluster)].T @ hidden_D
        if not embedding.projections:
            return hidden_D
        return embedding.projections[0 if embedding.one_table else cluster].T @ hidden_D

    def scores(cluster: int) -> list[Tensor]:
        return [score(word, cluster) for word in range(starts[cluster], starts[cluster + 1])]

    columns = [head.cluster_weight[n] @ project(0) + head.cluster_bias[n] for n in range(num_tails)]
    first = torch.log_softmax(torch.stack(scores(0) + columns), dim=0)
    parts = [first[: starts[1]]]
    for cluster in range(1, num_tails + 1):
        column = head.columns[cluster - 1]
        parts.append(first[column] + torch.log_softmax(torch.stack(scores(cluster)), dim=0))
    return torch.cat(parts)


@settings(max_examples=25, deadline=None)
@given(layers())
def test_the_distribution_written_out(pair):
    embedding, head = pair
    hidden, targets = torch.randn(2, 3, WIDTH).double(), torch.randint(VOCABULARY, (2, 3))
    log_probs = head.log_probs(hidden)
    expected = torch.stack([written_out(embedding, head, h) for h in hidden.flatten(0, 1)])
    torch.testing.assert_close(log_probs.flatten(0, 1), expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 3), rtol=1e-5, atol=1e-5)
    nll = head.nll(hidden, targets)
    assert nll.dtype == log_probs.dtype == torch.float32
    torch.testing.assert_close(nll, -log_probs.gather(-1, targets[..., None])[..., 0])


@settings(max_examples=25, deadline=None)
@given(layers(), st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6))
def test_every_gradient_as_from_the_distribution_written_out(pair, targets):
    embedding, head = pair
    hidden = torch.randn(1, len(targets), WIDTH).double().requires_grad_()
    leaves = [hidden, *head.parameters(), *embedding.parameters()]
    used = head.nll(hidden, torch.tensor([targets])).sum()
    explicit = -sum(written_out(embedding, head, h)[word] for h, word in zip(hidden[0], targets, strict=True))
    found = torch.autograd.grad(used, leaves, allow_unused=True)
    expected = torch.autograd.grad(explicit, leaves, allow_unused=True)
    for got, wanted, leaf in zip(found, expected, leaves, strict=True):
        if got is None:  # only what is not tied stays outside
            assert any(leaf is parameter for parameter in embedding.parameters())
            assert wanted is None
        else:
            wanted = torch.zeros_like(leaf) if wanted is None else wanted
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(layers())
def test_each_word_is_its_row_projected_and_scaled(pair):
    embedding, _ = pair
    words = torch.arange(VOCABULARY)
    rows = [
        row if projection is None else projection @ row
        for table, projection in zip(embedding.cluster_tables(), embedding.cluster_projections(), strict=True)
        for row in table
    ]
    expected = torch.stack(rows) * math.sqrt(WIDTH)
    torch.testing.assert_close(embedding(words.flip(0)[None])[0], expected.flip(0))


@pytest.mark.parametrize("token", [-1, VOCABULARY])
@pytest.mark.parametrize("one_table", [True, False])
def test_no_word_outside_the_vocabulary_is_read(token: int, one_table: bool) -> None:
    division = 1 if one_table else 2
    embedding = AdaptiveEmbedding(VOCABULARY, WIDTH, cutoffs=(5, 9), division=division, one_table=one_table)
    with pytest.raises(IndexError):
        embedding(torch.tensor([[1, token]]))


def adaptive(**choices) -> tuple[AdaptiveEmbedding, AdaptiveSoftmaxHead]:
    torch.manual_seed(2)
    embedding = AdaptiveEmbedding(VOCABULARY, WIDTH, cutoffs=(5, 9, 17), division=2)
    choices = {"tie_tables": True, "tie_projections": True} | choices
    return embedding, AdaptiveSoftmaxHead(embedding, **choices)


def test_a_cluster_without_tokens_gets_gradients_of_zero():
    embedding, head = adaptive(tie_tables=False, tie_projections=False)
    tokens = torch.tensor([[1, 6, 2]])
    head.nll(embedding(tokens), tokens).sum().backward()
    for module in (embedding, head):
        assert all(parameter.grad is not None for parameter in module.parameters())
        assert module.tables[1].grad.abs().sum() > 0
        assert module.tables[3].grad.abs().sum() == 0
    assert head.projections["3"].grad.abs().sum() == 0


@pytest.mark.parametrize("cutoffs", [(), (5,), (5, 9)])
def test_a_word_beyond_the_vocabulary_is_refused(cutoffs):
    head = AdaptiveSoftmaxHead(
        AdaptiveEmbedding(VOCABULARY, WIDTH, cutoffs=cutoffs), tie_tables=True, tie_projections=True
    )
    hidden = torch.randn(1, 2, WIDTH)
    head.nll(hidden, torch.tensor([[0, VOCABULARY - 1]]))
    with pytest.raises(IndexError, match="out of bounds"):
        head.nll(hidden, torch.tensor([[0, VOCABULARY]]))


def test_column_orders_are_each_other_reversed():
    embedding, head = adaptive(cluster_order="from-end")
    _, other = adaptive(cluster_order="forward")
    with torch.no_grad():
        head.cluster_weight.normal_()
        other.cluster_weight.copy_(head.cluster_weight.flip(0))
    other._embedding = (embedding,)
    hidden = torch.randn(2, 3, WIDTH)
    assert head.columns == [7, 6, 5]
    assert other.columns == [5, 6, 7]
    torch.testing.assert_close(head.log_probs(hidden), other.log_probs(hidden))


def test_scores_of_rare_words_are_computed_only_for_their_tokens(monkeypatch):
    _, head = adaptive()
    sizes = []
    linear = torch.nn.functional.linear

    def watched(*arguments):
        result = linear(*arguments)
        sizes.append(result.shape)
        return result

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    targets = torch.tensor([[0, 6, 1, 20, 2, 3, 7, 4]])
    head.nll(torch.randn(1, 8, WIDTH), targets)
    assert [tuple(shape) for shape in sizes[1::2]] == [(8, 5 + 3), (2, 4), (0, 8), (1, 6)]


def test_tied_weights_are_stored_once_and_follow_the_embedding():
    embedding, head = adaptive()
    assert set(head.state_dict()) == {"cluster_weight", "cluster_bias", *(f"biases.{n}" for n in range(4))}
    hidden = torch.randn(1, 2, WIDTH)
    before = head.log_probs(hidden)
    with torch.no_grad():
        embedding.tables[2].mul_(2)
    assert not torch.allclose(head.log_probs(hidden), before)


def test_a_copied_model_is_tied_to_its_own_embedding():
    model = build(TIED, VOCABULARY)
    twin = copy.deepcopy(model)
    hidden = torch.randn(1, 2, WIDTH)
    before = model.head.log_probs(hidden)
    with torch.no_grad():
        twin.embedding.tables[0].mul_(2)
    assert torch.equal(model.head.log_probs(hidden), before)
    assert not torch.allclose(twin.head.log_probs(hidden), before)


def test_ten_updates_learn_a_block():
    torch.manual_seed(4)
    model = build(TIED, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (2, 9))
    stage = StageConfig(steps=10, optimizer="adam", learning_rate=0.02)
    optimizers, updater = build_optimizers(model, stage), Updater(model)
    nats = [
        updater.update(tokens[:, :-1], tokens[:, 1:], model.initial_state(2), optimizers, 1.0)[0].item()
        for _ in range(10)
    ]
    assert nats[-1] < 0.8 * nats[0]


def test_under_autocast():
    embedding, head = adaptive()
    tokens = torch.randint(VOCABULARY, (2, 7))
    expected = head.nll(embedding(tokens), tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = head.nll(embedding(tokens), tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in embedding.parameters())


def test_compiled():
    embedding, head = adaptive()

    def loss(tokens: Tensor) -> Tensor:
        return head.nll(embedding(tokens), tokens)

    compiled = torch.compile(loss, backend="eager")
    for tokens in (
        torch.zeros(2, 3, dtype=torch.int64),
        torch.tensor([[0, 7, 22]]),
        torch.tensor([[20, 20]]),
    ):
        torch.testing.assert_close(compiled(tokens), loss(tokens))


def test_fresh_weights_are_of_a_size_that_trains():
    torch.manual_seed(1)
    embedding = AdaptiveEmbedding(4000, 64, cutoffs=(1000, 2000), division=4)
    head = AdaptiveSoftmaxHead(embedding, tie_tables=True, tie_projections=True)
    log_probs = head.log_probs(torch.randn(1, 100, 64))
    for words in torch.arange(4000).split([1000, 1000, 2000]):
        assert embedding(words[None]).std().item() == pytest.approx(1, rel=0.2)
        assert log_probs[..., words].std().item() == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("cutoffs", [(5, 3), (4, 4), (0,), (5, 23), (30,), (-1, 5)])
def test_cutoffs_that_do_not_fit(cutoffs):
    with pytest.raises(UserError, match="of 23: they must increase and lie between 1 and 22"):
        AdaptiveEmbedding(VOCABULARY, WIDTH, cutoffs=cutoffs)


def test_a_division_that_leaves_no_width():
    with pytest.raises(UserError, match="division 8 leaves no width for the last of 3 clusters"):
        AdaptiveEmbedding(VOCABULARY, WIDTH, cutoffs=(5, 10), division=8)


@pytest.mark.parametrize("config", [AdaptiveSpanConfig, AllAttentionConfig])
def test_models_check_cutoffs_against_the_vocabulary(config):
    model = config(num_layers=1, width=16, vocabulary=VocabularyConfig(cutoffs=(5, 300)))
    with pytest.raises(UserError, match="cutoffs 5, 300 do not fit a vocabulary of 256"):
        build(model, 256)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"cutoffs": [5, 3]}, "model.vocabulary: cutoffs must be above 0 and increase"),
        ({"cutoffs": [5, 5]}, "model.vocabulary: cutoffs must be above 0 and increase"),
        ({"cutoffs": [5], "division": 0}, "model.vocabulary: division must be at least 1"),
        ({"tied": True}, "model.vocabulary: tied has no effect without cutoffs"),
    ],
)
def test_a_configuration_that_makes_no_sense(table, message):
    with pytest.raises(UserError, match=message):
        schema.read(RunConfig, {"model": {"architecture": "all-attention", "vocabulary": table}})


def test_a_head_that_narrows_alone_is_torchs():
    """The adaptive softmax of Grave et al., 2017, over an embedding that is one table."""
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(VOCABULARY, WIDTH, cutoffs=(5, 9), one_table=True)
    head = AdaptiveSoftmaxHead(
        embedding, tie_tables=False, tie_projections=False, cluster_order="forward", division=4
    )
    assert [tuple(table.shape) for table in head.tables] == [(5, 16), (4, 4), (14, 1)]
    assert head.projections.keys() == {"1", "2"}
    torchs = torch.nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, [5, 9], div_value=4, head_bias=True)
    with torch.no_grad():
        head.cluster_weight.normal_()
        head.cluster_bias.normal_()
        head.biases[0].normal_()
        torchs.head.weight.copy_(torch.cat([head.tables[0], head.cluster_weight]))
        torchs.head.bias.copy_(torch.cat([head.biases[0], head.cluster_bias]))
        for number, (down, up) in enumerate(torchs.tail, start=1):
            down.weight.copy_(head.projections[str(number)].mT)
            up.weight.copy_(head.tables[number])
    hidden_BTD = torch.randn(2, 3, WIDTH)
    expected = torchs.log_prob(hidden_BTD.flatten(0, 1)).view(2, 3, VOCABULARY)
    torch.testing.assert_close(head.log_probs(hidden_BTD), expected)


@pytest.mark.parametrize("divided", ["both", "head"])
def test_cluster_widths_of_a_recipe(divided):
    """Each cluster has the width it is given, in the head alone or in the embedding too."""
    vocabulary = XLVocabularyConfig(cutoffs=(5, 9), cluster_widths=(12, 3, 7), divided=divided, tied=False)
    model = build(
        TransformerXLConfig(num_layers=1, width=WIDTH, num_heads=2, vocabulary=vocabulary), VOCABULARY
    )
    head = [tuple(table.shape) for table in model.head.tables]
    assert head == [(5, 12), (4, 3), (14, 7)]
    embedding = [tuple(table.shape) for table in model.embedding.tables]
    assert embedding == (head if divided == "both" else [(VOCABULARY, WIDTH)])
    assert model.head.cluster_weight.shape == (2, 12)


def test_cluster_widths_take_the_place_of_division():
    """With the widths that a division gives, the weights and their initial values are the same."""
    models = []
    for options in ({"division": 2}, {"cluster_widths": (16, 8, 4)}):
        vocabulary = VocabularyConfig(cutoffs=(5, 9), tied=True, **options)
        torch.manual_seed(5)
        models.append(build(AdaptiveSpanConfig(num_layers=1, width=WIDTH, vocabulary=vocabulary), VOCABULARY))
    first, second = (model.state_dict() for model in models)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("cls", "options", "complaint"),
    [
        (VocabularyConfig, {"cluster_widths": [4, 2]}, "cluster_widths has no effect without cutoffs"),
        (
            VocabularyConfig,
            {"cutoffs": [5], "cluster_widths": [4]},
            "cluster_widths has 1 entries for 2 clusters",
        ),
        (VocabularyConfig, {"cutoffs": [5], "cluster_widths": [4, 0]}, "must be at least 1, not 4, 0"),
        (
            VocabularyConfig,
            {"cutoffs": [5], "cluster_widths": [4, 2], "division": 2},
            "division has no effect with cluster_widths",
        ),
        (XLVocabularyConfig, {"cluster_widths": [4, 2]}, "cluster_widths has 2 entries for 1 clusters"),
        (
            XLVocabularyConfig,
            {"cutoffs": [5], "cluster_widths": [4, 2], "table_width": 8},
            "division and table_width have no effect with cluster_widths",
        ),
    ],
)
def test_cluster_widths_that_make_no_sense(cls, options, complaint):
    with pytest.raises(UserError, match=complaint):
        schema.read(cls, options)
