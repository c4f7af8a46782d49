"""The embeddings once more before every attention, against the equation written out."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from longspan.config import ModernConfig, SpanConfig, StageConfig
from longspan.layers.attention import Attention
from longspan.layers.embedding_residual import EmbeddingResidual
from longspan.models import Stack, build
from longspan.optim import build_optimizers

V, D = 7, 8
PLAIN = ModernConfig(
    num_layers=2,
    width=D,
    num_heads=2,
    inner_width=8,
    convolution=2,
    span=SpanConfig(kind="fixed", limit=4),
)
CONFIG = dataclasses.replace(PLAIN, embedding_residual=True, ngrams=(2,))


def fresh(config: ModernConfig) -> Stack:
    torch.manual_seed(4)
    model = build(config, V).double().eval()
    assert isinstance(model, Stack)
    return model


def lively() -> Stack:
    model = fresh(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def text(length: int) -> Tensor:
    return torch.randint(V, (2, length), generator=torch.Generator().manual_seed(1))


def test_it_is_its_equation_with_its_gradients() -> None:
    residual = EmbeddingResidual(D).double()
    torch.nn.init.normal_(residual.stream_D)
    torch.nn.init.normal_(residual.again_D)
    h, e = torch.randn(2, 2, 3, D, dtype=torch.float64).requires_grad_().unbind()
    found = residual(h, e)
    rms = (e.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(found, residual.stream_D * h + residual.again_D * e / rms)
    inputs = (h.detach().requires_grad_(), e.detach().requires_grad_())
    assert torch.autograd.gradcheck(residual, inputs)
    (found * h.detach()).sum().backward()
    torch.testing.assert_close(residual.stream_D.grad, h.square().sum((0, 1)))
    torch.testing.assert_close(residual.again_D.grad, (h * e / rms).sum((0, 1)))


def test_a_fresh_model_is_the_one_without() -> None:
    plain, model, tokens = fresh(PLAIN), fresh(CONFIG), text(9)
    expected, _ = plain(tokens, plain.initial_state(2))
    found, _ = model(tokens, model.initial_state(2))
    assert torch.equal(found, expected)


def test_every_attention_gets_what_the_first_block_got() -> None:
    model, tokens = lively(), text(9)
    assert [type(model.blocks[int(number)]) for number in model.residuals] == [Attention] * 2
    e = model.embedding(tokens) + model.ngrams(tokens, model.ngrams.initial_state(2))[0]
    h = e
    for number, block in enumerate(model.blocks):
        if isinstance(block, Attention):
            part = model.residuals[str(number)]
            h = part.stream_D * h + part.again_D * e / (e.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        h, _ = block(h, block.initial_state(2))
    found, _ = model(tokens, model.initial_state(2))
    torch.testing.assert_close(found, model.final_norm(h))


def test_single_tokens_go_on_from_a_state() -> None:
    model, tokens = lively(), text(9)
    with torch.no_grad():
        expected, _ = model(tokens, model.initial_state(2))
        _, state = model(tokens[:, :4], model.initial_state(2))
        step = model.step_from(state)
        found = [step(tokens[:, t : t + 1].T.contiguous())[0].clone() for t in range(4, 9)]
    torch.testing.assert_close(torch.stack(found, dim=1), expected[:, 4:])


def test_its_weights_are_moved_by_adamw_without_decay() -> None:
    model = fresh(CONFIG)
    stage = StageConfig(steps=9, optimizer="muon", learning_rate=0.5, weight_decay=0.1)
    muon, adamw = build_optimizers(model, stage)
    (group,) = adamw.param_groups
    moved = {id(p) for p in group["params"]}
    assert all(id(p) in moved for p in model.residuals.parameters())
    assert group["weight_decay"] == 0
    held = [*moved, *(id(p) for group in muon.param_groups for p in group["params"])]
    assert sorted(held) == sorted(map(id, model.parameters()))


def test_a_compiled_model_is_the_same() -> None:
    model, tokens = lively(), text(9)
    expected, _ = model(tokens, model.initial_state(2))
    for part in model.residuals.values():
        part.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(tokens, model.initial_state(2))[0], expected)
