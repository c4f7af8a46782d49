"""examples/quickstart.ipynb: valid, without outputs, and run from the first cell to the last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
PARAMETERS = """
steps = 4
options = {
    "model__num_layers": 1, "model__width": 16, "model__num_heads": 2, "model__inner_width": 16,
    "model__ngrams": [], "model__span__limit": 32, "training__batch_size": 2, "training__log_every": 2,
    "stage__0__warmup_steps": 2,
    "data": "text.txt", "evaluation__max_tokens": 200, "evaluation__max_tokens_final": 200,
}
"""


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_valid_and_saved_without_outputs() -> None:
    book = read()
    nbformat.validate(book)
    for cell in book.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    first = next(cell for cell in book.cells if cell.cell_type == "code")
    assert re.search(r"except ImportError:\n +%pip install .*longspan", first.source)
    assert sum("parameters" in cell.metadata.get("tags", ()) for cell in book.cells) == 1


def shown(book: Any, source: str, kind: str) -> str:
    """The output of this kind of the one cell that contains `source`."""
    (cell,) = (cell for cell in book.cells if cell.cell_type == "code" and source in cell.source)
    found = [output["data"][kind] for output in cell.outputs if kind in output.get("data", {})]
    assert found, f"{source} shows no {kind}: {cell.outputs}"
    return str(found[0])


@pytest.mark.timeout(600)
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = read()
    (place,) = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ()))
    place.source = PARAMETERS
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\n" * 300)
    monkeypatch.setenv("CXX", "no-such-compiler")  # compiling would take longer than the training
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    errors = [
        output for cell in book.cells for output in cell.get("outputs", ()) if output.output_type == "error"
    ]
    assert errors == []

    bits = float(shown(book, 'run.final["test"]', "text/plain"))
    assert 1.0 < bits < 9.0
    assert f"{bits:.4f}" in shown(book, "longspan.train(", "text/html")
    for figure in ("tokens_per_second", "mean span"):
        assert len(shown(book, figure, "image/png")) > 2000
    assert "Spans in tokens (limit 32)" in shown(book, "lm.spans()", "text/html")
    letters = shown(book, "lm.score(text)", "text/html")
    assert letters.count("<span title=") > 100
    assert len(eval(shown(book, "mean_distance_LH", "text/plain"))[0]) == 2
    (cell,) = (cell for cell in book.cells if "lm.generate(" in cell.source)
    assert len(cell.outputs[0].text) >= 100
    assert (tmp_path / "runs" / "quickstart" / "config.toml").is_file()
