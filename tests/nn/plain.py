"""What every part must do in a plain PyTorch program."""

from __future__ import annotations

import copy
import io

import torch
from torch import Tensor, nn


def round_trips(module: nn.Module, other: nn.Module) -> None:
    """Weights go through `torch.save` into `other`, a module with other weights; a deep copy has them too."""
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for found in (other, copy.deepcopy(module)):
        assert found.state_dict().keys() == module.state_dict().keys()
        for name, value in module.state_dict().items():
            assert torch.equal(found.state_dict()[name], value), name


def every_weight_learns(module: nn.Module, out: Tensor) -> None:
    """Backpropagation from `out` gives every parameter a gradient that is not zero."""
    module.zero_grad()
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    (out * weights).sum().backward()
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().max() > 0, name
