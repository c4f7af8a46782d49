"""One model on several ranks: replicated by DDP, or sharded by FSDP2.

torch's modules for sharded tensors take long to import: they are imported where they are needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longspan import distributed
from longspan.config import TrainingConfig
from longspan.models.interface import LanguageModel
from longspan.state import State


def sharded(training: TrainingConfig) -> bool:
    """Whether weights are divided. Without torchrun there is one process, and nothing to divide."""
    return training.shard and dist.is_initialized()


def shard(model: LanguageModel, *, detach_states: bool = False) -> None:
    """Divide the matrices of a model over the ranks; a block is gathered as it runs.

    Vectors and scalars stay whole. Dividing them saves nothing, and hooks read them outside of the forward
    pass, where sharded parameters are not gathered: spans, logits of a search. With `detach_states` no
    gradient flows through the carried state, and FSDP2 adds no hooks to its tensors.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.mesh(next(model.parameters()).device.type)
    whole = {p for p in model.parameters() if p.ndim < 2}
    lists = (child for child in model.children() if isinstance(child, nn.ModuleList))
    blocks = [block for children in lists for block in children]
    for block in blocks if detach_states else ():
        block.register_forward_hook(_detach_state)
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, ignored_params=whole)


def _detach_state(block: nn.Module, inputs: Any, output: Any) -> Any:
    """For a block of any kind: what it returns, with the state detached if there is one."""
    if not isinstance(output, tuple):
        return output
    return tuple(part.detach() if isinstance(part, State) else part for part in output)


def replicate(module: nn.Module) -> nn.Module:
    """The same module; the gradients of its backward pass are averaged over the ranks."""
    if not dist.is_initialized():
        return module
    with warnings.catch_warnings():
        # torch renames `broadcast_buffers`. Older versions do not know the new name.
        warnings.filterwarnings("ignore", message=".*forward_sync_buffers")
        # Buffers follow from the weights, or are only shown, as the sizes of dynamic spans of rank 0.
        return DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)


def synchronised(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """A context for one of several backward passes: only the last one averages the gradients."""
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    for part in module.modules():
        if (synchronise := getattr(type(part), "set_requires_gradient_sync", None)) is not None:  # sharded
            synchronise(part, last, recurse=False)
    return nullcontext()


def left_out(model: LanguageModel, captured: bool, sharded: bool) -> list[nn.Parameter]:
    """The parameters whose gradients neither DDP nor FSDP2 averages."""
    if not dist.is_initialized() or not (captured or sharded):
        return []
    return [p for p in model.parameters() if captured or p.ndim < 2]


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients of `parameters` over the ranks, in one piece, after the backward pass.

    For passes replayed from a CUDA graph, which DDP does not see, and for parameters that FSDP2 leaves out.
    Unlike theirs it does not overlap with the backward pass.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= distributed.size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(
        gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    )


def clip_norm(parameters: list[nn.Parameter], limit: float) -> None:
    """`clip_grad_norm_` for parameters of which some may be sharded: the norm is that of all of them."""
    parts = distributed.by_placement(parameters)
    if len(parts) < 2 and not any(map(distributed.is_sharded, parameters)):
        nn.utils.clip_grad_norm_(parameters, limit)
        return
    norms = [nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts]
    norm = torch.stack([distributed.full(norm) for norm in norms]).norm()
    for part in parts:
        nn.utils.clip_grads_with_norm_(part, limit, norm)


def placed_like(full: Tensor, own: Tensor) -> Tensor:
    """The part of a whole tensor that belongs on this rank, if `own` is sharded; else the tensor."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor):
        return full
    return distribute_tensor(full.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def of_all_lanes(own: Tensor) -> Tensor:
    """The carried state of all ranks as one tensor, of which this rank has its own lanes."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(own, distributed.mesh(own.device.type), [Shard(0)], run_check=False)
