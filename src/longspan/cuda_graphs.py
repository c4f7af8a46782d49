"""CUDA graph capture that can fail without harm to the rest of the process.

An operation that a capture does not allow, such as a copy to the host, invalidates the capture. CUDA then
ends it with an error, and torch's `capture_end` stops at that error: the allocator still serves the capture's
memory pool, and the random generator still counts for the capture, so that every later dropout of any model
fails. `capture` finishes what `capture_end` left.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def capture(work: Callable[[], T], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture the operations of `work` on the current device; they run only when the graph is replayed.

    If `work` cannot be captured its error is raised, with memory, streams and random generators restored.
    `pool` is the memory pool of an earlier graph that is replayed before this one.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(torch.cuda.current_device())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a graph has memory of its own
    with _without_garbage_collection(), torch.cuda.stream(stream):
        # Other threads may allocate and copy meanwhile: only what this thread does can end up in the graph.
        graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode="thread_local")
        try:
            result = work()
        except BaseException:
            _end(graph, stream)
            raise
        try:
            graph.capture_end()
        except BaseException:
            _end_invalidated(graph, stream)
            raise
    return graph, result


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Destroying another model's graph, if it is garbage, would invalidate a running capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _end(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """End a capture whose work raised an error, and drop what was captured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph may be empty
        try:
            graph.capture_end()
        except RuntimeError:
            _end_invalidated(graph, stream)
        else:
            graph.reset()


def _end_invalidated(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Let torch finish a capture that CUDA has ended already.

    torch can leave a capture only by `capture_end`, which needs a capture that CUDA can end. So an empty
    capture is started on the same stream, through the driver, and ended with the graph's `capture_end`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph is empty
        error = _driver().cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), ctypes.c_int(_RELAXED))
        if error:
            raise RuntimeError(f"a failed CUDA graph capture could not be ended: CUDA driver error {error}")
        graph.capture_end()
        graph.reset()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
