"""What the rules need of a model under test: tokens, states in the middle of a text, comparisons.

Shapes: B batch, T block.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from longspan.models.interface import LanguageModel
from longspan.state import State


class Broken(AssertionError):
    """A rule does not hold; the message says what was seen."""


class Probe:
    """A model under test: a copy in evaluation mode, so that nothing happens to the original.

    Weights that are all zero, such as projections that begin by adding nothing, get small random values:
    what they multiply would be invisible otherwise.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = copy.deepcopy(model).eval()
        some = next(iter(self.model.parameters()), None)
        if some is None:
            raise Broken("the model has no parameters")
        self.device, self.dtype = some.device, some.dtype
        self._draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.is_floating_point() and weight.numel() and not weight.any():
                    weight.copy_(0.3 * torch.randn(weight.shape, generator=self._draw))
        self.model.after_update()

    def copy(self) -> Probe:
        return Probe(self.model)

    def tokens(self, batch: int, length: int) -> Tensor:
        """The same random tokens for every call with the same sizes."""
        draw = torch.Generator().manual_seed(5)
        return torch.randint(self.model.vocabulary_size, (batch, length), generator=draw).to(self.device)

    def others(self, tokens_BT: Tensor) -> Tensor:
        """Another token in every place."""
        return (tokens_BT + 1) % self.model.vocabulary_size

    def warm_state(self, batch: int) -> State:
        """The state in the middle of texts that differ from row to row."""
        rows_B1 = torch.arange(batch, device=self.device)[:, None] % self.model.vocabulary_size
        with torch.no_grad():
            return self.model(rows_B1.expand(batch, 7).contiguous(), self.model.initial_state(batch))[1]

    def has_state(self) -> bool:
        return bool(self.model.initial_state(1).flatten())

    def close(self, found: Tensor, expected: Tensor, what: str, *, double: tuple[float, float]) -> None:
        """Compare: relative and absolute tolerance `double` in float64, looser ones in lower precision."""
        if found.shape != expected.shape:
            raise Broken(f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
        if found.dtype != expected.dtype:
            raise Broken(f"{what}: {found.dtype} instead of {expected.dtype}")
        rtol, atol = self.tolerance(found.dtype, double)
        if not torch.allclose(found, expected, rtol=rtol, atol=atol):
            most = float((found.double() - expected.double()).abs().max()) if found.numel() else 0.0
            raise Broken(f"{what} (largest difference {most:.3g})")

    def tolerance(self, dtype: torch.dtype, double: tuple[float, float]) -> tuple[float, float]:
        if not dtype.is_floating_point:
            return 0.0, 0.0
        if self.dtype == torch.float64 and dtype == torch.float64:
            return double
        if torch.finfo(dtype).eps < 1e-6 and torch.finfo(self.dtype).eps < 1e-6:
            return 1e-4, 1e-5
        return 5e-2, 5e-2

    def close_states(self, found: State, expected: State, what: str, *, double: tuple[float, float]) -> None:
        flat, wanted = found.flatten(), expected.flatten()
        if flat.keys() != wanted.keys():
            raise Broken(f"{what}: the state has {sorted(flat)} instead of {sorted(wanted)}")
        for name in flat:
            self.close(flat[name], wanted[name], f"{what}: '{name}' of the state differs", double=double)


def copies(state: State) -> dict[str, Tensor]:
    """A copy of every tensor."""
    return {name: leaf.detach().clone() for name, leaf in state.flatten().items()}


def changed(state: State, before: dict[str, Tensor]) -> str | None:
    """The first tensor that is no longer what it was."""
    flat = state.flatten()
    if flat.keys() != before.keys():
        return ", ".join(sorted(flat.keys() ^ before.keys()))
    return next((name for name, leaf in flat.items() if not torch.equal(leaf, before[name])), None)
