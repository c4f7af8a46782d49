"""Files of `torch.save`, whole modules included, read without running anything from them.

torch has two formats: a zip archive with a pickle and one entry per storage, and the older one, which is five
pickles and then the storages. Sizes that a file claims are checked against the size of the file.
"""

from __future__ import annotations

import io
import math
import mmap
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.interop.pickles import Global, Machine, StandIn, hashable

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
MOST_DIMENSIONS = 64
DTYPES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "Untyped": torch.uint8,
}


@dataclass(frozen=True)
class Contents:
    """What a file holds: plain values, tensors and stand-ins. `calls` are names that it would have called."""

    value: Any
    calls: frozenset[str]


def read_torch_file(path: Path) -> Contents:
    """The contents of a file; a `UserError` says why it is refused."""
    size = path.stat().st_size
    if not size:
        raise UserError("it is empty")
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":
            return _read_zip(path, size)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _read_legacy(mapped, size)


def _read_zip(path: Path, size: int) -> Contents:
    left = size  # entries may overlap: together they are at most as large as the file

    def entry(name: str) -> bytearray:
        nonlocal left
        info = archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > left:
            raise UserError(f"its entry {name} is compressed, or larger than the file")
        left -= info.file_size
        return bytearray(archive.read(info))  # an entry that is cut off is an error of zipfile

    def storage(key: str, dtype: torch.dtype, count: int) -> Tensor:
        return _flat(entry(f"{folder}/data/{key}"), dtype, count)

    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            folder = next((name[:-9] for name in names if name.endswith("/data.pkl")), None)
            if folder is None:
                raise UserError("it is an archive without data.pkl, which is no torch checkpoint")
            if f"{folder}/byteorder" in names and entry(f"{folder}/byteorder") != b"little":
                raise UserError("it was written on a big-endian machine: save it again on another")
            machine = _machine(_each_once(storage), size)
            return Contents(machine.read(io.BytesIO(entry(f"{folder}/data.pkl"))), frozenset(machine.calls))
    except (
        zipfile.BadZipFile,
        LookupError,
        EOFError,
        OSError,
        ValueError,
        NotImplementedError,
        RuntimeError,
    ):
        raise UserError("it is a damaged or incomplete archive") from None


def _read_legacy(mapped: mmap.mmap, size: int) -> Contents:
    plain = _machine(None, size)
    first = plain.read(mapped)
    if first != MAGIC or type(first) is not int:  # a pickle, but not of torch: it has no tensors
        return Contents(first, frozenset(plain.calls))
    version, about = plain.read(mapped), plain.read(mapped)
    if version != PROTOCOL or type(about) is not dict or about.get("little_endian") is not True:
        raise UserError("it has an unknown version of torch's format, or was written on a big-endian machine")
    # The pickle says the types of the storages, which follow it. So it is read twice.
    start, wanted = mapped.tell(), dict[str, torch.dtype]()

    def note(key: str, dtype: torch.dtype, count: int) -> Any:
        if wanted.setdefault(key, dtype) != dtype:
            raise UserError(f"its storage {key} has two types")
        return StandIn("storage", ())

    _machine(note, size).read(mapped)
    keys = plain.read(mapped)
    if type(keys) is not list or not all(type(key) is str and key in wanted for key in keys):
        raise UserError("its list of storages does not fit its tensors")
    places, at = dict[str, tuple[int, int]](), mapped.tell()
    for key in keys:
        count = int.from_bytes(mapped[at : at + 8], "little")
        begin, at = at + 8, at + 8 + count * wanted[key].itemsize
        if at > size:
            raise UserError(f"its storage {key} is cut off")
        places[key] = begin, at

    def storage(key: str, dtype: torch.dtype, count: int) -> Tensor:
        if key not in places:
            raise UserError(f"its storage {key} is missing")
        begin, end = places[key]
        with memoryview(mapped) as view:
            return _flat(bytearray(view[begin:end]), dtype, count)

    mapped.seek(start)
    machine = _machine(_each_once(storage), size)
    return Contents(machine.read(mapped), frozenset(machine.calls))


_Storage = Callable[[str, torch.dtype, int], Any]


