"""A recurrent block. Shapes: B batch, T block, D width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.kernels.layout import contiguous_split
from longspan.layers.chunks import ChunkReader, ReadsChunks
from longspan.layers.dropout import dropout
from longspan.state import State

GRADIENT_SCALE = 1024.0  # keeps gradients of a mean over 65,536 tokens among the normal numbers of fp16


class LSTMBlock(ReadsChunks):
    """out = dropout(LSTM(LN(h))): the LSTM's output replaces h, there is no residual.

    Under autocast cuDNN's LSTM computes in fp16, also if autocast is set to bf16. With bf16 the loss is not
    scaled, so the LSTM's gradients are scaled here: multiplied by `GRADIENT_SCALE` where they enter, divided
    by it where they leave. Gradients of its state are not changed, since they go only to an LSTM.

    In training, `weight_drop` is the dropout probability of the recurrent matrix (Merity et al., 2017,
    section 2): one mask for all steps and rows of a block of tokens, and kept weights are scaled up.
    """

    def __init__(self, width: int, *, dropout: float, epsilon: float, weight_drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, epsilon)
        self.lstm = nn.LSTM(width, width)
        self.dropout = dropout
        self.weight_drop = weight_drop
        self._enter, self._leave, self._flattened = _enter, _leave, _flattened

    def initial_state(self, batch_size: int) -> State:
        zeros_BD = self.norm.weight.new_zeros(batch_size, self.lstm.hidden_size)
        return State({"hidden": zeros_BD, "cell": zeros_BD.clone()})

    def compile_parts(self) -> None:
        """The operations before and after the LSTM, which is one operation already."""
        self._enter, self._leave = torch.compile(_enter), torch.compile(_leave)
        self._flattened = torch.compile(_flattened)

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        reading = self.begin(state, h_BTD.shape[1])
        return reading.read(h_BTD), reading.end()

    def begin(self, state: State, length: int) -> ChunkReader:
        return _LSTMReader(self, state)

    def weights(self) -> list[Tensor]:
        """The weights of the next block of tokens, in the order of torch, with a new mask if dropped."""
        inputs, recurrent, *biases = self.lstm.parameters()
        if self._drops():
            return [inputs, dropout(recurrent, self.weight_drop, training=True), *biases]
        return [inputs, recurrent, *biases]

    def _drops(self) -> bool:
        return self.training and self.weight_drop > 0


class _LSTMReader(ChunkReader):
    """The LSTM's weights and its state in the precision in which it computes, from chunk to chunk."""

    def __init__(self, block: LSTMBlock, state: State) -> None:
        self.block = block
        self.before = state.tensor("hidden"), state.tensor("cell")
        self.dtype, self.scale = _precision(self.before[0])
        self.weights = block.weights()
        fits = (self.dtype, self.scale) == (self.weights[0].dtype, 1.0)
        # A dropped matrix is outside the buffer that cuDNN expects, so all weights are copied into a new one.
        fits = fits and (not self.before[0].is_cuda or not block._drops())
        self.flat = None if fits else block._flattened(self.weights, self.dtype, self.scale)
        self.now = tuple(one_BD[None].to(self.dtype) for one_BD in self.before)

    def read(self, h_BTD: Tensor) -> Tensor:
        lstm = self.block.lstm
        x_TBD = self.block._enter(h_BTD, self.block.norm, self.dtype, self.scale)
        # On a GPU all tensors have the right dtype already; autocast would copy the weights again.
        with torch.autocast("cuda", enabled=False):
            # cuDNN keeps what the backward pass needs only in training.
            training = lstm.training or torch.is_grad_enabled()
            out_TBD, *now = torch.lstm(x_TBD, self.now, self._weights(), True, 1, 0.0, training, False, False)
        self.now = tuple(now)
        dropped = self.block.dropout if self.block.training else 0.0
        return self.block._leave(out_TBD, h_BTD.dtype, self.scale, dropped)

    def _weights(self) -> list[Tensor]:
        own = self.weights
        if self.flat is None:
            return own
        # Split for every chunk: cuDNN returns gradients in one buffer, and the chunks' buffers are added up.
        parts = contiguous_split(self.flat, [weight.numel() for weight in own], 0)
        return [part.view_as(weight) for part, weight in zip(parts, own, strict=True)]

    def end(self) -> State:
        # The carried state stays in full precision.
        hidden_BD, cell_BD = (new[0].to(old.dtype) for new, old in zip(self.now, self.before, strict=True))
        return State({"hidden": hidden_BD, "cell": cell_BD})


def _precision(hidden_BD: Tensor) -> tuple[torch.dtype, float]:
    """The dtype of the LSTM and its gradient scale."""
    if not (hidden_BD.is_cuda and torch.is_autocast_enabled("cuda")):
        return hidden_BD.dtype, 1.0
    asked = torch.get_autocast_dtype("cuda")
    return torch.float16, GRADIENT_SCALE if asked == torch.bfloat16 else 1.0


def _flattened(weights: Sequence[Tensor], dtype: torch.dtype, scale: float) -> Tensor:
    """All weights in one buffer, in the order of cuDNN, which then does not copy them."""
    return torch.cat([_scaled(weight, 1 / scale).to(dtype).flatten() for weight in weights])


def _enter(h_BTD: Tensor, norm: nn.LayerNorm, dtype: torch.dtype, scale: float) -> Tensor:
    return _exchanged(_scaled(norm(h_BTD), 1 / scale)).to(dtype)


def _leave(out_TBD: Tensor, dtype: torch.dtype, scale: float, probability: float) -> Tensor:
    return dropout(_exchanged(_scaled(out_TBD.to(dtype), scale)), probability, training=True)


def _scaled(x: Tensor, scale: float) -> Tensor:
    """x itself; its gradient times `scale`."""
    return x if scale == 1 else _ScaledGradient.apply(x, scale)  # type: ignore[no-untyped-call]


def _exchanged(x: Tensor) -> Tensor:
    """Exchange batch and time. The result is contiguous in both passes: otherwise an LSTM copies."""
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
