"""Checkpoints that several processes write together, while the training goes on.

Each rank copies its tensors, and a thread writes the copy by torch.distributed.checkpoint into a partial
folder: a shard per rank. When all shards are on the disk, rank 0 adds `facts.json` with their checksums and
renames: the checkpoints before it get their next numbers, and the new folder its name. A process that is
killed at any moment leaves a whole checkpoint, see `kept`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from longspan import distributed
from longspan.errors import UserError
from longspan.files import left_over, new_writer, partial_path, to_disk
from longspan.runs.checkpoint import load
from longspan.runs.kept import make_room, numbered, remove_oldest
from longspan.runs.shards import FACTS, Shard, contents

__all__ = ["ShardedWriter", "load"]


class ShardedWriter:
    """Writes the checkpoints of a run in the background. Every rank has one, and makes the same calls."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")  # of its own: the thread never delays the training
        self._writer = distributed.text_from_first(new_writer())
        self._saves = 0
        self._copies = _Copies()
        self._running: tuple[Path, Path, futures.Future[Any]] | None = None

    def save(
        self, path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], keep: int = 1
    ) -> None:
        """Copy everything and begin to write it as the folder `path`; `wait` says when it is in place.

        A tensor is a DTensor, or a plain tensor that is the same on all ranks that have its name; it is
        written once. `facts` are those of rank 0. Of the checkpoints that were written to `path`, the newest
        `keep` stay. The save before is completed first.
        """
        self.wait()
        self._saves += 1  # in the name, so that no save finds files of another
        partial = partial_path(path, self._writer.replace("@", f"{self._saves:x}@", 1))
        writer = _Writer(path, partial, json.loads(json.dumps(facts)), keep)
        running = async_save(
            _grouped(tensors), storage_writer=writer, process_group=self._group, async_stager=self._copies
        )
        assert isinstance(running, futures.Future)
        self._running = path, partial, running

    def wait(self) -> None:
        """Wait until the last save is in place. If it failed on one rank, all ranks raise `UserError`."""
        if self._running is None:
            return
        path, partial, running = self._running
        futures.wait([running])  # if a signal interrupts it, the save still counts as running
        self._running = None
        try:
            running.result()
        except CheckpointException as problem:  # every rank has stopped writing
            if distributed.is_first():
                shutil.rmtree(partial, ignore_errors=True)
            rank, (cause, _) = min(problem.failures.items(), key=lambda failure: failure[0])
            if not isinstance(cause, OSError):
                raise RuntimeError(f"rank {rank} could not write the checkpoint {path}: {cause!r}") from cause
            where = f" (rank {rank})" if distributed.size() > 1 else ""
            said = cause.strerror or cause
            raise UserError(f"could not write the checkpoint {path}: {said}{where}") from None


class _Copies(BlockingAsyncStager):
    """Copies tensors to the CPU, completely: the next step of the training changes the originals.

    Copies in pinned memory are held until the next ones: the thread must not free them, which is a call to
    CUDA, while the training captures a graph.
    """

    _pinned: dict[str, Any] | None = None

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._pinned = None
        gpus: set[torch.device] = set()
        copies = self._copies(state_dict, gpus)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        if gpus:
            self._pinned = copies
        return copies

    def _copies(self, tensors: Mapping[str, Any], gpus: set[torch.device]) -> dict[str, Any]:
        """Copies of tensors and of dictionaries of tensors; adds to `gpus` where the tensors are."""
        copies: dict[str, Any] = {}
        for name, held in tensors.items():
            if isinstance(held, Mapping):
                copies[name] = self._copies(held, gpus)
            else:
                copies[name] = _copy(held)
                if held.device.type == "cuda":
                    gpus.add(held.device)
        return copies


def _copy(tensor: Tensor) -> Tensor:
    # Of its own, also for tied weights: safetensors does not allow two names for one storage.
    # From a GPU, pinned memory is many times faster; torch keeps it for the next copy.
    copy = torch.empty_like(
        tensor, device="cpu", pin_memory=tensor.device.type == "cuda", memory_format=torch.contiguous_format
    )
    return copy.copy_(tensor, non_blocking=True)


def _grouped(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors in a dictionary for each first part of their names: torch joins the names again.

    torch logs every entry of the outer dictionary, which takes as long as to copy a small tensor.
    """
    groups: dict[str, Any] = {}
    for name, tensor in tensors.items():
        first, dot, rest = name.partition(".")
        if dot and first not in tensors:
            groups.setdefault(first, {})[rest] = tensor
        else:
            groups[name] = tensor
    return groups


class _Writer(HuggingFaceStorageWriter):
    """Writes the shard of this rank; on rank 0 it also completes the folder. All of it in the background.

    torch calls `write_data` on every rank, and then `finish` on rank 0, unless a rank has failed.
    """

    def __init__(self, path: Path, partial: Path, facts: Mapping[str, Any], keep: int) -> None:
        super().__init__(str(partial), save_distributed=True)
        self.per_thread_copy_ahead = 0  # the copies are on the CPU: the thread needs no CUDA stream
        self._path, self._partial, self._facts, self._keep = path, partial, facts, keep

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for path in numbered(self._path, self._keep):
                for entry in left_over(path):
                    if entry != self._partial:
                        _remove(entry)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        for name in names:
            to_disk(self._partial / name)  # torch does so before it has written the end of a small file
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [replace(results[0], storage_data={name: Shard.of(self._partial / name) for name in names})]
            if results
            else []
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        shards = {}
        for result in (result for of_rank in results for result in of_rank):
            shards.update(result.storage_data)
        with (self._partial / FACTS).open("w", encoding="utf-8") as file:
            file.write(contents(self._facts, shards))
            file.flush()
            os.fsync(file.fileno())
        to_disk(self._partial)
        make_room(self._path, self._keep, for_folder=True)
        os.replace(self._partial, self._path)
        to_disk(self._path.parent)
        remove_oldest(self._path, self._keep)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
