"""`examples/train_from_python.py` runs, and says what it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_from_python.py"


@pytest.mark.slow
def test_train_from_python(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"train loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 0.5  # it learns
    assert len(re.findall(r"(\d\.\d+) bits per byte on the", done.stdout)) == 2
    assert len(re.findall(r"after 20,000 tokens, seed \d: ['\"].+['\"]", done.stdout)) == 2
    assert "layer 1: spans of " in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "best.safetensors").is_file()
