"""What SHA-RNN promises beyond the contract of all models."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys

import pytest
import torch
from torch import Tensor, nn

from longspan.config import ShaRnnConfig
from longspan.errors import UserError
from longspan.layers import lstm, sha_attention
from longspan.layers.block import Block
from longspan.layers.boom import Boom
from longspan.layers.lstm import LSTMBlock
from longspan.layers.sha_attention import SingleHeadAttention
from longspan.models import LanguageModel, build
from longspan.models.pipeline import pipelined
from longspan.models.sha_rnn import ShaRnn, collapse_value_gates, drop_memory
from longspan.output import SplitSoftmaxHead
from longspan.state import State

CONFIG = ShaRnnConfig(num_layers=3, width=8, inner_width=16, attention="every", memory_length=12)


def trained(config: ShaRnnConfig = CONFIG) -> LanguageModel:
    """A model with weights that no initial value explains."""
    torch.manual_seed(4)
    model = build(config, 9).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return model


def read(model: LanguageModel, tokens: Tensor, cuts: list[int]) -> Tensor:
    state, pieces = model.initial_state(len(tokens)), []
    with torch.no_grad():
        for piece in tokens.split(cuts, dim=1):
            hidden, state = model(piece, state)
            pieces.append(hidden)
    return torch.cat(pieces, dim=1)


def tokens(length: int) -> Tensor:
    return torch.randint(9, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cuts", [[1] * 12, [5, 7], [3, 8, 1]])
def test_while_the_memory_lasts_cuts_do_not_matter(cuts):
    model = trained()
    torch.testing.assert_close(read(model, tokens(12), cuts), read(model, tokens(12), [12]))


def test_beyond_it_long_blocks_forget_sooner():
    model = trained()
    assert not model.block_invariant
    by_token, by_block = read(model, tokens(20), [1] * 20), read(model, tokens(20), [10, 10])
    torch.testing.assert_close(by_token[:, :10], by_block[:, :10])
    assert (by_token - by_block)[:, 10:].abs().max() > 1e-3


def test_without_attention_there_is_no_memory_and_cuts_never_matter():
    model = trained(dataclasses.replace(CONFIG, attention="none"))
    assert model.block_invariant
    assert {name.rpartition(".")[2] for name in model.initial_state(1).flatten()} == {"hidden", "cell"}


@pytest.mark.parametrize(
    ("attention", "expected"), [("every", [1, 4, 7]), ("second-last", [3]), ("none", [])]
)
def test_where_attention_is(attention, expected):
    model = trained(dataclasses.replace(CONFIG, attention=attention))
    blocks = dict(model.get_submodule("blocks").named_children())
    assert [int(n) for n, block in blocks.items() if isinstance(block, SingleHeadAttention)] == expected


def test_a_row_sees_its_own_text_only_however_much_the_others_have():
    """Rows that began at different times, in one batch."""
    model = trained()
    with torch.no_grad():
        _, late = model(tokens(3)[:1], model.initial_state(1))
        _, early = model(tokens(9)[:1], model.initial_state(1))
        both = type(late).join([late, early])
        together, _ = model(tokens(6), both)
        for row, state in enumerate((late, early)):
            alone, _ = model(tokens(6)[row : row + 1], state)
            torch.testing.assert_close(together[row : row + 1], alone)


def test_a_block_longer_than_the_memory_is_seen_whole_and_remembered_in_part():
    model = trained(dataclasses.replace(CONFIG, memory_length=4))
    _, state = model(tokens(9), model.initial_state(2))
    assert state.flatten()["blocks.1.memory"].shape == (2, 4, 8)
    assert state.flatten()["blocks.1.filled"].tolist() == [4, 4]


def test_the_memory_of_a_trained_model_can_be_dropped_in_the_middle_of_a_text():
    model = trained()
    with torch.no_grad():
        _, state = model(tokens(7), model.initial_state(2))
        remembering, _ = model(tokens(4), state)
        drop_memory(model)
        found, after = model(tokens(4), state)
        forgotten = {n: torch.zeros_like(t) if "filled" in n else t for n, t in state.flatten().items()}
        expected, _ = trained()(tokens(4), type(state).unflatten(forgotten))
    assert not torch.allclose(found, remembering)
    torch.testing.assert_close(found, expected)
    memories = [leaf for name, leaf in after.flatten().items() if name.endswith(("memory", "filled"))]
    assert len(memories) == 6
    assert sum(int(leaf.count_nonzero()) for leaf in memories) == 0
    assert model.initial_state(1).flatten().keys() == after.flatten().keys()


def test_collapsed_gates_give_the_same_with_fewer_weights():
    model = trained()
    expected = read(model, tokens(20), [6, 6, 8])
    before = sum(p.numel() for p in model.parameters())
    collapse_value_gates(model)
    assert torch.equal(read(model, tokens(20), [6, 6, 8]), expected)
    assert before - sum(p.numel() for p in model.parameters()) == 3 * (8 + 8 * 16 + 16)
    collapse_value_gates(model)  # again: nothing more to do
    assert torch.equal(read(model, tokens(20), [6, 6, 8]), expected)


def test_boom_by_hand():
    boom = Boom(2, 5, dropout=0.0, epsilon=1e-12).double()
    h = torch.tensor([[[0.5, -2.0]]], dtype=torch.float64)
    out, _ = boom(h, None)
    normed = torch.tensor([1.0, -1.0], dtype=torch.float64)
    inner = boom.expand(normed)
    inner = inner / (1 + torch.exp(-1.702 * inner))
    torch.testing.assert_close(out[0, 0], normed + inner[:2] + inner[2:4], rtol=1e-9, atol=1e-9)
    out.square().sum().backward()
    assert boom.expand.weight.grad[4].tolist() == [0.0, 0.0]


def test_initial_values():
    torch.manual_seed(0)
    model = build(ShaRnnConfig(num_layers=2, width=64, inner_width=128, memory_length=8), 500)
    small = 0.1 / math.sqrt(64)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            assert module.weight.std().item() == pytest.approx(small, rel=0.1)
        if isinstance(module, nn.Linear):
            assert not module.bias.any()
        if isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-12
            assert (module.weight == 1).all()
        if isinstance(module, nn.LSTM):
            assert module.weight_hh_l0.abs().max().item() == pytest.approx(1 / 8, rel=0.01)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("scale_D"))


def test_dropout_is_only_for_training():
    model = trained(dataclasses.replace(CONFIG, dropout=0.3, embedding_dropout=0.2))
    plain = trained()
    assert torch.equal(read(model, tokens(9), [9]), read(plain, tokens(9), [9]))
    model.train()
    assert not torch.allclose(read(model, tokens(9), [9]), read(plain, tokens(9), [9]))


def test_carried_state_stays_in_full_precision_under_autocast():
    model = build(CONFIG, 9)
    state = model.initial_state(2)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            hidden, state = model(tokens(5), state)
            model.head.nll(hidden, tokens(5)).sum().backward()
            state = state.detach()
    kinds = {leaf.dtype for leaf in state.flatten().values()}
    assert kinds == {torch.float32, torch.int64}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("splits", [(), (5,), (2, 3, 7)])
def test_split_probabilities(splits, tied):
    """One softmax per part, the parts' entries in reverse; the loss is read off the same numbers."""
    torch.manual_seed(2)
    embedding = nn.Embedding(11, 4)
    head = SplitSoftmaxHead(embedding, splits, tied=tied)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
        hidden, targets = torch.randn(2, 30, 4), torch.randint(11, (2, 30))
        log_probs = head.log_probs(hidden)
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 30))
        nll = head.nll(hidden, targets)
        torch.testing.assert_close(nll, -log_probs.gather(-1, targets[..., None])[..., 0])
        if splits:
            weight = embedding.weight if tied else head.get_parameter("table.weight")
            assert_parts(head, weight, hidden, log_probs)


