"""How much memory a training step needs.

The plan is for one process. `weights`, `gradients` and `optimizer` are exact, `activations` are measured on a
few lanes (`activations.py`), with learned spans as long as they are at that moment. Buffers of single
operations are not counted, nor is what the process needs besides training.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

import torch
from torch import Tensor

from longspan.config import RunConfig
from longspan.distributed import local_size
from longspan.machine_memory import free_memory
from longspan.models import LanguageModel, Stack
from longspan.optim import build_optimizers, state_bytes
from longspan.training.activations import Activations, measure_activations
from longspan.training.formatting import size
from longspan.training.step import autocast


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one process while it makes a step. The state is there twice: before and after the block."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    carried_state: int

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        parts = ((part.name.replace("_", " "), getattr(self, part.name)) for part in fields(self))
        return f"{size(self.total)} ({', '.join(f'{name} {size(count)}' for name, count in parts)})"


def measured_for(model: LanguageModel, config: RunConfig) -> Activations:
    """The activations of a step of the stage with the longest blocks; `config` has no `auto`."""
    device = next(model.parameters()).device
    longest = max(map(config.block_length, config.stage))
    return measure_activations(model, longest, autocast(device, config.training.precision))


def memory_plan(
    model: LanguageModel, config: RunConfig, activations: Activations, *, ranks: int = 1, shard: bool = False
) -> MemoryPlan:
    """The plan for a model that is not yet wrapped or sharded, on one of `ranks` processes.

    They share the lanes. With `shard` they also share weights, gradients and optimizer state; a block then
    has all of its weights and gradients on every process while it is computed, and so has what is outside of
    all blocks.
    """
    training = config.training
    parts = ranks if shard else 1

    def own(parameter: Tensor) -> int:
        """Rows of a matrix are divided, rounded up; vectors stay whole."""
        if parameter.ndim < 2:
            return _bytes(parameter)
        rows = parameter.shape[0]
        return _bytes(parameter) * ceil(rows / parts) // max(1, rows)

    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    gathered = _gathered(model) if shard else 0
    optimizer = max(state_bytes(build_optimizers(model, stage), own) for stage in config.stage)
    if training.average:
        optimizer += sum(map(own, parameters))
    lanes = ceil(training.batch_size / ranks)
    used = activations.plain
    if training.activation_checkpointing and activations.recomputed is not None:
        used = activations.recomputed
    return MemoryPlan(
        weights=sum(map(own, parameters)) + sum(map(_bytes, model.buffers())) + gathered,
        gradients=sum(map(own, trained)) + gathered,
        optimizer=optimizer,
        activations=used.at(ceil(lanes / training.micro_batches)) * training.accumulate,
        carried_state=2 * activations.state.at(lanes),
    )


def available_memory(model: LanguageModel) -> int | None:
    """Bytes that a run may use on the device of the model, the model included; None if unknown.

    On a CPU the processes that torchrun starts on one machine share its memory.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    free_on_host = free_memory() if device.type == "cpu" else None
    if free_on_host is None:
        return None
    share = free_on_host // local_size()
    return share + sum(_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _gathered(model: LanguageModel) -> int:
    """The bytes of the matrices of the largest block, and of those outside of blocks."""
    blocks = list(model.blocks) if isinstance(model, Stack) else []
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = sum(_bytes(p) for p in model.parameters() if p.ndim > 1 and id(p) not in inside)
    of_blocks = (sum(_bytes(p) for p in block.parameters() if p.ndim > 1) for block in blocks)
    return outside + max(of_blocks, default=0)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