def _each_once(read: _Storage) -> _Storage:
    found: dict[str, Tensor] = {}

    def storage(key: str, dtype: torch.dtype, count: int) -> Tensor:
        if key not in found:
            found[key] = read(key, dtype, count)
        if found[key].dtype != dtype or len(found[key]) != count:
            raise UserError(f"its storage {key} has two types or sizes")
        return found[key]

    return storage


def _flat(content: bytearray, dtype: torch.dtype, count: int) -> Tensor:
    if len(content) != count * dtype.itemsize:
        raise UserError(f"a storage of {count} numbers has {len(content)} bytes")
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _machine(storage: _Storage | None, size: int) -> Machine:
    def persistent(identity: Any) -> Any:
        if type(identity) is tuple and identity[:1] == ("module",) and len(identity) > 1:
            return identity[1]  # a class of modules; its source code follows
        if storage is None or type(identity) is not tuple or identity[:1] != ("storage",):
            raise UserError("it refers to something outside of the file")
        _, kind, key, _, count, *view = identity
        if type(key) is not str or type(count) is not int or not 0 <= count <= size:
            raise UserError("it has a storage with an impossible key or size")
        found = storage(key, _dtype(kind), count)
        return _part(found, view[0]) if view and view[0] is not None else found

    def tensor(storage: Any, offset: Any, shape: Any, strides: Any, *more: Any) -> Any:
        return storage if type(storage) is StandIn else _strided(storage, offset, shape, strides, size)

    def typed(rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
        return machine.call(rebuild, arguments)

    def dictionary(items: Any = ()) -> dict[Any, Any]:
        copied = machine.copied(items)
        return {hashable(key): value for key, value in (copied.items() if type(copied) is dict else copied)}

    known: Mapping[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor": tensor,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_parameter": lambda data, *more: data,
        "torch._utils._rebuild_parameter_with_state": lambda data, *more: data,
        "torch._tensor._rebuild_from_type_v2": typed,
        "torch.Size": lambda sizes=(): tuple(machine.copied(sizes)),
        "collections.OrderedDict": dictionary,
        "collections.Counter": dictionary,
        "collections.defaultdict": lambda factory=None, items=(): dictionary(items),
        "builtins.dict": dictionary,
        "builtins.list": lambda members=(): list(machine.copied(members)),
        "builtins.set": lambda members=(): set(map(hashable, machine.copied(members))),
        "builtins.frozenset": lambda members=(): frozenset(map(hashable, machine.copied(members))),
        "copyreg._reconstructor": lambda kind, base, state: StandIn(kind.name, ()),
    }
    machine = Machine(known, persistent, size)
    return machine


def _dtype(kind: Any) -> torch.dtype:
    name = kind.name if type(kind) is Global else ""
    short = name.rpartition(".")[2].removesuffix("Storage")
    if not name.startswith("torch.") or short not in DTYPES:
        raise UserError(f"the type of storage {name!r} is not known")
    return DTYPES[short]


def _part(storage: Any, view: Any) -> Any:
    """Older versions of torch save a storage that is a part of another one."""
    if type(storage) is StandIn:
        return storage
    _, offset, count = view
    return _strided(storage, offset, (count,), (1,), len(storage))


def _strided(storage: Any, offset: Any, sizes: Any, steps: Any, limit: int) -> Tensor:
    """A view of a storage; it must lie inside it."""
    if not isinstance(storage, Tensor):
        raise UserError("it has a tensor without a storage")
    if type(sizes) is not tuple or type(steps) is not tuple:
        raise UserError("it has a tensor without a shape")
    if len(sizes) != len(steps) or len(sizes) > MOST_DIMENSIONS:
        raise UserError("it has a tensor whose shape does not fit its strides")
    numbers = (offset, *sizes, *steps)
    if not all(type(number) is int and 0 <= number <= limit for number in numbers):
        raise UserError("it has a tensor with an impossible shape")
    last = offset + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    count = math.prod(sizes)
    if count > limit or (offset > len(storage) if count == 0 else last >= len(storage)):
        raise UserError("it has a tensor that is larger than its storage")
    return storage.as_strided(sizes, steps, offset) if count else storage.new_empty(sizes)
