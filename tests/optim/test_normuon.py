"""NorMuon and cautious decay, against loops over one matrix at a time in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from longspan.optim import Muon, NorMuon
from longspan.optim.polar import POLAR_EXPRESS

SHAPES = ((6, 4), (4, 6), (6, 4), (5, 5), (2, 3, 7))


def parameters() -> list[nn.Parameter]:
    values = torch.Generator().manual_seed(2)
    return [nn.Parameter(torch.randn(s, generator=values, dtype=torch.float64)) for s in SHAPES]


def gradients(number: int) -> list[Tensor]:
    noise = torch.Generator().manual_seed(100 + number)
    return [torch.randn(s, generator=noise, dtype=torch.float64) for s in SHAPES]


def step(optimizer: torch.optim.Optimizer, of: list[nn.Parameter], number: int) -> None:
    for p, gradient in zip(of, gradients(number), strict=True):
        p.grad = gradient
    optimizer.step()


def polar(x: Tensor) -> Tensor:
    """The odd polynomials, applied to the singular values."""
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    s = s / (1.02 * s.square().sum().sqrt())
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return left @ torch.diag(s) @ right


class PlainNorMuon:
    """One matrix, as the formula says it."""

    def __init__(self, weight: Tensor, lr: float, decay: float, cautious: bool) -> None:
        self.weight, self.lr, self.decay, self.cautious = weight.clone(), lr, decay, cautious
        self.mean = torch.zeros_like(weight)
        self.moments = [0.0] * max(weight.shape)

    def step(self, g: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * g
        o = polar(0.1 * g + 0.9 * self.mean)
        tall = o.shape[0] >= o.shape[1]
        lines = list(o if tall else o.T)
        self.moments = [
            0.95 * v + 0.05 * float((line * line).mean()) for v, line in zip(self.moments, lines, strict=True)
        ]
        e = torch.stack([line / math.sqrt(v) for v, line in zip(self.moments, lines, strict=True)])
        e = (e if tall else e.T) * o.norm() / e.norm()
        for i in range(o.shape[0]):
            for j in range(o.shape[1]):
                w = float(self.weight[i, j])
                decays = not self.cautious or float(e[i, j]) * w > 0
                move = 0.2 * self.lr * math.sqrt(max(o.shape)) * float(e[i, j])
                self.weight[i, j] = w - (self.lr * self.decay * w if decays else 0.0) - move


@pytest.mark.parametrize("cautious", [False, True])
def test_it_follows_the_formula(cautious: bool) -> None:
    ours = parameters()
    optimizer = NorMuon(ours, lr=0.1, momentum=0.9, weight_decay=0.2, cautious=cautious)
    plain = [[PlainNorMuon(m, 0.1, 0.2, cautious) for m in p.data.reshape(-1, *p.shape[-2:])] for p in ours]
    for number in range(3):
        step(optimizer, ours, number)
        for matrices, gradient in zip(plain, gradients(number), strict=True):
            for matrix, g in zip(matrices, gradient.reshape(-1, *gradient.shape[-2:]), strict=True):
                matrix.step(g)
    for p, matrices in zip(ours, plain, strict=True):
        expected = torch.stack([matrix.weight for matrix in matrices]).view_as(p)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-10, atol=1e-10)
        moments = torch.tensor([matrix.moments for matrix in matrices], dtype=torch.float64)
        found = optimizer.state[p]["line_moment"]
        torch.testing.assert_close(found, moments.view_as(found), rtol=1e-10, atol=1e-12)


def test_neurons_move_alike_and_the_norm_is_kept() -> None:
    """The first step evens lines out completely; Muon's rows differ in length."""
    moves: dict[type[Muon], list[Tensor]] = {}
    for kind in (Muon, NorMuon):
        of = parameters()
        before = [p.detach().clone() for p in of]
        step(kind(of, lr=1.0), of, 0)
        moves[kind] = [(p.detach() - b) for p, b in zip(of, before, strict=True)]
    for plain, even in zip(moves[Muon], moves[NorMuon], strict=True):
        along = -1 if even.shape[-2] >= even.shape[-1] else -2
        lengths = even.norm(dim=along)
        torch.testing.assert_close(lengths, lengths[..., :1].expand_as(lengths))
        if even.shape[-2] != even.shape[-1]:
            assert plain.norm(dim=along).std() > 0.02 * plain.norm(dim=along).mean()
        # All singular values near 1: the norm is the root of their number.
        rows = min(even.shape[-2:])
        expected = 0.2 * math.sqrt(max(even.shape[-2:])) * math.sqrt(rows)
        assert torch.all((even.norm(dim=(-2, -1)) / expected - 1).abs() < 0.13)


def test_a_matrix_of_zeros_stays_and_spoils_nobody() -> None:
    of = parameters()
    optimizer = NorMuon(of, lr=0.1)
    before = of[0].detach().clone()
    for p, gradient in zip(of, gradients(0), strict=True):
        p.grad = gradient
    of[0].grad = torch.zeros_like(of[0])
    optimizer.step()
    assert torch.equal(of[0], before)
    assert all(torch.isfinite(p).all() for p in of)


def test_cautious_decay_is_where_the_step_goes_to_zero() -> None:
    """Against the same step without decay: (1 - lr decay) of what has the sign of its step."""
    plain, decayed = parameters(), parameters()
    before = [p.detach().clone() for p in plain]
    step(Muon(plain, lr=0.01), plain, 0)
    step(Muon(decayed, lr=0.01, weight_decay=0.3, cautious=True), decayed, 0)
    counts = [0, 0]
    for w, p, q in zip(before, plain, decayed, strict=True):
        nearer = (w - p.detach()) * w > 0
        torch.testing.assert_close(q.detach(), p.detach() - torch.where(nearer, 0.003 * w, 0.0))
        counts[0] += int(nearer.sum())
        counts[1] += int((~nearer).sum())
    assert min(counts) > 20


def test_moments_are_a_line_of_numbers() -> None:
    of = parameters()
    optimizer = NorMuon(of, lr=0.1)
    step(optimizer, of, 0)
    shapes = [tuple(optimizer.state[p]["line_moment"].shape) for p in of]
    assert shapes == [(6,), (6,), (6,), (5,), (2, 7)]


def test_a_group_added_later_has_the_same_beta() -> None:
    first, second = parameters()[:2]
    optimizer = NorMuon([first], lr=0.1, beta2=0.5)
    optimizer.add_param_group({"params": [second]})
    assert [group["beta2"] for group in optimizer.param_groups] == [0.5, 0.5]
