"""A checkpoint that several processes wrote: a folder with a safetensors file (a shard) of each.

`facts.json` holds the facts, and size and checksum of every shard; it has a checksum itself. So a shard that
is damaged, missing or from elsewhere is detected before it is used. Nothing is pickled.
"""

from __future__ import annotations

import json
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.data.checksums import crc32

FACTS = "facts.json"

Place = Callable[[str, torch.Size, torch.dtype], Tensor | None]


def full_tensor_on_cpu(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """All of a tensor, in the memory of this process."""
    return torch.empty(shape, dtype=dtype)


class Shard(NamedTuple):
    """What `facts.json` says about a file."""

    size: int
    checksum: str

    @staticmethod
    def of(file: Path) -> Shard:
        return Shard(file.stat().st_size, f"{crc32(file):08x}")


class Damage(Exception):
    """Why a checkpoint cannot be read."""


def contents(facts: Mapping[str, Any], shards: Mapping[str, Shard]) -> str:
    """The text of `facts.json`."""
    held = {"facts": facts, "shards": {name: shard._asdict() for name, shard in shards.items()}}
    return json.dumps({**held, "checksum": _checksum(held)}) + "\n"


def read_facts(folder: Path) -> tuple[dict[str, Any], dict[Path, Shard]]:
    """The facts of a checkpoint, and its shards, which are all there in their right sizes."""
    if folder.is_symlink():
        raise Damage("a link, and links are not followed")
    entries = {entry.name: entry for entry in folder.iterdir()}
    for entry in entries.values():
        if not stat.S_ISREG(entry.lstat().st_mode):
            raise Damage(f"damaged: {entry.name} in it is not a regular file")
    if FACTS not in entries:
        raise Damage(f"damaged: it has no {FACTS}")
    try:
        held = json.loads(entries[FACTS].read_bytes())
        said = held.pop("checksum")
        facts, shards = dict(held["facts"]), {name: Shard(**shard) for name, shard in held["shards"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damage(f"damaged: {FACTS} in it is not readable") from None
    if said != _checksum(held):
        raise Damage(f"damaged: {FACTS} in it has changed")
    for name, shard in shards.items():
        if name not in entries:
            raise Damage(f"damaged: {name} is missing")
        if entries[name].stat().st_size != shard.size:
            raise Damage(f"damaged: {name} in it does not have its size, {shard.size} bytes")
        entries[name].open("rb").close()  # without permission to read, the system's error is raised here
    if extra := sorted(entries.keys() - shards.keys() - {FACTS}):
        raise Damage(f"damaged: {extra[0]} does not belong in it")
    return facts, {entries[name]: shard for name, shard in shards.items()}


def verify(shards: Mapping[Path, Shard]) -> None:
    """Raise `Damage` if the content of a shard is not what was written."""
    for file, shard in shards.items():
        if shard != Shard.of(file):
            raise Damage(f"damaged: {file.name} in it has changed")


def _checksum(held: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(held, sort_keys=True).encode()):08x}"
