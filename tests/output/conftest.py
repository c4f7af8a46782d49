from __future__ import annotations

import pytest

from longspan.output import product_time


@pytest.fixture
def quick_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_time, "_SIDES", [8, 64])
    monkeypatch.setattr(product_time, "_MEASURED_S", 1e-4)
