"""What every test gets: one thread (the suite runs in parallel), and a cache folder of its own.

Without a GPU Triton's interpreter runs the kernels. Triton reads the variable that asks for it when it is
first imported, by whichever test comes first, so it is set for all; on the CPU nothing else runs Triton code.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path / "longspan-home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
