"""The cores that this process may use, and threads that leave them to others while they wait."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """How many cores this process may use: those of its affinity, but no more than its CPU quota pays for."""
    return max(1, min([_allowed_cores(), *(math.ceil(quota) for quota in cpu_quotas())]))


def settle_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Settings for OpenMP, unless the user has made them. They count only before torch is imported.

    By default OpenMP's threads spin for some milliseconds when they wait for each other. Beside other work
    that takes cores from the threads that are waited for. With a passive policy they sleep.
    """
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # libgomp, which torch is built with
    environment.setdefault("KMP_BLOCKTIME", "0")  # libiomp, in other builds
    if usable_cores() < _allowed_cores():  # OpenMP knows the affinity but not the quota
        environment.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def cpu_quotas(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> Iterator[float]:
    """The CPU quotas of this process and of the groups above it, in cores."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:  # version 2
                yield from _quotas(root, group, _version_2)
            elif "cpu" in controllers.split(","):
                yield from _quotas(root / controllers, group, _version_1)
                if controllers != "cpu":
                    yield from _quotas(root / "cpu", group, _version_1)


def _quotas(mount: Path, group: str, read: Callable[[Path], float | None]) -> Iterator[float]:
    """In a container the path of the group may not exist: then its own group is the root."""
    path = Path(group.lstrip("/"))
    for place in {mount / path, *(mount / parent for parent in path.parents), mount}:
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota = read(place)
            if quota is not None and quota > 0:
                yield quota


def _version_2(group: Path) -> float | None:
    quota, period = (group / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _version_1(group: Path) -> float | None:
    quota = int((group / "cpu.cfs_quota_us").read_text())
    return quota / int((group / "cpu.cfs_period_us").read_text())  # negative: no limit


def _allowed_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
