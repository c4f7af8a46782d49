"""A recurrent block. Shapes: B batch, T block, D width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longspan.layers.block import Block
from longspan.layers.dropout import dropout
from longspan.state import State

GRADIENT_SCALE = 1024.0  # keeps gradients of a mean over 65,536 tokens among the normal numbers of fp16


class Recurrent(Block):
    """out = dropout(LSTM(LN(h))): the LSTM's output takes the place of h, there is no residual.

    Under autocast cuDNN's LSTM computes in fp16, whichever half precision was asked for. Who asks for bf16
    scales no loss, so there the LSTM's gradients are scaled here: times `GRADIENT_SCALE` where they come in,
    divided by it where they leave. Those of its state stay as they are, since they go to an LSTM only.
    """

    def __init__(self, width: int, *, dropout: float, epsilon: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, epsilon)
        self.lstm = nn.LSTM(width, width)
        self.dropout = dropout
        self._enter, self._leave = _enter, _leave

    def initial_state(self, batch_size: int) -> State:
        zeros_BD = self.norm.weight.new_zeros(batch_size, self.lstm.hidden_size)
        return State({"hidden": zeros_BD, "cell": zeros_BD.clone()})

    def compile_parts(self) -> None:
        """What goes into the LSTM and what comes out of it: itself it is one operation already."""
        self._enter, self._leave = torch.compile(_enter), torch.compile(_leave)

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        dtype, scale = _precision(h_BTD)
        before = state.tensor("hidden"), state.tensor("cell")
        x_TBD = self._enter(h_BTD, self.norm, dtype, scale)
        out_TBD, *after = self._lstm(x_TBD, (before[0][None], before[1][None]), scale)
        # Under autocast the LSTM answers in half precision; what is carried and added up stays full.
        hidden_BD, cell_BD = (new[0].to(old.dtype) for new, old in zip(after, before, strict=True))
        out_BTD = self._leave(out_TBD, h_BTD.dtype, scale, self.dropout if self.training else 0.0)
        return out_BTD, State({"hidden": hidden_BD, "cell": cell_BD})

    def _lstm(self, x_TBD: Tensor, before: tuple[Tensor, Tensor], scale: float) -> tuple[Tensor, ...]:
        weights = [_scaled(weight, 1 / scale) for weight in self.lstm.parameters()]
        return torch.lstm(x_TBD, before, weights, True, 1, 0.0, self.lstm.training, False, False)


def _precision(h_BTD: Tensor) -> tuple[torch.dtype, float]:
    """In which the LSTM will compute, and by how much its gradients want to be larger."""
    if not (h_BTD.is_cuda and torch.is_autocast_enabled("cuda")):
        return h_BTD.dtype, 1.0
    asked = torch.get_autocast_dtype("cuda")
    return torch.float16, GRADIENT_SCALE if asked == torch.bfloat16 else 1.0


def _enter(h_BTD: Tensor, norm: nn.LayerNorm, dtype: torch.dtype, scale: float) -> Tensor:
    return _exchanged(_scaled(norm(h_BTD), 1 / scale)).to(dtype)


def _leave(out_TBD: Tensor, dtype: torch.dtype, scale: float, probability: float) -> Tensor:
    return dropout(_exchanged(_scaled(out_TBD.to(dtype), scale)), probability, training=True)


def _scaled(x: Tensor, scale: float) -> Tensor:
    """x itself; its gradient times `scale`."""
    return x if scale == 1 else _ScaledGradient.apply(x, scale)  # type: ignore[no-untyped-call]


def _exchanged(x: Tensor) -> Tensor:
    """Batch first from time first or the other way, in order in both passes: else an LSTM copies."""
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
        return x.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx.transpose(0, 1).contiguous()
