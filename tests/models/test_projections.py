"""The products around attention are what they would be piece by piece, and so are their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan.kernels import span_attention as entry
from longspan.kernels.layout import contiguous_split
from longspan.layers.attention import Attention
from longspan.layers.learned_span import LearnedSpan
from longspan.layers.positions import LearnedDistanceKeys
from longspan.layers.projections import end_to_end, rows_of_heads
from longspan.state import State

HEADS, HEAD_WIDTH, WIDTH = 3, 4, 5


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    total = sum((out.double() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outputs)
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, inputs))


@pytest.mark.parametrize(
    "pieces",
    [[[2, 0, 1, 5, 3, 4], [5, 2]], [[0, 1, 2, 3, 4, 5], [3, 4, 5]], [[4], [4]]],
    ids=["picked", "ranges", "one head twice"],
)
def test_rows_of_heads(pieces: list[list[int]]) -> None:
    matrices = [torch.randn(HEADS * HEAD_WIDTH, WIDTH, requires_grad=True) for _ in range(2)]
    by_head = torch.cat(matrices).unflatten(0, (-1, HEAD_WIDTH))
    expected = [by_head[piece].flatten(0, 1) for piece in pieces]
    found = list(rows_of_heads(matrices, pieces, HEAD_WIDTH))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(gradients(found, matrices), gradients(expected, matrices), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_in_half_precision_have_their_gradients_summed_in_float32() -> None:
    matrix = torch.ones(HEAD_WIDTH, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        once, again = rows_of_heads([matrix], [[0], [0]], HEAD_WIDTH)
    assert once.dtype == again.dtype == torch.bfloat16
    # 1 + 2^-9 has no room in bfloat16.
    total = once.sum(dtype=torch.float32) + again.sum(dtype=torch.float32) * 2**-9
    (gradient,) = torch.autograd.grad(total, matrix)
    assert torch.equal(gradient, torch.full_like(matrix, 1 + 2**-9))


def test_products_that_follow_each_other() -> None:
    memory_MBD = torch.randn(7, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(width, WIDTH, dtype=torch.float64, requires_grad=True) for width in (4, 6, 2)]
    reaches = [3, 0, 9]
    found = list(end_to_end(memory_MBD, reaches, weights))
    expected = [
        memory_MBD[max(0, 7 - reach) :] @ weight.mT for reach, weight in zip(reaches, weights, strict=True)
    ]
    torch.testing.assert_close(found, expected)
    place = found[0].storage_offset()
    for product in found:
        assert product.is_contiguous()
        assert product.untyped_storage().data_ptr() == found[0].untyped_storage().data_ptr()
        assert product.storage_offset() == place
        place += product.numel()
    inputs = [memory_MBD, *weights]
    torch.testing.assert_close(gradients(found, inputs), gradients(expected, inputs))


class _Scaled(torch.autograd.Function):
    """Both parts times 2, with gradients that are parts of one tensor or not."""

    @staticmethod
    def forward(ctx, left, right, together):  # type: ignore[no-untyped-def]
        ctx.together = together
        return left * 2, right * 2

    @staticmethod
    def backward(ctx, dleft, dright):  # type: ignore[no-untyped-def]
        room = torch.cat([dleft, dright], dim=1) * 2
        ctx.together.append(room)
        return *room.split([dleft.shape[1], dright.shape[1]], dim=1), None


def test_adjacent_gradients_are_not_copied() -> None:
    x = torch.randn(3, 5, 2, requires_grad=True)
    rooms: list[Tensor] = []
    seen: list[int] = []
    doubled = x * 1
    doubled.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    left, right = contiguous_split(doubled, [2, 3], dim=1)
    assert torch.equal(torch.cat([left, right], dim=1), x)
    (found,) = gradients(list(_Scaled.apply(left, right, rooms)), [x])  # type: ignore[no-untyped-call]
    (expected,) = gradients([x[:, :2] * 2, x[:, 2:] * 2], [x])
    assert torch.equal(found, expected)
    assert seen == [rooms[0].data_ptr()]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_gradients_that_lie_elsewhere_are_joined(order: tuple[int, int]) -> None:
    x = torch.randn(3, 4, 2, requires_grad=True)
    parts = contiguous_split(x, [2, 2], dim=1)
    expected = x.split([2, 2], dim=1)
    found, wanted = ([split[place] * (place + 2) for place in order] for split in (parts, expected))
    assert torch.equal(gradients(found, [x])[0], gradients(wanted, [x])[0])


def test_attention_through_the_kernels_equals_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads of three groups: their rows, their memory and their distances, forward and backward."""
    gpu = pytest.importorskip("longspan.kernels.span_attention.gpu", reason="needs Triton")
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is for machines without a GPU")
    limit, spans = 320, [150.0, 3.0, 280.0, 9.0]
    span = LearnedSpan(len(spans), limit, ramp=4)
    with torch.no_grad():
        span.fraction_H.copy_(torch.tensor(spans) / limit)
    span.set_fractions(span.fraction_H.tolist())
    positions = LearnedDistanceKeys(limit, 4)
    attention = Attention(16, len(spans), span=span, positions=positions, dropout=0.0, norm_first=False)
    h_BTD = torch.randn(2, 12, 16, requires_grad=True)
    memory = torch.randn(span.memory_length, 2, 16).transpose(0, 1).requires_grad_()
    inputs = [h_BTD, memory, positions.keys_LK, *attention.parameters()]

    def run() -> list[Tensor]:
        out_BTD, after = attention(h_BTD, State({"memory": memory}))
        outputs = [out_BTD, after.tensor("memory")]
        return [*outputs, *gradients(outputs, inputs)]

    expected = run()
    monkeypatch.setattr(entry, "_gpu_backend", lambda x, head_width: gpu)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-5)
