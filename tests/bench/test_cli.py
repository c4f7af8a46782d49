"""`longspan bench` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longspan.bench import machine, measure
from longspan.cli import main
from longspan.kernels.dispatch import forced_path
from longspan.layers import attention

TINY = ["--model.num-layers", "2", "--model.width", "16", "--model.inner-width", "32", "--steps", "2"]
TINY += ["--batch-size", "1", "--block-length", "8", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _stand_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(machine._SIDE, "cpu", 32)
    monkeypatch.setattr(measure, "DECODED", 4)


def test_a_table_and_all_figures(tmp_path, capsys):
    words = ["bench", "quickstart", *TINY, "--spans", "profile", "--decode", "--json", "out/figures.json"]
    assert main(words) == 0
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines() if line.strip().startswith("quickstart ")]
    assert [row[row.index("profile") + 1] for row in rows] == ["reference", "fast"]
    assert "times as fast as the reference path" in shown.out
    assert "quickstart: decodes" in shown.out
    assert "comparing the paths" in shown.err
    report = json.loads((tmp_path / "out/figures.json").read_text())
    assert report["environment"]["device"] == "cpu"
    (figures,) = report["figures"]
    assert (figures["recipe"], figures["batch_size"], figures["block_length"]) == ("quickstart", 1, 8)
    assert figures["agreement"]["error"] <= figures["agreement"]["allowed"]
    assert [len(steps["seconds"]) for steps in figures["steps"]] == [2, 2]
    assert len(figures["decoding"]["seconds"]) == 4
    assert figures["mean_window"] > 48


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["quickstart"], "spans start"),
        (["quickstart", "--model.span.kind", "fixed"], "spans fixed"),
        (["sha-rnn", "--model.memory-length", "16"], "no spans"),
    ],
)
def test_a_model_without_spans_says_so(words, shown, capsys):
    assert main(["bench", *words, *TINY]) == 0
    assert f", {shown} " in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_are_recorded(capsys):
    assert main(["bench", *TINY[:-1], "cuda", "--training.precision", "bf16", "--decode"]) == 0
    shown = capsys.readouterr().out
    assert "times as fast as the reference path" in shown
    assert "quickstart: decodes" in shown


def test_a_broken_path_gets_no_speed(tmp_path, monkeypatch, capsys):
    whole = attention.span_attention
    monkeypatch.setattr(
        attention, "span_attention", lambda *args: whole(*args) if forced_path() == "eager" else -whole(*args)
    )
    assert main(["bench", *TINY, "--json", "figures.json"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "longspan: quickstart: the fast path disagrees" in shown.err
    assert not (tmp_path / "figures.json").exists()


def test_on_a_cpu_steps_are_small(monkeypatch):
    seen = []
    monkeypatch.setattr(measure.Bench, "__init__", lambda _, config, *__, **___: seen.append(config.training))
    monkeypatch.setattr(measure.Bench, "check", lambda _: None)
    monkeypatch.setattr("longspan.cli.bench._show", lambda _: None)
    monkeypatch.setattr(measure.Bench, "measure", lambda *_, **__: None)
    assert main(["bench", "enwik8", "enwik8-large", "--device", "cpu", "--training.block-length", "32"]) == 0
    assert [(training.batch_size, training.block_length) for training in seen] == [(2, 32), (2, 32)]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["quickstar"], "unknown recipe 'quickstar'"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--spans", "long"], "invalid choice: 'long'"),
        (["--json", "there.json"], "there.json exists already"),
        (["--device", "abacus"], "there is no device 'abacus'"),
        (["--device", "cpu", "--batch-size", "many"], "'training.batch_size' must be a whole number"),
        (["--batch-size", "2", "--training.batch-size", "3"], "are the same option: give one"),
        (["--training.device", "cpu"], "use --device"),
        (["--device", "cpu", "--model.span.kind", "fixed", "--spans", "profile"], "has no learned spans"),
    ],
)
def test_mistakes_are_one_line(words, complaint, tmp_path, capsys):
    (tmp_path / "there.json").write_text("{}")
    found_later = ("unknown recipe", "there.json", "there is no device", "has no learned spans")
    assert main(["bench", *words]) == (1 if complaint.startswith(found_later) else 2)
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("longspan: ")
    assert complaint in line
