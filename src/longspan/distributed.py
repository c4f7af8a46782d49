"""The processes that torchrun starts: which one this is, and what they agree on.

Each process is a rank. They share one batch: every rank reads its own lanes of it. Without torchrun there is
one rank, and nothing here communicates. Small values travel through gloo, on the CPU, so that no call waits
for a GPU.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from longspan.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from longspan.state import State

T = TypeVar("T", bound=Tensor)

_DIAGNOSIS_SECONDS = 10.0  # after a time-out: the other ranks notice theirs a little later
_NOTICE_SECONDS = 3.0  # after a connection was closed
_joins = count()


def launched() -> bool:
    """Whether torchrun started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def restarts() -> int:
    """How often torchrun has started these processes again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if launched() else 0


def local_rank() -> int:
    """The number of this process among those of its machine."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0


def local_size() -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched() else 1


@contextmanager
def joined(device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Inside, the processes of torchrun are connected: NCCL between GPUs, gloo between CPUs."""
    if not launched() or dist.is_initialized():
        yield
        return
    on_gpu, timeout = device.type == "cuda", timedelta(seconds=timeout_seconds)
    store, rank_, size_ = next(rendezvous("env://", timeout=timeout))
    # A name of its own for every start of the processes and every join: else one finds addresses of another.
    name = f"longspan-{restarts()}-{next(_joins)}"
    store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank_,
        world_size=size_,
        timeout=timeout,
        device_id=device if on_gpu else None,
    )
    try:
        yield
    except BaseException as problem:
        if size() == 1:
            raise
        if _is_communication(problem):
            raise UserError(_why(problem, store, timeout_seconds)) from problem
        _tell(store, str(problem) or type(problem).__name__)
        raise
    mesh.cache_clear()
    dist.destroy_process_group()  # not after a failure: it could wait for a process that is gone


def size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among all; known before they are connected, and after."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if launched() else 0


def is_first() -> bool:
    """Whether this process writes logs, metrics and samples."""
    return rank() == 0


def share(batch_size: int) -> range:
    """The lanes of this rank: equally many on every rank, in order."""
    if batch_size % size():
        raise UserError(
            f"{batch_size} lanes cannot be divided over {size()} processes: choose a training.batch_size "
            f"that is a multiple of {size()}"
        )
    lanes, first = batch_size // size(), rank() if size() > 1 else 0
    return range(first * lanes, (first + 1) * lanes)


@cache
def mesh(device_type: str) -> DeviceMesh:
    """All ranks, as DTensors need them."""
    return init_device_mesh(device_type, (size(),))


def divided(lanes: int) -> range:
    """The lanes of this rank where their number need not be a multiple of the ranks; perhaps none."""
    first = rank() if size() > 1 else 0
    return range(first * lanes // size(), (first + 1) * lanes // size())


def summed(values: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, on each of them."""
    if size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds only some rows of the tensor: a `DTensor`, as FSDP2 makes of parameters."""
    return _as_sharded(tensor) is not None


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that this rank holds, possibly none; any other tensor itself."""
    sharded = _as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def full(tensor: Tensor) -> Tensor:
    """All rows of a sharded tensor, with its gradient; any other tensor itself. Every rank must call it."""
    sharded = _as_sharded(tensor)
    return tensor if sharded is None else sharded.full_tensor()


def by_placement(tensors: Iterable[T]) -> list[list[T]]:
    """The whole tensors and the sharded ones, each in order: torch's updates of many take no mixture."""
    both: tuple[list[T], list[T]] = ([], [])
    for tensor in tensors:
        both[is_sharded(tensor)].append(tensor)
    return [alike for alike in both if alike]


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on one rank or more. Also makes every rank wait for the others."""
    return bool(highest(flag))


def highest(number: int) -> int:
    """The highest of the numbers that the ranks have."""
    if size() == 1:
        return number
    held = torch.tensor(number)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held)


def from_first(number: float) -> float:
    """The number that rank 0 has: what depends on a clock must be the same everywhere."""
    if size() == 1:
        return number
    held = torch.tensor(number, dtype=torch.float64)
    dist.broadcast(held, src=0)
    return float(held)


def text_from_first(text: str) -> str:
    """The text that rank 0 has."""
    if size() == 1:
        return text
    said = text.encode("utf-8", "surrogateescape")
    held = torch.zeros(int(from_first(len(said))), dtype=torch.uint8)
    if is_first():
        held = torch.tensor(list(said), dtype=torch.uint8)
    dist.broadcast(held, src=0)
    return bytes(held.tolist()).decode("utf-8", "surrogateescape")


class _Begins(Protocol):
    def initial_state(self, batch_size: int) -> State: ...

    def modules(self) -> Iterator[nn.Module]: ...


def initial_state(model: _Begins, batch_size: int) -> State:
    """`model.initial_state` for a model that may be sharded: it reads weights outside of the forward pass."""
    modules = _sharded_modules(model)
    if not modules:
        return model.initial_state(batch_size)
    for module in modules:
        module.unshard()
    with torch.no_grad():
        state = model.initial_state(batch_size).map(torch.clone)
    reshard(model)
    return state


def reshard(model: _Begins) -> None:
    """Free the gathered weights of a sharded model; each rank keeps its part."""
    for module in _sharded_modules(model):
        module.reshard()


@contextmanager
def first_before_others() -> Iterator[None]:
    """Inside, rank 0 runs first and the others after it, to find what it has made."""
    if size() == 1:
        yield
        return
    if not is_first() and any_rank(False):
        raise UserError("rank 0 failed: see its message")
    try:
        yield
    except BaseException:
        if is_first():
            any_rank(True)
        raise
    if is_first():
        any_rank(False)


def _sharded_modules(model: _Begins) -> list[FSDPModule]:
    if not dist.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _as_sharded(tensor: Tensor) -> DTensor | None:
    if not dist.is_initialized():
        return None
    from torch.distributed.tensor import DTensor  # slow to import

    return tensor if isinstance(tensor, DTensor) else None


def _is_communication(problem: BaseException) -> bool:
    """Whether the exception says that another process could not be reached."""
    if isinstance(problem, dist.DistError):
        return True
    return isinstance(problem, RuntimeError) and re.search("gloo|nccl", str(problem), re.I) is not None


def _why(problem: BaseException, store: Store, timeout_seconds: float) -> str:
    """Which rank ended or does not answer, as far as this rank can find out, and why."""
    _tell(store, _WAITED)
    late = re.search("timed? ?out", str(problem), re.I) is not None
    told = _told(store, _DIAGNOSIS_SECONDS if late else _NOTICE_SECONDS)
    silent = [str(other) for other in range(size()) if other not in told]
    failed = {other: reason for other, reason in told.items() if reason != _WAITED}
    if failed:
        other, reason = min(failed.items())
        return f"rank {other} failed: {reason}"
    if late and silent:
        return (
            f"rank {', '.join(silent)} did not answer for {timeout_seconds:.0f} seconds: it hangs or is very "
            "slow; see its log, or raise training.timeout_seconds"
        )
    if late:
        return (
            f"the processes waited {timeout_seconds:.0f} seconds for each other: one of them was slow; raise "
            "training.timeout_seconds"
        )
    if len(silent) == 1:
        return f"rank {silent[0]} ended without a message: it was killed, perhaps for want of memory"
    return f"another process of this training ended (this is rank {rank()}): see torchrun's report"


_WAITED = "-"  # what a rank tells that failed because of another


def _tell(store: Store, reason: str) -> None:
    """Let the other ranks know why this one ends."""
    with suppress(RuntimeError):  # the store ends with torchrun
        store.set(f"end-of-rank-{rank()}", reason)


def _told(store: Store, patience: float) -> dict[int, str]:
    """Why ranks end; those that have not told after some seconds are left out."""
    keys, until = {other: f"end-of-rank-{other}" for other in range(size())}, time.monotonic() + patience
    told: dict[int, str] = {}
    with suppress(RuntimeError):
        while len(told) < size() and time.monotonic() < until:
            there = [other for other, key in keys.items() if other not in told and store.check([key])]
            told |= {other: store.get(keys[other]).decode() for other in there}
            time.sleep(0.05)
    return told
