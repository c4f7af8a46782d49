"""QK-norm and RoPE by every backend against the loops: outputs and every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from longspan.kernels import qk_norm_rope
from longspan.kernels.qk_norm_rope import QKV, Mix, Rope, eager, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROPES = [Rope(50.0), Rope(50.0, 0.5)]
# (B, T, H, K): positions beyond a tile, heads whose halves are no power of two, one pair, one position.
SHAPES = [(2, 40, 2, 8), (1, 33, 3, 6), (3, 5, 1, 2), (2, 1, 2, 4)]
OPTIONS = list(itertools.product([True, False], repeat=3))


@pytest.fixture(params=["eager", "triton"])
def transform(request):
    if request.param == "eager":
        return eager.qk_norm_rope
    return pytest.importorskip(
        "longspan.kernels.qk_norm_rope.triton_kernels", reason="needs Triton"
    ).qk_norm_rope


def inputs(
    shape: tuple[int, ...],
    *,
    queries: bool = True,
    normed: bool = True,
    rotated: bool = True,
    rope: Rope = ROPES[0],
) -> tuple[Tensor, int, Tensor | None, Tensor | None, Rope]:
    batch, block, heads, width = shape
    rows = torch.randn(batch, block, (2 + queries) * heads, width, device=DEVICE)
    gain = 1 + 0.3 * torch.randn(heads, device=DEVICE) if normed else None
    first = torch.tensor([0, 7, 10**9][:batch], device=DEVICE) if rotated else None
    return rows, heads, gain, first, rope


def exact(rows: Tensor, heads: int, gain: Tensor | None, first: Tensor | None, rope: Rope):
    gain = None if gain is None else gain.detach().double().cpu().requires_grad_(gain.requires_grad)
    rows = rows.detach().double().cpu().requires_grad_(rows.requires_grad)
    return rows, heads, gain, None if first is None else first.cpu(), rope


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("queries", "normed", "rotated"), OPTIONS)
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_it_is_the_loops(
    transform, shape: tuple[int, ...], queries: bool, normed: bool, rotated: bool, rope: Rope
) -> None:
    given = inputs(shape, queries=queries, normed=normed, rotated=rotated, rope=rope)
    for found, expected in zip(transform(*given), reference.qk_norm_rope(*exact(*given)), strict=True):
        close(found, expected)


def gradients(transform, given, upstream: list[Tensor | None]) -> tuple[Tensor, ...]:
    """Of the rows, and of the gains if there are any, where these gradients come from above."""
    leaves = [tensor.requires_grad_() for tensor in (given[0], given[2]) if tensor is not None]
    pairs = [(x, dx.to(x)) for x, dx in zip(transform(*given), upstream, strict=True) if dx is not None]
    results, above = zip(*pairs, strict=True)
    return torch.autograd.grad(results, leaves, above, materialize_grads=True)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize(("queries", "normed", "rotated"), OPTIONS)
def test_the_gradients(transform, shape, queries: bool, normed: bool, rotated: bool) -> None:
    given = inputs(shape, queries=queries, normed=normed, rotated=rotated)
    upstream = [*(torch.randn_like(x) for x in transform(*given)[:3]), None]
    expected = gradients(eager.qk_norm_rope, exact(*given), upstream)
    for found, wanted in zip(gradients(transform, given, upstream), expected, strict=True):
        close(found, wanted)


def mix(shape: tuple[int, ...], still: int, valued: bool) -> Mix:
    batch, block, heads, width = shape
    value = torch.randn(batch, block, heads, width, device=DEVICE) if valued else None
    gate = torch.rand(batch, block, heads, device=DEVICE) if valued else None
    return Mix(value, gate, torch.randn(batch, 1, heads, 2, still, device=DEVICE) if still else None)


def mixed_gradients(transform, given, mixed: Mix, upstream: list[Tensor]) -> tuple[Tensor, ...]:
    """Of the rows, the gains and of all that is mixed in."""
    leaves = [x.requires_grad_() for x in (given[0], given[2], *mixed) if x is not None]
    out = transform(*given, mixed)[:3]
    return torch.autograd.grad(out, leaves, [dx.to(x) for dx, x in zip(upstream, out, strict=True)])


# A tile of positions and one more, a single position; all pairs that stand still but one, and only one.
@pytest.mark.parametrize("shape", [(2, 33, 2, 8), (2, 1, 3, 8)], ids=str)
@pytest.mark.parametrize(("still", "valued"), [(3, True), (1, False), (0, True)])
@pytest.mark.parametrize("normed", [True, False])
def test_what_is_mixed_in_is_that_of_the_loops(
    transform, shape: tuple[int, ...], still: int, valued: bool, normed: bool
) -> None:
    given, mixed = inputs(shape, normed=normed, rope=ROPES[1]), mix(shape, still, valued)
    double = Mix(*(None if x is None else x.double().cpu() for x in mixed))
    expected = reference.qk_norm_rope(*exact(*given), double)
    for found, wanted in zip(transform(*given, mixed), expected, strict=True):
        close(found, wanted)
    upstream = [torch.randn_like(x) for x in expected[:3]]
    wanted = mixed_gradients(eager.qk_norm_rope, exact(*given), double, upstream)
    for found, one in zip(mixed_gradients(transform, given, mixed, upstream), wanted, strict=True):
        close(found, one)


def test_a_text_in_blocks_has_the_keys_of_the_whole_text() -> None:
    """The pairs of the last key that stand still are what the next block begins with."""
    rows, heads, gain, _, rope = inputs((2, 9, 2, 8), rope=ROPES[1])
    begin = Mix(before_B1H2S=torch.zeros(2, 1, heads, 2, 2, device=DEVICE))
    first = torch.zeros(2, dtype=torch.long, device=DEVICE)
    whole = eager.qk_norm_rope(rows, heads, gain, first, rope, begin)
    last = rows[:, 3:4, heads : 2 * heads].unflatten(-1, (2, -1))[..., -2:]
    second = eager.qk_norm_rope(rows[:, 4:], heads, gain, first + 4, rope, Mix(before_B1H2S=last))
    close(second.k_BTHK, whole.k_BTHK[:, 4:])


def test_what_is_remembered_has_a_gradient_too(transform) -> None:
    given = inputs((2, 9, 3, 8))
    upstream = [torch.randn_like(x) for x in transform(*given)]
    expected = gradients(eager.qk_norm_rope, exact(*given), upstream)
    for found, wanted in zip(gradients(transform, given, upstream), expected, strict=True):
        close(found, wanted)


def test_what_nobody_used_has_no_gradient(transform) -> None:
    given = inputs((2, 9, 3, 8))
    upstream = [None, None, None, torch.randn(2, 9, 6, 8)]
    rows, gain = gradients(transform, given, upstream)
    assert not rows[:, :, :3].any()
    assert rows[:, :, 3:].all()
    assert not gain.any()


def test_a_head_of_odd_width_may_be_normed(transform) -> None:
    given = inputs((2, 5, 2, 7), rotated=False)
    for found, expected in zip(transform(*given), reference.qk_norm_rope(*exact(*given)), strict=True):
        close(found, expected)


def test_rows_may_lie_anywhere(transform) -> None:
    rows, *others = inputs((2, 9, 2, 8))
    expected = transform(rows, *others)
    packed = torch.randn(2, 9, 8, 8, device=DEVICE)
    packed[:, :, 1:7] = rows
    by_position = rows.transpose(0, 1).contiguous().transpose(0, 1)
    for same in (packed[:, :, 1:7], by_position, rows.mT.contiguous().mT):
        for found, wanted in zip(transform(same, *others), expected, strict=True):
            close(found, wanted, 1e-6)
    upstream = [torch.randn_like(x) for x in expected]
    wanted = gradients(transform, (rows, *others), upstream)
    aslant = [x.mT.contiguous().mT for x in upstream]
    for found, same in zip(
        gradients(transform, (by_position.detach(), *others), aslant), wanted, strict=True
    ):
        close(found, same, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_full(transform, dtype: torch.dtype) -> None:
    rows, *others = inputs((2, 9, 3, 8))
    rows = rows.to(dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    found, expected = transform(rows, *others), eager.qk_norm_rope(rows.float(), *others)
    upstream = [torch.randn_like(x) for x in found]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        close(one, other, tolerance)
    wanted = gradients(eager.qk_norm_rope, (rows.float(), *others), upstream)
    drows, dgain = gradients(transform, (rows, *others), upstream)
    assert (drows.dtype, dgain.dtype) == (dtype, torch.float32)
    close(drows, wanted[0], 4 * tolerance)
    close(dgain, wanted[1], 16 * tolerance)


def test_nothing_stays_nothing(transform) -> None:
    q, k, v, kv = transform(*inputs((2, 0, 3, 8)))
    assert q.shape == k.shape == v.shape == (2, 0, 3, 8)
    assert kv.shape == (2, 0, 6, 8)


def test_what_is_remembered_lies_position_by_position() -> None:
    """Only on a GPU does it matter."""
    transform = pytest.importorskip(
        "longspan.kernels.qk_norm_rope.triton_kernels", reason="needs Triton"
    ).qk_norm_rope
    assert transform(*inputs((2, 5, 3, 8))).kv_BTXK.transpose(0, 1).is_contiguous()


def through_the_entry_point(given) -> QKV:
    rows, heads, gain, first, rope = given
    return qk_norm_rope.qk_norm_rope(rows, heads, gain_H=gain, first_B=first, rope=rope)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_door_picks_the_kernels_on_a_gpu() -> None:
    given = inputs((2, 9, 3, 8))
    kernels = pytest.importorskip("longspan.kernels.qk_norm_rope.triton_kernels")
    assert torch.equal(through_the_entry_point(given).q_BTHK, kernels.qk_norm_rope(*given).q_BTHK)
    double = given[0].double(), *given[1:]
    assert torch.equal(through_the_entry_point(double).q_BTHK, eager.qk_norm_rope(*double).q_BTHK)


def test_the_door_is_plain_torch_elsewhere() -> None:
    given = [x.cpu() if isinstance(x, Tensor) else x for x in inputs((2, 9, 3, 8))]
    assert torch.equal(through_the_entry_point(given).q_BTHK, eager.qk_norm_rope(*given).q_BTHK)
