"""LAMB against its formula, tensor by tensor, and as an optimizer of a stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from longspan.config import StageConfig
from longspan.optim import Lamb, build_optimizers, memories

from .tiny import TinyModel


def expected_step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, min_trust: float) -> Tensor:
    """One update by the definition; `m` and `v` are moved in place."""
    m.mul_(0.8).add_(g, alpha=0.2)
    v.mul_(0.95).add_(g * g, alpha=0.05)
    u = m / (v.sqrt() + 1e-6) + 0.1 * p
    length, step = min(float(p.norm()), 10.0), float(u.norm())
    if min_trust > 0:
        trust = 1.0 if length == 0 or step == 0 else max(length / step, min_trust)
    else:
        trust = length / step
    return p - 0.03 * trust * u


@pytest.mark.parametrize("min_trust", [0.0, 0.25])
def test_it_follows_the_formula(min_trust: float) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # trust above and below the least, weights longer than 10, a scalar, all zeros
    values = [draw(4, 3), draw(5) * 0.01, draw(6, 5) * 9, draw(), torch.zeros(3, dtype=torch.float64)]
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = Lamb(parameters, lr=0.03, betas=(0.8, 0.95), weight_decay=0.1, min_trust=min_trust)
    means, squares = ([torch.zeros_like(value) for value in values] for _ in range(2))
    for _ in range(4):
        for i, p in enumerate(parameters):
            p.grad = draw(*p.shape)
            values[i] = expected_step(values[i], p.grad, means[i], squares[i], min_trust)
        optimizer.step()
    for p, value in zip(parameters, values, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-12, atol=1e-14)


def test_zeros_move_only_with_a_least_trust() -> None:
    for min_trust, moves in ((0.0, False), (0.25, True)):
        p = nn.Parameter(torch.zeros(3))
        p.grad = torch.ones(3)
        Lamb([p], lr=0.1, min_trust=min_trust).step()
        assert bool(p.any()) == moves


@pytest.mark.parametrize("min_trust", [0.0, 0.25])
def test_without_a_direction_nothing_happens(min_trust: float) -> None:
    still, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    still.grad = torch.zeros(3)
    optimizer = Lamb([still, unused], lr=0.1, min_trust=min_trust)
    optimizer.step()
    assert still.tolist() == [1.0] * 3
    assert unused.tolist() == [1.0] * 2
    assert unused not in optimizer.state


def test_a_stage_builds_it_with_its_settings() -> None:
    model = TinyModel()
    stage = StageConfig(
        steps=1, optimizer="lamb", learning_rate=0.5, beta1=0.8, beta2=0.9, weight_decay=0.1, min_trust=0.5
    )
    (lamb,) = build_optimizers(model, stage)
    assert isinstance(lamb, Lamb)
    groups = lamb.param_groups
    assert [(g["betas"], g["min_trust"], g["peak"]) for g in groups] == [((0.8, 0.9), 0.5, 0.5)] * 2
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {names[id(p)] for g in groups if g["weight_decay"] == 0.1 for p in g["params"]}
    assert decayed == {"mix.weight", "keep.weight"}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    lamb.step()
    assert {name.rpartition(".")[2] for name in memories(model, [lamb])} == {"exp_avg", "exp_avg_sq"}


def test_only_lamb_has_a_least_trust() -> None:
    with pytest.raises(ValueError, match="min_trust has no effect with optimizer adamw"):
        StageConfig(steps=1, learning_rate=0.1, min_trust=0.5)
    with pytest.raises(ValueError, match="min_trust must not be negative"):
        StageConfig(steps=1, optimizer="lamb", learning_rate=0.1, min_trust=-0.5)
