"""One update of a model. Shapes: B lanes, T block."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from longspan import distributed
from longspan.compile_fallback import CompileFallback
from longspan.config.training import Precision
from longspan.data import TokenBlock
from longspan.hooks import added_penalties
from longspan.models import LanguageModel, Stack
from longspan.state import State
from longspan.training import parallel
from longspan.training.grad_scaler import GradScaler
from longspan.training.graphs import CapturedModel

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Updater:
    """Reads a block, updates the weights, returns the carried state.

    The batch is split by lanes into `micro_batches`. Their gradients add up to those of the whole batch, and
    activations are held for one of them at a time. The loss stays on the device; only the gradient scaler of
    fp16 synchronises, to check for overflow. On a GPU without micro-batches the model is called through a
    `CapturedModel`; `capture` is false for blocks of changing length, where a graph is hardly ever replayed,
    and for updates over several blocks, because a captured pass has no gradient for the carried state. With
    activation checkpointing nothing is captured: it reads the random generator in the backward pass.
    `fallback` is the `CompileFallback` of a compiled model.

    Under torchrun the lanes are those of this rank, and gradients are averaged over all ranks. `sharded` is
    whether the model is: then a pass gathers weights, and cannot be captured.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        precision: Precision = "float32",
        micro_batches: int = 1,
        fallback: CompileFallback | None = None,
        capture: bool = True,
        sharded: bool = False,
    ) -> None:
        if precision == "auto":
            raise ValueError("precision 'auto' must be resolved before an update")
        self.model = model
        self.micro_batches = micro_batches
        self.device = next(model.parameters()).device
        self.scaler = GradScaler(self.device.type, enabled=precision == "fp16")
        self._fallback = fallback or CompileFallback(enabled=False)
        recomputes = isinstance(model, Stack) and model.around_block is not None
        can_capture = self.device.type == "cuda" and micro_batches == 1 and not recomputes and not sharded
        capture = capture and can_capture
        losses = _Losses(model, precision, CapturedModel(model) if capture else None)
        self._losses: nn.Module = losses if capture or sharded else parallel.replicate(losses)
        self._left_out = parallel.left_out(model, captured=capture, sharded=sharded)

    def update(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        state: State,
        optimizers: list[Optimizer],
        clip_norm: float = 0.0,
        *,
        clip_value: float = 0.0,
        more: Sequence[TokenBlock] = (),
        multi_token: Sequence[float] = (),
    ) -> tuple[Tensor, State]:
        """The sum of nats over the block, computed before the update, and the detached state after the block.

        Only parameters of `optimizers` are clipped and updated. The sum has no penalties: they change the
        gradients but are not reported. Blocks in `more` follow the first one and are part of the update.
        `multi_token` are the weights of the losses of later tokens, see `gradients`.
        """
        nats, state = self._fallback.run(
            lambda: self._fresh_gradients(tokens_BT, targets_BT, state, more, multi_token)
        )
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
        if clip_norm > 0 or clip_value > 0:
            held = {
                id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
            }
            moving = [p for p in self.model.parameters() if id(p) in held]
            if clip_value > 0:
                for alike in distributed.by_placement(moving):
                    torch.nn.utils.clip_grad_value_(alike, clip_value)
            if clip_norm > 0:
                parallel.clip_norm(moving, clip_norm)
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.model.after_update()
        return nats, state

    def _fresh_gradients(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        state: State,
        more: Sequence[TokenBlock],
        multi_token: Sequence[float],
    ) -> tuple[Tensor, State]:
        self.model.zero_grad()
        return self.gradients(tokens_BT, targets_BT, state, more, multi_token)

    def gradients(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        state: State,
        more: Sequence[TokenBlock] = (),
        multi_token: Sequence[float] = (),
    ) -> tuple[Tensor, State]:
        """Add the gradients of (mean nats per token + penalties) to the parameters.

        With `more` blocks it is the sum of this over all blocks; gradients flow through the state from block
        to block. With the weights w_1, w_2, ... of `multi_token`, the nats of a position t are those of its
        target plus w_i times those of target t + i, if that lies in the block. The nats that are returned
        are those of the targets alone.
        """
        blocks = [
            _Block(self._on_device(tokens_BT), self._on_device(targets_BT), begins=False),
            *(_Block(self._on_device(b.tokens_BT), self._on_device(b.targets_BT), b.begins) for b in more),
        ]
        batch_size = tokens_BT.shape[0]
        edges = [batch_size * i // self.micro_batches for i in range(self.micro_batches + 1)]
        nats = torch.zeros((), device=self.device)
        after: list[State] = []
        for first, end in itertools.pairwise(edges):
            lanes = slice(first, end)
            with parallel.synchronised(self._losses, last=end == batch_size):
                loss, piece, new_state = self._losses(blocks, lanes, state.select(lanes), multi_token)
                self.scaler.scale(loss).backward()
            nats = nats + piece
            after.append(new_state.detach())
        parallel.average_gradients(self._left_out)
        return nats, after[0] if len(after) == 1 else State.join(after)

    def _on_device(self, block_BT: Tensor) -> Tensor:
        """Copied asynchronously from pinned memory; a tensor that is already pinned is not pinned again."""
        if self.device.type != "cuda":
            return block_BT.to(self.device)
        return block_BT.pin_memory().to(self.device, non_blocking=True)


@dataclass(frozen=True)
class _Block:
    tokens_BT: Tensor
    targets_BT: Tensor
    begins: bool


class _Losses(nn.Module):
    """The loss of one micro-batch, over all blocks of an update.

    It is a module of its own because DDP averages the gradients of what happens inside of one `forward`.
    """

    def __init__(self, model: LanguageModel, precision: Precision, captured: CapturedModel | None) -> None:
        super().__init__()
        self.model = model
        self._precision, self._captured = precision, captured

    def forward(
        self, blocks: list[_Block], lanes: slice, state: State, multi_token: Sequence[float]
    ) -> tuple[Tensor, Tensor, State]:
        """The loss to differentiate, the sum of nats, and the state after the last block."""
        losses, nats = [], torch.zeros((), device=blocks[0].tokens_BT.device)
        for block in blocks:
            if block.begins:
                state = distributed.initial_state(self.model, lanes.stop - lanes.start)
            with added_penalties() as added:
                hidden_BTD, state = self._read(block.tokens_BT[lanes], state)
            with self._autocast():
                nll_BT, *later = self._nll_ahead(hidden_BTD, block.targets_BT[lanes], len(multi_token))
            piece = nll_BT.sum()
            weighted = [weight * nll.sum() for weight, nll in zip(multi_token, later, strict=False)]
            loss = sum(weighted, start=piece) / block.targets_BT.numel()
            if lanes.start == 0:  # once per batch, not once per micro-batch
                loss = loss + sum(self.model.penalties().values())
            if added:  # a mean over the tokens of this micro-batch
                loss = loss + sum(added) * (nll_BT.shape[0] / block.targets_BT.shape[0])
            losses.append(loss)
            nats = nats + piece.detach()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(), nats, state

    def _nll_ahead(self, hidden_BTD: Tensor, targets_BT: Tensor, ahead: int) -> list[Tensor]:
        """The nats of the next tokens, and of so many tokens after them as the block has."""
        ahead = min(ahead, targets_BT.shape[1] - 1)
        if ahead == 0:
            return [self.model.head.nll(hidden_BTD, targets_BT)]
        return self.model.head.nll_ahead(hidden_BTD, targets_BT, ahead)

    def _read(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        if self._captured is not None:
            return self._captured(tokens_BT, state, self._autocast())
        with self._autocast():
            hidden_BTD, after = self.model(tokens_BT, state)
        return hidden_BTD, after

    def _autocast(self) -> torch.autocast:
        return autocast(next(self.model.parameters()).device, self._precision)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The precision of the forward pass."""
    dtype = _AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype, enabled=dtype is not None)
