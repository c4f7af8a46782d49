"""The number of threads follows the cores that this process may use, and waiting threads sleep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longspan import cores
from longspan.cores import cpu_quotas, settle_threads, usable_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def quotas(tmp_path: Path, own: str, files: dict[str, str]) -> list[float]:
    write(tmp_path / "own", own)
    for name, text in files.items():
        write(tmp_path / "cgroup" / name, text)
    return sorted(cpu_quotas(tmp_path / "cgroup", tmp_path / "own"))


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, [1.5]),
        ("0::/\n", {"cpu.max": "max 100000\n"}, []),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, [3.0]),
        ("0::/outside/of/the/container\n", {"cpu.max": "200000 100000\n"}, [2.0]),
        (
            "4:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            [0.5],
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, []),
        ("1:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "1\n", "cpuset/cpu.cfs_period_us": "1\n"}, []),
        ("0::/\n", {"cpu.max": "damaged"}, []),
        ("0::/\n", {}, []),
    ],
)
def test_quotas(tmp_path: Path, own: str, files: dict[str, str], expected: list[float]) -> None:
    assert quotas(tmp_path, own, files) == expected


def test_without_control_groups(tmp_path: Path) -> None:
    assert list(cpu_quotas(tmp_path, tmp_path / "missing")) == []


@pytest.mark.parametrize(
    ("quota", "expected"), [([], 8), ([2.5], 3), ([2.5, 1.0], 1), ([0.5], 1), ([100.0], 8)]
)
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, quota: list[float], expected: int) -> None:
    monkeypatch.setattr(cores, "cpu_quotas", lambda: iter(quota))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert usable_cores() == expected
    environment: dict[str, str] = {}
    settle_threads(environment)
    assert environment.get("OMP_NUM_THREADS") == (None if expected == 8 else str(expected))


def test_the_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cpu_quotas", lambda: iter([1.0]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    own = {"OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "7", "OMP_NUM_THREADS": "3"}
    environment = dict(own)
    settle_threads(environment)
    assert environment == own


PROGRAM = """
import json, sys, time
from longspan.cli import main
assert "torch" not in sys.modules
try:
    main(["--version"])
except SystemExit:
    pass
import torch
torch.set_num_threads(2)
x = torch.ones(1 << 20)
for _ in range(10):
    x.add_(1)  # starts the threads
total, own = time.process_time(), time.thread_time()
for _ in range(100):
    x.add_(1)  # in two threads; then the other one waits
    until = time.thread_time() + 0.002
    while time.thread_time() < until:
        pass
own = time.thread_time() - own
print(json.dumps([own, time.process_time() - total - own]))
"""


def cpu_seconds(**environment: str) -> list[float]:
    """Of the main thread, and of the others."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=kept | environment, capture_output=True, text=True, check=True
    )
    found: Any = json.loads(done.stdout.splitlines()[-1])
    return list(found)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenMP itself spins less on one core")
def test_waiting_threads_sleep() -> None:
    main_thread, others = cpu_seconds()
    assert others < 0.3 * main_thread
    main_thread, others = cpu_seconds(OMP_WAIT_POLICY="ACTIVE")
    assert others > 0.5 * main_thread  # so the measurement can tell
