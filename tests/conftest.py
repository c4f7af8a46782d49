"""What every test gets: one thread (the suite runs in parallel), and a cache folder of its own.

Without a GPU Triton's interpreter runs the kernels. Triton reads the variable that asks for it when it is
first imported, by whichever test comes first, so it is set for all; on the CPU nothing else runs Triton code.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from longspan import plugins, registry
from tests.interpreter import replace_once_per_launch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    replace_once_per_launch()
    # They would keep every seed, with the stack of its caller, until a GPU is used: 1 ms each.
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None

gc.disable()  # until all tests are imported: almost nothing of that can be collected


def pytest_collection_finish() -> None:
    gc.freeze()  # so later collections need not visit the modules
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that are not made until something is written; most tests write nothing."""
    place = tmp_path_factory.mktemp("homes")
    return (place / str(number) for number in count())


@pytest.fixture(autouse=True)
def _own_home(_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_HOME", str(next(_homes)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP has its usual effect, also if the tests run under nohup, where training ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def own_registry() -> Iterator[None]:
    """What a test registers, and the modules it imports for that, are forgotten after it."""
    tables = (registry.ARCHITECTURES, registry.BLOCKS, registry.TOKENIZERS, registry.CORPORA)
    entries, modules = [dict(table.known()) for table in tables], set(sys.modules)
    folders, loaded = set(plugins._run_folders), registry._entry_points_loaded
    yield
    for table, before in zip(tables, entries, strict=True):
        added = [entry for name, entry in table._entries.items() if name not in before]
        for entry in added:
            if (module := getattr(entry.made_by, "__module__", None)) not in modules:
                sys.modules.pop(module, None)
        table._entries = before
    plugins._run_folders, registry._entry_points_loaded = folders, loaded
