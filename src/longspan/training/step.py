"""One update of a model. Shapes: B lanes, T block."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.optim import Optimizer

from longspan.compile_fallback import CompileFallback
from longspan.config.training import Precision
from longspan.models.interface import LanguageModel
from longspan.state import State
from longspan.training.graphs import RecordedModel

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Updater:
    """Reads a block, moves the weights, returns the carried state.

    The batch runs in `micro_batches` pieces, each some of the lanes: gradients add up to those of the
    whole batch, and only the memory of one piece is held. The loss stays on the device; what does wait for
    it is the scaler of fp16, which must know whether gradients overflowed. On a GPU a batch in one piece is
    read by a `RecordedModel`. `fallback` is that of a compiled model.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        precision: Precision = "float32",
        micro_batches: int = 1,
        fallback: CompileFallback | None = None,
    ) -> None:
        if precision == "auto":
            raise ValueError("the precision of an update must be known: resolve 'auto' first")
        self.model = model
        self.micro_batches = micro_batches
        self.device = next(model.parameters()).device
        self.dtype = _AUTOCAST.get(precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self._fallback = fallback or CompileFallback(enabled=False)
        can_record = self.device.type == "cuda" and micro_batches == 1
        self._recorded = RecordedModel(model) if can_record else None

    def update(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        state: State,
        optimizers: list[Optimizer],
        clip_norm: float = 0.0,
    ) -> tuple[Tensor, State]:
        """The sum of nats over the block before the update, and the state after it, cut from its history.

        Only what `optimizers` hold is clipped and moves. The sum is the plain one: penalties push the
        weights but are not part of what is reported.
        """
        nats, state = self._fallback.run(lambda: self._fresh_gradients(tokens_BT, targets_BT, state))
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
        if clip_norm > 0:
            held = {
                id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
            }
            moving = [p for p in self.model.parameters() if id(p) in held]
            torch.nn.utils.clip_grad_norm_(moving, clip_norm)
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.model.after_update()
        return nats, state

    def _fresh_gradients(self, tokens_BT: Tensor, targets_BT: Tensor, state: State) -> tuple[Tensor, State]:
        self.model.zero_grad()
        return self.gradients(tokens_BT, targets_BT, state)

    def gradients(self, tokens_BT: Tensor, targets_BT: Tensor, state: State) -> tuple[Tensor, State]:
        """Add the gradients of (mean nats per token + penalties) to the parameters."""
        tokens_BT, targets_BT = self._on_device(tokens_BT), self._on_device(targets_BT)
        batch_size = tokens_BT.shape[0]
        edges = [batch_size * i // self.micro_batches for i in range(self.micro_batches + 1)]
        nats = torch.zeros((), device=self.device)
        after: list[State] = []
        for first, end in itertools.pairwise(edges):
            lanes = slice(first, end)
            hidden_BTD, new_state = self._read(tokens_BT[lanes], state.select(lanes))
            with self._autocast():
                nll_BT = self.model.head.nll(hidden_BTD, targets_BT[lanes])
            piece = nll_BT.sum()
            loss = piece / targets_BT.numel()
            if first == 0:  # once for the batch, however many pieces it has
                loss = loss + sum(self.model.penalties().values())
            self.scaler.scale(loss).backward()
            nats = nats + piece.detach()
            after.append(new_state.detach())
        return nats, after[0] if len(after) == 1 else State.join(after)

    def _read(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        if self._recorded is not None:
            return self._recorded(tokens_BT, state, self._autocast())
        with self._autocast():
            hidden_BTD, after = self.model(tokens_BT, state)
        return hidden_BTD, after

    def _on_device(self, block_BT: Tensor) -> Tensor:
        """Copied from pinned memory, so that nobody waits for it; what is pinned already is not moved."""
        if self.device.type != "cuda":
            return block_BT.to(self.device)
        return block_BT.pin_memory().to(self.device, non_blocking=True)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)
