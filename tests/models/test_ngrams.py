"""n-gram embeddings against a loop over the text, and what the model around them makes of them."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.cli import main
from longspan.config import ModernConfig, SpanConfig, StageConfig
from longspan.flops import Shape
from longspan.layers.ngrams import PRIME, NgramEmbeddings
from longspan.models import Stack, build
from longspan.optim import build_optimizers

V, D = 7, 5
PLAIN = ModernConfig(
    num_layers=1, width=8, num_heads=2, inner_width=8, span=SpanConfig(kind="fixed", limit=4)
)
CONFIG = dataclasses.replace(PLAIN, ngrams=(2, 3), ngram_rows=100)


def lively(sizes: tuple[int, ...], rows: int, vocabulary: int = V) -> NgramEmbeddings:
    torch.manual_seed(2)
    ngrams = NgramEmbeddings(vocabulary, D, sizes=sizes, rows=rows).double()
    for table in ngrams.tables:
        torch.nn.init.normal_(table.weight)
    return ngrams


def text(length: int, batch: int = 2, vocabulary: int = V) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def row(ngrams: NgramEmbeddings, number: int, digits: list[int]) -> int:
    """Where the n-gram is in the table of this number, in numbers without end."""
    power_sum = sum(digit * ngrams.multipliers[number] ** i for i, digit in enumerate(reversed(digits)))
    return power_sum % PRIME % ngrams.tables[number].num_embeddings


def found_by_hand(ngrams: NgramEmbeddings, number: int, tokens: Tensor) -> Tensor:
    """What the table of this number says about every token."""
    n, weight = ngrams.sizes[number], ngrams.tables[number].weight
    rows = [
        [
            row(ngrams, number, [line[s] + 1 if s >= 0 else 0 for s in range(t - n + 1, t + 1)])
            for t in range(len(line))
        ]
        for line in tokens.tolist()
    ]
    return weight[torch.tensor(rows)]


def by_hand(ngrams: NgramEmbeddings, tokens: Tensor) -> Tensor:
    return sum(found_by_hand(ngrams, number, tokens) for number in range(len(ngrams.sizes)))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=3, unique=True),
    rows=st.sampled_from([1, 64, 97, 512]),
    vocabulary=st.sampled_from([1, 7, 256, 2**31 - 2]),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_it_is_its_equation_however_the_text_is_cut(
    sizes: list[int], rows: int, vocabulary: int, cuts: list[int]
) -> None:
    ngrams = lively(tuple(sizes), rows, vocabulary)
    tokens = text(sum(cuts), vocabulary=vocabulary)
    expected = by_hand(ngrams, tokens)
    state, pieces = ngrams.initial_state(2), []
    for piece in tokens.split(cuts, dim=1):
        found, state = ngrams(piece, state)
        pieces.append(found)
        assert state.tensor("before").shape == (2, max(sizes) - 1)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected)


def test_each_has_its_own_row_where_there_are_enough() -> None:
    ngrams = lively((2, 3), (V + 1) ** 2)
    assert [table.num_embeddings for table in ngrams.tables] == [(V + 1) ** 2] * 2
    assert len({row(ngrams, 0, list(digits)) for digits in product(range(V + 1), repeat=2)}) == (V + 1) ** 2
    assert lively((2,), 10**6).tables[0].num_embeddings == (V + 1) ** 2


def test_a_hash_spreads_and_shares_differently_for_every_length() -> None:
    ngrams = lively((2, 3, 4), 4096, vocabulary=256)
    letters = range(98, 123)
    rows = [
        torch.tensor([row(ngrams, number, [33] * (n - 2) + [a, b]) for a in letters for b in letters])
        for number, n in enumerate(ngrams.sizes)
    ]
    for found in rows:  # 625 pairs into 4096 rows: by chance 580 rows, and 10 more or less
        assert len(found.unique()) > 540
    shared = [(r[:, None] == r) & ~torch.eye(len(r), dtype=torch.bool) for r in rows]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (shared[one] & shared[other]).sum() <= 2


def test_what_stands_before_a_text_is_no_token() -> None:
    ngrams = lively((2,), 10**6)
    fresh, _ = ngrams(torch.tensor([[3]]), ngrams.initial_state(1))
    for token in range(V):
        _, state = ngrams(torch.tensor([[token]]), ngrams.initial_state(1))
        assert not torch.allclose(ngrams(torch.tensor([[3]]), state)[0], fresh)


def test_gradients_go_to_the_rows_that_were_read() -> None:
    ngrams, tokens = lively((2, 3), 40), text(9)
    weights = torch.randn(2, 9, D, dtype=torch.float64)
    (ngrams(tokens, ngrams.initial_state(2))[0] * weights).sum().backward()
    found = [table.weight.grad.clone() for table in ngrams.tables]
    ngrams.zero_grad()
    (by_hand(ngrams, tokens) * weights).sum().backward()
    for table, grad in zip(ngrams.tables, found, strict=True):
        torch.testing.assert_close(grad, table.weight.grad)
        assert (grad == 0).all(1).any()


def test_narrow_tables_are_concatenated_and_projected() -> None:
    torch.manual_seed(2)
    ngrams = NgramEmbeddings(V, D, sizes=(2, 3), rows=40, table_width=3).double()
    for table in ngrams.tables:
        torch.nn.init.normal_(table.weight)
    tokens = text(9)
    concatenated = torch.cat([found_by_hand(ngrams, number, tokens) for number in (0, 1)], dim=-1)
    found, _ = ngrams(tokens, ngrams.initial_state(2))
    torch.testing.assert_close(found, concatenated @ ngrams.widen.weight.mT)
    assert ngrams.widen.weight.shape == (D, 6)


@pytest.mark.parametrize(
    ("epochs", "epoch", "probability"), [(1, 1, 0.3), (3, 1, 0.1), (3, 2, 0.2), (3, 3, 0.3), (3, 9, 0.3)]
)
def test_dropout_of_rows_grows_with_the_epochs(epochs: int, epoch: int, probability: float) -> None:
    torch.manual_seed(2)
    ngrams = NgramEmbeddings(V, D, sizes=(2, 3), rows=40, dropout=0.3, dropout_epochs=epochs).double()
    for table in ngrams.tables:
        torch.nn.init.normal_(table.weight)
    tokens = text(3000)
    pairs, triples = (found_by_hand(ngrams, number, tokens) for number in (0, 1))
    ngrams.begin_epoch(0)
    torch.testing.assert_close(ngrams(tokens, ngrams.initial_state(2))[0], pairs + triples)
    ngrams.begin_epoch(epoch)
    dropped, _ = ngrams(tokens, ngrams.initial_state(2))
    counted = 0
    for pair, triple in ((1, 1), (1, 0), (0, 1), (0, 0)):
        kept = (pair * pairs + triple * triples) / (1 - probability)
        here = torch.isclose(dropped, kept, rtol=1e-6).all(-1)
        share = (1 - probability) ** (pair + triple) * probability ** (2 - pair - triple)
        assert abs(here.double().mean().item() - share) < 0.03
        counted += here.sum()
    assert counted == tokens.numel()
    torch.testing.assert_close(ngrams.eval()(tokens, ngrams.initial_state(2))[0], pairs + triples)


class TestModel:
    def model(self, config: ModernConfig = CONFIG) -> Stack:
        torch.manual_seed(4)
        model = build(config, V)
        assert isinstance(model, Stack)
        return model.eval()

    def test_a_fresh_one_is_the_one_without(self) -> None:
        tokens, found = text(9), []
        for config in (PLAIN, CONFIG):
            model = self.model(config)
            found.append(model(tokens, model.initial_state(2))[0])
        assert torch.equal(*found)

    def test_they_are_added_to_the_embedding(self) -> None:
        model, tokens = self.model(), text(9)
        for table in model.ngrams.tables:
            torch.nn.init.normal_(table.weight)
        hidden, state = model(tokens, model.initial_state(2))
        e = model.embedding(tokens) + model.ngrams(tokens, model.ngrams.initial_state(2))[0]
        h, _ = model.blocks[0](e, model.blocks[0].initial_state(2))
        h, _ = model.blocks[1](h, model.blocks[1].initial_state(2))
        torch.testing.assert_close(hidden, model.final_norm(h))
        assert next(iter(state.flatten())) == "ngrams.before"
        assert state.flatten()["ngrams.before"].tolist() == (tokens[:, -2:] + 1).tolist()

    def test_single_tokens_go_on_from_a_state(self) -> None:
        model, tokens = self.model(), text(9)
        for table in model.ngrams.tables:
            torch.nn.init.normal_(table.weight)
        with torch.no_grad():
            expected, _ = model(tokens, model.initial_state(2))
            _, state = model(tokens[:, :4], model.initial_state(2))
            step = model.step_from(state)
            found = [step(tokens[:, t : t + 1].T.contiguous())[0].clone() for t in range(4, 9)]
        torch.testing.assert_close(torch.stack(found, dim=1), expected[:, 4:])

    def test_they_move_as_the_embedding_does(self) -> None:
        model = self.model()
        stage = StageConfig(
            steps=9, optimizer="muon", learning_rate=0.5, adamw_learning_rate=0.25, weight_decay=0.1
        )
        muon, adamw = build_optimizers(model, stage)
        groups = {id(p): group for group in adamw.param_groups for p in group["params"]}
        with_embedding = groups[id(model.embedding.weight)]
        assert all(groups[id(table.weight)] is with_embedding for table in model.ngrams.tables)
        assert with_embedding["weight_decay"] == 0
        held = [p for optimizer in (muon, adamw) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(map(id, held)) == sorted(map(id, model.parameters()))

    def test_they_cost_memory_and_no_products(self) -> None:
        plain, model = self.model(PLAIN), self.model()
        more = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in plain.parameters())
        assert more == ((V + 1) ** 2 + 100) * 8
        assert model.flops(Shape(2, 5)) == plain.flops(Shape(2, 5))
        narrow = self.model(dataclasses.replace(CONFIG, ngram_width=3))
        assert narrow.flops(Shape(2, 5)) == plain.flops(Shape(2, 5)) + 2 * (2 * 3) * PLAIN.width

    def test_compiled_it_is_the_same(self) -> None:
        ngrams = lively((2, 3), 40)
        compiled = torch.compile(ngrams, backend="aot_eager", fullgraph=True)
        tokens, state = text(9), ngrams.initial_state(2)
        expected, after = ngrams(tokens, state)
        found, state = compiled(tokens, state)
        assert torch.equal(found, expected)
        assert torch.equal(state.tensor("before"), after.tensor("before"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ngrams=[1,2]", "ngrams must be different numbers of tokens, each at least 2"),
        ("ngrams=[3,3]", "ngrams must be different numbers"),
        ("ngrams=3", "'model.ngrams' must be a list"),
        ("ngram-rows=0", "ngram_rows must be at least 1"),
        ("ngram-dropout=1.0", "ngram_dropout must be at least 0 and below 1"),
        ("ngram-dropout-epochs=0", "ngram_dropout_epochs must be at least 1"),
        ("ngram-width=0", "ngram_width must be between 1 and width"),
        ("ngram-width=1000", "ngram_width must be between 1 and width"),
        ("ngram-rows=2147483648", "ngram_rows must be at least 1 and below"),
    ],
)
def test_what_cannot_be_is_refused(value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", f"--model.{value}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
