"""Do two paths compute the same? Before that is known, their speeds mean nothing.

Both read the same small block from the same state, without dropout, and their hidden states and gradients
are held against those of the reference path in float64. Rounding sets the measure: the fast path may be as
far from them as the precision allows, or a few times as far as the reference path itself.
Shapes: B batch, T block.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longspan.bench.bench_paths import Way
from longspan.bench.machine import autocast
from longspan.config.training import Precision
from longspan.errors import UserError
from longspan.models import LanguageModel
from longspan.state import State
from longspan.training.graphs import STEADY, RecordedModel

BATCH, BLOCK = 2, 64
TOLERANCE = {"float32": 1e-3, "bf16": 5e-2, "fp16": 2e-2}
LENIENCE = 3  # times the error of the reference path, where that is the larger: two roundings, by chance
NEGLIGIBLE = (
    1e-5  # of the longest gradient: what is shorter is measured by this, since it may be all rounding
)


@dataclass(frozen=True)
class Agreement:
    """Where the fast path is furthest from the exact result, and how far, relative to its length."""

    tensor: str
    error: float
    allowed: float


def check_agreement(
    model: LanguageModel, reference: Way, fast: Way, *, precision: Precision, block_length: int, name: str
) -> Agreement:
    """A `UserError` if the outputs or a gradient of the fast path are not those of the reference path."""
    model = copy.deepcopy(model)
    _without_dropout(model)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    shape = (2, BATCH, 1 + min(BLOCK, block_length))
    earlier_BT, block_BT = torch.randint(model.vocabulary_size, shape, generator=generator).to(device)
    with reference.taken(), torch.no_grad(), autocast(device, precision):
        _, state = model(earlier_BT[:, :-1], _noise(model.initial_state(BATCH), generator))
    found = {way.name: _results(model, way, block_BT, state, precision) for way in (reference, fast)}
    exact = _results(model.double(), reference, block_BT, state.to(dtype=torch.float64), "float32")
    worst = _furthest(exact, found[reference.name], found[fast.name], TOLERANCE[precision])
    if not worst.error <= worst.allowed:
        raise UserError(
            f"{name}: the fast path disagrees with the reference path, {worst.tensor} is off by "
            f"{worst.error:.1e} of its size, more than {worst.allowed:.1e}: its speed would mean nothing"
        )
    return worst


def _furthest(
    exact: Mapping[str, Tensor], reference: Mapping[str, Tensor], fast: Mapping[str, Tensor], tolerance: float
) -> Agreement:
    """The tensor that is furthest from what is allowed for it."""
    negligible = NEGLIGIBLE * max(tensor.norm().item() for tensor in exact.values())
    found = []
    for name, tensor in exact.items():
        size = max(tensor.norm().item(), negligible)
        by_reference, by_fast = ((x[name].double() - tensor).norm().item() / size for x in (reference, fast))
        found.append(Agreement(name, by_fast, max(tolerance, LENIENCE * by_reference)))
    # What is not a number is further off than any number.
    return max(found, key=lambda one: one.error / one.allowed if one.error == one.error else float("inf"))


def _results(
    model: LanguageModel, way: Way, block_BT: Tensor, state: State, precision: Precision
) -> dict[str, Tensor]:
    """Hidden states and every gradient of the summed loss."""
    recorded = RecordedModel(model) if way.recorded else None
    for _ in range(STEADY + 1 if recorded else 1):  # the last is a replay
        model.zero_grad()
        hidden_BTD = _there_and_back(recorded or model, way, block_BT, state, precision)
    gradients = {
        f"the gradient of {name}": parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"the output": hidden_BTD, **gradients}


def _there_and_back(
    model: LanguageModel | RecordedModel, way: Way, block_BT: Tensor, state: State, precision: Precision
) -> Tensor:
    """Hidden states. Nothing here keeps a graph: torch could not record while the one before is alive."""
    cast = autocast(block_BT.device, precision)
    if isinstance(model, RecordedModel):
        hidden_BTD, _ = model(block_BT[:, :-1], state, cast)
        head = model.model.head
    else:
        with way.taken(), cast:
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
    """As if much had been read: all that is remembered is there to be seen."""

    def fill(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)

    return state.map(fill)
