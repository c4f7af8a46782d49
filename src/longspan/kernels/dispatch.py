"""Which way an operation is done: by kernels on a GPU, by plain torch elsewhere, or as a benchmark wants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Path: TypeAlias = Literal["eager", "padded"]

_forced: ContextVar[Path | None] = ContextVar("forced path", default=None)


@contextmanager
def forced(path: Path | None) -> Iterator[None]:
    """Inside, every forward pass takes this path, wherever it runs; None is the choice of each operation.

    A state in its decoding form is good for the path that it was made for.
    """
    token = _forced.set(path)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_path() -> Path | None:
    return _forced.get()


def use_triton(x: Tensor) -> bool:
    """Whether Triton's kernels do what is done with `x`. What is being compiled becomes kernels anyway."""
    on_gpu = not torch.compiler.is_compiling() and x.is_cuda and x.dtype != torch.float64
    return on_gpu and _forced.get() is None and has_triton()


@cache
def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
