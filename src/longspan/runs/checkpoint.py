"""A checkpoint: named tensors and facts (JSON values), in one safetensors file or in a folder of shards.

One process writes a file: its header has the facts and a checksum over everything, so a damaged file is
detected before it is used. Several processes write a folder, see `sharded_checkpoint` and `shards`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.errors import UserError, is_out_of_memory
from longspan.files import whole_file
from longspan.runs import shards
from longspan.runs.kept import SUFFIX, make_room, newest, previous, remove_oldest
from longspan.runs.old_names import current_facts, current_tensor_name
from longspan.runs.shards import Damage, Place, full_tensor_on_cpu

__all__ = ["SUFFIX", "Checkpoint", "Damaged", "check", "exists", "is_folder", "load", "previous", "save"]

_TRIES = 3  # to read a checkpoint that a training replaces at the same time


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: tensors, and JSON values."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def below(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix` and a dot, under the rest of their names."""
        start = f"{prefix}."
        return {name[len(start) :]: t for name, t in self.tensors.items() if name.startswith(start)}


class Damaged(UserError):
    """A checkpoint that cannot be read."""


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], keep: int = 1) -> None:
    """Write a checkpoint as a file. An existing one is replaced only when the new one is complete.

    Of the checkpoints that were written to `path`, the newest `keep` stay, see `previous`.
    """
    # Copies: safetensors does not allow two names for one storage, and tied weights have two.
    whole = {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    said = json.dumps(facts, sort_keys=True)
    with whole_file(path) as partial:
        try:
            save_file(whole, partial, metadata={"facts": said, "checksum": _checksum(whole, said)})
        except SafetensorError as problem:  # wraps errors of the system, such as a full disk
            raise UserError(f"could not write the checkpoint {path}: {problem}") from None
        make_room(path, keep, for_folder=False)
    remove_oldest(path, keep)


def exists(path: Path) -> bool:
    """Whether there is a checkpoint that `load(path)` would read."""
    return newest(path).exists()


def is_folder(path: Path) -> bool:
    """Whether several processes wrote the checkpoint at `path`."""
    return path.is_dir() and (path / shards.FACTS).is_file()


def load(path: Path, place: Place = full_tensor_on_cpu) -> Checkpoint:
    """Read a checkpoint, a file or a folder, and verify its checksums.

    `place` returns the tensor to read into, by name, shape and dtype: a plain tensor for all of it, a DTensor
    for the part of this process, None to leave it out. No process waits for another.
    """
    return _settled(path, lambda found: _read(found, place))


def check(path: Path) -> Checkpoint:
    """Verify all of a checkpoint. Its tensors are returned without values, on the device `meta`."""
    return _settled(path, _verify)


def _settled(path: Path, read: Callable[[Path], Checkpoint]) -> Checkpoint:
    """What `read` returns for the newest checkpoint. It reads again if a training replaces the checkpoint."""
    for _ in range(_TRIES):
        before = _seen(path)
        found = newest(path)
        try:
            if not found.is_dir():
                if not found.is_file():  # a named pipe would never end
                    raise FileNotFoundError
                found.open("rb").close()  # without permission to read, the system's error is raised here
            return read(found)
        except (Damage, FileNotFoundError) as problem:
            if _seen(path) != before:
                continue
            if isinstance(problem, Damage):
                raise Damaged(f"the checkpoint {found} is {problem}{_other_checkpoint(found)}") from None
            break
    raise UserError(f"there is no checkpoint {path}")


def _seen(path: Path) -> list[tuple[str, int, int]]:
    """What changes if a checkpoint is written to `path`."""
    status = ((found.name, found.lstat()) for found in (path, *previous(path)) if os.path.lexists(found))
    return [(name, held.st_ino, held.st_mtime_ns) for name, held in status]


def _read(path: Path, place: Place) -> Checkpoint:
    files: Mapping[Path, shards.Shard | None]
    if path.is_dir():
        facts, files = shards.read_facts(path)
    else:
        whole = _read_file(path)
        if place is full_tensor_on_cpu:
            return whole
        facts, files = whole.facts, {path: None}
    from longspan.runs.shard_reader import read_tensors  # takes a second to import

    def renamed(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        return place(current_tensor_name(name), shape, dtype)

    return _current(read_tensors(files, renamed), facts)


def _verify(path: Path) -> Checkpoint:
    held = {}

    def note(name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        held[name] = torch.empty(shape, dtype=dtype, device="meta")

    if path.is_dir():
        shards.verify(shards.read_facts(path)[1])
    return Checkpoint(held, _read(path, note).facts)


def _read_file(path: Path) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, RuntimeError) as problem:
        if is_out_of_memory(problem):
            raise
        raise Damage("truncated or damaged") from None
    if not {"facts", "checksum"} <= metadata.keys():
        raise Damage("not a checkpoint of longspan")
    if metadata["checksum"] != _checksum(tensors, metadata["facts"]):
        raise Damage("damaged")
    try:
        return _current(tensors, json.loads(metadata["facts"]))
    except ValueError:  # the checksum is right: written by hand
        raise Damage("not a checkpoint of longspan") from None


def _current(tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> Checkpoint:
    """A checkpoint with the names of this version."""
    named = {current_tensor_name(name): tensor for name, tensor in tensors.items()}
    try:
        return Checkpoint(named, current_facts(facts))
    except (ValueError, TypeError, AttributeError, KeyError):  # the checksum is right: written by hand
        raise Damage("not a checkpoint of longspan") from None


def _checksum(tensors: Mapping[str, Tensor], said: str) -> str:
    crc = zlib.crc32(said.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def _other_checkpoint(path: Path) -> str:
    """A hint to use another checkpoint of the run, if there is one that is not damaged."""
    others = [other for other in path.parent.glob(f"*{SUFFIX}") if other != path]
    others.sort(key=lambda other: (len(other.stem), other.stem))  # best and last before last-1
    for other in others:
        try:
            _verify(other)
        except Damage:
            continue
        if path.is_dir() or other.is_dir():
            return f"; replace it by {other.name} to continue from there"
        return f"; copy {other.name} over it to continue from there"
    return f", and so is {others[0].name}: start a new run" if others else ""
