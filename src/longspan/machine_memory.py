"""The memory of this machine, how much of it this process may still use, and a bound on what oneDNN keeps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def physical_memory() -> int | None:
    """The memory of this machine in bytes; None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def free_memory(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int | None:
    """Bytes that this process may still allocate on the host; None if the system does not say.

    It is the least of three: the memory that is available, what the control groups of this process (such as
    the limit of a container) leave, and what `ulimit -v` leaves.
    """
    found = [*_available(proc), *_left_by_cgroups(cgroups, proc / "self/cgroup"), *_left_by_ulimit(proc)]
    return max(0, min(found)) if found else None


def bound_code_of_products(environment: MutableMapping[str, str] = os.environ) -> None:
    """Settings for oneDNN, unless the user has made them. They count until its first product.

    It keeps code for every number of rows that it meets, half a megabyte each, by default for 1,024 of them.
    Training a model of eight layers uses about 110 at a time.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        environment.setdefault(name, "256")


def _available(proc: Path) -> Iterator[int]:
    yield from _kilobytes(proc / "meminfo", "MemAvailable")


def _left_by_ulimit(proc: Path) -> Iterator[int]:
    with suppress(ImportError):  # Windows
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield from (limit - used for used in _kilobytes(proc / "self/status", "VmSize"))


def _kilobytes(path: Path, field: str) -> Iterator[int]:
    """The bytes of a field such as `MemAvailable:   1234 kB`."""
    with suppress(OSError):
        for number in re.findall(rf"^{field}:\s+(\d+) kB$", path.read_text(), re.MULTILINE):
            yield 1024 * int(number)


def _left_by_cgroups(root: Path, own: Path) -> Iterator[int]:
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:  # version 2
                yield from _left_in(root, group, ("memory.max", "memory.current", "inactive_file"))
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _left_in(root / "memory", group, names)


def _left_in(mount: Path, group: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Of a group and those above it. In a container its path may not exist: then its own group is the root.

    Pages of files that were not used lately count as free: the system drops them first.
    """
    limit_name, used_name, cached_name = names
    path = Path(group.lstrip("/"))
    for place in {mount / path, *(mount / parent for parent in path.parents), mount}:
        with suppress(OSError, ValueError):  # no limit is the word "max"
            limit, used = (int((place / name).read_text()) for name in (limit_name, used_name))
            cached = re.search(rf"^{cached_name} (\d+)$", (place / "memory.stat").read_text(), re.MULTILINE)
            yield limit - used + (int(cached[1]) if cached else 0)
