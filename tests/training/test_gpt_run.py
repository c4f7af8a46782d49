"""The GPT with spans on somebody's text, from the command line: trained, its spans drawn, text written."""

from __future__ import annotations

from pathlib import Path

import pytest

from longspan.cli import main

SMALL = {
    "model.num-layers": "2",
    "model.width": "16",
    "model.num-heads": "2",
    "model.inner-width": "32",
    "model.context": "48",
    "model.span.limit": "48",
    "model.span.ramp": "4",
    "model.span.penalty": "0.01",
    "model.span.start": "0.5",
    "training.batch-size": "4",
    "training.block-length": "48",
    "training.device": "cpu",
    "training.log-every": "5",
    "training.evaluate-every": "0",
    "stage.0.steps": "10",
    "stage.0.learning-rate": "0.01",
    "stage.0.warmup-steps": "0",
    "evaluation.max-tokens-final": "200",
}


def test_it_learns_spans_on_any_text(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    options = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    assert main(["train", "gpt-spans", "--data", str(text), "--out", str(run), *options]) == 0
    capsys.readouterr()

    assert main(["spans", str(run)]) == 0
    first, _, _, *layers, _, _ = capsys.readouterr().out.splitlines()
    assert first == "Learned spans of run after step 10, in tokens (limit 48)"
    assert len(layers) == 2
    for layer in layers:  # all began at 24 and a ramp of 4, and the penalty made them shorter
        assert 4 <= float(layer.split()[1]) < 28
    assert (run / "spans.png").stat().st_size > 1000

    assert main(["generate", str(run), "--prompt", "the cat", "--tokens", "60"]) == 0
    assert len(capsys.readouterr().out) > 60  # beyond the context
