"""A Transformer-XL is measured with a longer memory than it was trained with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.training import train

from .test_recipes_run import scaled_down, short_text


def test_a_longer_memory_in_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(scaled_down("txl-wikitext-103", short_text(tmp_path)), run)
    lengths = ["--model.memory-length", "50", "--model.clamp-length", "12", "--model.same-length", "true"]
    scores = []
    for options in (
        ["--block-length", "8"],
        ["--block-length", "8", *lengths],
        ["--block-length", "5", *lengths],
    ):
        capsys.readouterr()
        assert main(["eval", str(run), "--protocol", "every-token", "--json", *options]) == 0
        scores.append(json.loads(capsys.readouterr().out)["loss"])
    trained, longer, longer_in_other_blocks = scores
    assert longer != trained
    assert longer == pytest.approx(longer_in_other_blocks, abs=2e-7)