def assert_parts(head: SplitSoftmaxHead, weight: Tensor, hidden: Tensor, log_probs: Tensor) -> None:
    """Together the words of a part have the probability of its entry in the first softmax."""
    num_first = head.edges[0]
    words = hidden @ weight[:num_first].T + head.bias_V[:num_first]
    entries = hidden @ head.part_vectors.T + head.part_bias
    first = torch.cat([words, entries], dim=-1).softmax(-1)
    for part, (start, end) in enumerate(itertools.pairwise(head.edges), 1):
        torch.testing.assert_close(log_probs[..., start:end].exp().sum(-1), first[..., -part])


def test_parts_that_no_target_is_in_have_gradients_all_the_same():
    embedding = nn.Embedding(9, 4)
    head = SplitSoftmaxHead(embedding, (3, 6))
    head.nll(torch.randn(1, 5, 4), torch.zeros(1, 5, dtype=torch.long)).sum().backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert not head.bias_V.grad[3:].any()


@pytest.mark.filterwarnings("error")
def test_targets_that_are_one_column_of_a_text_bring_no_warning():
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        SplitSoftmaxHead(nn.Embedding(9, 4), (3, 6)).nll(torch.randn(2, 1, 4), tokens(5)[:, 2:3])
    finally:
        torch.set_warn_always(always)


