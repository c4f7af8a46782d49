"""How much memory a process may use: what the machine has, less what control groups and ulimit withhold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from longspan.machine_memory import free_memory, physical_memory


def memory(tmp_path: Path, files: dict[str, str]) -> int | None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return free_memory(tmp_path / "cgroup", tmp_path / "proc")


MACHINE = {"proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:    8000 kB\n"}
V1 = "cgroup/memory/job"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8000 * 1024),
        ({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "max\n"}, 8000 * 1024),
        (
            {
                "proc/self/cgroup": "0::/job/task\n",
                "cgroup/job/memory.max": "700000\n",
                "cgroup/job/memory.current": "500000\n",
                "cgroup/job/memory.stat": "anon 1\ninactive_file 30000\n",
            },
            230000,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/job\n",
                f"{V1}/memory.limit_in_bytes": "900000\n",
                f"{V1}/memory.usage_in_bytes": "999999\n",
                f"{V1}/memory.stat": "total_inactive_file 0\n",
            },
            0,
        ),
    ],
)
def test_the_least_of_machine_and_control_groups(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert memory(tmp_path, MACHINE | files) == expected


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert memory(tmp_path, {}) is None


def test_ulimit_counts() -> None:
    pytest.importorskip("resource")
    if physical_memory() is None or free_memory() is None:
        pytest.skip("this system does not say how much memory it has")
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29));"
        "from longspan.machine_memory import free_memory; print(free_memory())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 2**29
