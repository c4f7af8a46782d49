"""Which backend an operation uses: Triton kernels on a GPU, others elsewhere, or plain torch if forced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Path: TypeAlias = Literal["eager"]

_forced: ContextVar[Path | None] = ContextVar("forced path", default=None)


@contextmanager
def forced(path: Path | None) -> Iterator[None]:
    """Inside, every forward pass takes this path on any device; None lets each operation choose.

    A decoding state can be used only with the path for which it was made.
    """
    token = _forced.set(path)
    try:
        yield
    finally:
        _forced.reset(token)


def forced_path() -> Path | None:
    return _forced.get()


def use_triton(x: Tensor) -> bool:
    """Whether operations on `x` use Triton kernels. Under torch.compile they do not: it makes its own."""
    on_gpu = not torch.compiler.is_compiling() and x.is_cuda and x.dtype != torch.float64
    return on_gpu and _forced.get() is None and has_triton()


@cache
def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