def test_a_split_beyond_the_vocabulary_is_the_users_mistake():
    with pytest.raises(UserError, match="the last split, 9, must be below the vocabulary's size, 9"):
        build(dataclasses.replace(CONFIG, splits=(4, 9)), 9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_layers": 1}, "second-last"),
        ({"inner_width": 8, "width": 16}, "inner_width"),
        ({"memory_length": -1}, "memory_length"),
        ({"dropout": 1.0}, "dropout"),
        ({"splits": (5, 5)}, "splits"),
        ({"splits": (0, 5)}, "splits"),
    ],
)
def test_settings_that_mean_nothing(wrong, message):
    with pytest.raises(ValueError, match=message):
        ShaRnnConfig(**wrong)


@pytest.mark.parametrize("cuts", [[3], [4, 3], [2, 2, 3]])
def test_attention_written_out_is_that_of_torch(cuts):
    """Over the block alone, or memory before it as more pieces, rows hidden in one text of the two."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, rows, 6, dtype=torch.float64, requires_grad=True) for rows in (3, 7, 7))
    visible = sha_attention._visible(3, sum(cuts), torch.tensor([4, 1]))
    results = []
    for attend, sizes in (
        (sha_attention._attend_by_torch, [sum(cuts)]),
        (sha_attention._attend_by_products, cuts),
    ):
        out = attend(q, k[:, -sum(cuts) :].split(sizes, 1), v[:, -sum(cuts) :].split(sizes, 1), visible, 0.0)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)


def test_attention_written_out_drops_weights_and_keeps_their_mean():
    q, k, v = (torch.randn(1, rows, 6) for rows in (200, 200, 200))
    visible = sha_attention._visible(200, 200, torch.tensor([0]))
    v = torch.ones_like(v)
    plain, dropped = (sha_attention._attend_by_products(q, [k], [v], visible, p) for p in (0.0, 0.3))
    torch.testing.assert_close(plain, v)
    assert dropped[:, 20:].std() > 0.01
    assert dropped[:, 20:].mean().item() == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_scaled_gradients_of_an_lstm_come_out_as_they_are(scale, monkeypatch):
    """What autocast on a GPU does, in full precision."""
    torch.manual_seed(0)
    block = LSTMBlock(6, dropout=0.0, epsilon=1e-12).double()
    plain = nn.LSTM(6, 6, batch_first=True).double()
    plain.load_state_dict(block.lstm.state_dict())
    monkeypatch.setattr(lstm, "_precision", lambda h: (h.dtype, scale))
    h = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    out, state = block(h, block.initial_state(2))
    expected, (hidden, cell) = plain(block.norm(h))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state.tensor("hidden"), hidden[0])
    torch.testing.assert_close(state.tensor("cell"), cell[0])
    (dh,) = torch.autograd.grad(out.square().sum(), h, retain_graph=True)
    torch.testing.assert_close(dh, torch.autograd.grad(expected.square().sum(), h, retain_graph=True)[0])
    ours = torch.autograd.grad(out.square().sum(), list(block.lstm.parameters()))
    torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), list(plain.parameters())))


@pytest.mark.parametrize(("batch", "length"), [(2, 5), (1, 5), (2, 1)])
def test_what_surrounds_an_lstm_compiles_and_its_gradients_lie_in_order(batch, length):
    """Else cuDNN would put them in order, row by row. With one text or token they lie in both orders."""
    torch.manual_seed(0)
    torch.compiler.reset()
    enter, leave = (
        torch.compile(part, backend="aot_eager", fullgraph=True) for part in (lstm._enter, lstm._leave)
    )
    h = torch.randn(batch, length, 6, requires_grad=True)
    norm, full = nn.LayerNorm(6), torch.float32
    x = enter(h, norm, full, 8.0)
    assert x.is_contiguous()
    torch.testing.assert_close(x, norm(h).transpose(0, 1))
    out = leave(x, full, 8.0, 0.0)
    assert out.is_contiguous()
    weight = torch.randn_like(out)
    dx, dh = torch.autograd.grad((weight * out).sum(), (x, h))
    assert dx.is_contiguous()
    assert dh.is_contiguous()
    torch.testing.assert_close(dx, 8 * weight.transpose(0, 1))
    torch.testing.assert_close(dh, torch.autograd.grad((weight * norm(h)).sum(), h)[0])


def test_the_weights_of_an_lstm_lie_as_cudnn_wants_them():
    """In one buffer of half precision, in the order of the parameters; their gradients are scaled back."""
    torch.manual_seed(0)
    weights = list(nn.LSTM(3, 2).parameters())
    flattened = torch.compile(lstm._flattened, backend="aot_eager", fullgraph=True)
    flat = flattened(weights, torch.float16, 64.0)
    assert flat.untyped_storage().nbytes() == 2 * sum(weight.numel() for weight in weights)
    parts = flat.split([weight.numel() for weight in weights])
    for part, weight in zip(parts, weights, strict=True):
        assert torch.equal(part.view_as(weight), weight.half())
    gradients = torch.autograd.grad((flat * 64).sum(), weights)
    assert all(torch.equal(d, torch.full_like(d, 1.0)) for d in gradients)


def test_chunks_of_a_text_share_the_weights_of_the_lstm_and_their_gradients_add_up(monkeypatch):
    flattened, calls = lstm._flattened, []
    monkeypatch.setattr(lstm, "_flattened", lambda *args: calls.append(args) or flattened(*args))
    model = trained(dataclasses.replace(CONFIG, attention="none"))
    state = model.initial_state(2).branch("blocks")
    h = torch.randn(2, 6, 8, dtype=torch.float64)
    used = [p for name, p in model.named_parameters() if name.startswith("blocks.")]
    expected = torch.autograd.grad(model._through(h, state)[0].square().sum(), used)
    assert not calls
    monkeypatch.setattr(lstm, "_precision", lambda h: (h.dtype, 64.0))
    found = torch.autograd.grad(model._through_pipeline(h, state)[0].square().sum(), used)
    assert len(calls) == CONFIG.num_layers
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_attention_written_out_compiles(precision):
    """Its gradients come from a function of our own, which torch has to trace."""
    torch.manual_seed(0)
    torch.compiler.reset()
    q, k, v = (torch.randn(2, rows, 6, requires_grad=True) for rows in (3, 7, 7))
    visible = sha_attention._visible(3, 7, torch.tensor([4, 1]))
    attend, results = sha_attention._attend_by_products, []
    for way in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != torch.float32):
            out = way(q, k.split([4, 3], 1), v.split([4, 3], 1), visible, 0.0)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("attention", ["second-last", "every", "none"])
@pytest.mark.parametrize(("length", "pieces"), [(1, 2), (3, 2), (8, 2), (8, 4), (13, 3)])
def test_a_pipeline_gives_what_the_blocks_give(attention, length, pieces, monkeypatch):
    """Outputs, states and gradients; the memory is full and forgets."""
    monkeypatch.setattr(sys.modules[ShaRnn.__module__], "CHUNKS", pieces)
    model = trained(dataclasses.replace(CONFIG, attention=attention))
    with torch.no_grad():
        _, state = model(tokens(11), model.initial_state(2))
    results = []
    for through in (model._through, model._through_pipeline):
        h = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(3)).double().requires_grad_()
        out, after = through(h, state.branch("blocks"))
        used = [p for name, p in model.named_parameters() if name.startswith("blocks.")]
        # As if the next block learned from this one too.
        loss = out.square().sum() + sum(x.sum() for x in after.flatten().values())
        gradients = torch.autograd.grad(loss, [h, *used])
        results.append({"out": out, **after.flatten()} | {str(n): g for n, g in enumerate(gradients)})
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-10)


def test_a_pipeline_gives_every_block_its_chunks_in_order():
    """A block reads a chunk as soon as the block below is done with it."""
    turns = []

    class Noted(Block):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, h, state):
            turns.append((self.number, h[0, :, 0].tolist()))
            return h + 10, state

    h = torch.arange(5.0)[None, :, None]
    out, _ = pipelined([Noted(0), Noted(1)], h, [State({})] * 2, num_chunks=3)
    assert torch.equal(out, h + 20)
    assert turns == [(0, [0, 1]), (1, [10, 11]), (0, [2, 3]), (1, [12, 13]), (0, [4]), (1, [14])]


NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gradients(
    model: LanguageModel, *, pipeline: bool, precision: torch.dtype, share: float
) -> dict[str, Tensor]:
    """Of a loss as small as the mean over very many tokens is, times what it was divided by."""
    through = model._through_pipeline if pipeline else super(ShaRnn, model)._through
    states = model.initial_state(2).branch("blocks")
    h = torch.randn(2, 40, 128, generator=torch.Generator().manual_seed(3)).to(model.head.bias_V.device)
    model.zero_grad()
    with torch.autocast("cuda", precision, enabled=precision != torch.float32):
        out, _ = through(h, states)
    (out.square().sum() * share).backward()
    return {n: p.grad / share for n, p in model.named_parameters() if n.startswith("blocks.")}


@NEEDS_A_GPU
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("precision", "far"), [(torch.float32, 5e-3), (torch.bfloat16, 5e-2)])
def test_parallel_streams_give_the_gradients_of_one(compiled, precision, far):
    """Three times, since a race may be won by chance; and small gradients are not lost in fp16."""
    torch.manual_seed(0)
    config = ShaRnnConfig(num_layers=4, width=128, inner_width=256, memory_length=64)
    model = build(config, 9).cuda()
    expected = gradients(model, pipeline=False, precision=torch.float32, share=1.0)
    if compiled:
        model.compile()
    for _ in range(3):
        found = gradients(model, pipeline=True, precision=precision, share=2.0**-20)
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= far * gradient.norm() + 1e-6, name
