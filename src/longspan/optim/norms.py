"""The norms of many tensors at once."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.compile_fallback import not_compiled
from longspan.distributed import summed


@not_compiled(reason="stacking would launch one kernel per tensor")
def norms(tensors: list[Tensor] | tuple[Tensor, ...], sharded: bool = False) -> Tensor:
    """Their 2-norms, [N], on the device. If the tensors are shards, the norms of the whole tensors."""
    found_N = torch.stack(torch._foreach_norm(tensors))
    if not sharded:
        return found_N
    return summed(found_N.double().square()).sqrt().to(found_N.dtype)
