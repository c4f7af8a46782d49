"""Refuse a model that is larger than the memory of this machine before any of it is allocated.

Without this check a large model fills the memory for minutes, at the expense of other programs, and then
fails.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from longspan.errors import UserError, is_out_of_memory
from longspan.machine_memory import physical_memory
from longspan.models.skeleton import skeletons
from longspan.registry import ARCHITECTURES


def check_memory(build: Callable[[], nn.Module], architecture: str) -> None:
    """Raise `UserError` if the weights of what `build` returns exceed the memory of this machine.

    They are counted on the meta device. Architectures of plugins may not support it, so they are not checked.
    """
    available = physical_memory()
    if available is None or ARCHITECTURES.plugin_of(architecture) is not None:
        return
    if torch.get_default_device().type == "meta":  # the caller wants no weights
        return
    try:
        with torch.random.fork_rng(devices=[]), skeletons():
            model = build()
    except RuntimeError as problem:
        if not is_out_of_memory(problem):
            raise
        raise UserError("the model does not fit into memory: make it smaller") from None
    needed = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    if needed > available:
        raise UserError(
            f"the weights of the model need {needed / 2**30:,.1f} GiB of memory, and this machine has "
            f"{available / 2**30:,.1f} GiB: make the model smaller"
        )
