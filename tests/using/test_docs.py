"""Every block of Python in docs/python.md runs, in the order a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import longspan
from longspan.testing import RULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "stopped" / "checkpoints" / "best.safetensors").is_file()
    assert "90% of the weight within" in done.stdout


def test_what_the_page_names_is_there() -> None:
    for name in re.findall(r"`longspan\.(\w+)", PAGE):
        assert hasattr(longspan, name) or name in ("data",), name
    for name in re.findall(r"`lm\.(\w+)", PAGE):
        assert name in {*dir(longspan.LoadedModel), *longspan.LoadedModel.__dataclass_fields__}, name
    assert all(rule in RULES for rule in re.findall(r'check_model\(model, \["(.*?)"\]', PAGE))
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
