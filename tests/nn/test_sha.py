"""Boom and the SHA block in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.nn import Boom, SHABlock

from .plain import every_weight_learns, round_trips

D = 6


def lively(module: nn.Module) -> nn.Module:
    """In float64, and no weight at an initial value that hides it."""
    module.double()
    for p in module.parameters():
        nn.init.normal_(p, mean=0.3)
    return module


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, (D,), layer.weight, layer.bias, 1e-12)


def boom_by_hand(block: nn.Module, x: Tensor) -> Tensor:
    inner = norm(block.norm, x) @ block.expand.weight.T + block.expand.bias
    inner = inner * torch.sigmoid(1.702 * inner)
    return norm(block.residual_norm, x) + inner[..., :D] + inner[..., D : 2 * D] + inner[..., 2 * D : 3 * D]


def test_boom_is_its_formula_and_fits_into_a_sequential_model() -> None:
    boom = lively(Boom(D, 3 * D))
    x = torch.randn(2, 4, D, dtype=torch.float64)
    torch.testing.assert_close(boom(x), boom_by_hand(boom.block, x))
    model = nn.Sequential(nn.Linear(D, D), boom, Boom(D, 3 * D)).double()
    every_weight_learns(model, model(x))
    round_trips(boom, Boom(D, 3 * D).double())


def sha_by_hand(block: SHABlock, x: Tensor) -> Tensor:
    """A whole text, token by token, seeing everything before it."""
    weights = block.lstm.lstm
    hidden = cell = x.new_zeros(len(x), D)
    hs = []
    for t in range(x.shape[1]):
        gates = norm(block.lstm.norm, x[:, t]) @ weights.weight_ih_l0.T + weights.bias_ih_l0
        i, f, g, o = (gates + hidden @ weights.weight_hh_l0.T + weights.bias_hh_l0).chunk(4, dim=-1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        hidden = torch.sigmoid(o) * torch.tanh(cell)
        hs.append(hidden)
    h, a = torch.stack(hs, dim=1), block.attention
    seen, x = norm(a.memory_norm, h), norm(a.norm, h)
    q = torch.sigmoid(a.query_scale_D) * norm(a.query_norm, x @ a.query.weight.T + a.query.bias)
    scores = q @ (torch.sigmoid(a.key_scale_D) * seen).mT / D**0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    content, forget = (torch.sigmoid(a.value_gate.scale_D) @ a.value_gate.mix.weight.T).chunk(2)
    content_b, forget_b = a.value_gate.mix.bias.chunk(2)
    gate = torch.sigmoid(forget + forget_b) * torch.tanh(content + content_b)
    return boom_by_hand(block.boom, x + scores.softmax(-1) @ (gate * seen))


def test_sha_block_is_its_formula() -> None:
    block = lively(SHABlock(D, 3 * D, memory_length=20))
    x = torch.randn(2, 9, D, dtype=torch.float64)
    out, memory = block(x)
    torch.testing.assert_close(out, sha_by_hand(block, x))
    every_weight_learns(block, out)
    shapes = {name: tuple(leaf.shape) for name, leaf in memory.items()}
    assert shapes == {
        "lstm.hidden": (2, D),
        "lstm.cell": (2, D),
        "attention.memory": (2, 20, D),
        "attention.filled": (2,),
    }
    round_trips(block, SHABlock(D, 3 * D, memory_length=20).double())


def test_blocks_with_their_memory_are_one_block() -> None:
    block = lively(SHABlock(D, 3 * D, memory_length=20))
    x = torch.randn(2, 12, D, dtype=torch.float64)
    whole, _ = block(x)
    parts, memory = [], None
    for piece in x.split(4, dim=1):
        out, memory = block(piece, memory)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    begun = {name: torch.zeros_like(leaf) for name, leaf in memory.items()}  # type: ignore[union-attr]
    torch.testing.assert_close(block(x[:, :4], begun)[0], whole[:, :4])


@pytest.mark.parametrize("detached", [False, True])
def test_gradients_go_back_through_the_memory_unless_it_is_detached(detached: bool) -> None:
    block = lively(SHABlock(D, 3 * D, memory_length=20))
    first = torch.randn(2, 4, D, dtype=torch.float64, requires_grad=True)
    _, memory = block(first)
    if detached:
        memory = {name: leaf.detach() for name, leaf in memory.items()}
    out, _ = block(torch.randn(2, 4, D, dtype=torch.float64), memory)
    out.square().sum().backward()
    assert (first.grad is None) == detached


def test_a_plain_loop_trains_it() -> None:
    torch.manual_seed(1)
    embedding, block, head = nn.Embedding(5, D), SHABlock(D, 2 * D, memory_length=16), nn.Linear(D, 5)
    model = nn.ModuleList([embedding, block, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    tokens, memory, losses = torch.arange(8 * 60 + 1).remainder(5).view(1, -1), None, []
    for start in range(0, 8 * 60, 8):
        hidden, memory = block(embedding(tokens[:, start : start + 8]), memory)
        memory = {name: leaf.detach() for name, leaf in memory.items()}
        loss = F.cross_entropy(head(hidden).flatten(0, 1), tokens[:, start + 1 : start + 9].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
