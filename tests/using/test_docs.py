"""Every block of Python in docs/python.md and docs/nn.md runs, in the order a reader would run them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import longspan
import longspan.nn
import longspan.optim
from longspan.testing import RULES
from tests import forks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
PARTS = (ROOT / "docs" / "nn.md").read_text(encoding="utf-8")


def output_of(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a program prints that runs in a process of its own, in this folder."""
    monkeypatch.chdir(folder)
    out, err = folder / "out.txt", folder / "err.txt"
    process = forks.start(forks.program, program, out=out, err=err)
    assert forks.finish(process, 240) == 0, err.read_text()
    return out.read_text()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    assert "90% of the weight within" in output_of(program, tmp_path, monkeypatch)
    assert (tmp_path / "runs" / "stopped" / "checkpoints" / "best.safetensors").is_file()


def test_what_the_page_names_is_there() -> None:
    for name in re.findall(r"`longspan\.(\w+)", PAGE):
        assert hasattr(longspan, name) or name in ("data",), name
    for name in re.findall(r"`lm\.(\w+)", PAGE):
        assert name in {*dir(longspan.LoadedModel), *longspan.LoadedModel.__dataclass_fields__}, name
    assert all(rule in RULES for rule in re.findall(r'check_model\(model, \["(.*?)"\]', PAGE))


def test_the_page_of_parts_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", PARTS, flags=re.DOTALL))
    output_of(program, tmp_path, monkeypatch)


def test_the_page_of_parts_has_every_part_with_its_signature() -> None:
    rows = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", PARTS, flags=re.MULTILINE))
    optimizers = ["Adagrad", "Lamb", "Muon", "NorMuon"]
    assert {*rows} == {*longspan.nn.__all__, *optimizers}
    for name, shown in rows.items():
        part = getattr(longspan.optim if name in optimizers else longspan.nn, name)
        known = inspect.signature(part).parameters
        positional, _, keywords = shown.partition("*, ")
        for arguments, only_by_name in ((positional, False), (keywords, True)):
            for argument, default in re.findall(r"(\w+)(?:=(\([^)]*\)|[^,]+))?", arguments):
                kind = known[argument].kind
                assert (kind is inspect.Parameter.KEYWORD_ONLY) == only_by_name, (name, argument)
                assert not default or repr(known[argument].default) == default, (name, argument)
