"""A checkpoint: one safetensors file with named tensors and facts (JSON values).

The header has the facts and a checksum over everything, so a damaged file is detected before it is used.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longspan.errors import UserError, is_out_of_memory
from longspan.files import whole_file
from longspan.runs.old_names import current_facts, current_tensor_name

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a file: tensors on the CPU, and JSON values."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def below(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix` and a dot, under the rest of their names."""
        start = f"{prefix}."
        return {name[len(start) :]: t for name, t in self.tensors.items() if name.startswith(start)}


class Damaged(UserError):
    """A checkpoint that cannot be read."""


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], keep: int = 1) -> None:
    """Write a checkpoint. An existing file is replaced only when the new one is complete.

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
        _keep_previous(path, keep)


def previous(path: Path) -> list[Path]:
    """The checkpoints that were at `path` before and are kept, newest first: `last-1`, `last-2` ..."""
    pattern = re.compile(rf"{re.escape(path.stem)}-(\d+){re.escape(SUFFIX)}")
    found = ((pattern.fullmatch(entry.name), entry) for entry in path.parent.glob(f"{path.stem}-*{SUFFIX}"))
    return [entry for _, entry in sorted((int(match[1]), entry) for match, entry in found if match)]


def _keep_previous(path: Path, keep: int) -> None:
    """Give the file at `path` and those before it their next numbers; the oldest is replaced."""
    numbered = [path, *(path.with_name(f"{path.stem}-{number}{SUFFIX}") for number in range(1, keep))]
    for newer, older in reversed([*itertools.pairwise(numbered)]):
        if newer != path and newer.exists():
            os.replace(newer, older)
        elif newer.exists():  # a second name, so that there is a checkpoint at `path` at any time
            older.unlink(missing_ok=True)
            try:
                os.link(newer, older)
            except OSError:  # some file systems have no hard links
                os.replace(newer, older)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and verify its checksum."""
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}")
    path.open("rb").close()  # without permission to read, the system's error is raised here
    try:
        return _read(path)
    except _Damage as damage:
        raise Damaged(f"the checkpoint {path} is {damage}{_other_checkpoint(path)}") from None


class _Damage(Exception):
    """Why a file cannot be read."""


def _read(path: Path) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, RuntimeError) as problem:
        if is_out_of_memory(problem):
            raise
        raise _Damage("truncated or damaged") from None
    if not {"facts", "checksum"} <= metadata.keys():
        raise _Damage("not a checkpoint of longspan")
    if metadata["checksum"] != _checksum(tensors, metadata["facts"]):
        raise _Damage("damaged")
    named = {current_tensor_name(name): tensor for name, tensor in tensors.items()}
    try:
        facts = current_facts(json.loads(metadata["facts"]))
    except (ValueError, TypeError, AttributeError, KeyError):  # the checksum is right: written by hand
        raise _Damage("not a checkpoint of longspan") from None
    return Checkpoint(named, facts)


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
            _read(other)
        except _Damage:
            continue
        return f"; copy {other.name} over it to continue from there"
    return f", and so is {others[0].name}: start a new run" if others else ""
