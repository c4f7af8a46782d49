"""Reads tensors from shards by torch.distributed.checkpoint: any number of processes, what any number wrote.

Only `checkpoint` imports this, when it is needed: torch.distributed.checkpoint takes a second to import.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from longspan.errors import is_out_of_memory
from longspan.runs.kept import SUFFIX
from longspan.runs.shards import Damage, Place, Shard, verify


def read_tensors(files: Mapping[Path, Shard | None], place: Place) -> dict[str, Tensor]:
    """Read each tensor into the one that `place` returns for it; a file with a `Shard` is verified first.

    Processes need not read the same, and do not wait for each other. A file without `Shard` may also be the
    checkpoint of one process.
    """
    reader = _Reader(files)
    try:
        tensors = _places(reader.read_metadata(), place)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointException as problem:
        raise _cause(next(iter(problem.failures.values()))[0]) from None
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError) as problem:
        raise _cause(problem) from None
    return tensors


def _places(metadata: Metadata, place: Place) -> dict[str, Tensor]:
    placed = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        parts = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if parts != math.prod(tensor.size):
            raise Damage(f"damaged: {name} is incomplete")
        if (target := place(name, tensor.size, tensor.properties.dtype)) is not None:
            placed[name] = target
    return placed


def _cause(problem: BaseException) -> BaseException:
    """What to raise for a problem with reading."""
    if isinstance(problem, Damage) or is_out_of_memory(problem):
        return problem
    return Damage("truncated or damaged")


class _Reader(HuggingFaceStorageReader):
    """Reads the named files and no others; those that are needed are verified first."""

    def __init__(self, files: Mapping[Path, Shard | None]) -> None:
        super().__init__(os.path.commonpath([file.parent for file in files]) if files else "")
        self._files = {str(file): shard for file, shard in files.items()}
        self.fs = _Listed([*self._files])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        needed = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        verify({Path(file): shard for file in needed if (shard := self._files[file]) is not None})
        return super().read_data(plan, planner)


class _Listed(FileSystem):
    """A file system that knows only the given files."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [file for file in self._files if file.endswith(SUFFIX)]
