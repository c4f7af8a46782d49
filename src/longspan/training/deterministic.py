"""torch's deterministic mode while a training lasts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from longspan.errors import UserError


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, if `wanted`, the same step gives the same bits on a GPU too, in this process and the next.

    Without it cuBLAS may choose other kernels when several streams are used, as for CUDA graphs, and
    torch.compile times kernels and takes the fastest. Afterwards all is as before, except for the variable
    that cuBLAS reads at its first product.
    """
    if not wanted:
        yield
        return
    from torch._inductor import config as inductor

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # filling finds bugs, and costs time in every step
    try:
        with inductor.patch(deterministic=True):
            yield
    except RuntimeError as problem:
        if "does not have a deterministic implementation" not in str(problem):
            raise
        operation = str(problem).partition(" ")[0]
        raise UserError(
            f"torch has no deterministic {operation}, which this model needs: "
            "set training.deterministic = false"
        ) from None
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
        memory.fill_uninitialized_memory = fills
