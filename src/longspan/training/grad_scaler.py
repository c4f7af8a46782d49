"""The gradient scaler of fp16, for models of which some parameters are sharded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from longspan.distributed import by_placement


class GradScaler(torch.amp.GradScaler):
    """torch's scaler, but an optimizer may have whole and sharded parameters, whatever their shape.

    torch checks all gradients in one operation, which takes no mixture. For sharded ones it agrees with all
    ranks on whether there was an overflow.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = {}
        for alike in by_placement(p for group in optimizer.param_groups for p in group["params"]):
            part: Any = SimpleNamespace(param_groups=[{"params": alike}])
            overflows = super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16)
            for device, overflow in overflows.items():
                found[device] = torch.maximum(found.get(device, overflow), overflow)
        return found
