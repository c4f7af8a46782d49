"""Span attention over groups of heads, as all backends take it, and the same head by head.

Shapes: as in longspan.kernels.span_attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from longspan.kernels.span_attention import AttentionContext

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionContext], Tensor]

KINDS = {"none": (), "content": ("content",), "position": ("position",), "both": ("content", "position")}
QUERY_TERMS = ("content_bias_HK", "position_bias_HK", "position_map_HKE")


@dataclass(frozen=True, kw_only=True)
class Case:
    """For every group of heads their windows, and how many rows of the past it is given."""

    windows: tuple[tuple[int, ...], ...]
    reaches: tuple[int, ...]
    batch: int = 2
    block: int = 33
    width: int = 8
    positions: Literal["none", "shared", "per head", "mapped"] = "none"
    biases: Literal["none", "content", "position", "both"] = "none"
    num_persistent: int = 0
    spans: tuple[float, ...] | None = None
    dynamic: bool = False  # every query has a part of its head's span, from none to all in quarters
    ramp: int = 4
    renormalise: bool = True
    first_distance: int = 1
    filled: tuple[int, ...] | None = None

    @property
    def num_heads(self) -> int:
        return sum(map(len, self.windows))

    @property
    def flat_windows(self) -> list[int]:
        return list(itertools.chain(*self.windows))

    def options(self, device: str) -> dict[str, Any]:
        """What is no tensor that learns."""
        given: dict[str, Any] = {
            "ramp": self.ramp,
            "renormalise": self.renormalise,
            "first_distance": self.first_distance,
        }
        if self.filled is not None:
            given["filled_B"] = torch.tensor(self.filled, device=device)
        return given


def tensors_of(case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu") -> dict[str, Tensor]:
    """Everything that gets a gradient, drawn in float64 and then rounded; spans are float32 at least."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(device, dtype).requires_grad_()

    heads, longest = case.num_heads, max(case.flat_windows)
    made = {name: draw(case.batch, heads, case.block, case.width) for name in ("q", "k", "v")}
    for number, (windows, reach) in enumerate(zip(case.windows, case.reaches, strict=True)):
        made[f"past{number}"] = draw(case.batch, reach, 2 * len(windows), case.width)
    if case.positions == "shared":
        made["position_keys"] = draw(longest, case.width)
    if case.positions == "per head":
        made["position_keys"] = draw(heads, longest, case.width)
    if case.positions == "mapped":
        made["position_keys"] = draw(longest, case.width + 3)
        made["position_map_HKE"] = draw(heads, case.width, case.width + 3)
    made |= {f"{kind}_bias_HK": draw(heads, case.width) for kind in KINDS[case.biases]}
    if case.num_persistent:
        made |= {
            name: draw(heads, case.num_persistent, case.width) for name in ("persistent_k", "persistent_v")
        }
    if case.spans is not None:
        exact = torch.promote_types(dtype, torch.float32)
        spans = torch.tensor(case.spans, dtype=exact)
        if case.dynamic:
            quarters_BHT = torch.randint(5, (case.batch, heads, case.block))
            spans = spans[:, None] * quarters_BHT / 4
        made["spans"] = spans.to(device).requires_grad_()
    return made


def in_float64(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}


def context_of(case: Case, tensors: dict[str, Tensor], **more: Any) -> AttentionContext:
    return AttentionContext(
        past=[tensors[f"past{number}"] for number in range(len(case.windows))],
        windows=case.flat_windows,
        position_keys=tensors.get("position_keys"),
        **{name: tensors.get(name) for name in QUERY_TERMS},
        persistent=(tensors["persistent_k"], tensors["persistent_v"]) if case.num_persistent else None,
        spans=tensors.get("spans"),
        **case.options(tensors["q"].device.type),
        **more,
    )


def together(function: Attend, case: Case, tensors: dict[str, Tensor], **more: Any) -> Tensor:
    """All heads at once, in groups."""
    return function(tensors["q"], tensors["k"], tensors["v"], context_of(case, tensors, **more))


def with_keys(function: Attend) -> Callable[..., Tensor]:
    """The same function for heads of one window, given keys and values of memory and block together."""

    def attend(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, *, window: int, **given: Any) -> Tensor:
        memory = k_BHSK.shape[2] - q_BHTK.shape[2]
        past = torch.cat([x_BHSK[:, :, :memory].transpose(1, 2) for x_BHSK in (k_BHSK, v_BHSK)], dim=2)
        context = AttentionContext(past=[past], windows=[window] * q_BHTK.shape[1], **given)
        return function(q_BHTK, k_BHSK[:, :, memory:], v_BHSK[:, :, memory:], context)

    return attend


def keys_and_values(case: Case, tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """For every head its keys and values, those of the past first, [B, S, K]."""
    both, head = [], 0
    for number, windows in enumerate(case.windows):
        past_BMXK = tensors[f"past{number}"]
        for index in range(len(windows)):
            k_BSK = torch.cat([past_BMXK[:, :, index], tensors["k"][:, head]], dim=1)
            v_BSK = torch.cat([past_BMXK[:, :, len(windows) + index], tensors["v"][:, head]], dim=1)
            both.append((k_BSK, v_BSK))
            head += 1
    return both


def head_by_head(function: Attend, case: Case, tensors: dict[str, Tensor], windows: list[int]) -> Tensor:
    """Every head alone, with these windows."""
    past = [
        torch.stack([k, v], dim=2)[:, : k.shape[1] - case.block] for k, v in keys_and_values(case, tensors)
    ]
    context = replace(context_of(case, tensors), past=past, windows=windows)
    return function(tensors["q"], tensors["k"], tensors["v"], context)


def with_gradients(out: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What came out, and the gradient of every tensor that went in."""
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out)
    found = torch.autograd.grad((out * weight).sum(), list(tensors.values()), allow_unused=True)
    return {"out": out.detach()} | {
        name: torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(tensors.items(), found, strict=True)
    }


def assert_near(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float,
    usual: dict[str, Tensor] | None = None,
) -> None:
    """By the norm of the difference: within the tolerance, or up to four times that if it is `usual`.

    Entries much below 0.01 are what is left of larger ones. The gradient of a bias is what is left of a sum
    over queries, each of them rounded.
    """
    errors, others = _errors(found, expected), _errors(usual or expected, expected)
    wrong = {
        name: (error, others[name])
        for name, error in errors.items()
        if not error < max(tolerance, min(others[name], 4 * tolerance))
    }
    assert not wrong, f"relative errors above {tolerance}, and the usual ones: {wrong}"


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    errors = {}
    for name, tensor in expected.items():
        scale = max(float(tensor.norm()), 0.01 * tensor.numel() ** 0.5)
        if "bias" in name:
            scale = max(scale, float(expected["q"].norm()))
        errors[name] = float((found[name].double() - tensor).norm()) / scale if tensor.numel() else 0.0
    return errors
