"""A recurrent block. Shapes: B batch, T block, D width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.kernels.contiguous_split import contiguous_split
from longspan.layers.block import Block
from longspan.layers.dropout import dropout
from longspan.state import State

GRADIENT_SCALE = 1024.0  # keeps gradients of a mean over 65,536 tokens among the normal numbers of fp16


class LSTMBlock(Block):
    """out = dropout(LSTM(LN(h))): the LSTM's output replaces h, there is no residual.

    Under autocast cuDNN's LSTM computes in fp16, also when bf16 is asked for. Training in bf16 does not scale
    the loss, so the gradients inside the LSTM are scaled here: times `GRADIENT_SCALE` where they enter the
    LSTM, divided by it where they leave. Gradients of the state are not scaled: only an LSTM receives them.
    """

    def __init__(self, width: int, *, dropout: float, epsilon: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, epsilon)
        self.lstm = nn.LSTM(width, width)
        self.dropout = dropout
        self._enter, self._leave, self._flattened = _enter, _leave, _flattened

    def initial_state(self, batch_size: int) -> State:
        zeros_BD = self.norm.weight.new_zeros(batch_size, self.lstm.hidden_size)
        return State({"hidden": zeros_BD, "cell": zeros_BD.clone()})

    def compile_parts(self) -> None:
        """Compile what comes before and after the LSTM, which is one operation of cuDNN."""
        self._enter, self._leave = torch.compile(_enter), torch.compile(_leave)
        self._flattened = torch.compile(_flattened)

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        before = state.tensor("hidden"), state.tensor("cell")
        dtype, scale = _precision(before[0])
        x_TBD = self._enter(h_BTD, self.norm, dtype, scale)
        start = tuple(one_BD[None].to(dtype) for one_BD in before)
        # On a GPU everything is in the LSTM's precision already; autocast would copy the weights once more.
        with torch.autocast("cuda", enabled=False):
            out_TBD, *end = torch.lstm(
                x_TBD, start, self._weights(dtype, scale), True, 1, 0.0, self.lstm.training, False, False
            )
        out_BTD = self._leave(out_TBD, h_BTD.dtype, scale, self.dropout if self.training else 0.0)
        # The carried state stays in full precision.
        hidden_BD, cell_BD = (new[0].to(old.dtype) for new, old in zip(end, before, strict=True))
        return out_BTD, State({"hidden": hidden_BD, "cell": cell_BD})

    def _weights(self, dtype: torch.dtype, scale: float) -> list[Tensor]:
        """The LSTM's weights in this precision; their gradients times `1 / scale`."""
        own: list[Tensor] = list(self.lstm.parameters())
        if (dtype, scale) == (own[0].dtype, 1.0):
            return own
        # cuDNN returns the gradients of all weights in one buffer: split, they need no copy.
        flat = self._flattened(own, dtype, scale)
        parts = contiguous_split(flat, [weight.numel() for weight in own], 0)
        return [part.view_as(weight) for part, weight in zip(parts, own, strict=True)]


def _precision(hidden_BD: Tensor) -> tuple[torch.dtype, float]:
    """The precision in which the LSTM computes, and the factor by which its gradients are scaled."""
    if not (hidden_BD.is_cuda and torch.is_autocast_enabled("cuda")):
        return hidden_BD.dtype, 1.0
    asked = torch.get_autocast_dtype("cuda")
    return torch.float16, GRADIENT_SCALE if asked == torch.bfloat16 else 1.0


def _flattened(weights: Sequence[Tensor], dtype: torch.dtype, scale: float) -> Tensor:
    """All weights in one buffer, as cuDNN expects them: it then does not copy them."""
    return torch.cat([_scaled(weight, 1 / scale).to(dtype).flatten() for weight in weights])


def _enter(h_BTD: Tensor, norm: nn.LayerNorm, dtype: torch.dtype, scale: float) -> Tensor:
    return _exchanged(_scaled(norm(h_BTD), 1 / scale)).to(dtype)


def _leave(out_TBD: Tensor, dtype: torch.dtype, scale: float, probability: float) -> Tensor:
    return dropout(_exchanged(_scaled(out_TBD.to(dtype), scale)), probability, training=True)


def _scaled(x: Tensor, scale: float) -> Tensor:
    """x unchanged; its gradient is multiplied by `scale`."""
    return x if scale == 1 else _ScaledGradient.apply(x, scale)  # type: ignore[no-untyped-call]


def _exchanged(x: Tensor) -> Tensor:
    """Batch first from time first or back, contiguous in both passes: else the LSTM copies."""
    return _Exchanged.apply(x)  # type: ignore[no-untyped-call]


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx * ctx.scale, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # Always a copy: where `contiguous` had nothing to do, torch 2.11 compiled it without a gradient.
        return x.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx.transpose(0, 1).contiguous()
