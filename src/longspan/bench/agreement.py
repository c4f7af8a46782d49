"""Checks that the fast path computes the same as the reference path, before their speeds are compared.

Both read the same small block from the same state, without dropout. Hidden states and gradients are compared
with those of the reference path in float64. The error of the fast path may be as large as the precision
allows, or a few times that of the reference path in the same precision.
Shapes: B batch, T block.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longspan.bench.bench_paths import BenchPath
from longspan.bench.machine import autocast
from longspan.config.training import Precision
from longspan.errors import UserError
from longspan.models import LanguageModel
from longspan.state import State
from longspan.training.graphs import STEADY, CapturedModel

BATCH, BLOCK = 2, 64
TOLERANCE = {"float32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}
LENIENCE = 3  # times the error of the reference path, if that is larger: rounding errors vary by chance
# Times the largest norm: errors of smaller tensors are relative to this, since they may be all rounding.
NEGLIGIBLE = 1e-5


@dataclass(frozen=True)
class Agreement:
    """The tensor with the largest error of the fast path, relative to the norm of the exact result."""

    tensor: str
    error: float
    allowed: float


def check_agreement(
    model: LanguageModel,
    reference: BenchPath,
    fast: BenchPath,
    *,
    precision: Precision,
    block_length: int,
    name: str,
) -> Agreement:
    """Raise `UserError` if the outputs or a gradient of the fast path differ from the reference path."""
    model = copy.deepcopy(model)
    _without_dropout(model)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape = (2, BATCH, 1 + min(BLOCK, block_length))
    earlier_BT, block_BT = torch.randint(model.vocabulary_size, shape, generator=generator).to(device)
    with reference.forced(), torch.no_grad(), autocast(device, precision):
        _, state = model(earlier_BT[:, :-1], _noise(model.initial_state(BATCH), generator))
    found = {path.name: _results(model, path, block_BT, state, precision) for path in (reference, fast)}
    exact = _results(model.double(), reference, block_BT, state.to(dtype=torch.float64), "float32")
    worst = _furthest(exact, found[reference.name], found[fast.name], TOLERANCE[precision])
    if not worst.error <= worst.allowed:
        raise UserError(
            f"{name}: the fast path disagrees with the reference path: {worst.tensor} has a relative error "
            f"of {worst.error:.1e}, allowed is {worst.allowed:.1e}; no speed is reported"
        )
    return worst


def _furthest(
    exact: Mapping[str, Tensor], reference: Mapping[str, Tensor], fast: Mapping[str, Tensor], tolerance: float
) -> Agreement:
    """The tensor with the largest ratio of error to allowed error."""
    negligible = NEGLIGIBLE * max(tensor.norm().item() for tensor in exact.values())
    found = []
    for name, tensor in exact.items():
        size = max(tensor.norm().item(), negligible)
        by_reference, by_fast = ((x[name].double() - tensor).norm().item() / size for x in (reference, fast))
        found.append(Agreement(name, by_fast, max(tolerance, LENIENCE * by_reference)))
    # NaN counts as the largest error.
    return max(found, key=lambda one: one.error / one.allowed if one.error == one.error else float("inf"))


def _results(
    model: LanguageModel, path: BenchPath, block_BT: Tensor, state: State, precision: Precision
) -> dict[str, Tensor]:
    """Hidden states and every gradient of the summed loss."""
    captured = CapturedModel(model) if path.captured else None
    for _ in range(STEADY + 1 if captured else 1):  # the last is a replay
        model.zero_grad()
        hidden_BTD = _forward_and_backward(captured or model, path, block_BT, state, precision)
    gradients = {
        f"the gradient of {name}": parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"the output": hidden_BTD, **gradients}


def _forward_and_backward(
    model: LanguageModel | CapturedModel,
    path: BenchPath,
    block_BT: Tensor,
    state: State,
    precision: Precision,
) -> Tensor:
    """Hidden states. No autograd graph is kept: a live one would prevent the next capture."""
    cast = autocast(block_BT.device, precision)
    if isinstance(model, CapturedModel):
        hidden_BTD, _ = model(block_BT[:, :-1], state, cast)
        head = model.model.head
    else:
        with path.forced(), cast:
            hidden_BTD, _ = model(block_BT[:, :-1], state)
        head = model.head
    with cast:
        head.nll(hidden_BTD, block_BT[:, 1:]).sum().backward()
    return hidden_BTD.detach().clone()


def _without_dropout(model: nn.Module) -> None:
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.train()  # cuDNN computes no gradients otherwise
            module.dropout = 0.0


def _noise(state: State, generator: torch.Generator) -> State:
    """Random values, so that all of the memory is filled and visible."""

    def fill(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)

    return state.map(fill)
