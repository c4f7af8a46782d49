"""Every path of the rotation against the loops: what comes out, and the gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan.kernels import rotation
from longspan.kernels.rotation import eager, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Rows beyond a tile, a head whose pairs are no power of two, one pair, one row.
SHAPES = [(2, 40, 2, 8), (1, 33, 3, 6), (3, 5, 1, 2), (2, 1, 2, 4)]


@pytest.fixture(params=["eager", "triton"])
def rotate(request):
    if request.param == "eager":
        return eager.rotate
    return pytest.importorskip("longspan.kernels.rotation.triton", reason="needs Triton").rotate


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    first = torch.tensor([0, 7, 10**9][: shape[0]], device=DEVICE)
    return torch.randn(shape, device=DEVICE, dtype=dtype), first


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_loops(rotate, shape: tuple[int, ...]) -> None:
    x, first = inputs(shape)
    expected = reference.rotate(x.double().cpu(), first.cpu(), 50.0)
    torch.testing.assert_close(rotate(x, first, 50.0).double().cpu(), expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_is_turned_back(rotate) -> None:
    x, first = inputs((2, 40, 2, 8))
    x.requires_grad_()
    upstream = torch.randn_like(x)
    (found,) = torch.autograd.grad(rotate(x, first, 50.0), x, upstream)
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(eager.rotate(exact, first, 50.0), exact, upstream.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_heads_may_lie_anywhere(rotate) -> None:
    x, first = inputs((2, 9, 3, 8))
    packed = torch.randn(2, 9, 3, 3, 8, device=DEVICE)
    packed[:, :, 1] = x
    expected = rotate(x, first, 50.0)
    assert torch.equal(rotate(packed[:, :, 1], first, 50.0), expected)
    assert torch.equal(rotate(x.mT.contiguous().mT, first, 50.0), expected)
    assert torch.equal(rotate(x[:, 3:], first + 3, 50.0), expected[:, 3:])


def test_half_precision_is_computed_in_full(rotate) -> None:
    x, first = inputs((2, 9, 3, 8), torch.float16)
    found = rotate(x, first, 50.0)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), rotate(x.float(), first, 50.0), rtol=4e-3, atol=4e-3)


def test_nothing_is_turned_into_nothing(rotate) -> None:
    x, first = inputs((2, 0, 3, 8))
    assert rotate(x, first, 50.0).shape == (2, 0, 3, 8)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_door_picks_the_kernel_on_a_gpu() -> None:
    x, first = inputs((2, 9, 3, 8))
    assert rotation._fused_path() is not None
    assert torch.equal(rotation.rotate(x, first, 50.0), rotation._fused_path().rotate(x, first, 50.0))
    assert rotation.rotate(x.double(), first, 50.0).dtype == torch.float64


def test_the_door_is_plain_torch_elsewhere() -> None:
    x, first = (tensor.cpu() for tensor in inputs((2, 9, 3, 8)))
    assert torch.equal(rotation.rotate(x, first, 50.0), eager.rotate(x, first, 50.0))
