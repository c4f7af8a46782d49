"""Writes the checkpoints of a run: a file, or a folder of shards if there are several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from longspan import distributed
from longspan.runs import RunFolder, checkpoint

if TYPE_CHECKING:
    from longspan.runs.sharded_checkpoint import ShardedWriter


class CheckpointWriter:
    """`last`, of which the newest are kept, and `best`.

    One rank writes a file, and waits for it. Several ranks write a folder, each its own part, while training
    goes on.
    """

    def __init__(self, folder: RunFolder, sharded: bool) -> None:
        self._folder = folder
        self._shards: ShardedWriter | None = None
        if sharded or distributed.size() > 1:
            from longspan.runs.sharded_checkpoint import ShardedWriter  # takes long to import

            self._shards = ShardedWriter(folder.config.training.timeout_seconds)

    def save(
        self, which: Literal["last", "best"], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> None:
        path = self._folder.checkpoint(which)
        keep = self._folder.config.training.keep_checkpoints if which == "last" else 1
        self.wait()
        if self._shards is not None:
            self._shards.save(path, tensors, facts, keep)
        else:
            checkpoint.save(path, tensors, facts, keep)
            self._folder.note_saved()

    def wait(self) -> None:
        """Until the last checkpoint is complete."""
        if self._shards is not None and self._shards.wait() and distributed.is_first():
            self._folder.note_saved()
